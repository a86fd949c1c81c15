"""Inspect image files: size, content hash, and why one cannot be used.  ``image_decoding`` loads them."""

import io
import re
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .image_decoding import ImageSource, InMemoryImage, has_transparency, load_rgb_image, silence_pillow_warnings
from .scan import ImageDefect, Inspector, describe_read_error, hash_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

INSPECTION_VERSION = 2
"""The version of the inspection, incremented when it may give another result for the same bytes."""

MAX_PIXELS = 178_956_970
"""Pillow's own limit for opening an image, 512 MiB as RGB; repeated here because users can change Pillow's."""

LARGE_IMAGE_PIXELS = 2**25
"""The number of pixels above which images are decoded one at a time, so that threads do not fill the memory."""

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "JPEG2000", "PPM", "QOI", "AVIF", "JXL", "JPEG XL")
"""Formats that are decoded if Pillow can; others are not tried, because for EPS Pillow would run Ghostscript."""

TRAIT_DESCRIPTIONS = {
    "transparent": "with transparent parts, which are trained as white",
    "CMYK": "in CMYK, converted to RGB without their color profile; convert them yourself for exact colors",
    "16-bit": "with 16 bits per channel, of which 8 are used",
    "palette": "with a color palette, converted to RGB",
    "animated": "with several frames, of which only the first is used",
}
"""Notes about unusual images; they follow the number of images."""

EXIF_ORIENTATION_TAG = 0x0112
CONVERT_HINT = "convert it to PNG or JPEG"
_PIXEL_COUNT = re.compile(r"(\d+) pixels")
_TEXT_PREFIX_BYTES = 512
_HTML = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)?<(?:!doctype\s+html|html|head|body)\b", re.I | re.S)
_SVG = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!.*?>\s*)*<svg\b", re.I | re.S)
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"RIFF", "WEBP"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"\0\0\0\x0cjP  ", "JPEG2000"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
)
_FORMAT_HINTS = {"AVIF": "; Pillow 11.3 and later can read it", "JPEG XL": ", for example with `djxl`"}
_CONTAINER_BRANDS = {  # brands of ISO base media files, the container of images and videos
    "HEIC": (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"),
    "AVIF": (b"avif", b"avis"),
    "a video": (b"isom", b"iso2", b"mp41", b"mp42", b"qt  ", b"M4V ", b"dash"),
    "a camera raw file": (b"crx ",),
}
_NON_IMAGES: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a git-lfs pointer, not the image itself; run `git lfs pull`"),
    (b"%PDF", "a PDF document; export its pages as PNG"),
    (b"8BPS", "a Photoshop document; export it as PNG"),
    (b"%!PS", "a PostScript file; export it as PNG"),
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"\x1f\x8b", "compressed with gzip; unpack it"),
    (b"\x1aE\xdf\xa3", "a video; extract frames as PNG"),
)


@dataclass(frozen=True, slots=True)
class InspectedImage:
    """The result of inspecting one image file."""

    size: tuple[int, int]  # (width, height) in EXIF orientation
    content_hash: str  # the hash of the file; empty if it could not be read
    defect: ImageDefect | None = None
    traits: tuple[str, ...] = ()  # keys of TRAIT_DESCRIPTIONS
    exif_orientation: int = 1

    @property
    def problem(self) -> str | None:
        return None if self.defect is None else self.defect.text


def build_image_inspector() -> Inspector[InspectedImage]:
    """Build the inspector that decodes each image once."""
    silence_pillow_warnings()
    interned: dict[Any, Any] = {}

    def unpack(facts: list[Any], content_hash: str) -> InspectedImage:
        width, height, orientation, traits, *defect = facts
        # a dataset may have a million images, but few different sizes and traits
        size = interned.setdefault((width, height), (width, height))
        trait_names = interned.setdefault(traits, tuple(traits.split()))
        return InspectedImage(size, content_hash, ImageDefect(*defect) if defect else None, trait_names, orientation)

    version = build_inspection_version()
    return Inspector(
        name="images",
        version=version,
        inspect=inspect_bytes,
        fail=build_defective_image,
        pack=_pack_image,
        unpack=unpack,
    )


def _pack_image(image: InspectedImage) -> list[Any]:
    defect = [image.defect.kind, image.defect.text] if image.defect else []
    return [*image.size, image.exif_orientation, " ".join(image.traits), *defect]


def build_inspection_version() -> str:
    """Name everything on which the result for the same bytes depends."""
    import PIL

    return f"{INSPECTION_VERSION} Pillow {PIL.__version__} {' '.join(_list_readable_formats())}"


def _list_readable_formats() -> list[str]:
    from PIL import Image

    Image.init()
    return [name for name in IMAGE_FORMATS if name in Image.OPEN]


def inspect_image(source: ImageSource) -> InspectedImage:
    """Read and decode one image."""
    try:
        data = source.read_bytes()
        return inspect_bytes(data, hash_bytes(data), nullcontext())
    except (OSError, MemoryError) as error:
        return build_defective_image(describe_read_error(error))


def build_defective_image(defect: ImageDefect) -> InspectedImage:
    """Build the result for a file that could not be read."""
    return InspectedImage((0, 0), "", defect)


