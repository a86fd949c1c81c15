"""The position embedding of Stable Diffusion 3 in training: random crops of its table, and tables for resolutions.

Inference takes the central part of the table. Training may take another part for some samples, so that the model learns
relative positions (``--pos_emb_random_crop_rate``), and may stretch the positions of smaller resolutions over the range
that the model knows from 1024 pixels (``--enable_scaled_pos_embed``).
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..diffusion.noise import copy_async

TABLE_RATIO = 1.5
"""The side of a scaled table, in patches, by that of an image of its resolution."""

BASE_POSITIONS = 16
"""The range of positions over an image of a table's resolution, as in the weights of SD3.5 medium at 1024 pixels."""

VAE_FACTOR = 8


@dataclass(frozen=True)
class ScaledTable:
    """A table of positions that are stretched so that an image of ``side`` x ``side`` patches has the whole range."""

    side: int

    @property
    def size(self) -> int:
        return int(self.side * TABLE_RATIO)

    def compute_positions(self, start: int, count: int) -> Tensor:
        """Compute the positions of patches along one axis, from the ``start``-th of the table."""
        indices = torch.arange(start, start + count, dtype=torch.float64)
        return (indices - (self.size - self.side) / 2) * BASE_POSITIONS / self.side


def choose_scaled_table(height: int, width: int, resolution_sides: Sequence[int], patch_size: int) -> ScaledTable:
    """Choose the table for an image of this size in patches: that of the resolution whose area is nearest.

    ``resolution_sides`` are the sides in pixels of squares with the areas of the datasets' resolutions.
    """
    sides = sorted({side // VAE_FACTOR // patch_size for side in resolution_sides})
    limits = [(below**2 + above**2) // 2 for below, above in pairwise(sides)]
    chosen = next((side for side, limit in zip(sides, limits, strict=False) if height * width <= limit), sides[-1])
    table = ScaledTable(chosen)
    return table if max(height, width) <= table.size else ScaledTable(max(height, width))


@dataclass(frozen=True)
class PositionCrops:
    """Which part of the table each sample gets."""

    random_rate: float
    draws: Sequence[random.Random] | None
    """A generator for each sample; None: every sample gets the center."""
    resolution_sides: Sequence[int] = ()
    """The resolutions that have tables of their own; empty: the model's table is used for all."""

    def build_embeds(self, patch_embed: Any, latent_height: int, latent_width: int) -> Tensor:
        """Build the position embeddings (samples or 1, tokens, width) of latents of this size."""
        patch_size = patch_embed.patch_size
        height, width = latent_height // patch_size, latent_width // patch_size
        table = choose_scaled_table(height, width, self.resolution_sides, patch_size) if self.resolution_sides else None
        size = patch_embed.pos_embed_max_size if table is None else table.size
        free = size - height, size - width
        corners = [self._draw_corner(*free, draw) for draw in self.draws or (None,)]
        rows = {
            corner: _slice_table(patch_embed, corner, (height, width))
            if table is None
            else _compute_embeds(patch_embed, table, corner, (height, width))
            for corner in set(corners)
        }
        return torch.cat([rows[corner] for corner in corners])

    def _draw_corner(self, free_height: int, free_width: int, draw: random.Random | None) -> tuple[int, int]:
        if draw is None or draw.random() >= self.random_rate:
            return free_height // 2, free_width // 2
        return draw.randint(0, free_height), draw.randint(0, free_width)


def _slice_table(patch_embed: Any, corner: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Slice (1, tokens, width) out of the model's own table."""
    size, (top, left), (height, width) = patch_embed.pos_embed_max_size, corner, shape
    table: Tensor = patch_embed.pos_embed.reshape(1, size, size, -1)
    return table[:, top : top + height, left : left + width].flatten(1, 2)


def _compute_embeds(patch_embed: Any, table: ScaledTable, corner: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Compute (1, tokens, width) of a scaled table, of which only these rows are needed."""
    from diffusers.models.embeddings import get_2d_sincos_pos_embed_from_grid

    rows, columns = (table.compute_positions(start, count) for start, count in zip(corner, shape, strict=True))
    grid = torch.stack([columns.expand(shape), rows.unsqueeze(1).expand(shape)])  # columns first, as in the weights
    own: Tensor = patch_embed.pos_embed
    compute: Any = get_2d_sincos_pos_embed_from_grid
    embeds: Tensor = compute(own.shape[-1], grid, output_type="pt")
    return copy_async(embeds.to(own.dtype).unsqueeze(0), own)


@contextmanager
def replace_positions(patch_embed: Any, embeds: Tensor) -> Iterator[None]:
    """Let calls of the patch embedding add these embeddings, of which each sample may have its own."""
    patch_embed.cropped_pos_embed = lambda height, width: embeds
    try:
        yield
    finally:
        del patch_embed.cropped_pos_embed
