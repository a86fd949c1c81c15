"""Cache keys: a hash of everything that decides the latents of an image or the text-encoder output of a caption."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..data.augment import Augmenter, SampleView
from ..data.batch_plan import MicroBatchSchedule
from ..data.buckets import BucketAssignment
from ..data.images import CropParams
from ..data.manifest import Sample
from ..dataset.schema import SubsetConfig

KeyArray = NDArray[np.bytes_]
KEY_BYTES = 16


def stack_keys(keys: Iterable[bytes]) -> KeyArray:
    """Stack keys to one array."""
    return np.array(list(keys), f"S{KEY_BYTES}")


def get_key_bytes(key: np.bytes_) -> bytes:
    """Restore the trailing zero bytes of a key, which numpy strips."""
    return bytes(key).ljust(KEY_BYTES, b"\0")


def collect_run_captions(
    augmenter: Augmenter, batch_plan: MicroBatchSchedule, total_steps: int, extra_captions: Iterable[str] = ()
) -> dict[str, int]:
    """Collect every caption of ``total_steps`` steps on any rank, the empty one included, each with a sample using it.

    Captions are drawn by a stateless generator, so the batch plan tells them before training.  Only samples whose
    captions vary need a walk through the plan.
    """
    captions = dict.fromkeys(["", *extra_captions], 0)
    samples = range(len(augmenter.manifest.samples))
    varying = {index for index in samples if find_varying_caption_keys(augmenter.get_subset(index))}
    for index in samples:
        if index not in varying:
            captions.setdefault(augmenter.draw_caption(SampleView(0, 0, index, 0)), index)
    for position in range(total_steps * batch_plan.accumulation_steps if varying else 0):
        step = position // batch_plan.accumulation_steps
        for view in augmenter.list_views(batch_plan.get_micro_batch(position), step):
            if view.sample_index in varying:
                captions.setdefault(augmenter.draw_caption(view), view.sample_index)
    return captions


def find_varying_caption_keys(subset: SubsetConfig) -> tuple[str, ...]:
    """Return the keys that make captions of this subset vary from view to view."""
    return tuple(key for key in _VARYING_CAPTION_KEYS if getattr(subset, key))


_VARYING_CAPTION_KEYS = (
    "shuffle_caption",
    "enable_wildcard",
    "caption_dropout_rate",
    "caption_dropout_every_n_epochs",
    "caption_tag_dropout_rate",
    "token_warmup_step",
)

LATENT_KEY_VERSION = 1
"""Incremented when the same image, crop and VAE would give different latents than before."""

TEXT_KEY_VERSION = 1
"""Incremented when the same caption and text encoder would give different outputs than before."""


def compute_latent_key(
    sample: Sample,
    assignment: BucketAssignment,
    crop_params: CropParams,
    *,
    encoder_fingerprint: str,
    controls: Sequence[BucketAssignment] = (),
) -> bytes:
    """Hash one crop of an image with its mask and control images, given the assignments of these.

    The fingerprint stands for the VAE and ``--cache_precision``.
    """
    mask = () if sample.mask is None else ("alpha" if sample.mask.is_alpha else "mask", sample.mask.content_hash)
    return _hash_facts(
        "latents",
        LATENT_KEY_VERSION,
        sample.content_hash,
        *assignment.resized_size,
        *crop_params.left_top,
        *assignment.bucket_resolution,
        crop_params.interpolation or "",
        "mirrored" if crop_params.is_flipped else "",
        encoder_fingerprint,
        *mask,
        *_list_control_facts(sample, controls),
    )


def _list_control_facts(sample: Sample, assignments: Sequence[BucketAssignment]) -> Iterator[str | int]:
    for control, own in zip(sample.controls, assignments, strict=True):
        yield from ("control", control.content_hash, *own.resized_size, *own.crop_left_top, *own.bucket_resolution)
        if control.made:
            yield control.made


def compute_text_key(caption: str, encoder_fingerprint: str) -> bytes:
    """Hash one caption as the text encoder gets it."""
    return _hash_facts("text", TEXT_KEY_VERSION, encoder_fingerprint, caption)


def compute_encoder_fingerprint(*facts: str) -> str:
    """Hash several facts to one short text, unambiguous about where each of them ends."""
    return _hash_facts(*facts).hex()


def _hash_facts(*facts: str | int) -> bytes:
    text = "".join(f"{len(str(fact))}:{fact}" for fact in facts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True)
class LatentKeys:
    """Cached latents: one entry for each sample, and another one if it may be flipped."""

    sample_indices: NDArray[np.int64]
    flipped: NDArray[np.bool_]
    keys: KeyArray

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class TextKeys:
    """Cached text-encoder outputs: one entry for each caption."""

    captions: tuple[str, ...]
    owner_indices: tuple[int, ...]  # a sample with this caption, which decides about the directory
    keys: KeyArray

    def __len__(self) -> int:
        return len(self.keys)


def build_latent_keys(augmenter: Augmenter, encoder_fingerprint: str) -> LatentKeys:
    """Build the keys of all samples in order, then those of the flipped ones of subsets with ``flip_aug``."""
    samples = range(len(augmenter.manifest.samples))
    views = [(index, False) for index in samples]
    views += [(index, True) for index in samples if augmenter.get_subset(index).flip_aug]
    keys = [
        compute_latent_key(
            augmenter.manifest.samples[index],
            augmenter.assignments[index],
            get_cached_crop(augmenter, index, is_flipped=is_flipped),
            encoder_fingerprint=encoder_fingerprint,
            controls=augmenter.assign_controls(index),
        )
        for index, is_flipped in views
    ]
    sample_indices = np.array([index for index, _ in views], np.int64)
    return LatentKeys(sample_indices, np.array([is_flipped for _, is_flipped in views], np.bool_), stack_keys(keys))


def get_cached_crop(augmenter: Augmenter, sample_index: int, *, is_flipped: bool) -> CropParams:
    """Return the crop of cached latents: always the one of the bucket assignment."""
    return CropParams(
        augmenter.assignments[sample_index].crop_left_top,
        is_flipped,
        augmenter.get_subset(sample_index).resize_interpolation,
    )


def build_text_keys(captions: dict[str, int], encoder_fingerprint: str) -> TextKeys:
    """Build the keys of captions, each given with a sample that uses it."""
    keys = stack_keys(compute_text_key(caption, encoder_fingerprint) for caption in captions)
    return TextKeys(tuple(captions), tuple(captions.values()), keys)
