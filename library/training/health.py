"""Is the step fit to change the weights?  A number that is none must never reach them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.batch import PixelBatch
from ..errors import UserError


def check(loss: Tensor, gradient_norm: Tensor, work: Sequence[PixelBatch], step: int, *, scaled: bool) -> None:
    """Stop before the update when loss or gradient is not finite; both are the same on all ranks.

    With gradient scaling (fp16) an infinite gradient is how the scaler finds its scale; it skips that update itself.
    """
    fit = torch.isfinite(loss) if scaled else torch.isfinite(loss) & torch.isfinite(gradient_norm)
    if bool(fit):
        return
    names = ", ".join(name for batch in work for name in batch.ids)
    raise UserError(
        f"step {step + 1}: the loss is {loss.item():g} and the gradient's length {gradient_norm.item():g}; "
        "the weights were not changed.\n"
        f"pictures of this step on this process: {names}\n"
        "Try a lower learning_rate, or mixed_precision bf16 in the place of fp16."
    )
