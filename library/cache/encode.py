"""Making what a cache keeps: pictures through the VAE, captions through the text encoders, some at a time."""

import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..config.schema_data import CacheConfig
from ..data.augment import Augmenter
from ..data.batch import normalize_pixels
from ..data.images import BadSample, load_sample_pixels
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
from .readers import MASK_TENSOR, MOMENTS_TENSOR, split_cond

logger = logging.getLogger(__name__)


CACHE_DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


MAX_CAPTION_CHARACTERS = 80
"""Of a caption, in messages."""


PREFETCH_PER_THREAD = 2
"""Pictures for each thread."""


T = TypeVar("T")


@dataclass(frozen=True)
class EncoderLoader:
    """Where encoders come from and where they work."""

    strategy: Strategy
    family: Family
    model: DetectedModel
    config: CacheConfig

    def load_encoders(self, parts: Sequence[str], dtype: torch.dtype) -> Any:
        """A pipeline with these parts, frozen and on the device."""
        pipe = self.family.load(self.model, dtype, parts, device=self.strategy.device)
        for part in parts:
            module = getattr(pipe, part)
            if isinstance(module, torch.nn.Module):
                module.requires_grad_(False).to(self.strategy.device)
        return pipe


@dataclass
class LatentEncoder:
    """Latents of pictures, straight and mirrored; the VAE is in memory from the first to the last of them."""

    encoder_loader: EncoderLoader
    augmenter: Augmenter
    latent_keys: LatentKeys
    num_threads: int
    failures: dict[int, str] = field(default_factory=dict)

    def make_batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Pictures of one size, as many as the VAE takes at once."""
        by_size: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for number in indices:
            by_size[self.augmenter.assignments[int(self.latent_keys.sample_indices[number])].bucket_resolution].append(
                number
            )
        return [
            group
            for size in sorted(by_size)
            for group in _split_into_batches(by_size[size], self.encoder_loader.config.vae_batch_size)
        ]

    def encode_batches(self, batches: Iterator[list[int]]) -> Iterator[tuple[int, list[EncodedEntry]]]:
        """Pictures are read ahead by threads: Pillow decodes outside of Python's lock."""
        pipe: Any = None
        for group, found in _prefetch_batches(
            batches, self._load_image, max(1, min(self.num_threads, os.cpu_count() or 1))
        ):
            if pipe is None:
                pipe = self.encoder_loader.load_encoders(("vae",), torch.float32)
            pictures = {}
            for number, picture in zip(group, found, strict=True):
                if isinstance(picture, BadSample):
                    self.failures[number] = f"{picture.name}: {picture.problem}"
                else:
                    pictures[number] = picture
            yield len(group), self._build_entries(pipe, pictures) if pictures else []
        del pipe
        self.encoder_loader.strategy.empty_device_cache()

    def _load_image(self, entry_index: int) -> tuple[Pixels, MaskPixels | None] | BadSample:
        index = int(self.latent_keys.sample_indices[entry_index])
        way = get_cached_crop(self.augmenter, index, is_flipped=bool(self.latent_keys.flipped[entry_index]))
        return load_sample_pixels(self.augmenter.manifest.samples[index], self.augmenter.assignments[index], way)

    def _build_entries(
        self, pipe: Any, images_and_masks: Mapping[int, tuple[Pixels, MaskPixels | None]]
    ) -> list[EncodedEntry]:
        pixels = torch.from_numpy(np.stack([picture.transpose(2, 0, 1) for picture, _ in images_and_masks.values()]))
        moments = self._encode_moments(pipe, pixels)
        sound = moments.isfinite().flatten(1).all(1).tolist()
        entries = []
        for row, (number, (_, mask)) in enumerate(images_and_masks.items()):
            sample = self.augmenter.manifest.samples[int(self.latent_keys.sample_indices[number])]
            value = moments[row] if sound[row] else self._reencode_in_float32(pipe, pixels[row], sample.key)
            if value is None:
                self.failures[number] = f"{sample.image}: the VAE makes no finite latents of it"
                continue
            tensors = {MOMENTS_TENSOR: value.to(CACHE_DTYPES[self.encoder_loader.config.cache_precision]).cpu()}
            if mask is not None:
                tensors[MASK_TENSOR] = self._resize_mask_to_latents(mask, (value.shape[-2], value.shape[-1]))
            entries.append(EncodedEntry(number, tensors, sample.key))
        return entries

    def _encode_moments(self, pipe: Any, pixels: Tensor) -> Tensor:
        values = normalize_pixels(pixels.to(self.encoder_loader.strategy.device))
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            return self.encoder_loader.family.encode_moments(pipe, values).mean_and_std

    def _resize_mask_to_latents(self, mask: MaskPixels, latent_size: tuple[int, int]) -> Tensor:
        """As training would shrink it."""
        return resize_mask_to_latents(
            torch.from_numpy(mask)[None, None].to(self.encoder_loader.strategy.device), latent_size
        )[0].cpu()

    def _reencode_in_float32(self, pipe: Any, pixels: Tensor, name: str) -> Tensor | None:
        """Alone and in full precision, where the VAE overflowed; nothing when that does not help."""
        logger.warning("%s: the VAE overflows in %s; the picture is encoded in float32", name, pipe.vae.dtype)
        usual = pipe.vae.dtype
        pipe.vae.to(torch.float32)
        moments = self._encode_moments(pipe, pixels[None])[0]
        pipe.vae.to(usual)
        return moments if bool(moments.isfinite().all()) else None


