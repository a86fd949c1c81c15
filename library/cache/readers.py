"""The latents of a run's pictures as a cache holds them, for a batch at a time."""

import copy
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..data.augment import Augmenter
from ..data.batch import Cond, Moments, PixelBatch
from ..data.batch_plan import MicroBatchSchedule
from ..data.loader import ImageLoader, StepBatches
from ..errors import UserError
from .format import ByteArray, deserialize_tensors, read_tensor_spans, stack_keys, stack_tensors
from .keys import LatentKeys, compute_text_key
from .store import CacheStore

MOMENTS_TENSOR, MASK_TENSOR = "moments", "mask"
"""Names of the tensors (2, C, H, W), and (1, H, W) where a picture has a mask: shares of each latent, 0..1."""


class LatentReader:
    """Mean and spread of each picture's latents, copied once, from the file into the batch; and the masks."""

    def __init__(self, store: CacheStore, latent_keys: LatentKeys, num_samples: int):
        self.store = store
        self._rows = np.full((num_samples, 2), -1, np.int64)
        self._rows[latent_keys.sample_indices, latent_keys.flipped.astype(np.int64)] = store.find_rows(latent_keys.keys)

    def read_moments(self, sample_indices: Sequence[int], flipped: Sequence[bool]) -> Moments:
        """Of samples of one bucket, each straight or mirrored."""
        both = stack_tensors(self._read_blobs(sample_indices, flipped), MOMENTS_TENSOR)
        if not isinstance(both, Tensor):
            raise AssertionError("a batch is of one bucket, whose latents have one size")
        return Moments(both)

    def read_masks(self, sample_indices: Sequence[int], flipped: Sequence[bool]) -> Tensor | None:
        """The same for masks; of a picture without one everything counts, and nothing is there when none has one."""
        blobs = self._read_blobs(sample_indices, flipped)
        places = [read_tensor_spans(blob) for blob in blobs]
        if not any(MASK_TENSOR in place for place in places):
            return None
        height, width = places[0][MOMENTS_TENSOR].shape[-2:]
        return torch.stack(
            [
                stack_tensors([blob], MASK_TENSOR)[0] if MASK_TENSOR in place else torch.ones(1, height, width)
                for blob, place in zip(blobs, places, strict=True)
            ]
        )

    def _read_blobs(self, sample_indices: Sequence[int], flipped: Sequence[bool]) -> list[ByteArray]:
        rows = self._rows[list(sample_indices), [int(is_mirrored) for is_mirrored in flipped]].tolist()
        return [self.store.read_blob(row) for row in rows]


PREFETCH_STEPS = 2


class TextReader:
    """Conditioning for captions of a run."""

    def __init__(self, store: CacheStore, encoder_fingerprint: str):
        self.store, self.encoder_fingerprint = store, encoder_fingerprint

    def read_cond(self, captions: Sequence[str]) -> Cond:
        """As ``Family.encode_prompts`` would give it for these captions."""
        rows = self.store.find_rows(
            stack_keys(compute_text_key(caption, self.encoder_fingerprint) for caption in captions)
        )
        if (rows < 0).any():
            missing = captions[int((rows < 0).argmax())]
            raise UserError(f"the caption {missing!r} is not among those that were encoded before the run")
        return build_cond([self.store.read_blob(int(row)) for row in rows])


class CachedLatentLoader:
    """This rank's part of every step, with latents; with captions as text, or encoded where ``texts`` has them."""

    def __init__(
        self,
        augmenter: Augmenter,
        batch_plan: MicroBatchSchedule,
        rank: int,
        latent_reader: LatentReader,
        text_reader: TextReader | None,
        *,
        pin_memory: bool,
    ):
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
        batches = tuple(
            self.load_micro_batch(position) for position in range(first, first + self.batch_plan.accumulation_steps)
        )
        return StepBatches(batches, self.batch_plan.count_real_samples(step))

    def load_micro_batch(self, position: int) -> PixelBatch:
        """One micro-batch."""
        mine = self.batch_plan.get_micro_batch(position).shard(self.rank, self.batch_plan.dp_size)
        visits = self.augmenter.list_views(mine, position // self.batch_plan.accumulation_steps)
        mirrored = [self.augmenter.is_flipped(visit) for visit in visits]
        frames = [
            self.augmenter.compute_size_conditioning(
                visit.sample_index, self.augmenter.assignments[visit.sample_index].crop_left_top, is_flipped=flip
            )
            for visit, flip in zip(visits, mirrored, strict=True)
        ]
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
            latent_mask=self.latent_reader.read_masks(mine.sample_indices, mirrored)
            if any(sample.mask for sample in samples)
            else None,
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


_VARIABLE_LENGTH_SUFFIX = "*"
"""Behind the names of what a family hands out as a list, because captions differ in it."""


def split_cond(cond: Cond, num_captions: int) -> list[dict[str, Tensor]]:
    """The conditioning of ``count`` captions as an entry for each."""
    return [
        {
            f"{name}{_VARIABLE_LENGTH_SUFFIX}" if isinstance(value, list) else name: value[row].cpu()
            for name, value in cond.items()
        }
        for row in range(num_captions)
    ]


def build_cond(blobs: Sequence[ByteArray]) -> Cond:
    """The other way round: entries as the conditioning of a batch."""
    cond: Cond = {}
    for name in read_tensor_spans(blobs[0]):
        if name.endswith(_VARIABLE_LENGTH_SUFFIX):
            cond[name.removesuffix(_VARIABLE_LENGTH_SUFFIX)] = [deserialize_tensors(blob)[name] for blob in blobs]
            continue
        value = stack_tensors(blobs, name)
        if isinstance(value, list):
            raise AssertionError(f"{name} differs in shape from caption to caption; the family must hand out a list")
        cond[name] = value
    return cond
