"""The place of an image's bytes: a file of its own, a byte range of a tar shard, or a row of a table."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..storage.remote_path import build_remote_path, is_remote, is_remote_url, prefetch_ranges
from ..storage.remote_store import RemoteStore


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes of one image inside a larger file, such as a member of a tar shard."""

    name: str
    offset: int
    length: int

    @property
    def position(self) -> str:
        """Identifies the image inside its file as long as the file does not change."""
        return f"{self.offset}+{self.length}"


class ColumnReader(Protocol):
    """Reads single rows of an image column; all images of a subset share one reader."""

    column: str

    def read(self, path: Path, row: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of a parquet or Arrow file that holds images in a column."""

    reader: ColumnReader
    row: int  # the number of the row in the file, from 0

    @property
    def name(self) -> str:
        return str(self.row)

    @property
    def length(self) -> int:
        """Unknown before the row is read."""
        return 0

    @property
    def position(self) -> str:
        """Identifies the image inside its file as long as the file does not change."""
        return f"{self.reader.column}:{self.row}"


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A reference to one image; small, because a dataset may have a million: all images of a folder share its path."""

    folder: Path
    file: str  # relative to the folder, with "/"
    part: ByteRange | TableRow | None = None

    @property
    def path(self) -> Path:
        """The file that holds the bytes."""
        return self.folder / self.file

    @property
    def name(self) -> str:
        """The file name of the image, of its member in the archive, or the number of its row."""
        return (self.file if self.part is None else self.part.name).rpartition("/")[2]

    @property
    def key(self) -> str:
        """Folder and file name, independent of the rest of the path."""
        if self.part is not None:
            return f"{self.path.name}/{self.part.name}"
        below, _, name = self.file.rpartition("/")
        return f"{below.rpartition('/')[2] or self.folder.name}/{name}"

    @property
    def name_in_folder(self) -> str:
        """The path below the folder, independent of where that is and what it is called."""
        return self.file if self.part is None else f"{self.file}/{self.part.name}"

    def read_bytes(self) -> bytes:
        """Read the encoded image."""
        if self.part is None:
            return self.path.read_bytes()
        if isinstance(self.part, TableRow):
            return self.part.reader.read(self.path, self.part.row)
        with self.path.open("rb") as file:
            file.seek(self.part.offset)
            return file.read(self.part.length)

    def read_verified(self, content_hash: str) -> bytes:
        """Read the encoded image; raise ``OSError`` if it is not the one with this hash."""
        data = self.read_bytes()
        if hashlib.blake2b(data, digest_size=16).hexdigest() != content_hash:
            raise OSError("has changed since the start of the run; start again to train on the new file")
        return data

    def __str__(self) -> str:
        return str(self.path) if self.part is None else f"{self.path}:{self.part.name}"


def build_image_ref(folder: Path, name: str, remote: RemoteStore) -> ImageRef:
    """Refer to an image by its path in a folder, or by a URL."""
    if not is_remote_url(name):
        return ImageRef(folder, name)
    path = build_remote_path(name, remote)
    return ImageRef(path.parent, path.name)


def describe_remote_images(images: Iterable[ImageRef]) -> list[str]:
    """Say where copies of remote images are kept, and whether all of them fit there."""
    sizes: dict[RemoteStore, dict[str, int]] = {}
    for path in dict.fromkeys(image.path for image in images if is_remote(image.folder)):
        if is_remote(path) and path.store.knows(path.url):
            sizes.setdefault(path.store, {})[path.url] = path.get_info().size
    lines = []
    for store, by_url in sizes.items():
        directory, total, limit = store.settings.directory, sum(by_url.values()), store.settings.cache_bytes
        size, fits = f"{_format_size(total)} of remote files", _format_size(limit)
        if total > limit:
            lines.append(
                f"{size} are more than the {fits} that {directory} may have, so that they are requested again in each"
                " epoch; raise --remote_cache_size, or use --cache_latents_to_disk"
            )
        else:
            lines.append(
                f"{size} are kept in {directory} (at most {fits}: --remote_cache_size; elsewhere: --remote_cache_dir),"
                " and so are scan results and caches on disk unless --cache_dir is set"
            )
    return lines


def _format_size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MB"


def prefetch_images(images: Iterable[ImageRef]) -> None:
    """Bring the bytes of remote images into the cache, many at once; local images and rows of tables are left alone."""
    ranges = []
    for image in images:
        path, part = image.path, image.part
        if is_remote(path) and not isinstance(part, TableRow):
            ranges.append((path, *((None, None) if part is None else (part.offset, part.offset + part.length))))
    prefetch_ranges(ranges)
