"""Fuse the adapters of modules that are one in the original model (qkv), and split them again, without loss.

If the parts share lora_A, as sd-scripts trains them, the fused adapter has the same rank and concatenated lora_B.
Otherwise it has the sum of their ranks, and a block-diagonal lora_B.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import UserError
from .module_adapter import BIAS, DOWN, INPUT_MAGNITUDE, MAGNITUDE, UP, ModuleAdapter
from .original_module_names import OriginalModule


class FusionError(UserError):
    """Updates that cannot be fused or split; the message does not name the module."""


def fuse_adapters(adapters: Sequence[ModuleAdapter | None], original: OriginalModule) -> ModuleAdapter:
    """Fuse the adapters of all parts of an original module; None for a part without an adapter."""
    parts = [part for part in adapters if part is not None]
    first = parts[0]
    if len(original.diffusers_modules) == 1:
        return _swap_scale_shift(first) if needs_scale_shift_swap(first, original) else first
    types = {part.adapter_type for part in parts}
    if any(INPUT_MAGNITUDE in part.tensors for part in parts):
        raise FusionError("a dora_scale per input is one for each part, and would be one for all")
    if not types <= {"lora", "dora"}:
        if len(types) == 1 and (joined := _join_rows(parts, original)) is not None:
            return joined
        raise FusionError(
            f"{'/'.join(sorted(types))} adapters of {len(original.diffusers_modules)} modules cannot be fused"
        )
    if len(types) > 1 or ("dora" in types and None in adapters):
        raise FusionError("DoRA has to train all parts of a fused module, or none")
    down = first.tensors[DOWN]
    ups = [
        _get_up_rows(part, down.shape[1] * size // original.input_ratio, first)
        for part, size in zip(adapters, original.output_ratios, strict=True)
    ]
    if all(part is first or (torch.equal(part.tensors[DOWN], down) and part.alpha == first.alpha) for part in parts):
        up, alpha = torch.cat(ups), first.alpha
    else:
        blocks = [up if part is not None else up[:, :0] for part, up in zip(adapters, ups, strict=True)]
        down, alpha = torch.cat([part.tensors[DOWN] for part in parts]), _compute_fused_alpha(parts)
        up = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    fused = {DOWN: down, UP: up}
    if "dora" in types:
        fused[MAGNITUDE] = torch.cat([part.tensors[MAGNITUDE].flatten() for part in parts])
    if any(BIAS in part.tensors for part in parts):
        biases = [None if part is None else part.tensors.get(BIAS) for part in adapters]
        like = next(bias for bias in biases if bias is not None)
        zeros = (like.new_zeros(len(up)) for up in ups)
        fused[BIAS] = torch.cat([zero if bias is None else bias for zero, bias in zip(zeros, biases, strict=True)])
    return ModuleAdapter(fused, alpha)


def split_adapter(fused: ModuleAdapter, original: OriginalModule) -> list[ModuleAdapter | None]:
    """Split the adapter of an original module into its parts, None for a part without an adapter."""
    count = len(original.diffusers_modules)
    if count == 1:
        return [_swap_scale_shift(fused) if needs_scale_shift_swap(fused, original) else fused]
    if INPUT_MAGNITUDE in fused.tensors:
        raise FusionError(f"its dora_scale per input is that of {count} modules together")
    if fused.adapter_type not in ("lora", "dora"):
        return list(_split_by_rows(fused, original))
    down = fused.tensors[DOWN]
    sizes = [down.shape[1] * size // original.input_ratio for size in original.output_ratios]
    if sum(sizes) != len(fused.tensors[UP]):
        raise FusionError(f"it has {len(fused.tensors[UP])} outputs instead of {sum(sizes)}")
    ups = _split_rows(fused.tensors[UP], sizes)
    ranks = next((ranks for ranks in _propose_rank_splits(ups) if _is_block_diagonal(ups, ranks)), None)
    if ranks is None:
        # A part whose lora_B is zero has no adapter; in DoRA, and if all are zero, every part has one.
        drops_zeros = any(bool(up.any()) for up in ups) and MAGNITUDE not in fused.tensors
        parts: list[dict[str, Tensor] | None] = [
            None if drops_zeros and not bool(up.any()) else {DOWN: down, UP: up.contiguous()} for up in ups
        ]
        alphas = [fused.alpha] * len(ups)
    else:
        slices = [slice(end - rank, end) for end, rank in zip(accumulate(ranks), ranks, strict=True)]
        parts = [
            {DOWN: down[rows].contiguous(), UP: up[:, rows].contiguous()} if rank else None
            for up, rows, rank in zip(ups, slices, ranks, strict=True)
        ]
        alphas = [fused.alpha * rank / sum(ranks) for rank in ranks]
    if MAGNITUDE in fused.tensors:
        for part, magnitude in zip(parts, _split_rows(fused.tensors[MAGNITUDE].flatten(), sizes), strict=True):
            if part is not None:
                part[MAGNITUDE] = magnitude.contiguous()
    if BIAS in fused.tensors:
        biases = _split_rows(fused.tensors[BIAS], sizes)
        parts = [_add_bias(part, bias, down) for part, bias in zip(parts, biases, strict=True)]
    return [None if part is None else ModuleAdapter(part, alpha) for part, alpha in zip(parts, alphas, strict=True)]


def _add_bias(part: dict[str, Tensor] | None, bias: Tensor, down: Tensor) -> dict[str, Tensor] | None:
    """Add the bias of a part, which has an adapter of zeros if there is nothing else of it."""
    if not bool(bias.any()):
        return part
    part = {DOWN: down, UP: down.new_zeros(len(bias), len(down))} if part is None else part
    return {**part, BIAS: bias.contiguous()}


_ROW_TENSORS: Mapping[str, tuple[str, ...]] = {
    "loha": ("hada_w1_a", "hada_w2_a", MAGNITUDE, BIAS),
    "lokr": ("lokr_w1", "lokr_w1_a", MAGNITUDE, BIAS),
    "glora": ("b1", BIAS),
    "full": ("diff", BIAS),
}
"""The tensors of each adapter type whose rows belong to blocks of outputs; all parts share the others."""


def _split_by_rows(fused: ModuleAdapter, original: OriginalModule) -> Iterator[ModuleAdapter]:
    """Split an adapter of another type than LoRA, each part with a copy of what they share."""
    rows = {name: each for name, each in fused.tensors.items() if name in _ROW_TENSORS.get(fused.adapter_type, ())}
    units = sum(original.output_ratios)
    if not rows or fused.is_tucker or any(len(each) % units for each in rows.values()):
        raise FusionError(
            f"a fused {fused.adapter_type} adapter of {len(original.diffusers_modules)} modules cannot be split"
        )
    for end, ratio in zip(accumulate(original.output_ratios), original.output_ratios, strict=True):
        own = {name: each[(end - ratio) * len(each) // units : end * len(each) // units] for name, each in rows.items()}
        yield ModuleAdapter({**fused.tensors, **{name: each.contiguous() for name, each in own.items()}}, fused.alpha)


def _join_rows(parts: Sequence[ModuleAdapter], original: OriginalModule) -> ModuleAdapter | None:
    """Join the parts of a fused layer by rows, if they share all other tensors."""
    first, names = parts[0], _ROW_TENSORS.get(parts[0].adapter_type, ())
    shared = {name: each for name, each in first.tensors.items() if name not in names}
    if len(parts) != len(original.diffusers_modules) or not all(
        part.alpha == first.alpha
        and part.tensors.keys() == first.tensors.keys()
        and all(torch.equal(part.tensors[name], each) for name, each in shared.items())
        for part in parts
    ):
        return None
    joined = {name: torch.cat([part.tensors[name] for part in parts]) for name in first.tensors if name in names}
    return ModuleAdapter({**first.tensors, **joined}, first.alpha)


def _compute_fused_alpha(adapters: Sequence[ModuleAdapter]) -> float:
    """The alpha for the sum of the ranks that keeps alpha / rank."""
    if len({part.scale for part in adapters}) > 1:
        raise FusionError("its parts have different alpha / rank")
    if len({part.rank for part in adapters}) == 1:
        return adapters[0].alpha * len(adapters)
    return adapters[0].scale * sum(part.rank for part in adapters)


def _get_up_rows(adapter: ModuleAdapter | None, count: int, like: ModuleAdapter) -> Tensor:
    if adapter is None:
        return like.tensors[UP].new_zeros(count, like.rank)
    up = adapter.tensors[UP]
    if up.shape[0] != count or adapter.tensors[DOWN].shape[1:] != like.tensors[DOWN].shape[1:] or up.dim() > 2:
        raise FusionError(f"a part has the sizes {list(up.shape)} and {list(adapter.tensors[DOWN].shape)}")
    return up


def _propose_rank_splits(ups: Sequence[Tensor]) -> Iterator[list[int]]:
    """Candidates for the rank of each part of a block-diagonal lora_B: equal ranks, or the columns each part uses."""
    rank, used = ups[0].shape[1], [bool(up.any()) for up in ups]
    if not any(used):  # ambiguous; treated as a shared lora_A
        return
    if rank % len(ups) == 0:
        yield [rank // len(ups)] * len(ups)
    if rank % sum(used) == 0:
        yield [rank // sum(used) if each else 0 for each in used]
    owners = [[number for number, up in enumerate(ups) if bool(up[:, column].any())] for column in range(rank)]
    if all(len(each) == 1 for each in owners):
        yield [sum(owner == [number] for owner in owners) for number in range(len(ups))]


def _is_block_diagonal(ups: Sequence[Tensor], ranks: Sequence[int]) -> bool:
    """Whether each part uses only its own columns."""
    for up, end, rank in zip(ups, accumulate(ranks), ranks, strict=True):
        if bool(up[:, : end - rank].any()) or bool(up[:, end:].any()):
            return False
    return sum(bool(rank) for rank in ranks) > 1


def needs_scale_shift_swap(adapter: ModuleAdapter, original: OriginalModule) -> bool:
    """Whether the halves of the module's output, shift and scale or gate and value, have the other order there."""
    outputs, inputs = adapter.shape
    return original.swaps_halves or (original.swaps_scale_shift and 0 < outputs == 2 * inputs)


