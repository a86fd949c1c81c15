"""How a sample is shown at one visit: as which cut of its picture, mirrored or not, with which caption.

All of it follows from (seed, epoch, sample, copy) and the step, so whatever hands out a sample shows the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..dataset.schema import SubsetConfig
from ..randomness import derive_rng
from .batches import MicroBatch
from .buckets import BucketAssignment
from .captions import process_caption
from .manifest import Manifest


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
        return [SampleView(micro_batch.epoch, step, *entry) for entry in zip(micro_batch.sample_indices, micro_batch.repeat_indices, strict=True)]

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

    def compute_size_conditioning(self, sample_index: int, crop_left_top: tuple[int, int], *, is_flipped: bool) -> tuple[int, ...]:
        """(original height, width, crop top, left, target height, width), as cut out of the mirrored picture."""
        size, placement = self.manifest.samples[sample_index].size, self.assignments[sample_index]
        width, height = placement.bucket_resolution
        left = placement.resized_size[0] - width - crop_left_top[0] if is_flipped else crop_left_top[0]
        return size[1], size[0], crop_left_top[1], left, height, width

    def draw_caption(self, view: SampleView) -> str:
        """As the text encoders are given it."""
        sample, subset = self.manifest.samples[view.sample_index], self.get_subset(view.sample_index)
        draw = derive_rng(self.seed, "caption", view.epoch, view.sample_index, view.repeat_index)
        return process_caption(sample.caption, subset, draw, epoch=view.epoch, step=view.step, total_steps=self.total_steps)
