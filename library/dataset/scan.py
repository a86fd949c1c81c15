"""Scan all images with a pool of threads; results of unchanged files come from the scan cache."""

import errno
import hashlib
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..log import ProgressBar
from ..storage.filesystems import RemoteError, RemoteOutage
from ..storage.remote_path import is_remote, prefetch_infos
from .image_ref import ImageRef, prefetch_images
from .scan_cache import SETTLED_AFTER_NS, UNSETTLED, CachedScan, FileStamp, ScanCache

MAX_FILE_BYTES = 2**30
"""The number of bytes above which a file, or a part of a file, is not read."""

LARGE_FILE_BYTES = 2**26
"""The number of bytes above which files are read one at a time, so that threads do not fill the memory."""

_MAX_THREADS = 16
_IMAGES_PER_TASK = 32
_SECONDS_BETWEEN_WRITES = 60.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ImageDefect:
    """A reason not to use an image."""

    kind: str  # a word by which defects are counted, such as "unreadable"
    text: str  # completes the name of the image to a message: what is wrong, and what to do


def stat_file(path: str) -> FileStamp | ImageDefect:
    """Return the stamp of a regular file; taken before it is read, so that a change while it is read is noticed."""
    try:
        status = os.stat(path)
    except OSError as error:
        if os.path.islink(path) and isinstance(error, FileNotFoundError):
            text = f"is a broken link to {os.readlink(path)}; remove it, or restore that file"
            return ImageDefect("unreadable", text)
        return describe_read_error(error)
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        return ImageDefect("unreadable", f"is {kind}, not a file; remove it")
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def stat_remote_file(path: Path) -> FileStamp | ImageDefect:
    """Return the stamp of a remote file, as it was listed."""
    try:
        return path.get_info().stamp if is_remote(path) else UNSETTLED
    except RemoteOutage as error:
        raise RemoteOutage(f"{path}: {error}") from error
    except RemoteError as error:
        return describe_read_error(error)


