"""Read cached latents and text-encoder outputs, and build the loaders that put them into batches."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..dataloader.augment import Augmenter
from ..dataloader.batch import Cond, Moments, PixelBatch
from ..dataloader.batch_plan import AnyBatchPlan, MicroBatchSchedule
from ..dataloader.loader import (
    ImageLoader,
    MicroBatchDataset,
    ReadBatch,
    StepBatches,
    StepLoader,
    ValidationBatches,
    build_validation_batches,
)
from ..dataloader.prepare import PreparedData
from ..dataloader.slider_data import LatentShape
from ..dataloader.worker_pool import prefetch_in_threads
from ..dataset.clip_windows import TextImages
from ..errors import UserError
from .format import ByteArray, deserialize_tensors, read_tensor_spans, stack_tensors
from .keys import EncodedText, LatentKeys, compute_text_key, stack_keys
from .store import CacheStore

MOMENTS_TENSOR, MASK_TENSOR, CONTROL_TENSOR, FRAME_COND_TENSOR = "moments", "mask", "control_{}", "frame_{}"
SOUND_TENSOR = "sound"
"""Tensors of a latent entry: (2, C, H, W), or (2, C, F, H, W) of models of videos; for an image with a mask (1, H, W)
in 0..1 at latent resolution; the mean of each control image (C, H, W) or clip (C, F, H, W); ``Batch.frame_cond``;
the latents of sound (latents, channels)."""

PREFETCH_STEPS = 2
_VARIABLE_LENGTH_SUFFIX = "*"
"""Marks the name of a tensor that families return as a list, because its length differs between captions."""


class LatentReader:
    """Mean and standard deviation of each sample's latents, and masks, copied once from the mapped file."""

    def __init__(self, store: CacheStore, latent_keys: LatentKeys, num_samples: int):
        self.store = store
        self._rows = np.full((num_samples, 2), -1, np.int64)
        self._rows[latent_keys.sample_indices, latent_keys.flipped.astype(np.int64)] = store.find_rows(latent_keys.keys)

    def read_moments(self, sample_indices: Sequence[int], flipped: Sequence[bool]) -> Moments:
        """Read the latents of samples of one bucket, each as it is or flipped."""
        mean_and_std = stack_tensors(self._read_blobs(sample_indices, flipped), MOMENTS_TENSOR)
        if not isinstance(mean_and_std, Tensor):
            raise AssertionError("latents of one bucket differ in shape")
        return Moments(mean_and_std)

    def read_masks(self, sample_indices: Sequence[int], flipped: Sequence[bool]) -> Tensor | None:
        """Read the masks of these samples, ones where a sample has none; None if no sample has one."""
        blobs = self._read_blobs(sample_indices, flipped)
        spans = [read_tensor_spans(blob) for blob in blobs]
        if not any(MASK_TENSOR in span for span in spans):
            return None
        ones = torch.ones(1, *spans[0][MOMENTS_TENSOR].shape[-2:])
        masks = [
            stack_tensors([blob], MASK_TENSOR)[0] if MASK_TENSOR in span else ones
            for blob, span in zip(blobs, spans, strict=True)
        ]
        return torch.stack(masks)

    def read_controls(
        self, sample_indices: Sequence[int], flipped: Sequence[bool], num_controls: int
    ) -> tuple[Tensor, ...]:
        """Read the latents of the control images of samples of one bucket."""
        blobs = self._read_blobs(sample_indices, flipped) if num_controls else []
        found = [stack_tensors(blobs, CONTROL_TENSOR.format(number)) for number in range(num_controls)]
        return tuple(latents for latents in found if isinstance(latents, Tensor))

    def read_frame_cond(self, sample_indices: Sequence[int], flipped: Sequence[bool]) -> dict[str, Tensor] | None:
        """Read what models get of the clips' own frames; None for those that get none."""
        blobs, (start, end) = self._read_blobs(sample_indices, flipped), FRAME_COND_TENSOR.split("{}")
        names = [name for name in read_tensor_spans(blobs[0]) if name.startswith(start) and name.endswith(end)]
        found = {name.removeprefix(start): stack_tensors(blobs, name) for name in names}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)} or None

    def read_sound(self, sample_indices: Sequence[int], flipped: Sequence[bool]) -> Tensor:
        """Read the latents of the sound of samples of one bucket, which have some."""
        sound = stack_tensors(self._read_blobs(sample_indices, flipped), SOUND_TENSOR)
        if not isinstance(sound, Tensor):
            raise AssertionError("sounds of one bucket differ in length")
        return sound

    def _read_blobs(self, sample_indices: Sequence[int], flipped: Sequence[bool]) -> list[ByteArray]:
        rows = self._rows[list(sample_indices), [int(is_flipped) for is_flipped in flipped]].tolist()
        return [self.store.read_blob(row) for row in rows]


