"""Load image batches of a rank with DataLoader workers, and the fixed batches of validation.

The loader is not given to ``accelerator.prepare``, whose sharding of a bucketed sampler drops images and mixes buckets
in a batch.
"""

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from ..dataset.image_decoding import Pixels
from ..dataset.image_ref import prefetch_images
from ..dataset.mask_files import MaskPixels
from ..randomness import Purpose, derive_rng, derive_seed
from .augment import Augmenter, SampleView
from .batch import PixelBatch
from .batch_plan import Bucket, MicroBatch, MicroBatchSchedule
from .buckets import BucketAssignment, BucketKey, build_bucket_key
from .images import BadSample, CropParams, load_control_pixels, load_sample_pixels
from .manifest import Manifest
from .worker_pool import PrefetchIterator, WorkerFailure, prefetch_in_threads

PREFETCH_BATCHES = 2
ReadBatch = Callable[[int], PixelBatch]
"""Maps the index of a batch to the batch."""


@dataclass(frozen=True)
class ValidationBatches:
    """The fixed batches of validation, equal for any number of ranks; each rank takes entire batches."""

    buckets: tuple[Bucket, ...]
    micro_batches: tuple[MicroBatch, ...]
    dp_size: int = 1
    accumulation_steps: int = 1

    def get_micro_batch(self, position: int) -> MicroBatch:
        """Return a batch."""
        return self.micro_batches[position]

    @property
    def dataset_indices_in_file(self) -> dict[int, int]:
        """The dataset number of each sample."""
        return {
            sample: self.buckets[batch.bucket_index].dataset_index_in_file
            for batch in self.micro_batches
            for sample in batch.sample_indices
        }

    def count_real_samples(self, step: int) -> int:
        """Count the images of a batch; there is no padding."""
        return len(self.micro_batches[step].sample_indices)


def build_validation_batches(
    manifest: Manifest, assignments: Sequence[BucketAssignment], first_index: int, max_batches: int | None
) -> ValidationBatches:
    """Batch all samples bucket by bucket; sample indices start at ``first_index``.

    Of more than ``max_batches``, a hash of the first image of each chooses.  A sample's global position, which seeds
    its noise, is a hash of its image, so that it does not depend on the other images.
    """
    members: defaultdict[BucketKey, list[int]] = defaultdict(list)
    for index, sample in enumerate(manifest.samples):
        members[build_bucket_key(sample, assignments[index], manifest.datasets[sample.dataset_index])].append(index)
    buckets, batches = [], []
    for number, (key, samples) in enumerate(sorted(members.items())):
        dataset_index, size, num_frames, has_sound, controls, num_references = key
        batch_size = manifest.datasets[dataset_index].batch_size
        buckets.append(
            Bucket(
                resolution=size,
                sample_indices=samples,
                repeats=[1.0] * len(samples),
                batch_size=batch_size,
                dataset_index_in_file=dataset_index,
                control_resolutions=controls,
                num_references=num_references,
                num_frames=num_frames,
                has_sound=has_sound,
            )
        )
        batches += [
            _build_micro_batch(manifest, number, samples[start : start + batch_size], first_index)
            for start in range(0, len(samples), batch_size)
        ]
    chosen = sorted(
        range(len(batches)),
        key=lambda number: derive_seed(0, Purpose.VALIDATION_BATCH, batches[number].global_positions[0]),
    )[:max_batches]
    return ValidationBatches(tuple(buckets), tuple(batches[number] for number in sorted(chosen)))


def prefetch_batches(read_batch: ReadBatch, batch_indices: Sequence[int]) -> Iterator[PixelBatch]:
    """Read the batches with these indices in order, the next ones while the current one is computed."""
    return prefetch_in_threads(read_batch, batch_indices, depth=PREFETCH_BATCHES)


