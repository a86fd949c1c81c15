"""Remote files of one run: what a server lists, byte ranges through the cache on disk, and many of them at once."""

import hashlib
import os
import posixpath
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .block_cache import BlockCache
from .filesystems import (
    MAX_CONNECTIONS,
    IncompleteBodyError,
    MissingFileError,
    RemoteError,
    RemoteOutage,
    RetryPolicy,
    get_scheme,
    open_filesystem,
)
from .remote_info import FileInfo, RemoteListing, build_info, format_address, split_server

BLOCK_BYTES = 2**20
REQUEST_BYTES = 8 * BLOCK_BYTES
"""Missing blocks that follow each other are requested together, up to this."""

SMALL_FILE_BYTES = 2**16
"""The size below which files have a part of the cache of their own, so that images do not push out captions."""

_SMALL_FILES_PART = 0.1
_AHEAD_PART, _PREFETCH_PART = 4, 16  # parts of the cache, which threads and processes share
DEFAULT_CACHE_BYTES = 50 * 2**30
DEFAULT_RETRY_SECONDS = 120.0


def get_default_directory() -> Path:
    """Return the folder of remote files in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "lorikeet" / "remote"


@dataclass(frozen=True)
class RemoteSettings:
    """The folder for copies of remote files, the size that they may reach, and the time that a server is waited for."""

    cache_dir: str | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES
    retry_seconds: float = DEFAULT_RETRY_SECONDS

    @property
    def directory(self) -> Path:
        return Path(self.cache_dir).expanduser() if self.cache_dir else get_default_directory()


class RemoteStore:
    """Reads remote files; each is identified by its URL and the query of that.

    Listings are kept, so that a store sees one state of the server; a new one is made whenever datasets are loaded.
    It is pickled as its settings, and starts anew in a forked process.
    """

    def __init__(self, settings: RemoteSettings | None = None):
        self.settings = settings or RemoteSettings()
        self.retries = RetryPolicy(self.settings.retry_seconds)
        small = int(self.settings.cache_bytes * _SMALL_FILES_PART)
        self.small_files = BlockCache(self.settings.directory / "small", small)
        self.blocks = BlockCache(self.settings.directory / "blocks", self.settings.cache_bytes - small)
        self._infos: dict[str, FileInfo | RemoteError] = {}
        self._queries: dict[str, str] = {}
        self._listings: dict[tuple[str, bool], RemoteListing] = {}
        self._folders: dict[str, bool] = {}
        self._sends_ranges: dict[str, bool] = {}  # web servers
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._in_flight: dict[str, Future[bytes]] = {}

    def _reset_in_fork(self) -> None:
        if self._process != os.getpid():  # forked, perhaps while another thread held the lock
            self._reset()

    def __reduce__(self) -> tuple[type, tuple[RemoteSettings]]:
        return type(self), (self.settings,)

    def note_query(self, url: str, query: str) -> None:
        """Remember the query of a URL; with another one it may be another file, which would be read as the first."""
        if self._queries.setdefault(url, query) != query:
            self._infos[url] = RemoteError("has several queries (?...); list each file once, or download the files")

    def get_folder(self, url: str) -> Path:
        """Return the local folder that stands for ``.cache-lorikeet`` in a remote folder."""
        digest = hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
        return self.settings.directory / "folders" / f"{posixpath.basename(url)[:80]}-{digest}"

    def list_folder(self, url: str, *, recursive: bool) -> RemoteListing:
        """List the files of a folder, in all its folders or only at the top; raise ``RemoteError``."""
        if (url, recursive) not in self._listings:
            scheme, container = split_server(url)
            if not container:
                raise RemoteError(f"names no {get_scheme(scheme).container}")
            if not get_scheme(scheme).can_list:
                raise RemoteError(f"{scheme} servers list no folders; give the URLs of tar, parquet or metadata files")
            path = url.partition("://")[2]

            def request() -> list[dict[str, Any]]:
                filesystem = open_filesystem(scheme)
                try:
                    return list(
                        filesystem.find(path, detail=True).values() if recursive else filesystem.ls(path, detail=True)
                    )
                except FileNotFoundError as error:
                    if error.__cause__ is None and "/" in path and scheme != "hf":
                        return []  # the bucket exists, the folder does not
                    raise

            entries = self.retries.call(request, scheme, container, url)
            self._listings[url, recursive] = self._build_listing(url, path, entries)
        return self._listings[url, recursive]

    def _build_listing(self, url: str, path: str, entries: Iterable[dict[str, Any]]) -> RemoteListing:
        listing, folders = RemoteListing(), dict[str, None]()
        for entry in entries:
            name = str(entry["name"]).partition("://")[2] or str(entry["name"])
            relative = name.removeprefix(path).removeprefix("/")
            if name == path and entry.get("type") == "file":  # the URL is one of a file
                self._infos[url] = build_info(entry)
            if not name.startswith(path) or not relative or name == path:
                continue
            if entry.get("type") == "directory" or relative.endswith("/"):
                folders[relative.rstrip("/").partition("/")[0]] = None
                continue
            if "/" in relative:
                folders[relative.partition("/")[0]] = None
            listing.files[relative] = build_info(entry)
            self._infos[f"{url}/{relative}"] = listing.files[relative]
        listing.folders = sorted(folders)
        return listing

    def is_folder(self, url: str) -> bool:
        """Whether something is below a URL, without listing all of it; raise ``RemoteError`` if that is unknown."""
        scheme, container = split_server(url)
        if not container or not get_scheme(scheme).can_list:
            raise RemoteError(f"names no {get_scheme(scheme).container}")
        if url not in self._folders and "/" not in format_address(url, ""):  # a bucket, which may be empty
            listing = self.list_folder(url, recursive=False)
            self._folders[url] = bool(listing.files or listing.folders)
        elif url not in self._folders:
            try:
                found = self.retries.call(
                    lambda: open_filesystem(scheme).info(format_address(url, "")), scheme, container, url
                )
                self._folders[url] = found.get("type") == "directory"
                if not self._folders[url]:
                    self._infos[url] = build_info(found)
            except MissingFileError:
                self._folders[url] = False
        return self._folders[url]

    def get_info(self, url: str, query: str = "") -> FileInfo:
        """Return size and stamp of a file; raise ``RemoteError`` if there is none."""
        info = self._infos.get(url)
        if info is None:
            try:
                info = self._request_info(url, query)
            except RemoteOutage:  # may pass
                raise
            except RemoteError as error:
                info = error
            self._infos[url] = info
        if isinstance(info, RemoteError):
            raise type(info)(str(info))
        return info

    def _request_info(self, url: str, query: str) -> FileInfo:
        scheme, container = split_server(url)
        if not container:
            raise RemoteError(f"names no {get_scheme(scheme).container}")
        get_scheme(scheme)
        found = self.retries.call(
            lambda: open_filesystem(scheme).info(format_address(url, query)), scheme, container, url
        )
        if found.get("type") == "directory":
            raise RemoteError("is a folder, not a file")
        return build_info(found) if found.get("size") is not None else self._measure_by_reading(url, query)

    def _measure_by_reading(self, url: str, query: str) -> FileInfo:
        """Read a whole file whose server does not tell the size beforehand."""
        scheme, container = split_server(url)
        data: bytes = self.retries.call(
            lambda: open_filesystem(scheme).cat_file(format_address(url, query)), scheme, container, url
        )
        digest = int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big")
        info = FileInfo(len(data), 0, digest)
        self._keep(url, info, 0, data)
        return info

    def knows(self, url: str) -> bool:
        """Whether a file is listed, or was asked for."""
        return isinstance(self._infos.get(url), FileInfo)

    def prefetch_infos(self, files: Iterable[tuple[str, str]]) -> None:
        """Ask for many files at once, each a URL and its query; failures are met again by ``get_info``."""
        unknown = [file for file in dict.fromkeys(files) if file[0] not in self._infos]
        if unknown:
            self._run_in_pool([partial(self.get_info, *file) for file in unknown])

    def read_range(self, url: str, query: str, start: int, end: int, ahead: int = 0) -> bytes:
        """Read bytes from ``start`` to ``end``; what the cache lacks is requested, with ``ahead`` more bytes."""
        info = self.get_info(url, query)
        end = min(end, info.size)
        if start >= end:
            return b""
        cache = self._choose_cache(info)
        first, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        blocks: dict[int, bytes | None] = {
            index: cache.read(_make_key(url, info, index)) for index in range(first, last + 1)
        }
        missing = [index for index, block in blocks.items() if block is None]
        if missing and ahead:
            ahead = 0 if cache.is_failing else min(ahead, cache.limit // _AHEAD_PART)
            count = min(last + 1 + ahead // BLOCK_BYTES, _count_blocks(info)) - (last + 1)
            following = range(last + 1, last + 1 + count)
            missing += [index for index in following if not cache.contains(_make_key(url, info, index))]
        fetched = self._fetch(url, query, info, missing) if missing else {}
        blocks |= {index: block for index, block in fetched.items() if first <= index <= last}
        data = b"".join(blocks[index] or b"" for index in range(first, last + 1))
        return data[start - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def prefetch(self, ranges: Iterable[tuple[str, str, int | None, int | None]]) -> None:
        """Bring many ranges (URL, query, start, end; without start and end whole files) into the cache at once.

        Failures are met again when the range is read, and so is what would push out the rest of the cache.
        """
        ranges = list(ranges)
        self.prefetch_infos((url, query) for url, query, _, _ in ranges)
        if self.blocks.is_failing or self.small_files.is_failing:  # nothing would be kept
            return
        wanted: dict[tuple[str, str], set[int]] = {}
        for url, query, start, end in ranges:
            info = self._infos.get(url)
            if isinstance(info, FileInfo):
                end = info.size if end is None else min(end, info.size)
                wanted.setdefault((url, query), set()).update(
                    range((start or 0) // BLOCK_BYTES, -(-end // BLOCK_BYTES))
                )
        files: list[tuple[str, str, FileInfo, list[int]]] = []
        num_bytes = {self.blocks: 0, self.small_files: 0}
        for (url, query), indices in wanted.items():
            info = self.get_info(url, query)
            cache = self._choose_cache(info)
            missing = [index for index in sorted(indices) if not cache.contains(_make_key(url, info, index))]
            files.append((url, query, info, missing))
            num_bytes[cache] += min(len(missing) * BLOCK_BYTES, info.size)
        tasks: list[Callable[[], object]] = []
        for url, query, info, missing in files:
            cache = self._choose_cache(info)
            if num_bytes[cache] <= cache.limit // _PREFETCH_PART:
                runs = _group_runs(missing) if self._has_ranges(url) else [missing]
                tasks += [partial(self._fetch, url, query, info, run, waits=False) for run in runs]
        self._run_in_pool(tasks)

    def _run_in_pool(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Run tasks in threads; the errors of single ones are dropped."""
        for future in [self._get_pool().submit(task) for task in tasks]:
            future.exception()

    def _get_pool(self) -> ThreadPoolExecutor:
        self._reset_in_fork()
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MAX_CONNECTIONS, "remote-files")
            return self._pool

    def _choose_cache(self, info: FileInfo) -> BlockCache:
        return self.small_files if info.size <= SMALL_FILE_BYTES else self.blocks

    def _fetch(
        self, url: str, query: str, info: FileInfo, indices: Sequence[int], *, waits: bool = True
    ) -> dict[int, bytes]:
        """Request blocks; those that another thread is requesting are waited for, or with ``waits=False`` left to it.

        Threads of the pool never wait for others, whose requests may be behind them in the queue of the pool.
        """
        self._reset_in_fork()
        keys = {index: _make_key(url, info, index) for index in indices}
        with self._lock:
            others = {index: self._in_flight[key] for index, key in keys.items() if key in self._in_flight}
            own: dict[int, Future[bytes]] = {index: Future() for index in indices if index not in others}
            self._in_flight |= {keys[index]: future for index, future in own.items()}
        blocks: dict[int, bytes] = {}
        try:
            for fetched in self._request_runs(url, query, info, list(own), at_once=waits):
                blocks |= fetched
                for index in fetched.keys() & own.keys():
                    if not own[index].done():  # a server without ranges sends all blocks each time
                        own[index].set_result(fetched[index])
        except BaseException as error:
            for future in own.values():
                if not future.done():
                    future.set_exception(error)
            raise
        finally:
            with self._lock:
                for index in own:
                    self._in_flight.pop(keys[index], None)
        return blocks | {index: future.result() for index, future in others.items() if waits}

    def _has_ranges(self, url: str) -> bool:
        """Whether the server is known to send parts of files."""
        scheme, container = split_server(url)
        return get_scheme(scheme).can_list or self._sends_ranges.get(container, False)

    def _request_runs(
        self, url: str, query: str, info: FileInfo, indices: Sequence[int], *, at_once: bool
    ) -> Iterator[dict[int, bytes]]:
        """Request blocks: the first alone from a server that may send the whole file each time, the others at once."""
        runs, done = deque(_group_runs(indices)), set[int]()
        while runs:
            if at_once and len(runs) > 1 and self._has_ranges(url):
                for future in [self._get_pool().submit(self._request, url, query, info, run) for run in runs]:
                    yield future.result()
                return
            run = runs.popleft()
            if not done.issuperset(run):
                fetched = self._request(url, query, info, run)
                done |= fetched.keys()
                yield fetched

    def _request(self, url: str, query: str, info: FileInfo, run: Sequence[int]) -> dict[int, bytes]:
        """Request the blocks of one run, and keep them."""
        scheme, container = split_server(url)
        start, end = run[0] * BLOCK_BYTES, min((run[-1] + 1) * BLOCK_BYTES, info.size)
        options = {"cache_type": "none"} if scheme == "hf" else {}

        def request() -> bytes:
            data: bytes = open_filesystem(scheme).cat_file(format_address(url, query), start=start, end=end, **options)
            if len(data) < end - start:
                self._check_unchanged(url, query, info)
                raise IncompleteBodyError(f"{len(data)} of {end - start} bytes")
            return data

        data = self.retries.call(request, scheme, container, url, may_expire=bool(query))
        if len(data) == end - start:
            if len(data) < info.size:
                self._sends_ranges[container] = True
            return self._keep(url, info, start, data)
        if len(data) != info.size:
            raise RemoteError(f"has {len(data)} bytes, not {info.size} as when the run started; it has changed")
        self._sends_ranges[container] = False  # it sent the whole file
        if info.size > self.blocks.limit:
            raise RemoteError(
                f"its server sends no byte ranges, only all {info.size / 2**30:.1f} GiB, which do not fit into"
                " --remote_cache_size; set that higher, or download the file"
            )
        return self._keep(url, info, 0, data)

    def _check_unchanged(self, url: str, query: str, info: FileInfo) -> None:
        """Raise ``RemoteError`` if the server has another file now."""
        scheme, _ = split_server(url)
        if build_info(open_filesystem(scheme).info(format_address(url, query))).size != info.size:
            raise RemoteError("has another size than when the run started; it has changed on the server")

    def _keep(self, url: str, info: FileInfo, start: int, data: bytes) -> dict[int, bytes]:
        cache, first = self._choose_cache(info), start // BLOCK_BYTES
        blocks = {
            first + number: data[offset : offset + BLOCK_BYTES]
            for number, offset in enumerate(range(0, len(data), BLOCK_BYTES))
        }
        for index, block in blocks.items():
            cache.write(_make_key(url, info, index), block)
        return blocks


def _make_key(url: str, info: FileInfo, index: int) -> str:
    return f"{url}\0{info.stamp}\0{index}"


def _count_blocks(info: FileInfo) -> int:
    return -(-info.size // BLOCK_BYTES)


def _group_runs(indices: Sequence[int]) -> Iterator[list[int]]:
    """Group indices that follow each other, up to the size of one request."""
    run: list[int] = []
    for index in indices:
        if run and (index != run[-1] + 1 or len(run) * BLOCK_BYTES >= REQUEST_BYTES):
            yield run
            run = []
        run.append(index)
    if run:
        yield run
