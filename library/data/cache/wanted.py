"""What a run wants from a cache: the latents of its pictures, and each caption that it will ever show."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cutting import Cut
from ..showing import Showing
from .keys import latent_key, text_key
from .records import Keys, as_keys


@dataclass(frozen=True)
class WantedPictures:
    """Every picture as often as it is kept: once, or once more mirrored."""

    samples: NDArray[np.int64]
    mirrored: NDArray[np.bool_]
    keys: Keys

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class WantedTexts:
    """Captions, each once."""

    captions: tuple[str, ...]
    owners: tuple[int, ...]  # a sample that shows the caption, which decides in whose folder it is kept
    keys: Keys

    def __len__(self) -> int:
        return len(self.keys)


def wanted_pictures(showing: Showing, encoder: str) -> WantedPictures:
    """The samples in their order, first as they are, then mirrored where ``flip_aug`` asks for it."""
    every = range(len(showing.manifest.samples))
    places = [*((index, False) for index in every),
              *((index, True) for index in every if showing.subset(index).flip_aug)]  # fmt: skip
    keys = [latent_key(showing.manifest.samples[index], showing.placements[index],
                       way_kept(showing, index, is_mirrored=is_mirrored), encoder=encoder)
            for index, is_mirrored in places]  # fmt: skip
    samples = np.array([index for index, _ in places], np.int64)
    return WantedPictures(samples, np.array([is_mirrored for _, is_mirrored in places], np.bool_), as_keys(keys))


def way_kept(showing: Showing, sample: int, *, is_mirrored: bool) -> Cut:
    """How a picture is cut whose latents are kept: always in the same place."""
    return Cut(showing.placements[sample].crop, is_mirrored, showing.subset(sample).resize_interpolation)


def wanted_texts(captions: dict[str, int], encoder: str) -> WantedTexts:
    """``captions`` are those of a run, each with a sample that shows it."""
    keys = as_keys(text_key(caption, encoder) for caption in captions)
    return WantedTexts(tuple(captions), tuple(captions.values()), keys)
