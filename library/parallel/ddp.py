"""What one optimizer step means on however many processes."""

from typing import Any

from torch import nn


def exclude_frozen_from_ddp(model: nn.Module) -> None:
    """What is frozen is the same everywhere, so DDP need not send it around at the start, nor keep books on it."""
    frozen = [name for name, item in model.named_parameters() if not item.requires_grad]
    held: Any = model
    held._ddp_params_and_buffers_to_ignore = [*frozen, *(name for name, _ in model.named_buffers())]