def _build_micro_batch(
    manifest: Manifest, bucket_index: int, sample_indices: Sequence[int], first_index: int
) -> MicroBatch:
    positions = tuple(
        derive_seed(0, f"{Purpose.VALIDATION_POSITION}/{manifest.samples[index].identity}") for index in sample_indices
    )
    indices, count = tuple(first_index + index for index in sample_indices), len(sample_indices)
    return MicroBatch(
        bucket_index=bucket_index,
        epoch=0,
        sample_indices=indices,
        repeat_indices=(0,) * count,
        is_real=(True,) * count,
        global_positions=positions,
    )


BatchDataset = Dataset[PixelBatch | WorkerFailure]
"""Maps a position of the batch plan to this rank's batch, statelessly, so that any worker can prefetch any batch."""


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches of one optimizer step on this rank."""

    micro_batches: tuple[PixelBatch, ...]
    num_global_samples: int  # planned, over all ranks, without padding

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """Images that could not be loaded."""
        return tuple(problem for batch in self.micro_batches for problem in batch.bad_samples)


class StepLoader(Protocol):
    """An iterator over the batches of every step."""

    def iter_steps(self, first_step: int) -> Iterator[StepBatches]:
        """Yield the batches of each optimizer step from ``first_step`` on, without end."""


class ImageLoader:
    """Loads the batches of this rank from image files; the number of workers does not change them."""

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
        self.prefetch_factor, self.pin_memory = prefetch_factor, pin_memory
        self.multiprocessing_context = multiprocessing_context

    def iter_steps(self, first_step: int) -> Iterator[StepBatches]:
        """Yield the batches of each optimizer step from ``first_step`` on; workers live as long as the iterator."""
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
    """Count the CPUs this process may use, which in a container may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LoadedImage:
    """An image or the frames of a clip, cropped and augmented."""

    pixels: Pixels
    mask: MaskPixels | None
    size_conditioning: tuple[int, ...]  # original height, width; crop top, left; target height, width
    controls: tuple[Pixels, ...] = ()


