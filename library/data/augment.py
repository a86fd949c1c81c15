"""``color_aug``: one time in three, a small turn of all hues or a small change of brightness, as sd-scripts has it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..dataset.image_inspection import Pixels
from ..dataset.schema import SubsetConfig
from ..randomness import derive_rng
from .batch_plan import MicroBatch
from .buckets import BucketAssignment
from .captions import process_caption
from .manifest import Manifest

COLOR_AUG_PROBABILITY = 0.33


MAX_HUE_SHIFT = 8 / 180
"""As a part of the circle; OpenCV, which sd-scripts uses here, cuts it into 180."""


MAX_GAMMA_CHANGE = 0.05


def augment_color(pixels: Pixels, rng: random.Random) -> Pixels:
    """The picture, or a variation of it: hue or gamma, each in half of the cases."""
    if rng.random() >= COLOR_AUG_PROBABILITY:
        return pixels
    if rng.random() < 0.5:
        return adjust_hue(pixels, rng.uniform(-MAX_HUE_SHIFT, MAX_HUE_SHIFT))
    return adjust_gamma(pixels, rng.uniform(1 - MAX_GAMMA_CHANGE, 1 + MAX_GAMMA_CHANGE))


def adjust_hue(pixels: Pixels, shift: float) -> Pixels:
    """All hues turned by a part of the circle; saturation and value (the largest of red, green and blue) stay."""
    values = pixels.astype(np.float32)
    red, green, blue = values[..., 0], values[..., 1], values[..., 2]
    value = values.max(axis=2)
    chroma = value - values.min(axis=2)
    safe = np.where(chroma == 0, 1, chroma)
    sector = np.where(
        value == red,
        (green - blue) / safe % 6,
        np.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    sector = sector + np.float32(shift * 6)
    channels = [value - chroma * _compute_missing_chroma((sector + start) % 6) for start in (5, 3, 1)]
    turned: Pixels = np.rint(np.stack(channels, axis=2)).astype(np.uint8)
    return turned


def _compute_missing_chroma(sector: NDArray[np.float32]) -> NDArray[np.float32]:
    """How much of its chroma a channel lacks at a place on the circle of six sectors."""
    lack: NDArray[np.float32] = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    return lack


def adjust_gamma(pixels: Pixels, gamma: float) -> Pixels:
    """Black and white stay; a ``gamma`` above 1 makes what lies between darker."""
    table = np.rint(255 * (np.arange(256) / 255) ** gamma).astype(np.uint8)
    return np.take(table, pixels)


@dataclass(frozen=True)
class SampleView:
    """One showing of one sample; epoch and step are counted from 0, and the copy is which of its repeats it is."""

    epoch: int
    step: int
    sample_index: int
    repeat_index: int


@dataclass(frozen=True)
class Augmenter:
    """The samples of a run of ``total_steps`` steps, and the seed that decides how each is shown."""

    manifest: Manifest
    assignments: Sequence[BucketAssignment]
    seed: int
    total_steps: int

    def list_views(self, micro_batch: MicroBatch, step: int) -> list[SampleView]:
        """What a micro-batch shows."""
        return [
            SampleView(micro_batch.epoch, step, *entry)
            for entry in zip(micro_batch.sample_indices, micro_batch.repeat_indices, strict=True)
        ]

    def get_subset(self, sample_index: int) -> SubsetConfig:
        """The subset that a sample belongs to."""
        entry = self.manifest.samples[sample_index]
        return self.manifest.datasets[entry.dataset_index].subsets[entry.subset_index]

    def draw_crop(self, view: SampleView) -> tuple[int, int]:
        """(left, top) of the cut in the resized picture."""
        placement = self.assignments[view.sample_index]
        if not self.get_subset(view.sample_index).random_crop:
            return placement.crop_left_top
        draw = derive_rng(self.seed, "crop", view.epoch, view.sample_index, view.repeat_index)
        room = [placement.resized_size[side] - placement.bucket_resolution[side] for side in (0, 1)]
        return draw.randint(0, room[0]), draw.randint(0, room[1])

    def is_flipped(self, view: SampleView) -> bool:
        """Whether left is right."""
        if not self.get_subset(view.sample_index).flip_aug:
            return False
        return derive_rng(self.seed, "flip", view.epoch, view.sample_index, view.repeat_index).random() < 0.5

    def compute_size_conditioning(
        self, sample_index: int, crop_left_top: tuple[int, int], *, is_flipped: bool
    ) -> tuple[int, ...]:
        """(original height, width, crop top, left, target height, width), as cut out of the mirrored picture."""
        size, placement = self.manifest.samples[sample_index].size, self.assignments[sample_index]
        width, height = placement.bucket_resolution
        left = placement.resized_size[0] - width - crop_left_top[0] if is_flipped else crop_left_top[0]
        return size[1], size[0], crop_left_top[1], left, height, width

    def draw_caption(self, view: SampleView) -> str:
        """As the text encoders are given it."""
        sample, subset = self.manifest.samples[view.sample_index], self.get_subset(view.sample_index)
        draw = derive_rng(self.seed, "caption", view.epoch, view.sample_index, view.repeat_index)
        return process_caption(
            sample.caption, subset, draw, epoch=view.epoch, step=view.step, total_steps=self.total_steps
        )
