"""Updates put into the weights of a model for good."""

import torch
from torch import Tensor

from ..errors import UserError
from .state_dict import DOWN, MAGNITUDE, UP, ModuleUpdate


@torch.no_grad()
def merge_update(weight: Tensor, update: ModuleUpdate, multiplier: float) -> None:
    """Change a layer's weight as the update would at this strength; computed in float32."""
    base = weight.float()
    changed = base + update.scale * _compute_delta_weight(update).to(base).reshape(base.shape)
    if update.adapter_type == "dora":
        rows = changed.flatten(1).norm(dim=1)
        scale = update.tensors[MAGNITUDE].flatten().to(base) / rows
        changed = changed * scale.view(-1, *[1] * (base.dim() - 1))
    weight.copy_(base + multiplier * (changed - base))


def _compute_delta_weight(update: ModuleUpdate) -> Tensor:
    """What is added to the weight, before alpha."""
    found = {name: tensor.float() for name, tensor in update.tensors.items()}
    if update.adapter_type in ("lora", "dora"):
        return _multiply_up_down(found[UP], found[DOWN])
    if update.adapter_type == "loha":
        return _compose_factor(found, "hada_w1", "hada_t1") * _compose_factor(found, "hada_w2", "hada_t2")
    if update.adapter_type == "lokr":
        first, second = _compose_factor(found, "lokr_w1", ""), _compose_factor(found, "lokr_w2", "lokr_t2")
        return torch.kron(first.reshape(*first.shape, *[1] * (second.dim() - 2)), second)
    raise UserError(f"an adapter of kind {update.adapter_type} cannot be merged into a model here")


def _compose_factor(tensors: dict[str, Tensor], name: str, core: str) -> Tensor:
    """A matrix that is whole, in two, or in three with the kernel of a convolution between them."""
    if name in tensors:
        return tensors[name]
    first, second = tensors[f"{name}_a"], tensors[f"{name}_b"]
    if core in tensors:
        return torch.einsum("ijkl,jr,ip->prkl", tensors[core], second, first)
    return first @ second


def _multiply_up_down(up: Tensor, down: Tensor) -> Tensor:
    return up.flatten(1) @ down.flatten(1)
