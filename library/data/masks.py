"""The pixels of masks: 255 where the loss counts in full, 0 where it does not; resized, cut and mirrored as pictures.

Masks are numbers from 0 to 255 everywhere in ``data/``, as (height, width); nothing here needs torch.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..dataset.image_ref import ImageRef
from .buckets import Placement
from .images import Readable, area_averaged, turned, upright, without_transparency
from .mask_files import Mask

if TYPE_CHECKING:
    from PIL.Image import Image

MaskPixels = NDArray[np.uint8]
"""(height, width)."""


def mask_of(mask: Mask, placement: Placement, crop: tuple[int, int], *, is_mirrored: bool) -> MaskPixels:
    """The mask of what the model sees: resized, cut out at ``crop`` (left, top) and mirrored as its picture is.

    ``ValueError`` when the file is not what it was when it was looked at, ``OSError`` when it cannot be read.
    """
    values = opacity(mask.image) if mask.is_alpha else brightness(mask.image)
    return placed_mask(mask, values, placement, crop, is_mirrored=is_mirrored)


def placed_mask(mask: Mask, values: MaskPixels, placement: Placement, crop: tuple[int, int], *,
                is_mirrored: bool) -> MaskPixels:  # fmt: skip
    """The same for a mask that has been read."""
    size = (values.shape[1], values.shape[0])
    if size != mask.size:
        raise ValueError(f"the mask {mask.image} was {mask.size} at the start of the run, now it is {size}")
    left, top = crop
    width, height = placement.bucket
    cut = resized_mask(values, placement.resized)[top : top + height, left : left + width]
    return np.ascontiguousarray(cut[:, ::-1] if is_mirrored else cut)


def picture_and_mask(image: ImageRef, mask: Mask | None) -> "tuple[Image, MaskPixels | None]":
    """The picture to train, in RGB, and its whole mask; under an alpha mask the colours that are stored there."""
    if mask is None:
        return upright(image), None
    if mask.is_alpha:
        colours, values = without_transparency(turned(image))
        return colours, np.asarray(values)
    picture = upright(image)
    try:
        return picture, brightness(mask.image)
    except Exception as error:  # decoders raise whatever they like, and do not say of which file
        raise ValueError(f"its mask {mask.image}: {error}") from error


def brightness(image: Readable) -> MaskPixels:
    """The red channel, as in sd-scripts; in a grey picture all three are alike."""
    return np.asarray(turned(image).convert("RGB"))[..., 0]


def opacity(image: Readable) -> MaskPixels:
    """The alpha channel."""
    return np.asarray(without_transparency(turned(image))[1])


def resized_mask(values: MaskPixels, size: tuple[int, int]) -> MaskPixels:
    """Averaged over areas when shrinking, else bilinear: whatever the picture's filter, edges do not ring."""
    from PIL import Image

    height, width = values.shape
    if (width, height) == size:
        return values
    if width >= size[0] and height >= size[1]:
        return area_averaged(values[..., None], size)[..., 0]
    return np.asarray(Image.fromarray(values).resize(size, Image.Resampling.BILINEAR))
