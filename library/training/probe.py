"""Before the first step: does a gradient reach every weight that is to learn?"""

import logging
from collections.abc import Sequence

import torch

from ..data.batch import PixelBatch
from ..errors import UserError
from ..randomness import derive_seed
from .job import TrainingRun
from .rehearsal import run_forward_backward

logger = logging.getLogger(__name__)

MAX_PARAMETERS_SHOWN = 5
PERTURBATION_STD = 1e-2
"""Half of a LoRA starts at zero, which keeps the gradient from the other half; the probe stirs it this much."""


def probe_gradients(run: TrainingRun, batch: PixelBatch) -> None:
    """One forward and backward that changes nothing; what no gradient reaches is named."""
    model = run.strategy.unwrap_model(run.model)
    weights = {name: item for name, item in model.named_parameters() if item.requires_grad}
    kept = {name: item.detach().clone() for name, item in weights.items()}
    generator = torch.Generator().manual_seed(derive_seed(run.config.train.seed, "probe"))
    try:
        with torch.no_grad():
            for item in weights.values():
                if not bool(item.any()):
                    item.copy_(torch.randn(item.shape, generator=generator) * PERTURBATION_STD)
        loss = run_forward_backward(run, batch)
        _check_gradients(float(loss), {name: item.grad for name, item in weights.items()})
    finally:
        with torch.no_grad():
            for name, item in weights.items():
                item.copy_(kept[name])
                item.grad = None


def _check_gradients(loss: float, gradients: dict[str, torch.Tensor | None]) -> None:
    reached = [name for name, gradient in gradients.items() if gradient is not None and bool(gradient.any())]
    broken = [name for name in reached if not bool(torch.isfinite(gradients[name]).all())]  # type: ignore[arg-type]
    if not torch.isfinite(torch.tensor(loss)) or broken:
        raise UserError(f"before the first step: the loss is {loss:g} and {len(broken)} of {len(gradients)} gradients"
                        " hold something that is no number, though nothing was learnt yet; the model, its VAE or the"
                        f" precision is at fault. Try mixed_precision bf16 or no.{_format_names(broken)}")  # fmt: skip
    if not reached:
        raise UserError("before the first step: no gradient reaches any of the weights that are to learn")
    idle = [name for name in gradients if name not in set(reached)]
    if idle:
        logger.warning("%d of %d tensors that are to learn get no gradient and will stay as they are:%s", len(idle),
                       len(gradients), _format_names(idle))  # fmt: skip


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_PARAMETERS_SHOWN} more" if len(names) > MAX_PARAMETERS_SHOWN else ""
    return f" {', '.join(names[:MAX_PARAMETERS_SHOWN])}{more}" if names else ""
