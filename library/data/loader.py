"""Read ahead what a plan wants: pictures decoded, cut and mirrored, captions as they are shown."""

import atexit
import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..errors import UserError
from ..randomness import generator_for
from .batch import PixelBatch
from .batches import BatchPlan
from .buckets import Placement
from .captions import shown
from .images import cut_out, upright
from .manifest import Manifest


@dataclass(frozen=True)
class StepWork:
    """What this rank does in one optimizer step."""

    batches: tuple[PixelBatch, ...]
    samples: int  # in the step, over all ranks, without those that only fill up


@dataclass(frozen=True)
class Unreadable:
    """What a worker hands over in the place of a batch."""

    problem: str


class Loader:
    """This rank's part of every step; the number of workers changes nothing in it."""

    def __init__(self, manifest: Manifest, placements: Sequence[Placement], plan: BatchPlan, rank: int, *, seed: int,
                 total_steps: int, workers: int, pin_memory: bool):  # fmt: skip
        self.plan = plan
        self.reader = MicroBatchReader(manifest, placements, plan, rank, seed, total_steps)
        self.workers = min(workers, os.cpu_count() or 1)
        self.pin_memory = pin_memory

    def steps(self, from_step: int) -> Iterator[StepWork]:
        """The work of each step from ``from_step`` on, without end; workers live as long as the iterator."""
        loader: DataLoader[PixelBatch | Unreadable] = DataLoader(
            self.reader,
            batch_size=None,  # the plan made the batches
            sampler=_Positions(from_step * self.plan.accumulation),
            num_workers=self.workers,
            collate_fn=_as_it_is,
            worker_init_fn=_leave_signals_to_the_main_process,
            pin_memory=self.pin_memory,
        )
        items = iter(loader)
        # Workers do not react to SIGTERM, with which Python ends what is left of them at exit, and it would wait for
        # them for ever; a traceback that somebody keeps is enough for them to be left.
        stop = getattr(items, "_shutdown_workers", _nothing)  # not there without workers
        atexit.register(stop)
        try:
            for step in itertools.count(from_step):
                batches = tuple(_usable(next(items)) for _ in range(self.plan.accumulation))
                yield StepWork(batches, self.plan.real_samples(step))
        finally:
            atexit.unregister(stop)
            stop()


def _nothing() -> None:
    pass


class _Positions:
    """Every position of the plan from ``first`` on."""

    def __init__(self, first: int):
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.first)


def _as_it_is(item: Any) -> Any:
    return item


def _usable(item: PixelBatch | Unreadable) -> PixelBatch:
    """Raised here and not in a worker, whose traceback would become a part of the message."""
    if isinstance(item, Unreadable):
        raise UserError(item.problem)
    return item


def _leave_signals_to_the_main_process(worker: int) -> None:
    """A signal goes to the whole process group; the main process decides what it means, and needs its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class MicroBatchReader(Dataset[PixelBatch | Unreadable]):
    """Position of the plan -> this rank's batch, a function of nothing else."""

    def __init__(self, manifest: Manifest, placements: Sequence[Placement], plan: BatchPlan, rank: int, seed: int,
                 total_steps: int):  # fmt: skip
        self.manifest, self.placements, self.plan, self.rank = manifest, placements, plan, rank
        self.seed, self.total_steps = seed, total_steps

    def __getitem__(self, position: int) -> PixelBatch | Unreadable:
        batch = self.plan.micro_batch(position).share(self.rank, self.plan.ranks)
        step = position // self.plan.accumulation
        entries = list(zip(batch.samples, batch.copies, strict=True))
        try:
            pictures = [self.picture(batch.epoch, sample, copy) for sample, copy in entries]
        except UserError as error:
            return Unreadable(str(error))
        samples = [self.manifest.samples[index] for index in batch.samples]
        weights = [sample.weight * real for sample, real in zip(samples, batch.weights, strict=True)]
        return PixelBatch(
            pixels=torch.stack([picture for picture, _ in pictures]),
            captions=tuple(self.caption(batch.epoch, step, sample, copy) for sample, copy in entries),
            frame=torch.tensor([frame for _, frame in pictures], dtype=torch.float32),
            weight=torch.tensor(weights, dtype=torch.float32),
            places=batch.places,
            ids=tuple(sample.key for sample in samples),
        )

    def picture(self, epoch: int, index: int, copy: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """(3, height, width) in -1..1, and (original height, width, crop top, left, target height, width)."""
        sample, placement = self.manifest.samples[index], self.placements[index]
        subset = self.manifest.datasets[sample.dataset].subsets[sample.subset]
        width, height = placement.bucket
        left, top = placement.crop
        if subset.random_crop:
            draw = generator_for(self.seed, "crop", epoch, index, copy)
            left, top = draw.randint(0, placement.resized[0] - width), draw.randint(0, placement.resized[1] - height)
        try:
            image = upright(sample.image)
        except Exception as error:  # decoders raise whatever they like on broken data
            raise UserError(f"{sample.image}: was fine at the start and cannot be read now: {error}") from error
        if image.size != sample.size:
            raise UserError(f"{sample.image}: was {sample.size} at the start of the run, now it is {image.size}")
        picture = cut_out(image, placement, (left, top), subset.resize_interpolation)
        if subset.flip_aug and generator_for(self.seed, "flip", epoch, index, copy).random() < 0.5:
            picture = picture[:, ::-1]
            left = placement.resized[0] - width - left  # as cut out of the mirrored picture
        tensor = torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1))).float().div(127.5).sub(1)
        return tensor, (sample.size[1], sample.size[0], top, left, height, width)

    def caption(self, epoch: int, step: int, index: int, copy: int) -> str:
        """As it is shown this time."""
        sample = self.manifest.samples[index]
        subset = self.manifest.datasets[sample.dataset].subsets[sample.subset]
        draw = generator_for(self.seed, "caption", epoch, index, copy)
        return shown(sample.caption, subset, draw, epoch=epoch, step=step, steps=self.total_steps)
