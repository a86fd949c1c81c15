"""Thumbnails, cached on disk beside the scan of the pictures, by the hash of the file: none can be stale."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from ..atomic_files import open_atomic_path
from ..dataloader.images import load_first_frame
from ..dataset.image_decoding import load_rgb_image
from ..dataset.scan_cache import CACHE_FOLDER
from ..errors import UserError
from ..problems import report_file
from .folders import OpenedFolders
from .pictures import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

THUMBNAIL_SIDE, LARGE_SIDE = 320, 1600
FOLDER = "thumbnails"


def load_thumbnail(folders: OpenedFolders, picture: Picture, *, is_large: bool = False) -> bytes:
    """Return a WebP file of the picture; raise ``OutsideFolders`` if a link leads out of the opened folders."""
    folders.resolve(picture.sample.image.path)
    side = LARGE_SIDE if is_large else THUMBNAIL_SIDE
    cached = None if is_large else _find_cache_file(folders, picture)
    if cached is not None and cached.is_file():
        return cached.read_bytes()
    data = _encode(_load_reduced(picture, side))
    if cached is not None:
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            with open_atomic_path(cached) as temporary:
                temporary.write_bytes(data)
        except OSError:  # a read-only disk: it is made again the next time
            pass
    return data


def load_file_thumbnail(path: Path, side: int) -> bytes:
    """Return a WebP file of a picture that belongs to no dataset yet."""
    try:
        image = load_rgb_image(path)
    except OSError:
        raise
    except Exception as error:  # decoders raise all kinds of exceptions for damaged files
        raise UserError(report_file(path.name, f"cannot be decoded: {error}")) from None
    image.thumbnail((side, side), reducing_gap=2.0)
    return _encode(image)


def _find_cache_file(folders: OpenedFolders, picture: Picture) -> Path | None:
    folder = picture.subset.resolve_cache_directory() or picture.sample.image.folder / CACHE_FOLDER
    window = picture.sample.window
    name = picture.sample.content_hash + ("" if window is None else f"-{window.start}")
    path = folder / FOLDER / name[:2] / f"{name}-{THUMBNAIL_SIDE}.webp"
    return path if folders.contains(path) else None


def _load_reduced(picture: Picture, side: int) -> "Image":
    image = load_first_frame(picture.sample)[0]
    image.thumbnail((side, side), reducing_gap=2.0)
    return image


def _encode(image: "Image") -> bytes:
    data = io.BytesIO()
    image.save(data, "WEBP", quality=80, method=1)
    return data.getvalue()
