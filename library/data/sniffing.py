"""What a file is that is no picture for us, told by its first bytes, with the way out."""

import re
from collections.abc import Collection

_WEB = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)?<(?:!doctype\s+html|html|head|body)\b", re.I | re.S)
_SVG = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!.*?>\s*)*<svg\b", re.I | re.S)
_TEXT_LOOKED_AT = 512

_STARTS: tuple[tuple[bytes, str], ...] = (
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

_READ_BY = {"AVIF": "; Pillow 11.3 and later reads it", "JPEG XL": ", for example with `djxl`"}

_BOXES = {
    "HEIC": (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"),
    "AVIF": (b"avif", b"avis"),
    "a video": (b"isom", b"iso2", b"mp41", b"mp42", b"qt  ", b"M4V ", b"dash"),
    "a camera's raw file": (b"crx ",),
}
"""Brands of the container that pictures and videos share."""

_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a pointer of git-lfs and not the file itself; run `git lfs pull`"),
    (b"%PDF", "a PDF document; draw its pages as PNG"),
    (b"8BPS", "a Photoshop document; export it as PNG"),
    (b"%!PS", "a PostScript drawing; draw it as PNG"),
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"\x1f\x8b", "compressed with gzip; unpack it"),
    (b"\x1aE\xdf\xa3", "a video; take single frames as PNG"),
)

CONVERT = "convert it to PNG or JPEG"


def no_picture(data: bytes, readable: Collection[str]) -> str:
    """Completes "the file is ..." for a file that Pillow, which reads the kinds ``readable``, took for no picture."""
    for start, what in _OTHERS:
        if data.startswith(start):
            return what
    box = _box(data)
    if box in ("a video", "a camera's raw file"):
        return f"{box}; {'take single frames as PNG' if box == 'a video' else 'develop it into PNG or JPEG'}"
    kind = box or next((kind for start, kind in _STARTS if data.startswith(start)), None)
    if kind in readable:
        return f"a damaged {kind}: it starts as one and cannot be read; copy it again"
    if kind is not None:
        return f"{kind}, which this Pillow does not read; {CONVERT}{_READ_BY.get(kind, '')}"
    head = data[:_TEXT_LOOKED_AT]
    if _SVG.match(head):
        return "an SVG drawing; draw it as PNG"
    if _WEB.match(head):
        return "a web page and no picture; download the picture itself"
    if not data.strip(b"\0"):
        return "nothing but zero bytes; copy it again"
    return f"no picture that Pillow can read; {CONVERT}, or delete it"


def is_cut_off(data: bytes) -> bool:
    """Whether a file ends before its own headers say so, for kinds whose decoders do not tell."""
    if data.startswith(b"RIFF"):
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    return data.startswith(b"\0\0\0\x0cjP  ") and not data.endswith(b"\xff\xd9")


def _box(data: bytes) -> str | None:
    if data[4:8] != b"ftyp":
        return None
    brands = [data[8:12], *(data[at : at + 4] for at in range(16, min(int.from_bytes(data[:4], "big"), 64), 4))]
    return next((kind for brand in brands for kind, known in _BOXES.items() if brand in known), None)
