"""Cache latents (``--cache_latents``, ``--cache_latents_to_disk``): encode the images with the VAE before training.

When a cached file is out of date is decided by keys.py; the files are written by writer.py and read by store.py.
"""

import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..dataloader.augment import Augmenter
from ..dataloader.batch import Moments, normalize_pixels
from ..dataloader.images import BadSample, load_control_pixels, load_sample_pixels, load_sample_sound
from ..dataloader.loader import move_channels_first
from ..dataloader.prepare import PreparedData
from ..dataloader.worker_pool import prefetch_in_threads
from ..dataset.clip_sound import Waveform
from ..dataset.image_decoding import Pixels
from ..dataset.mask_files import MaskPixels
from ..diffusion.masked_loss import resize_mask_to_latents
from ..errors import FileError
from ..models.own_families import identify_class
from ..problems import Problem, report_file
from .distributed_encoding import CacheSpec, EncodedEntry, fill_cache, open_cache_dirs, open_shards, split_into_batches
from .frozen_encoders import FrozenEncoders
from .keys import LatentKeys, build_latent_keys, compute_encoder_fingerprint, get_cached_crop
from .paths import LATENTS_DIR_NAME, TEMPORARY_FINGERPRINT
from .readers import (
    CONTROL_TENSOR,
    FRAME_COND_TENSOR,
    MASK_TENSOR,
    MOMENTS_TENSOR,
    SOUND_TENSOR,
    LatentReader,
)

logger = logging.getLogger(__name__)
CACHE_DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PREFETCH_PER_THREAD = 2
"""The number of images that each thread reads ahead."""

LoadedEntry = tuple[Pixels, MaskPixels | None, tuple[Pixels, ...], Waveform | None]
"""An image or clip, its mask, its control images and its sound."""


