"""Filling a cache: what is missing or damaged is made, by all processes together, and found by all of them after."""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..data.cache.places import check_room, check_writable, size_of
from ..data.cache.records import Keys, as_bytes
from ..data.cache.store import Store
from ..data.cache.writer import Writer
from ..distributed.strategy import DataParallel
from ..errors import UserError
from .sharing import Share, Together, meet, together

logger = logging.getLogger(__name__)

SECONDS_UNTIL_SEEN = 60.0
"""How long a shared disk may take to show what another machine wrote."""
SECONDS_BETWEEN_LOOKS = 2.0
SHOWN_NAMES = 5

Numbers = NDArray[np.int64]
"""Which of the wanted entries."""


@dataclass(frozen=True)
class Entry:
    """One entry, made."""

    number: int
    tensors: dict[str, Tensor]
    name: str  # in messages


@dataclass(frozen=True)
class Shelf:
    """What is to be in a cache, and where."""

    what: str  # "latents"
    unit: str  # "picture"
    option: str  # the option that asks for it, for messages
    keys: Keys
    folders: Sequence[Path]  # of each key
    costs: Sequence[int]  # how much room each takes compared with the others
    way_out: str  # what to do when there is too little room


class Maker(Protocol):
    """Makes entries; loads what it needs for that when the first is asked for."""

    bad: dict[int, str]
    """What could not be made, and why."""

    def groups(self, numbers: Sequence[int]) -> list[list[int]]:
        """The entries with these numbers, in portions that are made at once."""

    def made(self, groups: Iterator[list[int]]) -> Iterator[tuple[int, list[Entry]]]:
        """Portion by portion how many were asked for, and those that could be made."""


def keep(strategy: DataParallel, shelf: Shelf, maker: Maker, *, check: bool) -> tuple[Store, dict[int, str]]:
    """Make what ``shelf`` lacks, in shares; return the cache and why some entries could not be made."""
    folders = list(dict.fromkeys(shelf.folders))
    share = meet(strategy, folders)
    store = Store(folders)
    mine = np.unique(shelf.keys, return_index=True)[1][share.place :: share.of]
    rows = store.find(shelf.keys[mine])
    missing = mine[rows < 0]
    with _Writers() as writers:
        if check:
            damaged = store.damaged(rows[rows >= 0].tolist())
            missing = np.concatenate([missing, mine[np.isin(rows, damaged)]])
            _drop(store, damaged, shelf, writers)
        with together(strategy, share, shelf.what, len(missing), shelf.unit) as shared:
            if len(missing):
                _fill(store, shelf, maker, missing, writers, shared, share)
    mine_failed = {bytes(shelf.keys[number]): why for number, why in maker.bad.items()}
    failed = {key: why for part in strategy.from_all([mine_failed]) for key, why in part.items()}
    bad = {number: failed[bytes(key)] for number, key in enumerate(shelf.keys) if key in failed} if failed else {}
    _see_all(store, shelf, bad)
    return store, bad


def _drop(store: Store, damaged: Sequence[int], shelf: Shelf, writers: "_Writers") -> None:
    """Nobody is to use these rows any more."""
    if not damaged:
        return
    names = ", ".join(store.name(row) for row in damaged[:SHOWN_NAMES])
    logger.warning("%s: %d kept entries are damaged and are made anew: %s%s", shelf.what, len(damaged), names,
                   ", ..." if len(damaged) > SHOWN_NAMES else "")  # fmt: skip
    for row in damaged:
        writers.of(store.folder_of(row)).drop(store.entries[[row]])
    store.refresh()


def _fill(store: Store, shelf: Shelf, maker: Maker, missing: Numbers, writers: "_Writers", shared: Together,
          share: Share) -> None:  # fmt: skip
    """Make entries and put them where they belong."""
    for folder in dict.fromkeys(shelf.folders[number] for number in missing):
        check_writable(folder, shelf.option)
    groups = maker.groups(missing.tolist())
    # Who works on the same folder and knows nothing of us begins somewhere else, and we meet in the middle.
    start = secrets.randbelow(len(groups))
    still = _still_missing(store, shelf.keys, [*groups[start:], *groups[:start]], shared)
    is_first = True
    for count, entries in maker.made(still):
        if entries and is_first:
            _check_room(shelf, missing, entries[0], share)
            is_first = False
        for entry in entries:
            writers.of(shelf.folders[entry.number]).put(as_bytes(shelf.keys[entry.number]), entry.tensors, entry.name)
        shared.done(count)
    writers.flush()


def _still_missing(store: Store, keys: Keys, groups: Sequence[list[int]], shared: Together) -> Iterator[list[int]]:
    """The groups without what somebody else has made in the meantime."""
    looked_at = time.monotonic()
    for group in groups:
        now = time.monotonic()
        if now - looked_at > SECONDS_BETWEEN_LOOKS:
            store.refresh()
            looked_at = time.monotonic()
        rest = [number for number, row in zip(group, store.find(keys[group]), strict=True) if row < 0]
        if len(rest) < len(group):
            shared.done(len(group) - len(rest))
        if rest:
            yield rest


def _check_room(shelf: Shelf, missing: Numbers, first: Entry, share: Share) -> None:
    """What all of it will take, told by the first; stop now if there is too little room."""
    unit = sum(tensor.nbytes for tensor in first.tensors.values()) / shelf.costs[first.number]
    for folder in dict.fromkeys(shelf.folders[number] for number in missing):
        costs = [shelf.costs[number] for number in missing if shelf.folders[number] == folder]
        wanted = round(unit * sum(costs) * share.of)
        count = len(costs) * share.of
        logger.info("%s of about %d %ss are made: %s in %s", shelf.what, count, shelf.unit, size_of(wanted), folder)
        check_room(folder, wanted, f"{shelf.what} of {count} {shelf.unit}s", shelf.way_out)


def _see_all(store: Store, shelf: Shelf, bad: dict[int, str]) -> None:
    """Everything that was made, by whom ever, is there; disks of several machines may take a while to show it."""
    wanted = np.setdiff1d(np.arange(len(shelf.keys)), list(bad))
    deadline = time.monotonic() + SECONDS_UNTIL_SEEN
    store.refresh()
    while (absent := wanted[store.find(shelf.keys[wanted]) < 0]).size:
        if time.monotonic() > deadline:
            raise UserError(f"{shelf.what}: {len(absent)} entries were made and cannot be found in"
                            f" {shelf.folders[absent[0]]}; do all machines see the same disk?")  # fmt: skip
        time.sleep(1)
        store.refresh()


class _Writers:
    """A writer for each folder that something is put into."""

    def __init__(self) -> None:
        self._writers: dict[Path, Writer] = {}

    def __enter__(self) -> "_Writers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for writer in self._writers.values():
            writer.close()

    def of(self, folder: Path) -> Writer:
        """The one for ``folder``."""
        if folder not in self._writers:
            self._writers[folder] = Writer(folder)
        return self._writers[folder]

    def flush(self) -> None:
        """Announce everything, in all folders."""
        for writer in self._writers.values():
            writer.flush()