@dataclass
class CaptionEncoder:
    """Encoded captions; the text encoders are in memory from the first to the last of them."""

    encoder_loader: EncoderLoader
    text_keys: TextKeys
    failures: dict[int, str] = field(default_factory=dict)

    def make_batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Captions, as many as are encoded at once."""
        return _split_into_batches(list(indices), self.encoder_loader.config.text_encoder_batch_size)

    def encode_batches(self, batches: Iterator[list[int]]) -> Iterator[tuple[int, list[EncodedEntry]]]:
        """In the precision and the autocast in which they would be encoded during training."""
        strategy, family, pipe = self.encoder_loader.strategy, self.encoder_loader.family, None
        for group in batches:
            if pipe is None:
                pipe = self.encoder_loader.load_encoders(
                    family.text_components, MIXED_PRECISION_DTYPES[strategy.mixed_precision]
                )
            captions = [self.text_keys.captions[number] for number in group]
            with torch.no_grad(), strategy.accelerator.autocast():
                rows = split_cond(family.encode_prompts(pipe, captions), len(captions))
            for caption, row in zip(captions, rows, strict=True):
                if not all(bool(tensor.isfinite().all()) for tensor in row.values()):
                    raise UserError(f"the text encoder makes no finite numbers of the caption {caption!r}")
            yield (
                len(group),
                [
                    EncodedEntry(number, row, caption[:MAX_CAPTION_CHARACTERS])
                    for number, caption, row in zip(group, captions, rows, strict=True)
                ],
            )
        del pipe
        strategy.empty_device_cache()


def _split_into_batches(indices: Sequence[int], batch_size: int) -> list[list[int]]:
    return [list(indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)]


def _prefetch_batches(
    batches: Iterable[list[int]], load: Callable[[int], T], num_threads: int
) -> Iterator[tuple[list[int], list[T]]]:
    """Each group with what ``read`` gives for its members, read by threads while the groups before are worked on."""
    waiting: deque[tuple[list[int], list[Future[T]]]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for group in batches:
            waiting.append((group, [pool.submit(load, number) for number in group]))
            while sum(len(members) for members, _ in waiting) > PREFETCH_PER_THREAD * num_threads and len(waiting) > 1:
                yield _collect_results(waiting)
        while waiting:
            yield _collect_results(waiting)


def _collect_results(pending: deque[tuple[list[int], list[Future[T]]]]) -> tuple[list[int], list[T]]:
    group, results = pending.popleft()
    return group, [result.result() for result in results]