@dataclass
class LatentEncoder:
    """Encodes images to latents; the VAE is loaded for the first batch and freed after the last."""

    encoders: FrozenEncoders
    augmenter: Augmenter
    latent_keys: LatentKeys
    num_threads: int
    failures: dict[int, Problem] = field(default_factory=dict)

    def make_batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Group entries of one resolution and number of frames to batches of ``--vae_batch_size``."""
        by_size: defaultdict[tuple[tuple[int, int], int], list[int]] = defaultdict(list)
        for index in indices:
            sample_index = int(self.latent_keys.sample_indices[index])
            num_frames = self.augmenter.manifest.samples[sample_index].num_frames
            by_size[self.augmenter.assignments[sample_index].bucket_resolution, num_frames].append(index)
        batch_size = self.encoders.cache.vae_batch_size
        return [batch for size in sorted(by_size) for batch in split_into_batches(by_size[size], batch_size)]

    def encode_batches(self, batches: Iterator[list[int]]) -> Iterator[tuple[int, list[EncodedEntry]]]:
        """Encode batches while threads read the next images: Pillow decodes without holding the GIL."""
        threads = max(1, min(self.num_threads, os.cpu_count() or 1))
        pipe: Any = None
        for batch in self._load_batches(batches, threads):
            if pipe is None:
                pipe = self.encoders.load(self.encoders.family.facts.image_encoders, torch.float32)
            images = {}
            for index, image in batch.items():
                if isinstance(image, BadSample):
                    self.failures[index] = report_file(image.name, image.problem)
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
        sound = load_sample_sound(sample)
        if isinstance(controls, BadSample):
            return controls
        return sound if isinstance(sound, BadSample) else (*loaded, controls, sound)

    def _encode_images(self, pipe: Any, images: Mapping[int, LoadedEntry]) -> list[EncodedEntry]:
        pixels = torch.from_numpy(np.stack([move_channels_first(image) for image, *_ in images.values()]))
        moments = self._encode_moments(pipe, pixels)
        frame_cond = self._encode_frame_cond(pipe, pixels, moments)
        finite = moments.isfinite().flatten(1).all(1).tolist()
        dtype = CACHE_DTYPES[self.encoders.cache.cache_precision]
        entries = []
        for row, (index, (image, mask, controls, sound)) in enumerate(images.items()):
            sample = self.augmenter.manifest.samples[int(self.latent_keys.sample_indices[index])]
            value = moments[row] if finite[row] else self._reencode(pipe, pixels[row], sample.key)
            if value is None:
                self.failures[index] = _report_overflow(sample.image)
                continue
            tensors = {MOMENTS_TENSOR: value.to(dtype).cpu()}
            for name, rows in frame_cond.items():
                is_rounded = rows.is_floating_point()  # indices of tokens are not
                tensors[FRAME_COND_TENSOR.format(name)] = rows[row].to(dtype if is_rounded else rows.dtype).cpu()
            if sound is not None:
                tensors[SOUND_TENSOR] = self._encode_sound(pipe, sound, sample.num_frames).to(dtype).cpu()
            if mask is not None:
                tensors[MASK_TENSOR] = self._resize_mask(mask, (value.shape[-2], value.shape[-1]))
            num_references = sum(control.is_reference for control in sample.controls)
            encoded = self._encode_controls(pipe, controls, image, sample.key, num_references=num_references)
            if encoded is None:
                self.failures[index] = _report_overflow(sample.controls[0].image)
                continue
            for name, value in self._encode_control_cond(pipe, controls).items():
                tensors[FRAME_COND_TENSOR.format(name)] = value.to(dtype).cpu()
            for number, latents in enumerate(encoded):
                is_rounded = latents.is_floating_point()  # pixels are not
                tensors[CONTROL_TENSOR.format(number)] = latents.to(dtype if is_rounded else latents.dtype).cpu()
            entries.append(EncodedEntry(index, tensors, sample.key))
        return entries

    def _encode_controls(
        self, pipe: Any, controls: Sequence[Pixels], image: Pixels, name: str, *, num_references: int
    ) -> tuple[Tensor, ...] | None:
        """Encode the control images of a picture; None if the VAE fails."""
        if not controls:
            return ()
        every = [torch.from_numpy(np.ascontiguousarray(move_channels_first(each)))[None] for each in (image, *controls)]

        def encode() -> tuple[Tensor, ...]:
            own, *others = (normalize_pixels(pixels.to(self.encoders.strategy.device)) for pixels in every)
            with torch.no_grad(), torch.autocast(own.device.type, enabled=False):
                latents = self.encoders.family.encode_all_controls(pipe, others, own, num_references)
                return tuple(each[0] for each in latents)

        latents = encode()
        return latents if _are_finite(latents) else self._repeat_in_float32(pipe, encode, name)

    def _encode_control_cond(self, pipe: Any, controls: Sequence[Pixels]) -> dict[str, Tensor]:
        """Encode what else the denoiser gets of the control images of a picture."""
        device = self.encoders.strategy.device
        rows = [torch.from_numpy(np.ascontiguousarray(move_channels_first(each)))[None] for each in controls]
        if not rows:
            return {}
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            pixels = [normalize_pixels(each.to(device)) for each in rows]
            found = self.encoders.family.encode_control_cond(pipe, pixels)
        return {name: value[0] for name, value in found.items()}

    def _encode_moments(self, pipe: Any, pixels: Tensor) -> Tensor:
        values = normalize_pixels(pixels.to(self.encoders.strategy.device))
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            return self.encoders.family.encode_moments(pipe, values).mean_and_std

    def _encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Tensor) -> dict[str, Tensor]:
        values = normalize_pixels(pixels.to(self.encoders.strategy.device))
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            return self.encoders.family.encode_frame_cond(pipe, values, Moments(moments))

    def _encode_sound(self, pipe: Any, sound: Waveform, num_frames: int) -> Tensor:
        with torch.no_grad(), torch.autocast(self.encoders.strategy.device.type, enabled=False):
            return self.encoders.family.encode_sound(pipe, torch.from_numpy(sound.samples), sound.rate, num_frames)

    def _resize_mask(self, mask: MaskPixels, latent_size: tuple[int, int]) -> Tensor:
        """Resize a mask to the latents, on the device as training does."""
        on_device = torch.from_numpy(mask)[None, None].to(self.encoders.strategy.device)
        return resize_mask_to_latents(on_device, latent_size)[0].cpu()

    def _reencode(self, pipe: Any, pixels: Tensor, name: str) -> Tensor | None:
        encoded = self._repeat_in_float32(pipe, lambda: (self._encode_moments(pipe, pixels[None])[0],), name)
        return None if encoded is None else encoded[0]

    def _repeat_in_float32(
        self, pipe: Any, encode: Callable[[], tuple[Tensor, ...]], name: str
    ) -> tuple[Tensor, ...] | None:
        """Encode one image again in float32, after the VAE overflowed; None if that does not help."""
        logger.warning("%s: the VAE overflows in %s; encoding the image in float32", name, pipe.vae.dtype)
        dtype = pipe.vae.dtype
        pipe.vae.to(torch.float32)
        encoded = encode()
        pipe.vae.to(dtype)
        return encoded if _are_finite(encoded) else None


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors)


def cache_latents(encoders: FrozenEncoders, prepared: PreparedData) -> tuple[PreparedData, LatentReader | None]:
    """Encode missing latents if ``--cache_latents`` is set; images that cannot be encoded count as bad data."""
    cache, comm = encoders.cache, encoders.strategy.comm
    if not cache.caches_latents or prepared.slider_prompts:
        return prepared, None
    to_disk = cache.cache_latents_to_disk
    with open_cache_dirs(cache, comm, prepared, to_disk=to_disk) as directories:
        fingerprint = compute_vae_fingerprint(encoders, directories[0]) if to_disk else TEMPORARY_FINGERPRINT
        spec, encoder = build_latent_cache(encoders, prepared, directories, fingerprint)
        store, failures = fill_cache(comm, spec, encoder, verify_existing=to_disk and not cache.skip_cache_check)
        latent_keys = encoder.latent_keys
        if failures:
            by_sample = {int(latent_keys.sample_indices[index]): reason for index, reason in failures.items()}
            prepared = _remove_failed_images(prepared, by_sample)
            latent_keys = build_latent_keys(prepared.merge_validation().build_static_augmenter(), fingerprint)
        open_shards(store, comm, to_disk=to_disk)
        return prepared, LatentReader(store, latent_keys, len(prepared.merge_validation().manifest.samples))


def build_latent_cache(
    encoders: FrozenEncoders, prepared: PreparedData, cache_dirs: Sequence[Path], encoder_fingerprint: str
) -> tuple[CacheSpec, LatentEncoder]:
    """Build the spec of the latent cache and its encoder; ``cache_dirs`` has the directory of each sample."""
    merged = prepared.merge_validation()
    augmenter = merged.build_static_augmenter()
    latent_keys = build_latent_keys(augmenter, encoder_fingerprint)
    option = "cache_latents_to_disk" if encoders.cache.cache_latents_to_disk else "cache_latents"
    sizes = [count_encoded_pixels(augmenter, int(sample)) for sample in latent_keys.sample_indices]
    spec = CacheSpec(
        name="latents",
        unit="image",
        option=option,
        keys=latent_keys.keys,
        directories=[cache_dirs[sample] / LATENTS_DIR_NAME for sample in latent_keys.sample_indices],
        relative_sizes=sizes,
        disk_full_hint="free disk space, set another directory with --cache_dir, use --cache_precision fp16 (half the"
        f" size), or encode images during training without --{option}",
    )
    return spec, LatentEncoder(encoders, augmenter, latent_keys, merged.config.max_data_loader_n_workers)


def count_encoded_pixels(augmenter: Augmenter, sample_index: int) -> int:
    """Count the pixels of an image and its control images, of which half as much is stored, in all frames."""
    own, *controls = (augmenter.assignments[sample_index], *augmenter.assign_controls(sample_index))
    areas = [each.bucket_resolution[0] * each.bucket_resolution[1] for each in (own, *controls)]
    return (2 * areas[0] + sum(areas[1:])) * augmenter.manifest.samples[sample_index].num_frames


def compute_vae_fingerprint(encoders: FrozenEncoders, cache_dir: Path) -> str:
    """Hash everything that decides which latents the VAE makes of given pixels, and how they are stored."""
    weights = encoders.compute_weight_hashes(encoders.family.facts.image_encoders, cache_dir)
    return compute_encoder_fingerprint(*identify_class(type(encoders.family)), encoders.cache.cache_precision, *weights)


def _report_overflow(image: object) -> Problem:
    return report_file(image, "the VAE returns NaN or Inf")


def _remove_failed_images(prepared: PreparedData, failures: dict[int, Problem]) -> PreparedData:
    """Skip the images that could not be encoded, or fail, as ``--on_invalid_images`` says."""
    problems = list(failures.values())
    if prepared.config.on_invalid_images == "fail":
        fix = "fix, remove or skip them (--on_invalid_images skip)"
        raise FileError([*problems, Problem("", f"{len(problems)} images cannot be encoded", fix)])
    for problem in problems:
        logger.warning("%s; skipped", problem)
    return prepared.remove_samples(frozenset(failures))
