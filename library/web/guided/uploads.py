"""Files that are dropped into the page: which are taken, under which names, and how they are written."""

import os
import re
import shutil
import unicodedata
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath

from ...atomic_files import open_atomic_path
from ...config.operating_systems import find_name_problem
from ...dataset.kohya_folders import parse_folder_name
from ...dataset.listing import IMAGE_EXTENSIONS
from ...errors import UserError
from ...problems import report_file
from ..guard import MAX_UPLOAD_BYTES

CAPTION_EXTENSIONS = (".txt", ".caption")
MAX_CAPTION_BYTES = 2**17
MAX_NAME_LENGTH = 120
LEAST_FREE_BYTES = 2**30
"""Disk space that uploads leave free."""

KEPT_PARENTS = ("reg", "regularization", "regularisation", "masks", "mask")
"""Folders above the last one that keep their meaning; of all other paths the last folder is kept."""

_ADVICE = {
    ".heic": "a photograph of a phone in HEIC; export it as JPEG",
    ".heif": "a photograph of a phone in HEIF; export it as JPEG",
    ".zip": "an archive; unpack it and drop the folder",
    ".mp4": "a video; the five steps are for pictures, docs/datasets.md tells how clips are trained",
    ".gif": "a GIF; save it as PNG",
    ".tif": "a TIFF; save it as PNG",
    ".tiff": "a TIFF; save it as PNG",
}
_UNSAFE = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]+')


def make_safe_name(name: str) -> str:
    """Return the name without what file systems refuse or treat in another way; empty if nothing is left."""
    text = unicodedata.normalize("NFC", name).encode("utf-8", "ignore").decode()
    text = _UNSAFE.sub("_", "".join(each for each in text if each.isprintable())).strip(" .")
    if len(text) > MAX_NAME_LENGTH:
        stem, extension = os.path.splitext(text)
        text = stem[: MAX_NAME_LENGTH - len(extension)].rstrip(" .") + extension
    return text


def resolve_upload(folder: Path, path: str) -> Path:
    """Return the file in ``folder`` for a dropped path: its name, and the last folder above it.

    Of kohya's ``img/10_name class`` and of masks the folders are kept by which they are recognized.
    """
    parts = [make_safe_name(part) for part in PurePosixPath(path.replace("\\", "/")).parts]
    parts = [part for part in parts if part]
    if not parts:
        raise UserError(report_file(path[:80], "has no name that a file can have"))
    name, extension = parts[-1], Path(parts[-1]).suffix.lower()
    if extension not in (*IMAGE_EXTENSIONS, *CAPTION_EXTENSIONS):
        reason = _ADVICE.get(extension, f"neither a picture ({' '.join(IMAGE_EXTENSIONS)}) nor a caption (.txt)")
        raise UserError(f"{name}: {reason}")
    if problem := find_name_problem(name, is_windows=True):
        raise UserError(f"{name}: {problem}")
    kept = [part for part in parts[:-2] if part.lower() in KEPT_PARENTS]
    kept += [part for part in parts[-3:-2] if part not in kept and is_repeats_folder(part)]
    return folder.joinpath(*kept[-1:], *parts[-2:-1], name)


def is_repeats_folder(name: str) -> bool:
    """Whether a folder is one of kohya's ``10_name class``."""
    return "_" in name and parse_folder_name(name) is not None


async def write_upload(target: Path, chunks: AsyncIterator[bytes]) -> bool:
    """Write a file as it comes; return False if the same file is there already.  Nothing is ever replaced."""
    limit = MAX_CAPTION_BYTES if target.suffix.lower() in CAPTION_EXTENSIONS else MAX_UPLOAD_BYTES
    target.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(target.parent).free < LEAST_FREE_BYTES + limit:
        raise UserError(f"{target.name}: the disk is nearly full; nothing more is taken")
    size = 0
    try:
        with open_atomic_path(target) as temporary:
            with temporary.open("xb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > limit:
                        raise UserError(f"{target.name}: larger than {_format_size(limit)}")
                    file.write(chunk)
            if not size:
                raise UserError(f"{target.name}: is empty")
            if target.exists():
                raise _AlreadyThere(temporary.read_bytes() == target.read_bytes())
    except _AlreadyThere as found:
        if found.is_same:
            return False
        raise UserError(f"{target.name}: another file of that name is there already; rename it") from None
    return True


class _AlreadyThere(Exception):
    """The target exists; the temporary file is removed on the way out."""

    def __init__(self, is_same: bool):
        super().__init__()
        self.is_same = is_same


def _format_size(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 1024} KiB"
