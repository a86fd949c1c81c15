"""Decode images for training: RGB in EXIF orientation with 8 bits per channel, transparent parts white.

In masks of inpainting, whose white is painted, transparent parts are black.
"""

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]
"""The pixels of an RGB image: (height, width, 3); of the frames of a clip: (frames, height, width, 3)."""

_MAX_UINT16 = 65535


class ImageSource(Protocol):
    """A ``Path`` or an ``ImageRef``."""

    def read_bytes(self) -> bytes: ...


@dataclass(frozen=True)
class InMemoryImage:
    """The encoded bytes of an image as an ``ImageSource``."""

    data: bytes

    def read_bytes(self) -> bytes:
        return self.data


def load_rgb_image(source: ImageSource) -> "Image":
    """Load in EXIF orientation and RGB; transparent parts become white."""
    return _load_on_background(source, 255)


def load_inpainting_mask(source: ImageSource) -> "Image":
    """Load a mask whose white is painted, in EXIF orientation and RGB; transparent parts, unpainted, become black."""
    return _load_on_background(source, 0)


def load_rgba_image(source: ImageSource) -> "Image":
    """Load in EXIF orientation with alpha, and the stored colors under transparent parts; opaque where it has none."""
    return load_oriented_image(source).convert("RGBA")


def _load_on_background(source: ImageSource, gray: int) -> "Image":
    from PIL import Image

    image = load_oriented_image(source)
    if has_transparency(image):
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, (gray, gray, gray, 255))
        image = Image.alpha_composite(background, image)
    return image.convert("RGB")


def load_oriented_image(source: ImageSource) -> "Image":
    """Load in EXIF orientation with 8 bits per channel, in the mode of the file."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(source.read_bytes())) as opened:
        image = ImageOps.exif_transpose(opened)
        image.load()
    if image.mode.startswith("I"):  # 16-bit gray, which Pillow's own conversion would clip at 255
        gray = np.asarray(image).astype(np.float64) * (255 / _MAX_UINT16)
        image = Image.fromarray(np.clip(np.rint(gray), 0, 255).astype(np.uint8))
    return image


def has_transparency(image: "Image") -> bool:
    """Whether the image has an alpha channel or a transparent color; it may still be opaque everywhere."""
    return "A" in image.getbands() or "transparency" in image.info


def split_alpha(image: "Image") -> "tuple[Image, Image]":
    """Split into RGB, with the stored colors under transparent parts as in sd-scripts, and the alpha channel."""
    rgba = image.convert("RGBA")
    return rgba.convert("RGB"), rgba.getchannel("A")


def silence_pillow_warnings() -> None:
    """Ignore Pillow's warnings: what matters is reported here, and ``-W error`` would turn them into failures."""
    warnings.filterwarnings("ignore", module=r"PIL\b")
