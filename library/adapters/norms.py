"""``scale_weight_norms``: no update of a LoRA becomes longer than a given length."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .lora import Adapter


class MaxNormRegularizer:
    """After each step, makes updates shorter that have become too long; nobody waits for the device."""

    def __init__(self, model: nn.Module, adapter: Adapter, max_norm: float):
        self.max_norm = max_norm
        self.groups: dict[int, tuple[nn.Parameter, float, list[nn.Parameter]]] = {}
        for name, size in adapter.rank_alphas.items():
            layer = model.get_submodule(name)
            down, up = (getattr(layer, half)["default"].weight for half in ("lora_A", "lora_B"))
            # What is one module in the original model shares its down matrix, and is as long as a whole.
            self.groups.setdefault(id(down), (down, size.alpha / size.rank, []))[2].append(up)

    @torch.no_grad()
    def __call__(self) -> None:
        for down, scale, ups in self.groups.values():
            ratio = (self.max_norm / compute_lora_norm(down, ups, scale)).clamp(max=1).sqrt()
            for half in (down, *ups):
                half.mul_(ratio)


def compute_lora_norm(down: Tensor, ups: Sequence[Tensor], scale: float) -> Tensor:
    """The norm of ``scale * up @ down``, by way of small matrices of rank x rank."""
    inner = down.flatten(1) @ down.flatten(1).T
    outer = sum((up.flatten(1).T @ up.flatten(1) for up in ups), torch.zeros_like(inner))
    return (inner * outer).sum().clamp_min(0).sqrt() * scale
