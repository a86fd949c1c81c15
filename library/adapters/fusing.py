"""One LoRA for several modules that are one in the original model, and back, without loss.

Where the parts share their down matrix, as sd-scripts trains them, the whole has the same rank and the up matrices
stand one below the other.  Where they do not, the whole has the sum of their ranks, and zeros beside each block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layouts import Original


@dataclass(frozen=True)
class Lora:
    """The update ``alpha / rank * up @ down`` of one module."""

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


def fuse(parts: Sequence[Lora | None], original: Original) -> Lora:
    """The LoRA of the original module; None for a part that has none."""
    there = [part for part in parts if part is not None]
    if len(original.parts) == 1:
        (only,) = there
        return Lora(only.down, _swapped(only.down, only.up) if original.pair else only.up, only.alpha)
    inputs = there[0].down.shape[1]
    ups = [_rows(part, inputs * size, there[0]) for part, size in zip(parts, original.outputs, strict=True)]
    first = there[0]
    if all(_same(part.down, first.down) and part.alpha == first.alpha for part in there):
        return Lora(first.down, torch.cat(ups), first.alpha)
    if len({(part.rank, part.alpha) for part in there}) > 1:
        raise ValueError("parts of one module have different ranks or alphas")
    blocks = [up if part is not None else up[:, :0] for part, up in zip(parts, ups, strict=True)]
    # More ranks over the same alpha would weaken the update.
    return Lora(torch.cat([part.down for part in there]), _diagonal(blocks), first.alpha * len(there))


def split(whole: Lora, original: Original) -> list[Lora]:
    """The LoRA of each part; undoes ``fuse``."""
    if len(original.parts) == 1:
        return [Lora(whole.down, _swapped(whole.down, whole.up) if original.pair else whole.up, whole.alpha)]
    inputs, count = whole.down.shape[1], len(original.parts)
    ups = _cut(whole.up, [inputs * size for size in original.outputs])
    if whole.rank % count == 0 and _is_block_diagonal(ups, whole.rank // count):
        rank = whole.rank // count
        downs = _cut(whole.down, [rank] * count)
        own = [up[:, number * rank : (number + 1) * rank] for number, up in enumerate(ups)]
        return [Lora(down.contiguous(), up.contiguous(), whole.alpha / count)
                for down, up in zip(downs, own, strict=True)]  # fmt: skip
    return [Lora(whole.down, up.contiguous(), whole.alpha) for up in ups]


def _rows(part: Lora | None, count: int, like: Lora) -> Tensor:
    if part is None:
        return like.up.new_zeros(count, like.rank)
    if part.up.shape[0] != count:
        raise ValueError(f"a part of a fused module has {part.up.shape[0]} outputs and not {count}")
    return part.up


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)


def _is_block_diagonal(ups: Sequence[Tensor], rank: int) -> bool:
    """Whether each part uses ranks of its own; a LoRA that is all zero could be either, and is taken as shared."""
    beside = [torch.cat([up[:, : number * rank], up[:, (number + 1) * rank :]], dim=1)
              for number, up in enumerate(ups)]  # fmt: skip
    return any(bool(up.any()) for up in ups) and not any(bool(each.any()) for each in beside)


def _swapped(down: Tensor, up: Tensor) -> Tensor:
    """The other order of shift and scale, where the module makes just these two."""
    return torch.cat(up.chunk(2)[::-1]) if up.shape[0] == 2 * down.shape[1] else up


def _cut(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Rows of a matrix in portions of these sizes."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [tensor[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Blocks from corner to corner, zeros beside them."""
    whole = blocks[0].new_zeros(sum(len(block) for block in blocks), sum(block.shape[1] for block in blocks))
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole
