"""Pictures out of the rows of tables; of parquet files, only whole groups of rows can be read."""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any

from .arrow import failures, first_line
from .table_files import TableFile, table_file

HELD_BYTES = 128 * 2**20
"""A process keeps the row groups that it read last up to this size, but two of them at least."""


class RowReader:
    """Reads one column; equal to every other reader of this column, and as small, when it is sent to a process.

    Rows that are read one after the other share the reading of their group.  Two groups are kept whatever their size,
    because threads that read ahead are in two of them when one ends.
    """

    def __init__(self, column: str):
        self.column = column
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._ends: dict[Path, list[int]] = {}
        self._held: OrderedDict[tuple[Path, int], tuple[Any, int]] = OrderedDict()
        self._size = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowReader) and self.column == other.column

    def __hash__(self) -> int:
        return hash(self.column)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.column,)

    def read(self, path: Path, number: int) -> bytes:
        """The bytes of the picture in a row; ``OSError`` when there are none."""
        if self._process != os.getpid():  # a fork may have happened while the lock was held
            self._forget()
        try:
            with self._lock:
                cell = self._cell(path, number)
        except failures() as error:
            raise _unreadable(f"{path}: row {number}: {first_line(error)}") from error
        return bytes_of(cell, path)

    def _cell(self, path: Path, number: int) -> Any:
        if path not in self._ends:
            self._ends[path] = group_ends(table_file(path))
        ends = self._ends[path]
        group = bisect_right(ends, number)
        if group == len(ends):
            raise ValueError("is not there any more")
        key = path, group
        if key not in self._held:
            self._held[key] = table_file(path).group(group, self.column)
            self._size += self._held[key][1]
        self._held.move_to_end(key)
        while len(self._held) > 2 and self._size > HELD_BYTES:
            self._size -= self._held.popitem(last=False)[1][1]
        first = ends[group - 1] if group else 0
        return self._held[key][0][number - first].as_py()


def group_ends(file: TableFile) -> list[int]:
    """The number behind the last row of each group."""
    return list(accumulate(file.group_rows))


def bytes_of(cell: Any, file: Path) -> bytes:
    """A cell may hold the bytes, or bytes and path, or a path as seen from the parquet file."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if not cell:
        raise _unreadable("the cell is empty")
    return (file.parent / cell).read_bytes() if isinstance(cell, str) else bytes(cell)


def _unreadable(reason: str) -> OSError:
    error = OSError(reason)
    error.strerror = reason
    return error
