"""Gradient clipping by global norm (``--max_grad_norm``) for every strategy.

The training loop calls ``Strategy.clip_grad_norm`` once per optimizer step, when gradients are accumulated and
all-reduced and before the NaN guard looks at their norm.  Adapters are whole on every rank, so the norm needs no
communication; DeepSpeed shards their gradients, and clips in its own step.  Where FSDP shards the trained weights, each
rank adds the squares of its part.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .sharded_weights import get_local_shard


def clip_grad_norm(
    accelerator: Accelerator, parameters: Iterable[nn.Parameter], max_norm: float, device: torch.device
) -> Tensor:
    """Clip gradients to ``max_norm`` (0: no clipping), unscaling those of fp16; return the norm before clipping."""
    norm = accelerator.clip_grad_norm_(parameters, max_norm or float("inf"))
    return torch.as_tensor(norm, device=device)


@torch.no_grad()
def clip_sharded_grad_norm(
    accelerator: Accelerator,
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    sum_over_shards: Callable[[Tensor], Tensor],
    count_copies: Callable[[nn.Parameter], int] = lambda parameter: 1,
) -> Tensor:
    """Clip gradients of which each rank holds a part, as ``clip_grad_norm`` does; the norm is that over all ranks.

    ``count_copies`` tells how many of the ranks over which is summed hold the same elements of a parameter.
    """
    accelerator.unscale_gradients()
    found = [(get_local_shard(each.grad), count_copies(each)) for each in parameters if each.grad is not None]
    gradients = [gradient for gradient, _ in found]
    filled = [(gradient, copies) for gradient, copies in found if gradient.numel()]
    norms = torch._foreach_norm([each for each, _ in filled], 2, torch.float32) if filled else []
    parts = [norm.square() / copies for norm, (_, copies) in zip(norms, filled, strict=True)]
    squares = torch.stack(parts).sum() if parts else torch.zeros(())
    norm = sum_over_shards(squares.to(accelerator.device)).sqrt()
    if max_norm and gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


class DeepSpeedGradientClipping:
    """Computes the gradient norm before DeepSpeed's step, which then clips by this norm instead of computing its own.

    So the norm is known before the step, and one that is infinite makes DeepSpeed skip the step.
    """

    def __init__(self, zero_optimizer: Any, stage: int):
        self._zero = zero_optimizer
        self._grad_norm = torch.zeros(())
        self._compute_grad_norm = self._replace_norm_function(stage)

    def _replace_norm_function(self, stage: int) -> Any:
        """Have DeepSpeed's step use ``_grad_norm``; return DeepSpeed's own function."""
        if stage < 3:
            original, self._zero.scaled_global_norm = self._zero.scaled_global_norm, lambda norm_type=2: self._grad_norm
            return original
        from deepspeed.runtime.utils import combine_grad_norm_groups

        get_groups, self._zero._get_norm_groups = self._zero._get_norm_groups, lambda: [self._grad_norm]
        return lambda: combine_grad_norm_groups(get_groups())

    def clip_in_next_step(self, max_norm: float) -> Tensor:
        """Return the norm over all ranks (inf if non-finite); the next step clips gradients to ``max_norm``."""
        self._zero.clip_grad = max_norm
        if wait := getattr(self._zero, "_wait_for_offload_copies", None):
            wait()
        # Kept on its device: DeepSpeed multiplies gradients, which may be offloaded, by a factor made of it.
        self._grad_norm = torch.as_tensor(self._compute_grad_norm())
        return self._grad_norm

    def skip_next_step(self) -> None:
        """Set an infinite norm: DeepSpeed then clears the gradients without an update."""
        self._grad_norm = torch.full_like(self._grad_norm, float("inf"))
