"""Merge an adapter into the weights of a model: the formulas of peft and LyCORIS."""

import torch
from torch import Tensor

from ..errors import UserError
from .module_adapter import DOWN, INPUT_MAGNITUDE, MAGNITUDE, UP, ModuleAdapter


@torch.no_grad()
def merge_adapter(weight: Tensor, adapter: ModuleAdapter, multiplier: float) -> None:
    """Merge an adapter into a layer's weight, scaled by ``multiplier``; computed in float32."""
    base = weight.float()
    weight.copy_(base + multiplier * (compute_merged_weight(base, adapter) - base))


@torch.no_grad()
def merge_bias_adapter(bias: Tensor | None, adapter: ModuleAdapter, multiplier: float) -> None:
    """Merge an adapter into a layer's bias: of a norm layer, or of a full difference."""
    for name in ("b_norm", "diff_b"):
        if name in adapter.tensors:
            if bias is None:
                raise UserError(f"{name} in the file, but the layer has no bias")
            bias.add_(multiplier * adapter.tensors[name].to(bias).reshape(bias.shape))


def compute_delta_weight(adapter: ModuleAdapter, dtype: torch.dtype) -> Tensor:
    """Compute what an adapter adds to the weight, before alpha / rank; not for types that need the base weight."""
    tensors = {name: tensor.to(dtype) for name, tensor in adapter.tensors.items()}
    return _compute_delta_weight(torch.zeros((), dtype=dtype), adapter.adapter_type, tensors)


def compute_merged_weight(base: Tensor, adapter: ModuleAdapter) -> Tensor:
    """The weight of a layer with an adapter at full strength."""
    tensors = {name: tensor.to(base) for name, tensor in adapter.tensors.items()}
    if adapter.adapter_type == "diag-oft":
        return _rotate_outputs(base, tensors, adapter.alpha)
    changed = base + adapter.scale * _compute_delta_weight(base, adapter.adapter_type, tensors).reshape(base.shape)
    if MAGNITUDE in tensors:
        rows = changed.flatten(1).norm(dim=1)
        changed = changed * (tensors[MAGNITUDE].flatten() / rows).view(-1, *[1] * (base.dim() - 1))
    if INPUT_MAGNITUDE in tensors:
        columns = changed.transpose(0, 1).flatten(1).norm(dim=1)
        changed = changed * (tensors[INPUT_MAGNITUDE].flatten() / columns).view(1, -1, *[1] * (base.dim() - 2))
    return changed


def _compute_delta_weight(base: Tensor, adapter_type: str, tensors: dict[str, Tensor]) -> Tensor:
    """The delta weight before scaling by alpha / rank."""
    match adapter_type:
        case "lora" | "dora" | "input-dora":
            return tensors[UP].flatten(1) @ tensors[DOWN].flatten(1)
        case "loha":
            return _compose_factor(tensors, "hada_w1", "hada_t1") * _compose_factor(tensors, "hada_w2", "hada_t2")
        case "lokr":
            first, second = _compose_factor(tensors, "lokr_w1", ""), _compose_factor(tensors, "lokr_w2", "lokr_t2")
            return torch.kron(first.reshape(*first.shape, *[1] * (second.dim() - 2)), second)
        case "glora":
            return _compute_glora_delta(base, tensors)
        case "norm":
            return tensors["w_norm"]
        case "full":
            return tensors.get("diff", torch.zeros_like(base))
    raise UserError(f"an adapter of type {adapter_type} cannot be merged")


def _compose_factor(tensors: dict[str, Tensor], name: str, core: str) -> Tensor:
    """A factor that is full, decomposed into two, or into three with the Tucker core of a convolution."""
    if name in tensors:
        return tensors[name]
    first, second = tensors[f"{name}_a"], tensors[f"{name}_b"]
    if core in tensors:
        return torch.einsum("ij...,jr,ip->pr...", tensors[core], second, first).contiguous()
    return (first @ second.flatten(1)).view(len(first), *second.shape[1:])


def compose_tucker_down(down: Tensor, mid: Tensor) -> Tensor:
    """One convolution that equals a 1x1 convolution followed by the core of a Tucker LoRA."""
    composed = torch.einsum("mn...,ni->mi...", mid.float(), down.flatten(1).float())
    return composed.to(down.dtype if down.dtype == torch.float64 else torch.float32)


def _compute_glora_delta(base: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """W A + B, with A on the inputs."""
    inputs = tensors["a1"].flatten(1) @ tensors["a2"].flatten(1)
    weighted = torch.einsum("oi...,ij->oj...", base, inputs)
    if "bm" not in tensors:
        return weighted + (tensors["b1"].flatten(1) @ tensors["b2"].flatten(1)).view(base.shape)
    core = torch.einsum("mn...,om,ni->oi...", tensors["bm"], tensors["b1"].flatten(1), tensors["b2"].flatten(1))
    return weighted + core


def _rotate_outputs(base: Tensor, tensors: dict[str, Tensor], constraint: float) -> Tensor:
    """Multiply blocks of outputs by orthogonal matrices, by several in turn for a butterfly."""
    blocks = tensors["oft_blocks"]
    skew = blocks - blocks.transpose(-1, -2)
    limit = constraint * len(base)
    if limit > 0 and (norm := skew.norm() + 1e-8) > limit:
        skew = skew * limit / norm
    identity = torch.eye(blocks.shape[-1], dtype=base.dtype, device=base.device)
    rotations = (identity + skew) @ torch.linalg.inv(identity - skew)
    rows = base.flatten(1)
    if blocks.dim() == 3:
        rows = (rotations.transpose(1, 2) @ rows.view(len(blocks), blocks.shape[1], -1)).reshape(rows.shape)
    else:
        for stage, rotation in enumerate(rotations):
            stride = 2**stage * (blocks.shape[-1] // 2)
            # Stage i pairs outputs that are 2^i half blocks apart.
            paired = rows.view(-1, 2, stride, rows.shape[1]).transpose(1, 2)
            rotated = rotation @ paired.reshape(blocks.shape[1], blocks.shape[-1], -1)
            rows = rotated.view(-1, stride, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    if "rescale" in tensors:
        rows = rows * tensors["rescale"].view(-1, 1)
    return rows.view(base.shape)