class TextReader:
    """Cached text-encoder outputs of the captions of a run."""

    def __init__(self, store: CacheStore, encoder_fingerprint: str, text_images: TextImages = "none"):
        self.store, self.encoder_fingerprint, self.text_images = store, encoder_fingerprint, text_images

    def read_batch_cond(self, batch: PixelBatch, captions: Sequence[str] | None = None) -> Cond:
        """Return the conditioning of the captions of a batch, or of others with the images of its samples."""
        keys = batch.frame_keys if self.text_images == "first frame" else batch.control_keys
        return self.read_cond(batch.captions if captions is None else captions, keys)

    def read_cond(self, captions: Sequence[str], image_keys: Sequence[str] = (), *, is_negative: bool = False) -> Cond:
        """Return what the family's text encoders return for these captions, each with its images if they are read.

        ``is_negative``: they are negative prompts, of a family that encodes these in another way.
        """
        used_keys = [""] * len(captions) if self.text_images == "none" else image_keys
        texts = [EncodedText(*text, is_negative) for text in zip(captions, used_keys, strict=True)]
        keys = stack_keys(compute_text_key(text, self.encoder_fingerprint) for text in texts)
        rows = self.store.find_rows(keys)
        if (rows < 0).any():
            missing = captions[int((rows < 0).argmax())]
            raise UserError(f"no cached text-encoder output for the caption {missing!r}")
        return build_cond([self.store.read_blob(int(row)) for row in rows])


