"""From a picture file to the pixels a model is trained on: upright, without transparency, resized and cut."""

import io
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .image_formats import CONVERT_HINT, describe_non_image, is_truncated
from .scan import ImageDefect, Inspector, describe_read_error, hash_bytes

if TYPE_CHECKING:
    from PIL.Image import Image


Pixels = NDArray[np.uint8]
"""(height, width, 3), RGB."""


_MAX_UINT16 = 65535


EXIF_ORIENTATION_TAG = 0x0112


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


INSPECTION_VERSION = 2
"""Of what is found out here; what an earlier one found out is not believed."""


MAX_PIXELS = 178_956_970
"""From here on Pillow refuses to open a picture: 512 MiB as RGB.  Our own limit, because Pillow's can be changed."""


LARGE_IMAGE_PIXELS = 2**25
"""Above this, pictures are decoded one at a time, so that a pool of threads does not fill the memory."""


IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "JPEG2000", "PPM", "QOI", "AVIF", "JXL", "JPEG XL")
"""Kinds that are read if Pillow reads them.  Others are not tried: for EPS, Pillow would start another program."""


_PIXEL_COUNT_PATTERN = re.compile(r"(\d+) pixels")


@dataclass(frozen=True, slots=True)
class InspectedImage:
    """What a picture file turned out to be."""

    size: tuple[int, int]  # (width, height) after EXIF orientation
    content_hash: str  # hash of the file; empty when it could not be read
    defect: ImageDefect | None = None
    traits: tuple[str, ...] = ()  # what is unusual about it; keys of ``TRAITS``
    exif_orientation: int = 1  # of EXIF; 1 is upright as it is stored

    @property
    def problem(self) -> str | None:
        """The flaw in words."""
        return None if self.defect is None else self.defect.text


TRAIT_DESCRIPTIONS = {
    "transparent": "with transparent parts, which are trained as white",
    "CMYK": "in CMYK, turned into RGB without their colour profile; convert them yourself for exact colours",
    "16-bit": "with 16 bits a channel, of which 8 are used",
    "palette": "with a palette of colours, turned into RGB",
    "animated": "with several frames, of which the first is used",
}
"""What is said of pictures that are used and are not plain."""


def build_inspection_version() -> str:
    """Names everything that may change what is found out about a file."""
    import PIL

    return f"{INSPECTION_VERSION} Pillow {PIL.__version__} {' '.join(_list_readable_formats())}"


def silence_pillow_warnings() -> None:
    """What Pillow warns of is told by us, or is of no account; where warnings are errors, it would end a run."""
    warnings.filterwarnings("ignore", module=r"PIL\b")


def inspect_image(source: ImageSource) -> InspectedImage:
    """Read and decode one picture."""
    try:
        data = source.read_bytes()
        return inspect_bytes(data, hash_bytes(data), nullcontext())
    except (OSError, MemoryError) as error:
        return build_defective_image(describe_read_error(error))


def build_defective_image(defect: ImageDefect) -> InspectedImage:
    """Of a file whose content is not known."""
    return InspectedImage((0, 0), "", defect)


def inspect_bytes(data: bytes, content_hash: str, decode_lock: AbstractContextManager[object]) -> InspectedImage:
    """What the bytes of a file are; large pictures are decoded while ``alone`` is held."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        return InspectedImage((0, 0), content_hash, ImageDefect("empty", "is empty; copy it again, or delete it"))
    try:
        with Image.open(io.BytesIO(data), formats=_list_readable_formats()) as image:
            pixels = image.width * image.height
            if pixels > MAX_PIXELS:
                return InspectedImage((0, 0), content_hash, ImageDefect("too large", _format_too_large(pixels)))
            with decode_lock if pixels > LARGE_IMAGE_PIXELS else nullcontext():
                return _measure_image(image, data, content_hash)
    except UnidentifiedImageError:
        flaw = ImageDefect("no picture", f"is {describe_non_image(data, _list_readable_formats())}")
    except Image.DecompressionBombError as error:
        flaw = ImageDefect("too large", _format_too_large(next(map(int, _PIXEL_COUNT_PATTERN.findall(str(error))), 0)))
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever they like on broken data
        flaw = _classify_decode_error(error, data)
    return InspectedImage((0, 0), content_hash, flaw)


def is_large_image(data: bytes) -> bool:
    """As the header of a picture says."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_list_readable_formats()) as image:
            return image.width * image.height > LARGE_IMAGE_PIXELS
    except Exception:  # what is wrong with it is told by those who decode it
        return False


