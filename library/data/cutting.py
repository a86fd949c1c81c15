"""What the model sees of a picture and of its mask: read, resized, cut out and mirrored alike."""

import random
from dataclasses import dataclass

import numpy as np

from .buckets import BucketAssignment
from .colours import augment_color
from .images import Pixels, resize_and_crop
from .masks import MaskPixels, load_image_and_mask, resize_and_crop_mask
from .sample import Sample


@dataclass(frozen=True)
class BadSample:
    """A picture that was fine when it was looked at, and cannot be used now."""

    name: str
    problem: str


@dataclass(frozen=True)
class CropParams:
    """One way in which a picture is shown."""

    left_top: tuple[int, int]  # left, top in the resized picture
    is_flipped: bool
    interpolation: str | None


def load_sample_pixels(sample: Sample, assignment: BucketAssignment, crop_params: CropParams, color_rng: random.Random | None = None
        ) -> tuple[Pixels, MaskPixels | None] | BadSample:  # fmt: skip
    """The pixels, and those of the mask; with ``colours`` they are changed a little, as it draws."""
    try:
        image, values = load_image_and_mask(sample.image, sample.mask)
        mask = values if sample.mask is None or values is None else resize_and_crop_mask(
            sample.mask, values, assignment, crop_params.left_top, is_flipped=crop_params.is_flipped)  # fmt: skip
    except Exception as error:  # decoders raise whatever they like on broken data
        return BadSample(str(sample.image), f"was fine at the start and cannot be read now: {error}")
    if image.size != sample.size:
        return BadSample(str(sample.image), f"was {sample.size} at the start of the run, now it is {image.size}")
    pixels = resize_and_crop(image, assignment, crop_params.left_top, crop_params.interpolation)
    if color_rng is not None:
        pixels = augment_color(pixels, color_rng)
    return np.ascontiguousarray(pixels[:, ::-1] if crop_params.is_flipped else pixels), mask
