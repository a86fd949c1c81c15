"""Identify the format of a file that Pillow cannot open by its first bytes, and suggest what to do with it."""

import re
from collections.abc import Collection

_HTML = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)?<(?:!doctype\s+html|html|head|body)\b", re.I | re.S)


_SVG = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!.*?>\s*)*<svg\b", re.I | re.S)


_TEXT_PREFIX_BYTES = 512


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


_CONTAINER_BRANDS = {
    "HEIC": (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"),
    "AVIF": (b"avif", b"avis"),
    "a video": (b"isom", b"iso2", b"mp41", b"mp42", b"qt  ", b"M4V ", b"dash"),
    "a camera raw file": (b"crx ",),
}
"""Brands of ISO base media files, the container of images and videos."""


_NON_IMAGES: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a git-lfs pointer, not the image itself; run `git lfs pull`"),
    (b"%PDF", "a PDF document; export its pages as PNG"),
    (b"8BPS", "a Photoshop document; export it as PNG"),
    (b"%!PS", "a PostScript file; export it as PNG"),
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"\x1f\x8b", "compressed with gzip; unpack it"),
    (b"\x1aE\xdf\xa3", "a video; extract frames as PNG"),
)


CONVERT_HINT = "convert it to PNG or JPEG"


def describe_non_image(data: bytes, readable: Collection[str]) -> str:
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


def is_truncated(data: bytes) -> bool:
    """Whether a file is shorter than its header says, for formats whose decoders do not check."""
    if data.startswith(b"RIFF"):
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    return data.startswith(b"\0\0\0\x0cjP  ") and not data.endswith(b"\xff\xd9")


def _identify_container(data: bytes) -> str | None:
    """Identify an ISO base media file by its brands."""
    if data[4:8] != b"ftyp":
        return None
    length = min(int.from_bytes(data[:4], "big"), 64)
    brands = [data[8:12], *(data[start : start + 4] for start in range(16, length, 4))]
    return next((name for brand in brands for name, known in _CONTAINER_BRANDS.items() if brand in known), None)