def _swap_scale_shift(adapter: ModuleAdapter) -> ModuleAdapter:
    """Swap the halves of the output: shift and scale, or gate and value."""
    rows: dict[str, tuple[str, ...]] = {"loha": ("hada_w1_a", "hada_w2_a"), "lokr": ("lokr_w1", "lokr_w1_a")}
    rows |= {"full": ("diff",), **dict.fromkeys(("lora", "dora", "input-dora"), (UP,))}
    names = [name for name in (*rows.get(adapter.adapter_type, ()), MAGNITUDE, BIAS) if name in adapter.tensors]
    if adapter.adapter_type not in rows or adapter.is_tucker or any(len(adapter.tensors[name]) % 2 for name in names):
        raise FusionError(f"the halves of the output of a {adapter.adapter_type} adapter cannot be swapped")
    swapped = {name: torch.cat(adapter.tensors[name].chunk(2)[::-1]) for name in names}
    return ModuleAdapter({**adapter.tensors, **swapped}, adapter.alpha)


def swap_magnitude(adapter: ModuleAdapter, original: OriginalModule) -> ModuleAdapter:
    """Bring the magnitude of a DoRA into the original order, as ComfyUI, which swaps the rest of an adapter itself."""
    if adapter.adapter_type != "dora" or not needs_scale_shift_swap(adapter, original):
        return adapter
    swapped = torch.cat(adapter.tensors[MAGNITUDE].chunk(2)[::-1])
    return ModuleAdapter({**adapter.tensors, MAGNITUDE: swapped}, adapter.alpha)


def _split_rows(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [tensor[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
