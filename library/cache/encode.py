"""Encode images with the VAE and captions with the text encoders, in batches, as entries of a cache."""

import logging
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor

from ..config.schema import ModelConfig
from ..config.schema_data import CacheConfig
from ..data.augment import Augmenter
from ..data.batch import Cond, normalize_pixels
from ..data.images import BadSample, load_control_pixels, load_preview_controls, load_sample_pixels
from ..data.worker_pool import prefetch_in_threads
from ..dataset.image_inspection import Pixels
from ..dataset.masks import MaskPixels
from ..diffusion.losses import resize_mask_to_latents
from ..distributed.devices import MIXED_PRECISION_DTYPES
from ..errors import UserError
from ..models.base import Family
from ..models.detect import DetectedModel
from ..parallel.strategy import Strategy
from .build import EncodedEntry
from .keys import LatentKeys, TextKeys, get_cached_crop
from .readers import CONTROL_TENSOR, MASK_TENSOR, MOMENTS_TENSOR, split_cond

logger = logging.getLogger(__name__)
CACHE_DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MAX_CAPTION_CHARACTERS = 80
"""Of a caption, as the name of an entry."""

PREFETCH_PER_THREAD = 2
"""Images."""

LoadedEntry = tuple[Pixels, MaskPixels | None, tuple[Pixels, ...]]
"""An image, its mask and its control images."""


@dataclass(frozen=True)
class FrozenEncoders:
    """Loads the frozen VAE or text encoders of a model onto this process's device."""

    strategy: Strategy
    family: Family
    model: DetectedModel
    model_config: ModelConfig
    cache: CacheConfig
    text_components: tuple[str, ...]
    """The components that encode texts: those of T5 alone where CLIP is trained."""

    @property
    def is_t5_only(self) -> bool:
        return self.text_components != self.family.text_components

    @property
    def reads_controls(self) -> bool:
        """Whether the text encoder reads control images together with captions."""
        return self.family.facts.text_tokens_per_control > 0

    def encode_prompts(self, pipe: Any, prompts: Sequence[str], controls: Sequence[Sequence[Image]] = ()) -> Cond:
        """Encode texts with the text components; ``controls`` are the control images of each, if they are read."""
        if self.reads_controls:
            return self.family.encode_prompts_with_controls(pipe, prompts, controls)
        encode = self.family.encode_t5_prompts if self.is_t5_only else self.family.encode_prompts
        return encode(pipe, prompts)

    def load(self, components: Sequence[str], dtype: torch.dtype) -> Any:
        """Load a pipeline with these components, frozen and on the device."""
        pipe = self.family.load(self.model, dtype, components, device=self.strategy.device)
        for component in components:
            module = getattr(pipe, component)
            if isinstance(module, torch.nn.Module):
                module.requires_grad_(False).to(self.strategy.device)
        return pipe


