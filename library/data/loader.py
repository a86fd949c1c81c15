"""Read ahead what a plan wants: pictures decoded, cut and mirrored, captions as they are shown."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from ..randomness import generator_for
from .batch import PixelBatch
from .batches import Layout
from .buckets import Placement
from .cutting import BadSample, Cut, cut
from .images import Pixels
from .manifest import Manifest
from .masks import MaskPixels
from .showing import Showing, Visit
from .workers import ReadAhead, Unreadable

Reader = Dataset[PixelBatch | Unreadable]
"""Position of the plan -> this rank's batch: a function of nothing else, so that anybody may read anything ahead."""


@dataclass(frozen=True)
class StepWork:
    """What this rank does in one optimizer step."""

    batches: tuple[PixelBatch, ...]
    samples: int  # in the step as it was planned, over all ranks, without those that only fill up

    @property
    def problems(self) -> tuple[BadSample, ...]:
        """Pictures that could not be used."""
        return tuple(problem for batch in self.batches for problem in batch.problems)


class StepLoader(Protocol):
    """Whatever hands out the work of steps."""

    def steps(self, from_step: int) -> Iterator[StepWork]:
        """The work of each step from ``from_step`` on, without end."""


class Loader:
    """This rank's part of every step; the number of workers changes nothing in it."""

    def __init__(self, reader: Reader, plan: Layout, *, workers: int, prefetch: int = 2, pin_memory: bool = False,
                 start_method: str | None = None):  # fmt: skip
        self.reader, self.plan = reader, plan
        self.workers = min(workers, _cores())
        self.prefetch, self.pin_memory, self.start_method = prefetch, pin_memory, start_method

    def steps(self, from_step: int) -> Iterator[StepWork]:
        """The work of each step from ``from_step`` on, without end; workers live as long as the iterator."""
        items: ReadAhead[PixelBatch] = ReadAhead(
            self.reader, from_step * self.plan.accumulation, workers=self.workers, prefetch=self.prefetch,
            pin_memory=self.pin_memory, start_method=self.start_method
        )  # fmt: skip
        try:
            for step in itertools.count(from_step):
                batches = tuple(itertools.islice(items, self.plan.accumulation))
                yield StepWork(batches, self.plan.real_samples(step))
        finally:
            items.stop()


def _cores() -> int:
    """Those that this process may use, which in a container may be few of those that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Shown:
    """A picture as it is shown once."""

    pixels: Pixels
    mask: MaskPixels | None
    frame: tuple[int, ...]  # original height, width; crop top, left; target height, width


class MicroBatchReader(Dataset[PixelBatch | Unreadable]):
    """Batches of pixels.

    A picture that cannot be used any more is replaced by its nearest neighbour in the batch, or by black where there is
    none, and weighs nothing.  The loss of the step is divided by its samples as planned all the same: that needs no
    word between processes, and the others weigh as they would have.
    """

    def __init__(self, manifest: Manifest, placements: Sequence[Placement], plan: Layout, rank: int, seed: int,
                 total_steps: int):  # fmt: skip
        self.showing = Showing(manifest, placements, seed, total_steps)
        self.plan, self.rank = plan, rank

    def __getitem__(self, position: int) -> PixelBatch:
        batch = self.plan.micro_batch(position).share(self.rank, self.plan.ranks)
        visits = self.showing.visits(batch, position // self.plan.accumulation)
        rows = [self._picture(visit) for visit in visits]
        stand_ins = [_stand_in(rows, row) for row in range(len(rows))]
        visits = [visits[row] for row in stand_ins]
        pictures = [self._usable(rows[row], visit.sample) for row, visit in zip(stand_ins, visits, strict=True)]
        samples = [self.showing.manifest.samples[visit.sample] for visit in visits]
        weights = [sample.weight * real * isinstance(row, Shown)
                   for sample, real, row in zip(samples, batch.weights, rows, strict=True)]  # fmt: skip
        return PixelBatch(
            pixels=torch.from_numpy(np.stack([picture.pixels.transpose(2, 0, 1) for picture in pictures])),
            captions=tuple(map(self.showing.caption, visits)),
            frame=torch.tensor([picture.frame for picture in pictures], dtype=torch.float32),
            weight=torch.tensor(weights, dtype=torch.float32),
            places=batch.places,
            ids=tuple(sample.key for sample in samples),
            mask=_stacked([picture.mask for picture in pictures], self.plan.buckets[batch.bucket].size),
            problems=tuple(row for row in rows if isinstance(row, BadSample)),
        )

    def picture(self, epoch: int, index: int, copy: int) -> Shown | BadSample:
        """The picture as it is shown this time."""
        return self._picture(Visit(epoch, 0, index, copy))

    def caption(self, epoch: int, step: int, index: int, copy: int) -> str:
        """As it is shown this time."""
        return self.showing.caption(Visit(epoch, step, index, copy))

    def _picture(self, visit: Visit) -> Shown | BadSample:
        showing, index = self.showing, visit.sample
        subset = showing.subset(index)
        way = Cut(showing.crop(visit), showing.is_mirrored(visit), subset.resize_interpolation)
        colours = None
        if subset.color_aug:
            colours = generator_for(showing.seed, "colour", visit.epoch, index, visit.copy)
        found = cut(showing.manifest.samples[index], showing.placements[index], way, colours)
        if isinstance(found, BadSample):
            return found
        return Shown(*found, showing.frame(index, way.crop, is_mirrored=way.is_mirrored))

    def _usable(self, row: Shown | BadSample, index: int) -> Shown:
        """The row, or black of the right size."""
        if isinstance(row, Shown):
            return row
        placement = self.showing.placements[index]
        width, height = placement.bucket
        frame = self.showing.frame(index, placement.crop, is_mirrored=False)
        return Shown(np.zeros((height, width, 3), np.uint8), None, frame)


def _stand_in(rows: Sequence[Shown | BadSample], row: int) -> int:
    """The row itself, or the nearest that can be used; itself again when there is none."""
    usable = [other for other, item in enumerate(rows) if isinstance(item, Shown)]
    return min(usable, key=lambda other: abs(other - row), default=row)


def _stacked(masks: Sequence[MaskPixels | None], size: tuple[int, int]) -> torch.Tensor | None:
    """The masks of a batch; of a picture without one everything counts."""
    if all(mask is None for mask in masks):
        return None
    whole = np.full((size[1], size[0]), 255, np.uint8)
    return torch.from_numpy(np.stack([whole if mask is None else mask for mask in masks])[:, None])
