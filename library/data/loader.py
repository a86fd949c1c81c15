"""Batches that are the same at every evaluation and on any number of processes: all pictures once, in a fixed order."""

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from ..dataset.image_inspection import Pixels
from ..dataset.masks import MaskPixels
from ..randomness import derive_rng, derive_seed
from .augment import Augmenter, SampleView
from .batch import PixelBatch
from .batch_plan import Bucket, MicroBatch, MicroBatchSchedule
from .buckets import BucketAssignment
from .images import BadSample, CropParams, load_sample_pixels
from .manifest import Manifest
from .worker_pool import PrefetchIterator, WorkerFailure, prefetch_in_threads

PREFETCH_BATCHES = 2


ReadBatch = Callable[[int], PixelBatch]
"""From the number of a batch to the batch."""


@dataclass(frozen=True)
class ValidationBatches:
    """What is read is what stands here, whole: it is shared over processes batch by batch."""

    buckets: tuple[Bucket, ...]
    micro_batches: tuple[MicroBatch, ...]
    dp_size: int = 1
    accumulation_steps: int = 1

    def get_micro_batch(self, position: int) -> MicroBatch:
        """The batch with this number."""
        return self.micro_batches[position]

    @property
    def dataset_numbers(self) -> dict[int, int]:
        """The dataset of each sample."""
        return {
            sample: self.buckets[batch.bucket_index].dataset_number
            for batch in self.micro_batches
            for sample in batch.sample_indices
        }

    def count_real_samples(self, step: int) -> int:
        """The pictures in it; none only fills up."""
        return len(self.micro_batches[step].sample_indices)


def build_validation_batches(
    manifest: Manifest, assignments: Sequence[BucketAssignment], first_index: int, max_batches: int | None
) -> ValidationBatches:
    """All samples, bucket by bucket in batches of their datasets' size; they are counted from ``first`` on.

    Of more than ``most`` batches those are taken that a hash of their first picture chooses.  The place of a sample,
    from which its random numbers follow, comes from its picture alone.
    """
    members: defaultdict[tuple[int, tuple[int, int]], list[int]] = defaultdict(list)
    for index in range(len(manifest.samples)):
        members[manifest.samples[index].dataset_index, assignments[index].bucket_resolution].append(index)
    buckets, batches = [], []
    for number, ((dataset, size), samples) in enumerate(sorted(members.items())):
        at_once = manifest.datasets[dataset].batch_size
        buckets.append(Bucket(size, samples, [1.0] * len(samples), at_once, dataset))
        batches += [
            _build_micro_batch(manifest, number, samples[start : start + at_once], first_index)
            for start in range(0, len(samples), at_once)
        ]
    chosen = sorted(
        range(len(batches)), key=lambda number: derive_seed(0, "measured", batches[number].global_positions[0])
    )[:max_batches]
    return ValidationBatches(tuple(buckets), tuple(batches[number] for number in sorted(chosen)))


def prefetch_batches(read_batch: ReadBatch, batch_indices: Sequence[int]) -> Iterator[PixelBatch]:
    """Read the batches with these indices in order, the next ones while the current one is computed."""
    return prefetch_in_threads(read_batch, batch_indices, depth=PREFETCH_BATCHES)


def _build_micro_batch(
    manifest: Manifest, bucket_index: int, sample_indices: Sequence[int], first_index: int
) -> MicroBatch:
    places = tuple(derive_seed(0, f"place/{manifest.samples[index].content_hash}") for index in sample_indices)
    count = len(sample_indices)
    return MicroBatch(
        bucket_index, 0, tuple(first_index + index for index in sample_indices), (0,) * count, (True,) * count, places
    )


BatchDataset = Dataset[PixelBatch | WorkerFailure]
"""Position of the plan -> this rank's batch: a function of nothing else, so that anybody may read anything ahead."""


@dataclass(frozen=True)
class StepBatches:
    """What this rank does in one optimizer step."""

    micro_batches: tuple[PixelBatch, ...]
    num_global_samples: int  # in the step as it was planned, over all ranks, without those that only fill up

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """Pictures that could not be used."""
        return tuple(problem for batch in self.micro_batches for problem in batch.bad_samples)


class StepLoader(Protocol):
    """Whatever hands out the work of steps."""

    def iter_steps(self, first_step: int) -> Iterator[StepBatches]:
        """The work of each step from ``from_step`` on, without end."""


class ImageLoader:
    """This rank's part of every step; the number of workers changes nothing in it."""

    def __init__(
        self,
        dataset: BatchDataset,
        batch_plan: MicroBatchSchedule,
        *,
        num_workers: int,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
    ):
        self.dataset, self.batch_plan = dataset, batch_plan
        self.num_workers = min(num_workers, _count_usable_cpus())
        self.prefetch_factor, self.pin_memory, self.multiprocessing_context = (
            prefetch_factor,
            pin_memory,
            multiprocessing_context,
        )

    def iter_steps(self, first_step: int) -> Iterator[StepBatches]:
        """The work of each step from ``from_step`` on, without end; workers live as long as the iterator."""
        items: PrefetchIterator[PixelBatch] = PrefetchIterator(
            self.dataset,
            first_step * self.batch_plan.accumulation_steps,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            pin_memory=self.pin_memory,
            multiprocessing_context=self.multiprocessing_context,
        )
        try:
            for step in itertools.count(first_step):
                batches = tuple(itertools.islice(items, self.batch_plan.accumulation_steps))
                yield StepBatches(batches, self.batch_plan.count_real_samples(step))
        finally:
            items.shutdown()