@dataclass
class LatentEncoder:
    """Encodes images to latents; the VAE is loaded for the first batch and freed after the last."""

    encoders: FrozenEncoders
    augmenter: Augmenter
    latent_keys: LatentKeys
    num_threads: int
    failures: dict[int, str] = field(default_factory=dict)

    def make_batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Group entries of one resolution to batches of ``--vae_batch_size``."""
        by_size: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for index in indices:
            sample_index = int(self.latent_keys.sample_indices[index])
            by_size[self.augmenter.assignments[sample_index].bucket_resolution].append(index)
        batch_size = self.encoders.cache.vae_batch_size
        return [batch for size in sorted(by_size) for batch in _split_into_batches(by_size[size], batch_size)]

    def encode_batches(self, batches: Iterator[list[int]]) -> Iterator[tuple[int, list[EncodedEntry]]]:
        """Encode batches while threads read the next images: Pillow decodes without holding the GIL."""
        threads = max(1, min(self.num_threads, os.cpu_count() or 1))
        pipe: Any = None
        for batch in self._load_batches(batches, threads):
            if pipe is None:
                pipe = self.encoders.load(("vae",), torch.float32)
            images = {}
            for index, image in batch.items():
                if isinstance(image, BadSample):
                    self.failures[index] = f"{image.name}: {image.problem}"
                else:
                    images[index] = image
            yield len(batch), self._encode_images(pipe, images) if images else []
        del pipe
        self.encoders.strategy.empty_device_cache()

    def _load_batches(
        self, batches: Iterable[list[int]], num_threads: int
    ) -> Iterator[dict[int, LoadedEntry | BadSample]]:
        """Load single images in threads, so that all of them work whatever the batch size, and regroup to batches."""
        requested: deque[list[int]] = deque()

        def iter_indices() -> Iterator[int]:
            for batch in batches:
                requested.append(batch)
                yield from batch

        depth = max(PREFETCH_PER_THREAD * num_threads, self.encoders.cache.vae_batch_size)
        loaded: dict[int, LoadedEntry | BadSample] = {}
        for image in prefetch_in_threads(self._load_image, iter_indices(), depth=depth, num_threads=num_threads):
            loaded[requested[0][len(loaded)]] = image
            if len(loaded) == len(requested[0]):
                requested.popleft()
                yield loaded
                loaded = {}

    def _load_image(self, entry_index: int) -> LoadedEntry | BadSample:
        index = int(self.latent_keys.sample_indices[entry_index])
        crop = get_cached_crop(self.augmenter, index, is_flipped=bool(self.latent_keys.flipped[entry_index]))
        sample, assignment = self.augmenter.manifest.samples[index], self.augmenter.assignments[index]
        loaded = load_sample_pixels(sample, assignment, crop)
        if isinstance(loaded, BadSample):
            return loaded
        controls = load_control_pixels(sample, assignment, self.augmenter.get_dataset(index), crop)
        return controls if isinstance(controls, BadSample) else (*loaded, controls)

    def _encode_images(self, pipe: Any, images: Mapping[int, LoadedEntry]) -> list[EncodedEntry]:
        pixels = torch.from_numpy(np.stack([image.transpose(2, 0, 1) for image, _, _ in images.values()]))
        moments = self._encode_moments(pipe, pixels)
        finite = moments.isfinite().flatten(1).all(1).tolist()
        dtype = CACHE_DTYPES[self.encoders.cache.cache_precision]
        entries = []
        for row, (index, (_, mask, controls)) in enumerate(images.items()):
            sample = self.augmenter.manifest.samples[int(self.latent_keys.sample_indices[index])]
            value = moments[row] if finite[row] else self._reencode_in_float32(pipe, pixels[row], sample.key)
            if value is None:
                self.failures[index] = f"{sample.image}: the VAE returns NaN or Inf"
                continue
            tensors = {MOMENTS_TENSOR: value.to(dtype).cpu()}
            if mask is not None:
                tensors[MASK_TENSOR] = self._resize_mask(mask, (value.shape[-2], value.shape[-1]))
            for number, control in enumerate(controls):
                latents = self._encode_control(pipe, control, sample.controls[number].image.key)
                if latents is None:
                    self.failures[index] = f"{sample.controls[number].image}: the VAE returns NaN or Inf"
                    break
                tensors[CONTROL_TENSOR.format(number)] = latents.to(dtype).cpu()
            else:
                entries.append(EncodedEntry(index, tensors, sample.key))
        return entries

    def _encode_control(self, pipe: Any, control: Pixels, name: str) -> Tensor | None:
        """Encode one control image, of which only the mean is used; None if the VAE fails."""
        pixels = torch.from_numpy(np.ascontiguousarray(control.transpose(2, 0, 1)))
        moments = self._encode_moments(pipe, pixels[None])[0]
        if not bool(moments.isfinite().all()):
            reencoded = self._reencode_in_float32(pipe, pixels, name)
            return None if reencoded is None else reencoded[0]
        return moments[0]

    def _encode_moments(self, pipe: Any, pixels: Tensor) -> Tensor:
        values = normalize_pixels(pixels.to(self.encoders.strategy.device))
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            return self.encoders.family.encode_moments(pipe, values).mean_and_std

    def _resize_mask(self, mask: MaskPixels, latent_size: tuple[int, int]) -> Tensor:
        """On the device, as training resizes it."""
        on_device = torch.from_numpy(mask)[None, None].to(self.encoders.strategy.device)
        return resize_mask_to_latents(on_device, latent_size)[0].cpu()

    def _reencode_in_float32(self, pipe: Any, pixels: Tensor, name: str) -> Tensor | None:
        """Encode one image again in float32, after the VAE overflowed; None if that does not help."""
        logger.warning("%s: the VAE overflows in %s; encoding the image in float32", name, pipe.vae.dtype)
        dtype = pipe.vae.dtype
        pipe.vae.to(torch.float32)
        moments = self._encode_moments(pipe, pixels[None])[0]
        pipe.vae.to(dtype)
        return moments if bool(moments.isfinite().all()) else None


@dataclass
class CaptionEncoder:
    """Encodes captions; the text encoders are loaded for the first batch and freed after the last."""

    encoders: FrozenEncoders
    augmenter: Augmenter
    text_keys: TextKeys
    failures: dict[int, str] = field(default_factory=dict)

    def make_batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Group entries to batches of ``--text_encoder_batch_size``."""
        return _split_into_batches(indices, self.encoders.cache.text_encoder_batch_size)

    def encode_batches(self, batches: Iterator[list[int]]) -> Iterator[tuple[int, list[EncodedEntry]]]:
        """Encode batches in the dtype and autocast that training without a cache uses."""
        strategy, pipe = self.encoders.strategy, None
        for batch in batches:
            if pipe is None:
                dtype = MIXED_PRECISION_DTYPES[strategy.mixed_precision]
                pipe = self.encoders.load(self.encoders.text_components, dtype)
            captions = [self.text_keys.captions[index] for index in batch]
            controls = [self._load_controls(index) for index in batch] if self.encoders.reads_controls else []
            with torch.no_grad(), strategy.accelerator.autocast():
                rows = split_cond(self.encoders.encode_prompts(pipe, captions, controls), len(captions))
            for caption, row in zip(captions, rows, strict=True):
                if not all(bool(tensor.isfinite().all()) for tensor in row.values()):
                    raise UserError(f"the text encoder returns NaN or Inf for the caption {caption!r}")
            names = [caption[:MAX_CAPTION_CHARACTERS] for caption in captions]
            yield len(batch), list(map(EncodedEntry, batch, rows, names))
        del pipe
        strategy.empty_device_cache()

    def _load_controls(self, entry_index: int) -> list[Image]:
        source = self.text_keys.sources[entry_index]
        if source.prompt is not None:
            return load_preview_controls(source.prompt)
        augmenter, index = self.augmenter, source.sample_index
        crop = get_cached_crop(augmenter, index, is_flipped=source.is_flipped)
        sample, assignment = augmenter.manifest.samples[index], augmenter.assignments[index]
        loaded = load_control_pixels(sample, assignment, augmenter.get_dataset(index), crop)
        if isinstance(loaded, BadSample):
            raise UserError(f"{loaded.name}: {loaded.problem}")
        return list(map(fromarray, loaded))


def _split_into_batches(indices: Sequence[int], batch_size: int) -> list[list[int]]:
    return [list(indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)]
