"""Updates put into the weights of a model for good."""

import torch
from torch import Tensor

from ..errors import UserError
from .updates import DOWN, MAGNITUDE, UP, Update


@torch.no_grad()
def merge(weight: Tensor, update: Update, multiplier: float) -> None:
    """Change a layer's weight as the update would at this strength; computed in float32."""
    base = weight.float()
    changed = base + update.scale * _difference(update).to(base).reshape(base.shape)
    if update.kind == "dora":
        rows = changed.flatten(1).norm(dim=1)
        scale = update.tensors[MAGNITUDE].flatten().to(base) / rows
        changed = changed * scale.view(-1, *[1] * (base.dim() - 1))
    weight.copy_(base + multiplier * (changed - base))


def _difference(update: Update) -> Tensor:
    """What is added to the weight, before alpha."""
    found = {name: tensor.float() for name, tensor in update.tensors.items()}
    if update.kind in ("lora", "dora"):
        return _product(found[UP], found[DOWN])
    if update.kind == "loha":
        return _half(found, "hada_w1", "hada_t1") * _half(found, "hada_w2", "hada_t2")
    if update.kind == "lokr":
        first, second = _half(found, "lokr_w1", ""), _half(found, "lokr_w2", "lokr_t2")
        return torch.kron(first.reshape(*first.shape, *[1] * (second.dim() - 2)), second)
    raise UserError(f"an adapter of kind {update.kind} cannot be merged into a model here")


def _half(found: dict[str, Tensor], name: str, core: str) -> Tensor:
    """A matrix that is whole, in two, or in three with the kernel of a convolution between them."""
    if name in found:
        return found[name]
    first, second = found[f"{name}_a"], found[f"{name}_b"]
    if core in found:
        return torch.einsum("ijkl,jr,ip->prkl", found[core], second, first)
    return first @ second


def _product(up: Tensor, down: Tensor) -> Tensor:
    return up.flatten(1) @ down.flatten(1)