def _count_usable_cpus() -> int:
    """Those that this process may use, which in a container may be few of those that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LoadedImage:
    """A picture as it is shown once."""

    pixels: Pixels
    mask: MaskPixels | None
    size_conditioning: tuple[int, ...]  # original height, width; crop top, left; target height, width


class MicroBatchDataset(Dataset[PixelBatch | WorkerFailure]):
    """Batches of pixels.

    A picture that cannot be used any more is replaced by its nearest neighbour in the batch, or by black where there is
    none, and weighs nothing.  The loss of the step is divided by its samples as planned all the same: that needs no
    word between processes, and the others weigh as they would have.
    """

    def __init__(
        self,
        manifest: Manifest,
        assignments: Sequence[BucketAssignment],
        batch_plan: MicroBatchSchedule,
        rank: int,
        seed: int,
        total_steps: int,
    ):
        self.augmenter = Augmenter(manifest, assignments, seed, total_steps)
        self.batch_plan, self.rank = batch_plan, rank

    def __getitem__(self, position: int) -> PixelBatch:
        batch = self.batch_plan.get_micro_batch(position).shard(self.rank, self.batch_plan.dp_size)
        visits = self.augmenter.list_views(batch, position // self.batch_plan.accumulation_steps)
        rows = [self._load_view(visit) for visit in visits]
        stand_ins = [_find_replacement(rows, row) for row in range(len(rows))]
        visits = [visits[row] for row in stand_ins]
        pictures = [
            self._replace_bad_with_black(rows[row], visit.sample_index)
            for row, visit in zip(stand_ins, visits, strict=True)
        ]
        samples = [self.augmenter.manifest.samples[visit.sample_index] for visit in visits]
        weights = [
            sample.loss_weight * real * isinstance(row, LoadedImage)
            for sample, real, row in zip(samples, batch.is_real, rows, strict=True)
        ]
        return PixelBatch(
            pixels=torch.from_numpy(np.stack([picture.pixels.transpose(2, 0, 1) for picture in pictures])),
            captions=tuple(map(self.augmenter.draw_caption, visits)),
            size_conditioning=torch.tensor([picture.size_conditioning for picture in pictures], dtype=torch.float32),
            loss_weights=torch.tensor(weights, dtype=torch.float32),
            global_positions=batch.global_positions,
            sample_keys=tuple(sample.key for sample in samples),
            mask=_stack_masks(
                [picture.mask for picture in pictures], self.batch_plan.buckets[batch.bucket_index].resolution
            ),
            bad_samples=tuple(row for row in rows if isinstance(row, BadSample)),
        )

    def load_image(self, epoch: int, sample_index: int, repeat_index: int) -> LoadedImage | BadSample:
        """The picture as it is shown this time."""
        return self._load_view(SampleView(epoch, 0, sample_index, repeat_index))

    def get_caption(self, epoch: int, step: int, sample_index: int, repeat_index: int) -> str:
        """As it is shown this time."""
        return self.augmenter.draw_caption(SampleView(epoch, step, sample_index, repeat_index))

    def _load_view(self, view: SampleView) -> LoadedImage | BadSample:
        showing, index = self.augmenter, view.sample_index
        subset = showing.get_subset(index)
        way = CropParams(showing.draw_crop(view), showing.is_flipped(view), subset.resize_interpolation)
        colours = None
        if subset.color_aug:
            colours = derive_rng(showing.seed, "colour", view.epoch, index, view.repeat_index)
        found = load_sample_pixels(showing.manifest.samples[index], showing.assignments[index], way, colours)
        if isinstance(found, BadSample):
            return found
        return LoadedImage(*found, showing.compute_size_conditioning(index, way.left_top, is_flipped=way.is_flipped))

    def _replace_bad_with_black(self, item: LoadedImage | BadSample, sample_index: int) -> LoadedImage:
        """The row, or black of the right size."""
        if isinstance(item, LoadedImage):
            return item
        placement = self.augmenter.assignments[sample_index]
        width, height = placement.bucket_resolution
        frame = self.augmenter.compute_size_conditioning(sample_index, placement.crop_left_top, is_flipped=False)
        return LoadedImage(np.zeros((height, width, 3), np.uint8), None, frame)


def _find_replacement(items: Sequence[LoadedImage | BadSample], index: int) -> int:
    """The row itself, or the nearest that can be used; itself again when there is none."""
    usable = [other for other, item in enumerate(items) if isinstance(item, LoadedImage)]
    return min(usable, key=lambda other: abs(other - index), default=index)


def _stack_masks(masks: Sequence[MaskPixels | None], resolution: tuple[int, int]) -> torch.Tensor | None:
    """The masks of a batch; of a picture without one everything counts."""
    if all(mask is None for mask in masks):
        return None
    whole = np.full((resolution[1], resolution[0]), 255, np.uint8)
    return torch.from_numpy(np.stack([whole if mask is None else mask for mask in masks])[:, None])
