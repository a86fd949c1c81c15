"""What the model sees of a picture and of its mask: read, resized, cut out and mirrored alike."""

import random
from dataclasses import dataclass

import numpy as np

from .buckets import Placement
from .colours import varied
from .images import Pixels, cut_out
from .masks import MaskPixels, picture_and_mask, placed_mask
from .sample import Sample


@dataclass(frozen=True)
class BadSample:
    """A picture that was fine when it was looked at, and cannot be used now."""

    name: str
    problem: str


@dataclass(frozen=True)
class Cut:
    """One way in which a picture is shown."""

    crop: tuple[int, int]  # left, top in the resized picture
    is_mirrored: bool
    interpolation: str | None


def cut(sample: Sample, placement: Placement, way: Cut, colours: random.Random | None = None
        ) -> tuple[Pixels, MaskPixels | None] | BadSample:  # fmt: skip
    """The pixels, and those of the mask; with ``colours`` they are changed a little, as it draws."""
    try:
        image, values = picture_and_mask(sample.image, sample.mask)
        mask = values if sample.mask is None or values is None else placed_mask(
            sample.mask, values, placement, way.crop, is_mirrored=way.is_mirrored)  # fmt: skip
    except Exception as error:  # decoders raise whatever they like on broken data
        return BadSample(str(sample.image), f"was fine at the start and cannot be read now: {error}")
    if image.size != sample.size:
        return BadSample(str(sample.image), f"was {sample.size} at the start of the run, now it is {image.size}")
    pixels = cut_out(image, placement, way.crop, way.interpolation)
    if colours is not None:
        pixels = varied(pixels, colours)
    return np.ascontiguousarray(pixels[:, ::-1] if way.is_mirrored else pixels), mask
