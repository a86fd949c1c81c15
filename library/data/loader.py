"""Read ahead what a plan wants: pictures decoded, cut and mirrored, captions as they are shown."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from ..randomness import generator_for
from .batch import BadSample, PixelBatch
from .batches import BatchPlan
from .buckets import Placement
from .captions import shown
from .colours import varied
from .images import Pixels, cut_out
from .manifest import Manifest
from .masks import MaskPixels, picture_and_mask, placed_mask
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


class Loader:
    """This rank's part of every step; the number of workers changes nothing in it."""

    def __init__(self, reader: Reader, plan: BatchPlan, *, workers: int, prefetch: int = 2, pin_memory: bool = False,
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

    def __init__(self, manifest: Manifest, placements: Sequence[Placement], plan: BatchPlan, rank: int, seed: int,
                 total_steps: int):  # fmt: skip
        self.manifest, self.placements, self.plan, self.rank = manifest, placements, plan, rank
        self.seed, self.total_steps = seed, total_steps

    def __getitem__(self, position: int) -> PixelBatch | Unreadable:
        batch = self.plan.micro_batch(position).share(self.rank, self.plan.ranks)
        step = position // self.plan.accumulation
        entries = list(zip(batch.samples, batch.copies, strict=True))
        rows = [self.picture(batch.epoch, sample, copy) for sample, copy in entries]
        stand_ins = [_stand_in(rows, row) for row in range(len(rows))]
        entries = [entries[row] for row in stand_ins]
        pictures = [self._usable(rows[row], entry) for row, entry in zip(stand_ins, entries, strict=True)]
        samples = [self.manifest.samples[index] for index, _ in entries]
        weights = [sample.weight * real * isinstance(row, Shown)
                   for sample, real, row in zip(samples, batch.weights, rows, strict=True)]  # fmt: skip
        return PixelBatch(
            pixels=torch.from_numpy(np.stack([picture.pixels.transpose(2, 0, 1) for picture in pictures])),
            captions=tuple(self.caption(batch.epoch, step, sample, copy) for sample, copy in entries),
            frame=torch.tensor([picture.frame for picture in pictures], dtype=torch.float32),
            weight=torch.tensor(weights, dtype=torch.float32),
            places=batch.places,
            ids=tuple(sample.key for sample in samples),
            mask=_stacked([picture.mask for picture in pictures], self.plan.buckets[batch.bucket].size),
            problems=tuple(row for row in rows if isinstance(row, BadSample)),
        )

    def picture(self, epoch: int, index: int, copy: int) -> Shown | BadSample:
        """The picture as it is shown this time."""
        sample, placement = self.manifest.samples[index], self.placements[index]
        subset = self.manifest.datasets[sample.dataset].subsets[sample.subset]
        width, height = placement.bucket
        left, top = placement.crop
        if subset.random_crop:
            draw = generator_for(self.seed, "crop", epoch, index, copy)
            left, top = draw.randint(0, placement.resized[0] - width), draw.randint(0, placement.resized[1] - height)
        is_mirrored = subset.flip_aug and generator_for(self.seed, "flip", epoch, index, copy).random() < 0.5
        try:
            image, values = picture_and_mask(sample.image, sample.mask)
            mask = values if sample.mask is None or values is None else placed_mask(
                sample.mask, values, placement, (left, top), is_mirrored=is_mirrored)  # fmt: skip
        except Exception as error:  # decoders raise whatever they like on broken data
            return BadSample(str(sample.image), f"was fine at the start and cannot be read now: {error}")
        if image.size != sample.size:
            return BadSample(str(sample.image), f"was {sample.size} at the start of the run, now it is {image.size}")
        pixels = cut_out(image, placement, (left, top), subset.resize_interpolation)
        if subset.color_aug:
            pixels = varied(pixels, generator_for(self.seed, "colour", epoch, index, copy))
        if is_mirrored:
            pixels = pixels[:, ::-1]
            left = placement.resized[0] - width - left  # as cut out of the mirrored picture
        return Shown(pixels, mask, (sample.size[1], sample.size[0], top, left, height, width))

    def caption(self, epoch: int, step: int, index: int, copy: int) -> str:
        """As it is shown this time."""
        sample = self.manifest.samples[index]
        subset = self.manifest.datasets[sample.dataset].subsets[sample.subset]
        draw = generator_for(self.seed, "caption", epoch, index, copy)
        return shown(sample.caption, subset, draw, epoch=epoch, step=step, steps=self.total_steps)

    def _usable(self, row: Shown | BadSample, entry: tuple[int, int]) -> Shown:
        """The row, or black of the right size."""
        if isinstance(row, Shown):
            return row
        sample, placement = self.manifest.samples[entry[0]], self.placements[entry[0]]
        (width, height), (left, top) = placement.bucket, placement.crop
        frame = (sample.size[1], sample.size[0], top, left, height, width)
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