class CachedLatentLoader:
    """This rank's batches with cached latents, and with cached text-encoder outputs if ``text_reader`` is given."""

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
        self.batch_plan = copy.deepcopy(batch_plan)  # two threads must not share the plan's cache of epochs
        self.pin_memory = pin_memory

    def iter_steps(self, first_step: int) -> Iterator[StepBatches]:
        """Yield the batches of each optimizer step from ``first_step`` on, without end."""
        return prefetch_in_threads(self.load_step, itertools.count(first_step), depth=PREFETCH_STEPS)

    def load_step(self, step: int) -> StepBatches:
        """Load the micro-batches of one optimizer step."""
        first = step * self.batch_plan.accumulation_steps
        positions = range(first, first + self.batch_plan.accumulation_steps)
        return StepBatches(tuple(map(self.load_micro_batch, positions)), self.batch_plan.count_real_samples(step))

    def load_micro_batch(self, position: int) -> PixelBatch:
        """Load one micro-batch."""
        shard = self.batch_plan.get_micro_batch(position).shard(self.rank, self.batch_plan.dp_size)
        views = self.augmenter.list_views(shard, position // self.batch_plan.accumulation_steps)
        flipped = [self.augmenter.is_flipped(view) for view in views]
        assignments = [self.augmenter.assignments[index] for index in shard.sample_indices]
        size_conditioning = [
            self.augmenter.compute_size_conditioning(view.sample_index, assignment, is_flipped=is_flipped)
            for view, assignment, is_flipped in zip(views, assignments, flipped, strict=True)
        ]
        samples = [self.augmenter.manifest.samples[index] for index in shard.sample_indices]
        weights = [sample.loss_weight * is_real for sample, is_real in zip(samples, shard.is_real, strict=True)]
        captions = tuple(map(self.augmenter.draw_caption, views))
        has_mask = any(sample.mask for sample in samples)
        batch = PixelBatch(
            pixels=None,
            captions=captions,
            size_conditioning=torch.tensor(size_conditioning, dtype=torch.float32),
            loss_weights=torch.tensor(weights, dtype=torch.float32),
            global_positions=shard.global_positions,
            sample_keys=tuple(sample.key for sample in samples),
            moments=self.latent_reader.read_moments(shard.sample_indices, flipped),
            latent_mask=self.latent_reader.read_masks(shard.sample_indices, flipped) if has_mask else None,
            control_latents=self.latent_reader.read_controls(shard.sample_indices, flipped, len(samples[0].controls)),
            num_references=sum(control.is_reference for control in samples[0].controls),
            control_keys=tuple(map(self.augmenter.identify_controls, views)),
            frame_keys=tuple(map(self.augmenter.identify_first_frame, views)),
            frame_cond=self.latent_reader.read_frame_cond(shard.sample_indices, flipped),
            sound=self.latent_reader.read_sound(shard.sample_indices, flipped) if samples[0].has_sound else None,
            network_multiplier=self.augmenter.get_dataset(shard.sample_indices[0]).network_multiplier,
        )
        batch = batch if self.text_reader is None else add_cached_cond(batch, self.text_reader)
        return batch.pin_memory() if self.pin_memory else batch


class CachedTextLoader:
    """An image loader, with cached text-encoder outputs added to its batches."""

    def __init__(self, image_loader: ImageLoader, text_reader: TextReader):
        self.image_loader, self.text_reader = image_loader, text_reader

    def iter_steps(self, first_step: int) -> Iterator[StepBatches]:
        """Yield the batches of each optimizer step from ``first_step`` on, without end."""
        for step_batches in self.image_loader.iter_steps(first_step):
            yield replace(step_batches, micro_batches=tuple(map(self._add_cond, step_batches.micro_batches)))

    def _add_cond(self, batch: PixelBatch) -> PixelBatch:
        batch = add_cached_cond(batch, self.text_reader)
        return batch.pin_memory() if self.image_loader.pin_memory else batch


def add_cached_cond(batch: PixelBatch, text_reader: TextReader) -> PixelBatch:
    """Add the cached text-encoder outputs of its captions."""
    return replace(batch, cond=text_reader.read_batch_cond(batch))


def build_step_loader(
    prepared: PreparedData,
    batch_plan: AnyBatchPlan,
    rank: int,
    *,
    total_steps: int,
    pin_memory: bool,
    latent_reader: LatentReader | None,
    text_reader: TextReader | None,
) -> StepLoader:
    """Build one rank's loader: from the caches that exist, from image files and captions otherwise."""
    if latent_reader is not None:
        augmenter = prepared.build_augmenter(batch_plan, total_steps)
        return CachedLatentLoader(augmenter, batch_plan, rank, latent_reader, text_reader, pin_memory=pin_memory)
    loader = prepared.build_image_loader(batch_plan, rank, total_steps=total_steps, pin_memory=pin_memory)
    return loader if text_reader is None else CachedTextLoader(loader, text_reader)


def build_validation_reader(
    prepared: PreparedData,
    max_batches: int | None,
    latent_reader: LatentReader | None,
    text_reader: TextReader | None,
) -> tuple[ValidationBatches, ReadBatch] | None:
    """Build the validation batches, at most ``max_batches``, and the function that reads one; None without images."""
    if prepared.validation is None:
        return None
    validation, first_index = prepared.validation, len(prepared.manifest.samples)
    merged = prepared.merge_validation()
    batches = build_validation_batches(validation.manifest, validation.assignments, first_index, max_batches)
    if latent_reader is None:
        read_pixels = MicroBatchDataset(
            merged.manifest, merged.assignments, batch_plan=batches, rank=0, seed=0, total_steps=0
        ).__getitem__
        if text_reader is None:
            return batches, read_pixels
        return batches, lambda number: add_cached_cond(read_pixels(number), text_reader)
    augmenter = merged.build_static_augmenter()
    loader = CachedLatentLoader(augmenter, batches, 0, latent_reader, text_reader, pin_memory=False)
    return batches, loader.load_micro_batch


def split_cond(cond: Cond, num_captions: int) -> list[dict[str, Tensor]]:
    """Split the conditioning of a batch into one cache entry for each caption."""
    names = {name: f"{name}{_VARIABLE_LENGTH_SUFFIX}" if isinstance(cond[name], list) else name for name in cond}
    return [{names[name]: value[row].cpu() for name, value in cond.items()} for row in range(num_captions)]


def build_cond(blobs: Sequence[ByteArray]) -> Cond:
    """Join cache entries to the conditioning of a batch; the inverse of ``split_cond``."""
    cond: Cond = {}
    for name in read_tensor_spans(blobs[0]):
        if name.endswith(_VARIABLE_LENGTH_SUFFIX):
            cond[name.removesuffix(_VARIABLE_LENGTH_SUFFIX)] = [deserialize_tensors(blob)[name] for blob in blobs]
            continue
        value = stack_tensors(blobs, name)
        if isinstance(value, list):
            raise AssertionError(f"{name} differs in shape from caption to caption; the family must return a list")
        cond[name] = value
    return cond


@dataclass(frozen=True)
class SliderFacts:
    """The facts of a model that a run on texts alone needs besides the loaded weights."""

    get_latent_shape: LatentShape
    size_multiple: int
    """Width and height are multiples of this."""
    has_guidance_embedding: bool


@dataclass(frozen=True)
class CacheReaders:
    """Readers of the caches of a run; None where encoders run during training."""

    latent_reader: LatentReader | None
    text_reader: TextReader | None
    slider: SliderFacts | None = None
    """The facts of the model of a run on texts alone, which encodes no images."""
