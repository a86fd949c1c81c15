"""Merge an adapter's update into the weights of a model."""

import torch
from torch import Tensor

from ..errors import UserError
from .state_dict import DOWN, MAGNITUDE, UP, ModuleUpdate


@torch.no_grad()
def merge_update(weight: Tensor, update: ModuleUpdate, multiplier: float) -> None:
    """Merge an update into a layer's weight, scaled by ``multiplier``; computed in float32."""
    base = weight.float()
    changed = base + update.scale * _compute_delta_weight(update).to(base).reshape(base.shape)
    if update.adapter_type == "dora":
        rows = changed.flatten(1).norm(dim=1)
        scale = update.tensors[MAGNITUDE].flatten().to(base) / rows
        changed = changed * scale.view(-1, *[1] * (base.dim() - 1))
    weight.copy_(base + multiplier * (changed - base))


def _compute_delta_weight(update: ModuleUpdate) -> Tensor:
    """The delta weight before scaling by alpha / rank."""
    tensors = {name: tensor.float() for name, tensor in update.tensors.items()}
    if update.adapter_type in ("lora", "dora"):
        return tensors[UP].flatten(1) @ tensors[DOWN].flatten(1)
    if update.adapter_type == "loha":
        return _compose_factor(tensors, "hada_w1", "hada_t1") * _compose_factor(tensors, "hada_w2", "hada_t2")
    if update.adapter_type == "lokr":
        first, second = _compose_factor(tensors, "lokr_w1", ""), _compose_factor(tensors, "lokr_w2", "lokr_t2")
        return torch.kron(first.reshape(*first.shape, *[1] * (second.dim() - 2)), second)
    raise UserError(f"an adapter of type {update.adapter_type} cannot be merged")


def _compose_factor(tensors: dict[str, Tensor], name: str, core: str) -> Tensor:
    """A factor that is full, decomposed into two, or into three with the Tucker core of a convolution."""
    if name in tensors:
        return tensors[name]
    first, second = tensors[f"{name}_a"], tensors[f"{name}_b"]
    if core in tensors:
        return torch.einsum("ijkl,jr,ip->prkl", tensors[core], second, first)
    return first @ second
