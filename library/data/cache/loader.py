"""Batches out of a cache: what each visit shows is decided as ever, and read from files that are mapped into memory.

There are no workers: reading an entry is one copy.  A thread reads steps ahead, so that a slow disk is waited for
while the device computes.
"""

import copy
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from ..batch import PixelBatch
from ..batches import MicroBatchSchedule
from ..loader import ImageLoader, StepBatches
from ..showing import Augmenter
from .latents import LatentReader
from .texts import TextReader

PREFETCH_STEPS = 2


class CachedLatentLoader:
    """This rank's part of every step, with latents; with captions as text, or encoded where ``texts`` has them."""

    def __init__(self, augmenter: Augmenter, batch_plan: MicroBatchSchedule, rank: int, latent_reader: LatentReader, text_reader: TextReader | None, *,
                 pin_memory: bool):  # fmt: skip
        self.augmenter, self.rank, self.latent_reader, self.text_reader = augmenter, rank, latent_reader, text_reader
        self.batch_plan = copy.deepcopy(batch_plan)  # it lays out epochs as they come, and not for two threads
        self.pin_memory = pin_memory

    def iter_steps(self, first_step: int) -> Iterator[StepBatches]:
        """The work of each step from ``from_step`` on, without end."""
        waiting: deque[Future[StepBatches]] = deque()
        with ThreadPoolExecutor(1, "cache") as pool:
            for step in itertools.count(first_step):
                ahead = range(step + len(waiting), step + 1 + PREFETCH_STEPS)
                waiting.extend(pool.submit(self.load_step, number) for number in ahead)
                yield waiting.popleft().result()

    def load_step(self, step: int) -> StepBatches:
        """One step."""
        first = step * self.batch_plan.accumulation_steps
        batches = tuple(self.load_micro_batch(position) for position in range(first, first + self.batch_plan.accumulation_steps))
        return StepBatches(batches, self.batch_plan.count_real_samples(step))

    def load_micro_batch(self, position: int) -> PixelBatch:
        """One micro-batch."""
        mine = self.batch_plan.get_micro_batch(position).shard(self.rank, self.batch_plan.dp_size)
        visits = self.augmenter.list_views(mine, position // self.batch_plan.accumulation_steps)
        mirrored = [self.augmenter.is_flipped(visit) for visit in visits]
        frames = [self.augmenter.compute_size_conditioning(visit.sample_index, self.augmenter.assignments[visit.sample_index].crop_left_top, is_flipped=flip)
                  for visit, flip in zip(visits, mirrored, strict=True)]  # fmt: skip
        samples = [self.augmenter.manifest.samples[index] for index in mine.sample_indices]
        weights = [sample.loss_weight * is_real for sample, is_real in zip(samples, mine.is_real, strict=True)]
        captions = tuple(map(self.augmenter.draw_caption, visits))
        batch = PixelBatch(
            pixels=None,
            captions=captions,
            size_conditioning=torch.tensor(frames, dtype=torch.float32),
            loss_weights=torch.tensor(weights, dtype=torch.float32),
            global_positions=mine.global_positions,
            sample_keys=tuple(sample.key for sample in samples),
            moments=self.latent_reader.read_moments(mine.sample_indices, mirrored),
            latent_mask=self.latent_reader.read_masks(mine.sample_indices, mirrored) if any(sample.mask for sample in samples) else None,
            cond=None if self.text_reader is None else self.text_reader.read_cond(captions),
        )
        return batch.pin_memory() if self.pin_memory else batch


class CachedTextLoader:
    """A loader of pixels, whose captions are encoded already."""

    def __init__(self, image_loader: ImageLoader, text_reader: TextReader):
        self.image_loader, self.text_reader = image_loader, text_reader

    def iter_steps(self, first_step: int) -> Iterator[StepBatches]:
        """As the loader's."""
        for work in self.image_loader.iter_steps(first_step):
            yield replace(work, micro_batches=self._add_cond(work.micro_batches))

    def _add_cond(self, batches: Sequence[PixelBatch]) -> tuple[PixelBatch, ...]:
        whole = [replace(batch, cond=self.text_reader.read_cond(batch.captions)) for batch in batches]
        return tuple(batch.pin_memory() if self.image_loader.pin_memory else batch for batch in whole)
