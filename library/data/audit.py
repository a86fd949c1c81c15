"""One pass over all files by a pool of threads; what is known of unchanged files is not found out again."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..log import Progress
from .folder_scan import FolderScan
from .origin import Origin
from .scan_store import SETTLED_AFTER, UNSETTLED, Row, kept_in
from .whole_files import LARGE_BYTES, MOST_BYTES, Flaw, Stamp, content_of, stamp_of, too_large, unreadable

_MOST_THREADS = 16
_AT_ONCE = 32
"""Files that a thread takes at a time."""
_SECONDS_BETWEEN_WRITES = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Inspection(Generic[T]):
    """What is found out about a file, and how it is kept."""

    name: str  # of the store
    reader: str  # changes when something else may be found out about the same bytes
    examine: Callable[[bytes, str, AbstractContextManager[object]], T]  # bytes, their hash, held for large ones
    failed: Callable[[Flaw], T]  # for files that cannot be read
    packed: Callable[[T], list[Any]]
    unpacked: Callable[[list[Any], str], T]


@dataclass
class Audit(Generic[T]):
    """What was found out, and what has to be said about the stores."""

    found: dict[Origin, T] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)  # of the stores that can be written to


@dataclass(frozen=True, slots=True)
class _Task:
    picture: Origin
    store: FolderScan
    key: str
    known: Row | None


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    task: _Task
    result: T
    row: Row | None  # None when it is not to be kept


def audited(inspection: Inspection[T], pictures: Mapping[Path, Iterable[Origin]],
            cache_dir: Callable[[Path], Path | None]) -> Audit[T]:  # fmt: skip
    """Look at the pictures, given with the folders beside which what is found out about them is kept, or in the folder
    that ``cache_dir`` gives for each."""
    return _Pass(inspection, pictures, cache_dir).run()


class _Pass(Generic[T]):
    def __init__(self, inspection: Inspection[T], pictures: Mapping[Path, Iterable[Origin]],
                 cache_dir: Callable[[Path], Path | None]):  # fmt: skip
        self.inspection = inspection
        self.started = time.time_ns()
        self.stores = [
            FolderScan(home, kept_in(home, cache_dir(home), inspection.name, inspection.reader)) for home in pictures
        ]
        self.tasks = [self._task(store, picture) for store, members in zip(self.stores, pictures.values(), strict=True)
                      for picture in members]  # fmt: skip
        self.one_at_a_time = threading.RLock()
        self.audit: Audit[T] = Audit()

    def _task(self, store: FolderScan, picture: Origin) -> _Task:
        key = store.key_of(picture)
        return _Task(picture, store, key, store.rows.get(key))

    def run(self) -> Audit[T]:
        for store in self.stores:
            store.leave_out_what_is_gone()
        written, wait = time.monotonic(), _SECONDS_BETWEEN_WRITES
        with Progress(len(self.tasks), 0, f"looking at {self.inspection.name}", wanted=True, unit="file",
                      ends=False) as progress:  # fmt: skip
            try:
                for outcomes in _in_order(self._several, self.tasks):
                    for outcome in outcomes:
                        self.audit.found[outcome.task.picture] = outcome.result
                        outcome.task.store.take(outcome.task.key, outcome.row)
                    progress.advance({}, len(outcomes))
                    if time.monotonic() - written > wait:
                        started = time.monotonic()
                        self._write()
                        written = time.monotonic()
                        wait = max(_SECONDS_BETWEEN_WRITES, 20 * (written - started))
            finally:  # whatever happens, what was found out is not lost
                self._write()
        return self.audit

    def _write(self) -> None:
        told = [store.write(self.inspection.reader) for store in self.stores]
        self.audit.notes = [note for note in told if note]
        self.audit.folders = [store.path.parent for store in self.stores if store.path is not None]

    def _several(self, tasks: Sequence[_Task]) -> list[_Outcome[T]]:
        stamps: dict[Path | str, Stamp | Flaw] = {}
        return [self._one(task, stamps) for task in tasks]

    def _one(self, task: _Task, stamps: dict[Path | str, Stamp | Flaw]) -> _Outcome[T]:
        path = os.path.join(task.picture.folder, task.picture.file)
        stamp = stamps[path] if path in stamps else stamps.setdefault(path, stamp_of(path))
        if isinstance(stamp, Flaw):
            return _Outcome(task, self.inspection.failed(stamp), None)
        known = task.known
        if known is not None and known.stamp == stamp:
            believed = self._believed(known.facts, known.content)
            if believed is not None:
                return _Outcome(task, believed, known)
        length = task.picture.part.length if task.picture.part else stamp[0]
        if length > MOST_BYTES:
            return _Outcome(task, self.inspection.failed(too_large(length)), None)
        try:
            with self.one_at_a_time if length > LARGE_BYTES else nullcontext():
                return self._read(task, stamp)
        except (OSError, MemoryError) as error:
            return _Outcome(task, self.inspection.failed(unreadable(error)), None)

    def _read(self, task: _Task, stamp: Stamp) -> _Outcome[T]:
        data = task.picture.read_bytes()
        content = content_of(data)
        facts = task.store.facts_about(content)
        result = self._believed(facts, content) if facts is not None else None
        if result is None:
            result = self.inspection.examine(data, content, self.one_at_a_time)
            facts = self.inspection.packed(result)
        is_settled = max(stamp[1], stamp[2]) < self.started - SETTLED_AFTER
        return _Outcome(task, result, Row(stamp if is_settled else UNSETTLED, content, facts or []))

    def _believed(self, facts: list[Any], content: str) -> T | None:
        """None for facts in another shape, as of a version that somebody works on."""
        try:
            return self.inspection.unpacked(facts, content)
        except (ValueError, TypeError):
            return None


def _in_order(work: Callable[[Sequence[_Task]], list[_Outcome[T]]],
              tasks: Sequence[_Task]) -> Iterator[list[_Outcome[T]]]:  # fmt: skip
    """A few pieces of work ahead; threads, because decoding and hashing happen outside Python's lock."""
    threads = min((os.cpu_count() or 1) + 1, _MOST_THREADS)
    pieces = (tasks[start : start + _AT_ONCE] for start in range(0, len(tasks), _AT_ONCE))
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[list[_Outcome[T]]]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(work, piece))
                if len(waiting) > 4 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
