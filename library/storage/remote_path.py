"""The path of a remote file, with the methods of ``Path`` that reading a dataset needs, and files opened from it.

So listing, scanning and loading have one implementation for local and remote files.  A path holds its file system and
its cache instead of looking them up in global state, so it works after fork and pickle.
"""

import io
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any, TypeGuard, cast
from urllib.parse import quote, unquote

from .filesystems import SCHEMES, RemoteError, RemoteOutage
from .remote_info import FileInfo, RemoteListing, split_server
from .remote_store import BLOCK_BYTES, RemoteStore

_SAFE_IN_NAMES = "!$&'()*+,;=:@~"
_SLASH_IN_NAME = "%2F"
"""Part of a name in an https URL; a slash would be one of its folders."""

_AHEAD_BYTES = 64 * BLOCK_BYTES
_SEQUENTIAL_BYTES = 4 * BLOCK_BYTES
"""A jump forward by less than this continues to read a file from its start to its end, as the headers of a tar do."""


def is_remote_url(name: str) -> bool:
    """Whether a name in the settings or in a table is a URL."""
    scheme, separator, _ = name.partition("://")
    return bool(separator) and len(scheme) > 1 and scheme.replace("+", "").isalnum()


def is_remote(path: object) -> "TypeGuard[RemotePath]":
    """Whether a path is remote."""
    return isinstance(path, RemotePath)


def build_remote_path(url: str, store: RemoteStore) -> Path:
    """Build the path of a URL; it stands for a ``Path`` wherever a dataset is read, and has only what that needs."""
    scheme, _, rest = url.partition("://")
    scheme, query = scheme.lower(), ""
    if scheme in SCHEMES and not SCHEMES[scheme].can_list:  # elsewhere, ? and # are part of a key
        rest, _, query = rest.partition("#")[0].partition("?")
        login, at, rest = rest.rpartition("@") if "@" in rest.partition("/")[0] else ("", "", rest)
        query = f"{login}{at}?{query}" if login or query else ""
        store.note_query(f"{scheme}://{rest.rstrip('/')}", query)
    return cast(Path, RemotePath(f"{scheme}://{rest.rstrip('/')}", store, query))


def resolve_links(path: Path) -> Path:
    """Return the path without links; a remote one as it is."""
    return cast(Path, path) if is_remote(path) else Path(os.path.realpath(path))


def strip_query(name: str) -> str:
    """Return a name without the query of an https URL, which may be a signature, and without a password."""
    if not name.lower().startswith(("https://", "http://")):
        return name
    return re.sub(r"(://)[^/]*@", r"\1", name.partition("?")[0])


def prefetch_files(paths: Iterable[Path]) -> None:
    """Bring remote files into the cache, many at once; local paths are left alone."""
    prefetch_ranges((path, None, None) for path in paths if is_remote(path))


def prefetch_infos(paths: Iterable[Path]) -> None:
    """Ask many servers at once for files that are not listed; local paths are left alone."""
    by_store: dict[RemoteStore, list[tuple[str, str]]] = {}
    for path in paths:
        if is_remote(path) and not path.can_list:
            by_store.setdefault(path.store, []).append((path.url, path.query))
    for store, members in by_store.items():
        store.prefetch_infos(members)


def prefetch_ranges(ranges: Iterable[tuple["RemotePath", int | None, int | None]]) -> None:
    """Bring ranges of remote files into the cache, many at once; those without start and end are whole files."""
    by_store: dict[RemoteStore, list[tuple[str, str, int | None, int | None]]] = {}
    for path, start, end in ranges:
        by_store.setdefault(path.store, []).append((path.url, path.query, start, end))
    for store, members in by_store.items():
        store.prefetch(members)


