"""From a picture file to the pixels a model is trained on: upright, without transparency, resized and cut."""

import io
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from .buckets import BucketAssignment

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]
"""(height, width, 3), RGB."""

_MAX_UINT16 = 65535
EXIF_ORIENTATION_TAG = 0x0112
_PILLOW_FILTERS = {"nearest": "NEAREST", "bilinear": "BILINEAR", "linear": "BILINEAR", "bicubic": "BICUBIC",
            "cubic": "BICUBIC", "lanczos": "LANCZOS", "box": "BOX"}  # fmt: skip


class ImageSource(Protocol):
    """A ``Path`` or an ``ImageRef``."""

    def read_bytes(self) -> bytes: ...


def load_rgb_image(source: ImageSource) -> "Image":
    """The picture as a viewer shows it, in RGB; transparent parts are white."""
    from PIL import Image

    image = load_oriented_image(source)
    if has_transparency(image):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def load_oriented_image(source: ImageSource) -> "Image":
    """The picture as it is stored, but in the orientation in which a viewer shows it, and with 8 bits a channel."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(source.read_bytes())) as opened:
        image = ImageOps.exif_transpose(opened)
        image.load()
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow's own conversion would cut off at 255
        grey = np.asarray(image).astype(np.float64) * (255 / _MAX_UINT16)
        image = Image.fromarray(np.clip(np.rint(grey), 0, 255).astype(np.uint8))
    return image


def has_transparency(image: "Image") -> bool:
    """Whether anything in the file speaks of transparency; it may still be opaque everywhere."""
    return "A" in image.getbands() or "transparency" in image.info


def split_alpha(image: "Image") -> "tuple[Image, Image]":
    """The colours that lie under the transparency, as sd-scripts takes them, and the opacity."""
    both = image.convert("RGBA")
    return both.convert("RGB"), both.getchannel("A")


def resize_and_crop(image: "Image", assignment: BucketAssignment, crop_left_top: tuple[int, int], interpolation: str | None) -> Pixels:
    """The bucket's pixels, cut out at ``crop`` (left, top) after resizing."""
    whole = resize_image(image, assignment.resized_size, interpolation)
    left, top = crop_left_top
    width, height = assignment.bucket_resolution
    return whole[top : top + height, left : left + width]


def resize_image(image: "Image", size: tuple[int, int], interpolation: str | None) -> Pixels:
    """As sd-scripts: without ``interpolation``, area when no side grows and Lanczos when one does."""
    from PIL import Image

    if image.size == size:
        return np.asarray(image)
    shrinks = image.size[0] >= size[0] and image.size[1] >= size[1]
    interpolation = interpolation or ("area" if shrinks else "lanczos")
    if interpolation == "area" and shrinks:
        return resize_area(np.asarray(image), size)
    # OpenCV, which sd-scripts uses here, takes area as bilinear when a side grows
    name = _PILLOW_FILTERS["bilinear" if interpolation == "area" else interpolation]
    return np.asarray(image.resize(size, Image.Resampling[name]))


def resize_area(image: Pixels, size: tuple[int, int]) -> Pixels:
    """Each pixel is the mean of the area it covers, parts of pixels counted as parts.

    Pillow's box filter counts whole pixels only, which makes pictures coarser unless sizes divide evenly.
    """
    height, width, channels = image.shape
    rows = _average_rows(image.reshape(height, -1), size[1]).reshape(size[1], width, channels)
    columns = _average_rows(rows.transpose(1, 0, 2).reshape(width, -1), size[0]).reshape(size[0], size[1], channels)
    return np.clip(np.rint(columns.transpose(1, 0, 2)), 0, 255).astype(np.uint8)


def _average_rows(image: NDArray[np.uint8] | NDArray[np.float32], num_rows: int) -> NDArray[np.float32]:
    """``count`` rows in the place of those of ``image``, which are more."""
    edges = np.linspace(0, len(image), num_rows + 1)
    starts, ends = edges[:-1, None], edges[1:, None]
    first = np.floor(starts).astype(np.int64)
    rows = first + np.arange(int((np.ceil(ends) - first).max()))
    shares = np.clip(np.minimum(rows + 1, ends) - np.maximum(rows, starts), 0, None)
    shares = (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32)
    rows = np.minimum(rows, len(image) - 1)
    averaged = np.zeros((num_rows, image.shape[1]), np.float32)
    for index in range(rows.shape[1]):
        averaged += image[rows[:, index]] * shares[:, index, None]
    return averaged
