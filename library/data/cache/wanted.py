"""What a run wants from a cache: the latents of its pictures, and each caption that it will ever show."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cutting import CropParams
from ..showing import Augmenter
from .keys import compute_latent_key, compute_text_key
from .records import KeyArray, stack_keys


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
    places = [*((index, False) for index in every),
              *((index, True) for index in every if augmenter.get_subset(index).flip_aug)]  # fmt: skip
    keys = [compute_latent_key(augmenter.manifest.samples[index], augmenter.assignments[index],
                       get_cached_crop(augmenter, index, is_flipped=is_mirrored), encoder_fingerprint=encoder_fingerprint)
            for index, is_mirrored in places]  # fmt: skip
    samples = np.array([index for index, _ in places], np.int64)
    return LatentKeys(samples, np.array([is_mirrored for _, is_mirrored in places], np.bool_), stack_keys(keys))


def get_cached_crop(augmenter: Augmenter, sample_index: int, *, is_flipped: bool) -> CropParams:
    """How a picture is cut whose latents are kept: always in the same place."""
    return CropParams(augmenter.assignments[sample_index].crop_left_top, is_flipped, augmenter.get_subset(sample_index).resize_interpolation)


def build_text_keys(captions: dict[str, int], encoder_fingerprint: str) -> TextKeys:
    """``captions`` are those of a run, each with a sample that shows it."""
    keys = stack_keys(compute_text_key(caption, encoder_fingerprint) for caption in captions)
    return TextKeys(tuple(captions), tuple(captions.values()), keys)
