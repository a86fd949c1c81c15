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
from ..batches import Layout
from ..loader import Loader, StepWork
from ..showing import Showing
from .latents import LatentReader
from .texts import TextReader

STEPS_AHEAD = 2


class CachedLoader:
    """This rank's part of every step, with latents; with captions as text, or encoded where ``texts`` has them."""

    def __init__(self, showing: Showing, plan: Layout, rank: int, latents: LatentReader, texts: TextReader | None, *,
                 pin_memory: bool):  # fmt: skip
        self.showing, self.rank, self.latents, self.texts = showing, rank, latents, texts
        self.plan = copy.deepcopy(plan)  # it lays out epochs as they come, and not for two threads
        self.pin_memory = pin_memory

    def steps(self, from_step: int) -> Iterator[StepWork]:
        """The work of each step from ``from_step`` on, without end."""
        waiting: deque[Future[StepWork]] = deque()
        with ThreadPoolExecutor(1, "cache") as pool:
            for step in itertools.count(from_step):
                ahead = range(step + len(waiting), step + 1 + STEPS_AHEAD)
                waiting.extend(pool.submit(self.work, number) for number in ahead)
                yield waiting.popleft().result()

    def work(self, step: int) -> StepWork:
        """One step."""
        first = step * self.plan.accumulation
        batches = tuple(self.batch(position) for position in range(first, first + self.plan.accumulation))
        return StepWork(batches, self.plan.real_samples(step))

    def batch(self, position: int) -> PixelBatch:
        """One micro-batch."""
        mine = self.plan.micro_batch(position).share(self.rank, self.plan.ranks)
        visits = self.showing.visits(mine, position // self.plan.accumulation)
        mirrored = [self.showing.is_mirrored(visit) for visit in visits]
        frames = [self.showing.frame(visit.sample, self.showing.placements[visit.sample].crop, is_mirrored=flip)
                  for visit, flip in zip(visits, mirrored, strict=True)]  # fmt: skip
        samples = [self.showing.manifest.samples[index] for index in mine.samples]
        weights = [sample.weight * is_real for sample, is_real in zip(samples, mine.weights, strict=True)]
        captions = tuple(map(self.showing.caption, visits))
        batch = PixelBatch(
            pixels=None,
            captions=captions,
            frame=torch.tensor(frames, dtype=torch.float32),
            weight=torch.tensor(weights, dtype=torch.float32),
            places=mine.places,
            ids=tuple(sample.key for sample in samples),
            moments=self.latents.moments(mine.samples, mirrored),
            latent_mask=self.latents.masks(mine.samples, mirrored) if any(sample.mask for sample in samples) else None,
            cond=None if self.texts is None else self.texts.cond(captions),
        )
        return batch.pin_memory() if self.pin_memory else batch


class WithTexts:
    """A loader of pixels, whose captions are encoded already."""

    def __init__(self, loader: Loader, texts: TextReader):
        self.loader, self.texts = loader, texts

    def steps(self, from_step: int) -> Iterator[StepWork]:
        """As the loader's."""
        for work in self.loader.steps(from_step):
            yield replace(work, batches=self._with_cond(work.batches))

    def _with_cond(self, batches: Sequence[PixelBatch]) -> tuple[PixelBatch, ...]:
        whole = [replace(batch, cond=self.texts.cond(batch.captions)) for batch in batches]
        return tuple(batch.pin_memory() if self.loader.pin_memory else batch for batch in whole)
