"""Merge an adapter into the weights of a model."""

import torch
from torch import Tensor

from ..errors import UserError
from .state_dict import DOWN, MAGNITUDE, UP, ModuleAdapter


@torch.no_grad()
def merge_adapter(weight: Tensor, adapter: ModuleAdapter, multiplier: float) -> None:
    """Merge an adapter into a layer's weight, scaled by ``multiplier``; computed in float32."""
    base = weight.float()
    changed = base + adapter.scale * _compute_delta_weight(adapter).to(base).reshape(base.shape)
    if adapter.adapter_type == "dora":
        rows = changed.flatten(1).norm(dim=1)
        scale = adapter.tensors[MAGNITUDE].flatten().to(base) / rows
        changed = changed * scale.view(-1, *[1] * (base.dim() - 1))
    weight.copy_(base + multiplier * (changed - base))


def _compute_delta_weight(adapter: ModuleAdapter) -> Tensor:
    """The delta weight before scaling by alpha / rank."""
    tensors = {name: tensor.float() for name, tensor in adapter.tensors.items()}
    if adapter.adapter_type in ("lora", "dora"):
        return tensors[UP].flatten(1) @ tensors[DOWN].flatten(1)
    if adapter.adapter_type == "loha":
        return _compose_factor(tensors, "hada_w1", "hada_t1") * _compose_factor(tensors, "hada_w2", "hada_t2")
    if adapter.adapter_type == "lokr":
        first, second = _compose_factor(tensors, "lokr_w1", ""), _compose_factor(tensors, "lokr_w2", "lokr_t2")
        return torch.kron(first.reshape(*first.shape, *[1] * (second.dim() - 2)), second)
    raise UserError(f"an adapter of type {adapter.adapter_type} cannot be merged")


def _compose_factor(tensors: dict[str, Tensor], name: str, core: str) -> Tensor:
    """A factor that is full, decomposed into two, or into three with the Tucker core of a convolution."""
    if name in tensors:
        return tensors[name]
    first, second = tensors[f"{name}_a"], tensors[f"{name}_b"]
    if core in tensors:
        return torch.einsum("ijkl,jr,ip->prkl", tensors[core], second, first)
    return first @ second