@dataclass(frozen=True)
class RemotePath:
    """A remote file or folder; the query of its URL, which may be a signature, is in no message.

    ``query`` is what https URLs have besides ``url``: ``USER:PASSWORD@?QUERY``.
    """

    url: str
    store: RemoteStore = field(compare=False, repr=False)
    query: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def __truediv__(self, name: str | PurePath) -> "RemotePath":
        text = name.as_posix() if isinstance(name, PurePath) else name
        parts = self.url.split("/")
        for part in text.split("/") if text else ():
            if part == "..":
                parts = parts[: max(3, len(parts) - 1)]
            elif part != ".":
                parts.append(part if self.can_list else _quote_name(part))
        return RemotePath("/".join(parts), self.store, self.query)

    @property
    def can_list(self) -> bool:
        scheme = SCHEMES.get(split_server(self.url)[0])
        return scheme is None or scheme.can_list

    @property
    def name(self) -> str:
        name = self.url.rpartition("/")[2]
        return name if self.can_list else _unquote_name(name)

    @property
    def stem(self) -> str:
        return PurePath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePath(self.name).suffix

    @property
    def parent(self) -> "RemotePath":
        folder = self.url.rpartition("/")[0]
        return self if folder.endswith(":/") else RemotePath(folder, self.store, self.query)

    def with_name(self, name: str) -> "RemotePath":
        """Return the path of another file in the same folder."""
        return self.parent / name

    def as_posix(self) -> str:
        return self.url

    def absolute(self) -> "RemotePath":
        return self

    def resolve(self) -> "RemotePath":
        return self

    def relative_to(self, folder: "RemotePath") -> PurePath:
        """Return the rest of the path; raise ``ValueError`` if it is elsewhere."""
        if not self.url.startswith(f"{folder}/"):
            raise ValueError(f"{self} is not below {folder}")
        return PurePath(self.url[len(str(folder)) + 1 :])

    def is_relative_to(self, folder: "RemotePath") -> bool:
        return self == folder or self.url.startswith(f"{folder}/")

    def samefile(self, other: object) -> bool:
        return str(self) == str(other)

    def get_info(self) -> FileInfo:
        """Return size and stamp; raise ``RemoteError`` if there is no such file."""
        return self.store.get_info(self.url, self.query)

    def list_folder(self, *, recursive: bool) -> RemoteListing:
        """List the folder; raise ``RemoteError``."""
        return self.store.list_folder(self.url, recursive=recursive)

    def is_dir(self) -> bool:
        """Whether something is below; raise ``RemoteError`` if the server cannot tell."""
        return self.can_list and self.store.is_folder(self.url)

    def is_file(self) -> bool:
        """Whether there is such a file; raise ``RemoteOutage`` if the server cannot be asked."""
        if self.store.knows(self.url):
            return True
        try:
            if self.can_list and self.name in self.parent.list_folder(recursive=False).files:
                return True
        except RemoteOutage:
            raise
        except RemoteError:  # perhaps files may be read, but not listed
            pass
        else:
            if self.can_list:
                return False
        try:
            self.get_info()
        except RemoteOutage:
            raise
        except RemoteError:
            return False
        return True

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def stat(self) -> os.stat_result:
        """Return the size, as ``st_size``."""
        info = self.get_info()
        return os.stat_result((0, 0, 0, 0, 0, 0, info.size, 0, info.changed_ns // 10**9, 0))

    def read_bytes(self) -> bytes:
        """Read the whole file."""
        return self.store.read_range(self.url, self.query, 0, self.get_info().size)

    def read_derived(self, name: str) -> bytes | None:
        """Return what ``write_derived`` has kept for this state of the file, None if nothing; raise ``RemoteError``."""
        return self.store.small_files.read(f"{self.url}\0{self.get_info().stamp}\0{name}")

    def write_derived(self, name: str, data: bytes) -> None:
        """Keep what was computed from the whole file, as long as that does not change."""
        self.store.small_files.write(f"{self.url}\0{self.get_info().stamp}\0{name}", data)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open for reading bytes."""
        if mode != "rb":
            raise ValueError(f"remote files are only read, not opened with {mode!r}")
        return cast(IO[bytes], RemoteFile(self))


def _quote_name(name: str) -> str:
    return quote(name, safe=_SAFE_IN_NAMES).replace(quote(_SLASH_IN_NAME), _SLASH_IN_NAME)


def _unquote_name(name: str) -> str:
    return _SLASH_IN_NAME.join(map(unquote, re.split(_SLASH_IN_NAME, name, flags=re.IGNORECASE)))


class RemoteFile(io.RawIOBase):
    """A remote file, read by ranges; what is read in order is requested ahead."""

    def __init__(self, path: RemotePath):
        super().__init__()
        self.path, self.size = path, path.get_info().size
        self._position, self._last_end = 0, 0
        self._block_start, self._block = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Read up to ``size`` bytes: all of them, unless the file ends."""
        start = self._position
        end = self.size if size is None or size < 0 else min(self.size, start + size)
        if end <= start:
            return b""
        if not (self._block_start <= start and end <= self._block_start + len(self._block)):
            self._read_block(start, end)
        self._position = end
        return self._block[start - self._block_start : end - self._block_start]

    def _read_block(self, start: int, end: int) -> None:
        """Read whole blocks, which are what the cache has."""
        is_sequential = 0 < self._last_end and -BLOCK_BYTES <= start - self._last_end <= _SEQUENTIAL_BYTES
        ahead = _AHEAD_BYTES if is_sequential else 0
        first = start // BLOCK_BYTES * BLOCK_BYTES
        last = -(-end // BLOCK_BYTES) * BLOCK_BYTES
        path = self.path
        self._block = path.store.read_range(path.url, path.query, first, last, ahead)
        self._block_start, self._last_end = first, last

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
