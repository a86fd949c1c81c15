"""One update for several modules that are one in the original model, and back, without loss.

Where the parts share their down matrix, as sd-scripts trains them, the whole has the same rank and the up matrices
stand one below the other.  Where they do not, the whole has the sum of their ranks, and zeros beside each block.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import UserError
from .original_layouts import OriginalModule
from .state_dict import DOWN, MAGNITUDE, UP, ModuleUpdate


class FusionError(UserError):
    """Parts that cannot be written as one module; says why, without a name."""


def fuse_updates(updates: Sequence[ModuleUpdate | None], original: OriginalModule) -> ModuleUpdate:
    """The update of the original module; None for a part that has none."""
    there = [part for part in updates if part is not None]
    if len(original.diffusers_modules) == 1:
        return _swap_scale_shift(there[0]) if needs_scale_shift_swap(there[0], original) else there[0]
    kinds = {part.adapter_type for part in there}
    if not kinds <= {"lora", "dora"}:
        raise FusionError(
            f"{len(original.diffusers_modules)} modules trained by {'/'.join(sorted(kinds))} are no single one"
        )
    if len(kinds) > 1 or ("dora" in kinds and None in updates):
        raise FusionError("DoRA has to train all parts of the module, or none")
    first = there[0]
    inputs = first.tensors[DOWN].shape[1]
    ups = [_get_up_rows(part, inputs * size, first) for part, size in zip(updates, original.output_ratios, strict=True)]
    if all(_is_same_tensor(part.tensors[DOWN], first.tensors[DOWN]) and part.alpha == first.alpha for part in there):
        down, up, alpha = first.tensors[DOWN], torch.cat(ups), first.alpha
    else:
        blocks = [up if part is not None else up[:, :0] for part, up in zip(updates, ups, strict=True)]
        # More ranks over the same alpha would weaken the update.
        down, up = torch.cat([part.tensors[DOWN] for part in there]), _build_block_diagonal(blocks)
        alpha = _compute_fused_alpha(there)
    whole = {DOWN: down, UP: up}
    if "dora" in kinds:
        whole[MAGNITUDE] = torch.cat([part.tensors[MAGNITUDE].flatten() for part in there])
    return ModuleUpdate(whole, alpha)


def split_update(fused: ModuleUpdate, original: OriginalModule) -> list[ModuleUpdate | None]:
    """The update of each part, None for one that has none; undoes ``fuse``."""
    if len(original.diffusers_modules) == 1:
        return [_swap_scale_shift(fused) if needs_scale_shift_swap(fused, original) else fused]
    if fused.adapter_type not in ("lora", "dora"):
        raise FusionError(
            f"a {fused.adapter_type} update of {len(original.diffusers_modules)} modules at once cannot be taken apart"
        )
    down = fused.tensors[DOWN]
    sizes = [down.shape[1] * size for size in original.output_ratios]
    if sum(sizes) != len(fused.tensors[UP]):
        raise FusionError(f"{len(fused.tensors[UP])} outputs are not {sum(sizes)}, as its parts have together")
    ups = _split_rows(fused.tensors[UP], sizes)
    ranks = next((ranks for ranks in _propose_rank_splits(ups) if _is_block_diagonal(ups, ranks)), None)
    if ranks is None:
        is_told = any(bool(up.any()) for up in ups) and MAGNITUDE not in fused.tensors
        found: list[dict[str, Tensor] | None] = [
            None if is_told and not bool(up.any()) else {DOWN: down, UP: up.contiguous()} for up in ups
        ]
        alphas = [fused.alpha] * len(ups)
    else:
        starts = [end - rank for end, rank in zip(accumulate(ranks), ranks, strict=True)]
        found = [
            {DOWN: down[start : start + rank].contiguous(), UP: up[:, start : start + rank].contiguous()}
            if rank
            else None
            for up, start, rank in zip(ups, starts, ranks, strict=True)
        ]
        alphas = [fused.alpha * rank / sum(ranks) for rank in ranks]
    if MAGNITUDE in fused.tensors:
        for part, magnitude in zip(found, _split_rows(fused.tensors[MAGNITUDE].flatten(), sizes), strict=True):
            if part is not None:
                part[MAGNITUDE] = magnitude.contiguous()
    return [None if part is None else ModuleUpdate(part, alpha) for part, alpha in zip(found, alphas, strict=True)]


def _compute_fused_alpha(updates: Sequence[ModuleUpdate]) -> float:
    """The alpha of all ranks together."""
    if len({part.scale for part in updates}) > 1:
        raise FusionError("its parts have different alpha / rank")
    if len({part.rank for part in updates}) == 1:
        return updates[0].alpha * len(updates)
    return updates[0].scale * sum(part.rank for part in updates)


def _get_up_rows(update: ModuleUpdate | None, count: int, like: ModuleUpdate) -> Tensor:
    if update is None:
        return like.tensors[UP].new_zeros(count, like.rank)
    up = update.tensors[UP]
    if up.shape[0] != count:
        raise ValueError(f"a part of a fused module has {up.shape[0]} outputs and not {count}")
    return up


def _is_same_tensor(left: Tensor, right: Tensor) -> bool:
    return left is right or torch.equal(left, right)


def _propose_rank_splits(ups: Sequence[Tensor]) -> Iterator[list[int]]:
    """The ranks that each part may have of its own: as many as each other part, or those that only it uses."""
    rank, used = ups[0].shape[1], [bool(up.any()) for up in ups]
    if not any(used):  # could be either, and is taken as shared
        return
    if rank % len(ups) == 0:
        yield [rank // len(ups)] * len(ups)
    if rank % sum(used) == 0:
        yield [rank // sum(used) if each else 0 for each in used]
    owners = [[number for number, up in enumerate(ups) if bool(up[:, column].any())] for column in range(rank)]
    if all(len(each) == 1 for each in owners):
        yield [sum(owner == [number] for owner in owners) for number in range(len(ups))]


def _is_block_diagonal(ups: Sequence[Tensor], ranks: Sequence[int]) -> bool:
    """Whether each part uses only ranks of its own."""
    for up, end, rank in zip(ups, accumulate(ranks), ranks, strict=True):
        if bool(up[:, : end - rank].any()) or bool(up[:, end:].any()):
            return False
    return sum(bool(rank) for rank in ranks) > 1


def needs_scale_shift_swap(update: ModuleUpdate, original: OriginalModule) -> bool:
    """Whether the module makes just shift and scale, which the original has in the other order."""
    outputs, inputs = update.shape
    return original.swaps_scale_shift and 0 < outputs == 2 * inputs


def _swap_scale_shift(update: ModuleUpdate) -> ModuleUpdate:
    """The other order of shift and scale, where the module makes just these two."""
    names = {"loha": ("hada_w1_a", "hada_w2_a"), "lora": (UP,), "dora": (UP, MAGNITUDE)}.get(update.adapter_type, ())
    if update.adapter_type == "lokr":
        names = tuple(name for name in ("lokr_w1", "lokr_w1_a") if name in update.tensors)
    if not names or any(len(update.tensors[name]) % 2 for name in names):
        raise FusionError(f"shift and scale stand in another order, in which {update.adapter_type} cannot be brought")
    turned = {name: torch.cat(update.tensors[name].chunk(2)[::-1]) for name in names}
    return ModuleUpdate({**update.tensors, **turned}, update.alpha)


def _split_rows(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Rows of a matrix in portions of these sizes."""
    return [tensor[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _build_block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Blocks from corner to corner, zeros beside them."""
    whole = blocks[0].new_zeros(sum(len(block) for block in blocks), sum(block.shape[1] for block in blocks))
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole
