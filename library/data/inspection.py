"""Decode pictures in full and measure them; what is wrong with a file is told, never raised."""

import hashlib
import io
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .images import Readable
from .origin import Origin

_EXIF_ORIENTATION = 0x0112
_MOST_THREADS = 16


@dataclass(frozen=True)
class Seen:
    """What a picture file turned out to be."""

    size: tuple[int, int]  # (width, height) after EXIF orientation
    content: str  # hash of the file
    problem: str | None = None


def look_at_all(pictures: Sequence[Origin]) -> dict[Origin, Seen]:
    """Look at every file, several at a time: Pillow decodes outside Python's lock."""
    logging.getLogger(__name__).info("checking %d pictures", len(pictures))
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as pool:
        return dict(zip(pictures, pool.map(look_at, pictures), strict=True))


def look_at(picture: Readable) -> Seen:
    """Read and decode one picture."""
    from PIL import Image, UnidentifiedImageError

    try:
        data = picture.read_bytes()
    except OSError as error:
        return Seen((0, 0), "", f"cannot be read: {error.strerror}")
    content = hashlib.blake2b(data, digest_size=16).hexdigest()
    if not data:
        return Seen((0, 0), content, "is empty")
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            width, height = image.size
            turned = image.getexif().get(_EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
    except UnidentifiedImageError:
        return Seen((0, 0), content, "is no picture that Pillow can read")
    except Image.DecompressionBombError:
        return Seen((0, 0), content, f"has more than {2 * (Image.MAX_IMAGE_PIXELS or 0)} pixels; make it smaller")
    except Exception as error:  # decoders raise whatever they like on broken data
        return Seen((0, 0), content, f"cannot be decoded: {error}")
    return Seen((height, width) if turned else (width, height), content)
