"""How a sample is shown at one visit: as which cut of its picture, mirrored or not, with which caption.

All of it follows from (seed, epoch, sample, copy) and the step, so whatever hands out a sample shows the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..dataset.schema import SubsetConfig
from ..randomness import generator_for
from .batches import MicroBatch
from .buckets import Placement
from .captions import shown
from .manifest import Manifest


@dataclass(frozen=True)
class Visit:
    """One showing of one sample; epoch and step are counted from 0, and the copy is which of its repeats it is."""

    epoch: int
    step: int
    sample: int
    copy: int


@dataclass(frozen=True)
class Showing:
    """The samples of a run of ``total_steps`` steps, and the seed that decides how each is shown."""

    manifest: Manifest
    placements: Sequence[Placement]
    seed: int
    total_steps: int

    def visits(self, batch: MicroBatch, step: int) -> list[Visit]:
        """What a micro-batch shows."""
        return [Visit(batch.epoch, step, *entry) for entry in zip(batch.samples, batch.copies, strict=True)]

    def subset(self, sample: int) -> SubsetConfig:
        """The subset that a sample belongs to."""
        entry = self.manifest.samples[sample]
        return self.manifest.datasets[entry.dataset].subsets[entry.subset]

    def crop(self, visit: Visit) -> tuple[int, int]:
        """(left, top) of the cut in the resized picture."""
        placement = self.placements[visit.sample]
        if not self.subset(visit.sample).random_crop:
            return placement.crop
        draw = generator_for(self.seed, "crop", visit.epoch, visit.sample, visit.copy)
        room = [placement.resized[side] - placement.bucket[side] for side in (0, 1)]
        return draw.randint(0, room[0]), draw.randint(0, room[1])

    def is_mirrored(self, visit: Visit) -> bool:
        """Whether left is right."""
        if not self.subset(visit.sample).flip_aug:
            return False
        return generator_for(self.seed, "flip", visit.epoch, visit.sample, visit.copy).random() < 0.5

    def frame(self, sample: int, crop: tuple[int, int], *, is_mirrored: bool) -> tuple[int, ...]:
        """(original height, width, crop top, left, target height, width), as cut out of the mirrored picture."""
        size, placement = self.manifest.samples[sample].size, self.placements[sample]
        width, height = placement.bucket
        left = placement.resized[0] - width - crop[0] if is_mirrored else crop[0]
        return size[1], size[0], crop[1], left, height, width

    def caption(self, visit: Visit) -> str:
        """As the text encoders are given it."""
        sample, subset = self.manifest.samples[visit.sample], self.subset(visit.sample)
        draw = generator_for(self.seed, "caption", visit.epoch, visit.sample, visit.copy)
        return shown(sample.caption, subset, draw, epoch=visit.epoch, step=visit.step, steps=self.total_steps)
