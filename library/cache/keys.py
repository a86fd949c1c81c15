"""Every caption that a run will show: known beforehand, because how a sample is shown follows from the plan."""

import hashlib
from collections.abc import Iterable
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
    """Each caption that any rank shows in ``steps`` steps, the empty one and ``also`` among them, with its sample.

    Where captions never change, a look at each sample is enough; else the plan is gone through step by step.
    """
    found = dict.fromkeys(["", *extra_captions], 0)
    changing = {
        index
        for index in range(len(augmenter.manifest.samples))
        if find_varying_caption_keys(augmenter.get_subset(index))
    }
    for index in range(len(augmenter.manifest.samples)):
        if index not in changing:
            found.setdefault(augmenter.draw_caption(SampleView(0, 0, index, 0)), index)
    for position in range(total_steps * batch_plan.accumulation_steps if changing else 0):
        for visit in augmenter.list_views(
            batch_plan.get_micro_batch(position), position // batch_plan.accumulation_steps
        ):
            if visit.sample_index in changing:
                found.setdefault(augmenter.draw_caption(visit), visit.sample_index)
    return found


def find_varying_caption_keys(subset: SubsetConfig) -> tuple[str, ...]:
    """The keys by which a caption of this subset may be another one each time it is shown."""
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
"""Raised when the same picture, placement and VAE would give other latents than before."""


TEXT_KEY_VERSION = 1
"""Raised when the same caption and text encoder would give another encoding than before."""


def compute_latent_key(
    sample: Sample, assignment: BucketAssignment, crop_params: CropParams, *, encoder_fingerprint: str
) -> bytes:
    """The latents of one picture as it is cut, with its mask; ``encoder`` stands for the VAE and the kept precision."""
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
    )


def compute_text_key(caption: str, encoder_fingerprint: str) -> bytes:
    """One caption as it is shown; ``encoder`` stands for everything that turns it into numbers."""
    return _hash_facts("text", TEXT_KEY_VERSION, encoder_fingerprint, caption)


def compute_encoder_fingerprint(*facts: str) -> str:
    """One short text for several facts, none of which can be mistaken for a part of another."""
    return _hash_facts(*facts).hex()


def _hash_facts(*facts: str | int) -> bytes:
    text = "".join(f"{len(str(fact))}:{fact}" for fact in facts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True)
class LatentKeys:
    """Every picture as often as it is kept: once, or once more mirrored."""

    sample_indices: NDArray[np.int64]
    flipped: NDArray[np.bool_]
    keys: KeyArray

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class TextKeys:
    """Captions, each once."""

    captions: tuple[str, ...]
    owner_indices: tuple[int, ...]  # a sample that shows the caption, which decides in whose folder it is kept
    keys: KeyArray

    def __len__(self) -> int:
        return len(self.keys)


def build_latent_keys(augmenter: Augmenter, encoder_fingerprint: str) -> LatentKeys:
    """The samples in their order, first as they are, then mirrored where ``flip_aug`` asks for it."""
    every = range(len(augmenter.manifest.samples))
    places = [
        *((index, False) for index in every),
        *((index, True) for index in every if augmenter.get_subset(index).flip_aug),
    ]
    keys = [
        compute_latent_key(
            augmenter.manifest.samples[index],
            augmenter.assignments[index],
            get_cached_crop(augmenter, index, is_flipped=is_mirrored),
            encoder_fingerprint=encoder_fingerprint,
        )
        for index, is_mirrored in places
    ]
    samples = np.array([index for index, _ in places], np.int64)
    return LatentKeys(samples, np.array([is_mirrored for _, is_mirrored in places], np.bool_), stack_keys(keys))


def get_cached_crop(augmenter: Augmenter, sample_index: int, *, is_flipped: bool) -> CropParams:
    """How a picture is cut whose latents are kept: always in the same place."""
    return CropParams(
        augmenter.assignments[sample_index].crop_left_top,
        is_flipped,
        augmenter.get_subset(sample_index).resize_interpolation,
    )


def build_text_keys(captions: dict[str, int], encoder_fingerprint: str) -> TextKeys:
    """``captions`` are those of a run, each with a sample that shows it."""
    keys = stack_keys(compute_text_key(caption, encoder_fingerprint) for caption in captions)
    return TextKeys(tuple(captions), tuple(captions.values()), keys)
