"""The pixels of masks: 255 where the loss counts in full, 0 where it does not; resized, cut and mirrored as pictures.

Masks are numbers from 0 to 255 everywhere in ``data/``, as (height, width); nothing here needs torch.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..dataset.image_ref import ImageRef
from .buckets import BucketAssignment
from .images import ImageSource, resize_area, load_oriented_image, load_rgb_image, split_alpha
from .mask_files import Mask

if TYPE_CHECKING:
    from PIL.Image import Image

MaskPixels = NDArray[np.uint8]
"""(height, width)."""


def load_resized_mask(mask: Mask, assignment: BucketAssignment, crop_left_top: tuple[int, int], *, is_flipped: bool) -> MaskPixels:
    """The mask of what the model sees: resized, cut out at ``crop`` (left, top) and mirrored as its picture is.

    ``ValueError`` when the file is not what it was when it was looked at, ``OSError`` when it cannot be read.
    """
    values = load_alpha_channel(mask.image) if mask.is_alpha else load_red_channel(mask.image)
    return resize_and_crop_mask(mask, values, assignment, crop_left_top, is_flipped=is_flipped)


def resize_and_crop_mask(mask: Mask, values: MaskPixels, assignment: BucketAssignment, crop_left_top: tuple[int, int], *,
                is_flipped: bool) -> MaskPixels:  # fmt: skip
    """The same for a mask that has been read."""
    size = (values.shape[1], values.shape[0])
    if size != mask.size:
        raise ValueError(f"the mask {mask.image} was {mask.size} at the start of the run, now it is {size}")
    left, top = crop_left_top
    width, height = assignment.bucket_resolution
    cut = resize_mask(values, assignment.resized_size)[top : top + height, left : left + width]
    return np.ascontiguousarray(cut[:, ::-1] if is_flipped else cut)


def load_image_and_mask(image: ImageRef, mask: Mask | None) -> "tuple[Image, MaskPixels | None]":
    """The picture to train, in RGB, and its whole mask; under an alpha mask the colours that are stored there."""
    if mask is None:
        return load_rgb_image(image), None
    if mask.is_alpha:
        colours, values = split_alpha(load_oriented_image(image))
        return colours, np.asarray(values)
    picture = load_rgb_image(image)
    try:
        return picture, load_red_channel(mask.image)
    except Exception as error:  # decoders raise whatever they like, and do not say of which file
        raise ValueError(f"its mask {mask.image}: {error}") from error


def load_red_channel(image: ImageSource) -> MaskPixels:
    """The red channel, as in sd-scripts; in a grey picture all three are alike."""
    return np.asarray(load_oriented_image(image).convert("RGB"))[..., 0]


def load_alpha_channel(image: ImageSource) -> MaskPixels:
    """The alpha channel."""
    return np.asarray(split_alpha(load_oriented_image(image))[1])


def resize_mask(values: MaskPixels, size: tuple[int, int]) -> MaskPixels:
    """Averaged over areas when shrinking, else bilinear: whatever the picture's filter, edges do not ring."""
    from PIL import Image

    height, width = values.shape
    if (width, height) == size:
        return values
    if width >= size[0] and height >= size[1]:
        return resize_area(values[..., None], size)[..., 0]
    return np.asarray(Image.fromarray(values).resize(size, Image.Resampling.BILINEAR))