def inspect_bytes(data: bytes, content_hash: str, decode_lock: AbstractContextManager[object]) -> InspectedImage:
    """Decode the bytes of a file; ``decode_lock`` is held for large images."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        return InspectedImage((0, 0), content_hash, ImageDefect("empty", "is empty; copy it again, or delete it"))
    try:
        with Image.open(io.BytesIO(data), formats=_list_readable_formats()) as image:
            pixels = image.width * image.height
            if pixels > MAX_PIXELS:
                return InspectedImage((0, 0), content_hash, _describe_too_large(pixels))
            with decode_lock if pixels > LARGE_IMAGE_PIXELS else nullcontext():
                return _measure_image(image, data, content_hash)
    except UnidentifiedImageError:
        defect = ImageDefect("not an image", f"is {_describe_non_image(data, _list_readable_formats())}")
    except Image.DecompressionBombError as error:
        defect = _describe_too_large(next(map(int, _PIXEL_COUNT.findall(str(error))), 0))
    except MemoryError:
        raise
    except Exception as error:  # decoders raise all kinds of exceptions for damaged files
        defect = _describe_decode_error(error, data)
    return InspectedImage((0, 0), content_hash, defect)


def is_large_image(data: bytes) -> bool:
    """Whether the header announces a large image; False for files that cannot be opened."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_list_readable_formats()) as image:
            return image.width * image.height > LARGE_IMAGE_PIXELS
    except Exception:  # reported when the image is decoded
        return False


def _measure_image(image: "Image", data: bytes, content_hash: str) -> InspectedImage:
    stored_mode = str(getattr(image, "tile", ""))  # tells how the pixels are stored, until they are loaded
    image.load()
    orientation = int(image.getexif().get(EXIF_ORIENTATION_TAG, 1))
    traits = tuple(_list_traits(image, stored_mode))
    if orientation == 1 and not traits and image.mode in ("RGB", "L"):
        return InspectedImage(image.size, content_hash)
    rgb = load_rgb_image(InMemoryImage(data))  # fails here for images that would fail in the data loader
    return InspectedImage(rgb.size, content_hash, None, traits, orientation)


def _list_traits(image: "Image", stored_mode: str) -> list[str]:
    traits = []
    if has_transparency(image):
        if image.convert("RGBA").getchannel("A").histogram()[255] < image.width * image.height:
            traits.append("transparent")
    if image.mode == "CMYK":
        traits.append("CMYK")
    if image.mode.startswith("I") or ";16" in stored_mode:
        traits.append("16-bit")
    if image.mode in ("P", "PA"):
        traits.append("palette")
    if getattr(image, "is_animated", False) and image.format != "MPO":  # phones store a second view as MPO
        traits.append("animated")
    return traits


def _describe_too_large(pixels: int) -> ImageDefect:
    text = f"is too large: {pixels:,} pixels, the limit is {MAX_PIXELS:,}; make it smaller"
    return ImageDefect("too large", text)


def _describe_decode_error(error: Exception, data: bytes) -> ImageDefect:
    message = str(error)
    if "truncated" in message.lower() or is_truncated(data):
        return ImageDefect("truncated", "is truncated: the file ends before the image does; copy it again")
    if "MAX_TEXT" in message or ("Text" in message and "too large" in message):
        text = "has more metadata (text or color profile) than Pillow reads; save it without metadata"
        return ImageDefect("metadata", text)
    reason = message or type(error).__name__
    return ImageDefect("undecodable", f"cannot be decoded: {reason}; copy it again, or {CONVERT_HINT}")


def is_truncated(data: bytes) -> bool:
    """Whether a file is shorter than its header says, for formats whose decoders do not check."""
    if data.startswith(b"RIFF"):
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    return data.startswith(b"\0\0\0\x0cjP  ") and not data.endswith(b"\xff\xd9")


def _describe_non_image(data: bytes, readable: Collection[str]) -> str:
    """Complete "the file is ..." for a file that Pillow, which reads the formats ``readable``, does not recognize."""
    for signature, description in _NON_IMAGES:
        if data.startswith(signature):
            return description
    brand = _identify_container(data)
    if brand == "a video":
        return f"{brand}; extract frames as PNG"
    if brand == "a camera raw file":
        return f"{brand}; develop it to PNG or JPEG"
    name = brand or next((name for signature, name in _SIGNATURES if data.startswith(signature)), None)
    if name in readable:
        return f"a damaged {name} file; copy it again"
    if name is not None:
        return f"{name}, which this version of Pillow cannot read; {CONVERT_HINT}{_FORMAT_HINTS.get(name, '')}"
    prefix = data[:_TEXT_PREFIX_BYTES]
    if _SVG.match(prefix):
        return "an SVG drawing; export it as PNG"
    if _HTML.match(prefix):
        return "a web page, not an image; download the image itself"
    if not data.strip(b"\0"):
        return "only zero bytes; copy it again"
    return f"not an image that Pillow can read; {CONVERT_HINT}, or delete it"


def _identify_container(data: bytes) -> str | None:
    """Identify an ISO base media file by its brands."""
    if data[4:8] != b"ftyp":
        return None
    length = min(int.from_bytes(data[:4], "big"), 64)
    brands = [data[8:12], *(data[start : start + 4] for start in range(16, length, 4))]
    return next((name for brand in brands for name, known in _CONTAINER_BRANDS.items() if brand in known), None)