def hash_bytes(data: bytes) -> str:
    """Compute the content hash of an image."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def describe_read_error(error: OSError | MemoryError) -> ImageDefect:
    """Describe why a file cannot be opened or does not fit into memory."""
    if isinstance(error, MemoryError):
        return ImageDefect("unreadable", "does not fit into memory; make it smaller")
    hints = {
        errno.EACCES: "change its permissions, or run as its owner",
        errno.EIO: "the disk may be failing",
        errno.ENOENT: "it may have been removed during the scan",
        errno.ELOOP: "it is a link to itself: remove it",
    }
    hint = hints.get(error.errno or 0)
    return ImageDefect("unreadable", f"cannot be read: {error.strerror or error}{f'; {hint}' if hint else ''}")


def _describe_large_file(size: int) -> ImageDefect:
    limit = MAX_FILE_BYTES // 2**30
    return ImageDefect("too large", f"is too large: {size / 2**30:.1f} GiB, the limit is {limit} GiB; make it smaller")


@dataclass(frozen=True)
class InPlaceInspection(Generic[T]):
    """The functions that inspect a file too large to be read as a whole, or a folder of files."""

    stat: Callable[[str], FileStamp | ImageDefect]
    hash: Callable[[ImageRef], str]
    inspect: Callable[[ImageRef, str], T]  # the reference and the content hash


@dataclass(frozen=True)
class Inspector(Generic[T]):
    """The functions that inspect an image, and that write the result to the cache and read it back."""

    name: str  # the name of the cache file, and in the progress bar
    version: str  # changes when the result for the same bytes may change
    inspect: Callable[[bytes, str, AbstractContextManager[object]], T]  # bytes, their hash, lock for large images
    fail: Callable[[ImageDefect], T]  # the result for a file that cannot be read
    pack: Callable[[T], list[Any]]
    unpack: Callable[[list[Any], str], T]
    in_place: InPlaceInspection[T] | None = None  # instead of ``inspect``


@dataclass
class ScanResult(Generic[T]):
    """The result for each image, notes about the caches, and the folders of the caches that are writable."""

    images: dict[ImageRef, T] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cache_folders: list[Path] = field(default_factory=list)


def scan_images(
    inspector: Inspector[T],
    images: Mapping[Path, Iterable[ImageRef]],
    get_cache_dir: Callable[[Path], Path | None],
) -> ScanResult[T]:
    """Inspect every image; ``images`` are grouped by the folder that caches their results, unless ``get_cache_dir``
    returns another one for it."""
    return _Scan(inspector, images, get_cache_dir).run()


@dataclass(frozen=True, slots=True)
class _Task:
    image: ImageRef
    cache: ScanCache
    key: str
    cached: CachedScan | None


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    task: _Task
    result: T
    entry: CachedScan | None  # the result to cache; None if it must not be cached


class _Scan(Generic[T]):
    def __init__(
        self,
        inspector: Inspector[T],
        images: Mapping[Path, Iterable[ImageRef]],
        get_cache_dir: Callable[[Path], Path | None],
    ):
        self.inspector = inspector
        self.started = time.time_ns()
        self.caches: list[ScanCache] = []
        self.tasks: list[_Task] = []
        for root, members in images.items():
            cache = ScanCache(root, get_cache_dir(root), inspector.name, inspector.version)
            self.caches.append(cache)
            for image in members:
                key = cache.make_key(image)
                self.tasks.append(_Task(image, cache, key, cache.entries.get(key)))
        self.large_image_lock = threading.RLock()
        self.result: ScanResult[T] = ScanResult()

    def run(self) -> ScanResult[T]:
        for cache in self.caches:
            cache.drop_deleted_files()
        written, wait = time.monotonic(), _SECONDS_BETWEEN_WRITES
        label = f"scanning {self.inspector.name}"
        with ProgressBar(len(self.tasks), 0, label, enabled=True, unit="file", log_first_and_last=False) as progress:
            try:
                for outcomes in _map_in_order(self._scan_batch, self.tasks):
                    for outcome in outcomes:
                        self.result.images[outcome.task.image] = outcome.result
                        outcome.task.cache.update(outcome.task.key, outcome.entry)
                    progress.update({}, len(outcomes))
                    if time.monotonic() - written > wait:
                        started = time.monotonic()
                        self._write_caches()
                        written = time.monotonic()
                        wait = max(_SECONDS_BETWEEN_WRITES, 20 * (written - started))
            finally:  # an interrupted scan keeps its results
                self._write_caches()
        return self.result

    def _write_caches(self) -> None:
        notes = [cache.write() for cache in self.caches]
        self.result.notes = [note for note in notes if note]
        self.result.cache_folders = [cache.path.parent for cache in self.caches if cache.path is not None]

    def _scan_batch(self, tasks: Sequence[_Task]) -> list[_Outcome[T]]:
        stamps: dict[str, FileStamp | ImageDefect] = {}  # a shard or table holds many images
        remote = [task for task in tasks if is_remote(task.image.folder)]
        if remote:
            prefetch_infos(task.image.path for task in remote)
            prefetch_images(task.image for task in remote if not self._is_unchanged(task))
        return [self._scan_image(task, stamps) for task in tasks]

    def _is_unchanged(self, task: _Task) -> bool:
        """Whether the cached result of a remote file holds."""
        return task.cached is not None and task.cached.stamp == stat_remote_file(task.image.path)

    def _scan_image(self, task: _Task, stamps: dict[str, FileStamp | ImageDefect]) -> _Outcome[T]:
        path = os.path.join(task.image.folder, task.image.file)
        if path not in stamps:
            remote = task.image.path if is_remote(task.image.folder) else None
            stat_local = self.inspector.in_place.stat if self.inspector.in_place else stat_file
            stamps[path] = stat_local(path) if remote is None else stat_remote_file(remote)
        stamp = stamps[path]
        if isinstance(stamp, ImageDefect):
            return _Outcome(task, self.inspector.fail(stamp), None)
        cached = task.cached
        if cached is not None and cached.stamp == stamp:
            result = self._unpack(cached.facts, cached.content)
            if result is not None:
                return _Outcome(task, result, cached)
        length = task.image.part.length if task.image.part else stamp[0]
        length = 0 if self.inspector.in_place else length
        if length > MAX_FILE_BYTES:
            return _Outcome(task, self.inspector.fail(_describe_large_file(length)), None)
        try:
            with self.large_image_lock if length > LARGE_FILE_BYTES else nullcontext():
                return self._read_image(task, stamp)
        except RemoteOutage as error:  # no fault of the image
            raise RemoteOutage(f"{task.image}: {error}") from error
        except (OSError, MemoryError) as error:
            return _Outcome(task, self.inspector.fail(describe_read_error(error)), None)

    def _read_image(self, task: _Task, stamp: FileStamp) -> _Outcome[T]:
        in_place = self.inspector.in_place
        data = b"" if in_place else task.image.read_bytes()
        content = in_place.hash(task.image) if in_place else hash_bytes(data)
        facts = task.cache.find_facts(content)
        result = self._unpack(facts, content) if facts is not None else None
        if result is None:
            if in_place:
                result = in_place.inspect(task.image, content)
            else:
                result = self.inspector.inspect(data, content, self.large_image_lock)
            facts = self.inspector.pack(result)
        has_tag = is_remote(task.image.folder) and stamp[2] != 0  # which changes with the content
        is_settled = has_tag or max(stamp[1], stamp[2]) < self.started - SETTLED_AFTER_NS
        return _Outcome(task, result, CachedScan(stamp if is_settled else UNSETTLED, content, facts or []))

    def _unpack(self, facts: list[Any], content: str) -> T | None:
        """Return None for facts of another shape, as written by a version under development."""
        try:
            return self.inspector.unpack(facts, content)
        except (ValueError, TypeError):
            return None


def _map_in_order(
    work: Callable[[Sequence[_Task]], list[_Outcome[T]]], tasks: Sequence[_Task]
) -> Iterator[list[_Outcome[T]]]:
    """Run batches of tasks in threads: decoding and hashing release the GIL, and processes would have to be fed."""
    threads = min((os.cpu_count() or 1) + 1, _MAX_THREADS)
    batches = (tasks[start : start + _IMAGES_PER_TASK] for start in range(0, len(tasks), _IMAGES_PER_TASK))
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[list[_Outcome[T]]]] = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(work, batch))
                if len(pending) > 4 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