class MicroBatchDataset(Dataset[PixelBatch | WorkerFailure]):
    """Batches of pixels, by position in the batch plan.

    An image that cannot be loaded is replaced by its nearest neighbor in the batch, or by black, with loss weight 0.
    The loss of the step is still divided by the planned number of samples: this needs no communication, and the other
    samples keep their weight.
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
        views = self.augmenter.list_views(batch, position // self.batch_plan.accumulation_steps)
        samples = [self.augmenter.manifest.samples[view.sample_index] for view in views]
        prefetch_images(sample.image for sample in samples if sample.window is None)
        rows = [self._load_view(view) for view in views]
        replacements = [_find_replacement(rows, row) for row in range(len(rows))]
        views = [views[row] for row in replacements]
        images = [
            self._replace_bad_with_black(rows[row], view.sample_index)
            for row, view in zip(replacements, views, strict=True)
        ]
        samples = [self.augmenter.manifest.samples[view.sample_index] for view in views]
        resolution = self.batch_plan.buckets[batch.bucket_index].resolution
        weights = [
            sample.loss_weight * real * isinstance(row, LoadedImage)
            for sample, real, row in zip(samples, batch.is_real, rows, strict=True)
        ]
        return PixelBatch(
            pixels=torch.from_numpy(np.stack([move_channels_first(image.pixels) for image in images])),
            captions=tuple(map(self.augmenter.draw_caption, views)),
            size_conditioning=torch.tensor([image.size_conditioning for image in images], dtype=torch.float32),
            loss_weights=torch.tensor(weights, dtype=torch.float32),
            global_positions=batch.global_positions,
            sample_keys=tuple(sample.key for sample in samples),
            mask=_stack_masks([image.mask for image in images], resolution),
            bad_samples=tuple(row for row in rows if isinstance(row, BadSample)),
            control_pixels=_stack_controls([image.controls for image in images]),
            num_references=sum(control.is_reference for control in samples[0].controls),
            control_keys=tuple(map(self.augmenter.identify_controls, views)),
            frame_keys=tuple(map(self.augmenter.identify_first_frame, views)),
            network_multiplier=self.augmenter.get_dataset(batch.sample_indices[0]).network_multiplier,
        )

    def load_image(self, epoch: int, sample_index: int, repeat_index: int) -> LoadedImage | BadSample:
        """Load one view of a sample."""
        return self._load_view(SampleView(epoch, 0, sample_index, repeat_index))

    def get_caption(self, epoch: int, step: int, sample_index: int, repeat_index: int) -> str:
        """Draw the caption of one view of a sample."""
        return self.augmenter.draw_caption(SampleView(epoch, step, sample_index, repeat_index))

    def _load_view(self, view: SampleView) -> LoadedImage | BadSample:
        augmenter, index = self.augmenter, view.sample_index
        subset = augmenter.get_subset(index)
        assignment = augmenter.draw_assignment(view)
        crop = CropParams(assignment.crop_left_top, augmenter.is_flipped(view), subset.resize_interpolation)
        color_rng = None
        if subset.color_aug:
            color_rng = derive_rng(augmenter.seed, Purpose.COLOR, view.epoch, index, view.repeat_index)
        sample = augmenter.manifest.samples[index]
        loaded = load_sample_pixels(sample, assignment, crop, color_rng)
        if isinstance(loaded, BadSample):
            return loaded
        control_rng = derive_rng(augmenter.seed, Purpose.CONTROL, view.epoch, index, view.repeat_index)
        controls = load_control_pixels(sample, assignment, augmenter.get_dataset(index), crop, control_rng)
        if isinstance(controls, BadSample):
            return controls
        conditioning = augmenter.compute_size_conditioning(index, assignment, is_flipped=crop.is_flipped)
        return LoadedImage(*loaded, conditioning, controls)

    def _replace_bad_with_black(self, item: LoadedImage | BadSample, sample_index: int) -> LoadedImage:
        if isinstance(item, LoadedImage):
            return item
        assignment = self.augmenter.assignments[sample_index]
        conditioning = self.augmenter.compute_size_conditioning(sample_index, assignment, is_flipped=False)
        sizes = [assignment, *self.augmenter.assign_controls(sample_index)]
        sample = self.augmenter.manifest.samples[sample_index]
        frames = (sample.num_frames,) if sample.num_frames > 1 else ()
        channels = [3, *(4 if each.has_alpha else 3 for each in sample.controls)]
        axes = [frames, *((1,) if each.is_reference else frames for each in sample.controls)]
        black, *controls = (
            np.zeros((*axis, *each.bucket_resolution[::-1], count), np.uint8)
            for axis, each, count in zip(axes, sizes, channels, strict=True)
        )
        return LoadedImage(black, None, conditioning, tuple(controls))


def move_channels_first(pixels: Pixels) -> Pixels:
    """Turn (height, width, 3) to (3, height, width), and the frames of a clip to (3, frames, height, width)."""
    return np.moveaxis(pixels, -1, 0)


def _find_replacement(items: Sequence[LoadedImage | BadSample], index: int) -> int:
    """Find the nearest usable row, ``index`` itself if it is usable or none is."""
    usable = [other for other, item in enumerate(items) if isinstance(item, LoadedImage)]
    return min(usable, key=lambda other: abs(other - index), default=index)


def _stack_controls(controls: Sequence[tuple[Pixels, ...]]) -> tuple[torch.Tensor, ...]:
    """Stack the first control images of all samples, the second ones, and so on; in a bucket they have one size."""
    return tuple(
        torch.from_numpy(np.stack(list(map(move_channels_first, images)))) for images in zip(*controls, strict=True)
    )


def _stack_masks(masks: Sequence[MaskPixels | None], resolution: tuple[int, int]) -> torch.Tensor | None:
    """Stack masks, with 255 everywhere for images without one; None if no image has one."""
    if all(mask is None for mask in masks):
        return None
    full = np.full((resolution[1], resolution[0]), 255, np.uint8)
    return torch.from_numpy(np.stack([full if mask is None else mask for mask in masks])[:, None])
