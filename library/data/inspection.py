"""Decode a picture in full and measure it; what is wrong with a file is told, never raised."""

import io
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..dataset.image_formats import CONVERT_HINT, describe_non_image, is_truncated
from ..dataset.scan import ImageDefect, Inspector, describe_read_error, hash_bytes
from .images import EXIF_ORIENTATION, Readable, upright

if TYPE_CHECKING:
    from PIL.Image import Image

VERSION = 2
"""Of what is found out here; what an earlier one found out is not believed."""
MOST_PIXELS = 178_956_970
"""From here on Pillow refuses to open a picture: 512 MiB as RGB.  Our own limit, because Pillow's can be changed."""
LARGE_PIXELS = 2**25
"""Above this, pictures are decoded one at a time, so that a pool of threads does not fill the memory."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "JPEG2000", "PPM", "QOI", "AVIF", "JXL", "JPEG XL")
"""Kinds that are read if Pillow reads them.  Others are not tried: for EPS, Pillow would start another program."""

_PIXELS = re.compile(r"(\d+) pixels")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a picture file turned out to be."""

    size: tuple[int, int]  # (width, height) after EXIF orientation
    content: str  # hash of the file; empty when it could not be read
    flaw: ImageDefect | None = None
    traits: tuple[str, ...] = ()  # what is unusual about it; keys of ``TRAITS``
    orientation: int = 1  # of EXIF; 1 is upright as it is stored

    @property
    def problem(self) -> str | None:
        """The flaw in words."""
        return None if self.flaw is None else self.flaw.text


TRAITS = {
    "transparent": "with transparent parts, which are trained as white",
    "CMYK": "in CMYK, turned into RGB without their colour profile; convert them yourself for exact colours",
    "16-bit": "with 16 bits a channel, of which 8 are used",
    "palette": "with a palette of colours, turned into RGB",
    "animated": "with several frames, of which the first is used",
}
"""What is said of pictures that are used and are not plain."""


def reader() -> str:
    """Names everything that may change what is found out about a file."""
    import PIL

    return f"{VERSION} Pillow {PIL.__version__} {' '.join(_formats())}"


def hush_pillow() -> None:
    """What Pillow warns of is told by us, or is of no account; where warnings are errors, it would end a run."""
    warnings.filterwarnings("ignore", module=r"PIL\b")


def look_at(picture: Readable) -> Seen:
    """Read and decode one picture."""
    try:
        data = picture.read_bytes()
        return examined(data, hash_bytes(data), nullcontext())
    except (OSError, MemoryError) as error:
        return failed(describe_read_error(error))


def failed(flaw: ImageDefect) -> Seen:
    """Of a file whose content is not known."""
    return Seen((0, 0), "", flaw)


def examined(data: bytes, content: str, alone: AbstractContextManager[object]) -> Seen:
    """What the bytes of a file are; large pictures are decoded while ``alone`` is held."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        return Seen((0, 0), content, ImageDefect("empty", "is empty; copy it again, or delete it"))
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            pixels = image.width * image.height
            if pixels > MOST_PIXELS:
                return Seen((0, 0), content, ImageDefect("too large", _too_large(pixels)))
            with alone if pixels > LARGE_PIXELS else nullcontext():
                return _measured(image, data, content)
    except UnidentifiedImageError:
        flaw = ImageDefect("no picture", f"is {describe_non_image(data, _formats())}")
    except Image.DecompressionBombError as error:
        flaw = ImageDefect("too large", _too_large(next(map(int, _PIXELS.findall(str(error))), 0)))
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever they like on broken data
        flaw = _failure(error, data)
    return Seen((0, 0), content, flaw)


def is_large(data: bytes) -> bool:
    """As the header of a picture says."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            return image.width * image.height > LARGE_PIXELS
    except Exception:  # what is wrong with it is told by those who decode it
        return False


def _measured(image: "Image", data: bytes, content: str) -> Seen:
    raw_mode = str(getattr(image, "tile", ""))  # there before the pixels are loaded, and says how they are stored
    image.load()
    orientation = int(image.getexif().get(EXIF_ORIENTATION, 1))
    traits = tuple(_traits(image, raw_mode))
    if orientation == 1 and not traits and image.mode in ("RGB", "L"):
        return Seen(image.size, content)
    seen = upright(Bytes(data))  # all that the loader does with unusual pictures is tried, too
    return Seen(seen.size, content, None, traits, orientation)


def _traits(image: "Image", raw_mode: str) -> list[str]:
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


def _failure(error: Exception, data: bytes) -> ImageDefect:
    said = str(error)
    if "truncated" in said.lower() or is_truncated(data):
        return ImageDefect("truncated", "is truncated: it ends before the picture does; copy it again")
    if "MAX_TEXT" in said or ("Text" in said and "too large" in said):
        text = "holds more text or colour profile beside its pixels than Pillow reads; save it without metadata"
        return ImageDefect("text", text)
    return ImageDefect(
        "undecodable", f"cannot be decoded: {said or type(error).__name__}; copy it again, or {CONVERT_HINT}"
    )


def _too_large(pixels: int) -> str:
    return f"is too large: {pixels:,} pixels, and at most {MOST_PIXELS:,} are decoded; make it smaller"


def _formats() -> list[str]:
    from PIL import Image

    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


@dataclass(frozen=True)
class Bytes:
    """As if read from a file."""

    data: bytes

    def read_bytes(self) -> bytes:
        return self.data


def pictures_inspected() -> Inspector[Seen]:
    """Every picture is decoded once."""
    hush_pillow()
    shared: dict[Any, Any] = {}
    return Inspector("pictures", reader(), examined, failed, _packed, lambda facts, content: _unpacked(
        facts, content, shared))  # fmt: skip


def _packed(seen: Seen) -> list[Any]:
    flaw = [seen.flaw.kind, seen.flaw.text] if seen.flaw else []
    return [*seen.size, seen.orientation, " ".join(seen.traits), *flaw]


def _unpacked(facts: list[Any], content: str, shared: dict[Any, Any]) -> Seen:
    """Equal sizes and traits are one object, since there may be a million of them."""
    width, height, orientation, traits, *flaw = facts
    size = shared.setdefault((width, height), (width, height))
    words = shared.setdefault(traits, tuple(traits.split()))
    return Seen(size, content, ImageDefect(*flaw) if flaw else None, words, orientation)