def _measure_image(image: "Image", data: bytes, content_hash: str) -> InspectedImage:
    raw_mode = str(getattr(image, "tile", ""))  # there before the pixels are loaded, and says how they are stored
    image.load()
    orientation = int(image.getexif().get(EXIF_ORIENTATION_TAG, 1))
    traits = tuple(_find_traits(image, raw_mode))
    if orientation == 1 and not traits and image.mode in ("RGB", "L"):
        return InspectedImage(image.size, content_hash)
    seen = load_rgb_image(InMemoryImage(data))  # all that the loader does with unusual pictures is tried, too
    return InspectedImage(seen.size, content_hash, None, traits, orientation)


def _find_traits(image: "Image", raw_mode: str) -> list[str]:
    found = []
    if "A" in image.getbands() or "transparency" in image.info:
        if image.convert("RGBA").getchannel("A").histogram()[255] < image.width * image.height:
            found.append("transparent")
    if image.mode == "CMYK":
        found.append("CMYK")
    if image.mode.startswith("I") or ";16" in raw_mode:
        found.append("16-bit")
    if image.mode in ("P", "PA"):
        found.append("palette")
    if getattr(image, "is_animated", False) and image.format != "MPO":  # phones put a second view into these
        found.append("animated")
    return found


def _classify_decode_error(error: Exception, data: bytes) -> ImageDefect:
    said = str(error)
    if "truncated" in said.lower() or is_truncated(data):
        return ImageDefect("truncated", "is truncated: it ends before the picture does; copy it again")
    if "MAX_TEXT" in said or ("Text" in said and "too large" in said):
        text = "holds more text or colour profile beside its pixels than Pillow reads; save it without metadata"
        return ImageDefect("text", text)
    return ImageDefect(
        "undecodable", f"cannot be decoded: {said or type(error).__name__}; copy it again, or {CONVERT_HINT}"
    )


def _format_too_large(num_pixels: int) -> str:
    return f"is too large: {num_pixels:,} pixels, and at most {MAX_PIXELS:,} are decoded; make it smaller"


def _list_readable_formats() -> list[str]:
    from PIL import Image

    Image.init()
    return [name for name in IMAGE_FORMATS if name in Image.OPEN]


@dataclass(frozen=True)
class InMemoryImage:
    """As if read from a file."""

    data: bytes

    def read_bytes(self) -> bytes:
        return self.data


def build_image_inspector() -> Inspector[InspectedImage]:
    """Every picture is decoded once."""
    silence_pillow_warnings()
    shared: dict[Any, Any] = {}
    return Inspector(
        "pictures",
        build_inspection_version(),
        inspect_bytes,
        build_defective_image,
        _pack_image,
        lambda facts, content: _unpack_image(facts, content, shared),
    )


def _pack_image(image: InspectedImage) -> list[Any]:
    flaw = [image.defect.kind, image.defect.text] if image.defect else []
    return [*image.size, image.exif_orientation, " ".join(image.traits), *flaw]


def _unpack_image(row: list[Any], content_hash: str, interned: dict[Any, Any]) -> InspectedImage:
    """Equal sizes and traits are one object, since there may be a million of them."""
    width, height, orientation, traits, *flaw = row
    size = interned.setdefault((width, height), (width, height))
    words = interned.setdefault(traits, tuple(traits.split()))
    return InspectedImage(size, content_hash, ImageDefect(*flaw) if flaw else None, words, orientation)
