"""The index of a cache: records of one width, each with a check of its own, so that a torn or damaged one is no record.

An index file belongs to one writer, which only ever appends to it.  Its first record is a header.  Whatever else
stands in it counts only when it is whole: a reader takes the records whose check fits and passes over the others.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16
FORMAT = 1
"""Raised when old files cannot be read any more; files of another format are left alone."""

HEADER, ENTRY, DROPPED = 1, 2, 3
"""Kinds of records: the first of a file; where an entry lies; that the entry at a place is not to be used any more."""

RECORD: np.dtype[Any] = np.dtype(
    [
        ("key", f"S{KEY_BYTES}"),
        ("kind", "<u4"),
        ("part", "<u4"),  # which of the writer's shards
        ("offset", "<u8"),  # of the entry in it
        ("length", "<u8"),  # of the tensors; the name of the picture or caption lies behind them
        ("name_length", "<u4"),
        ("checksum", "<u4"),  # of tensors and name
        ("writer", "<u8"),  # whose entry it is: the file's own, except in DROPPED
        ("check", "<u8"),  # of all that stands before it
    ]
)
Records = NDArray[np.void]
Keys = NDArray[np.bytes_]

_WORDS = RECORD.itemsize // 8 - 1
_FACTORS = np.array([(0x9E3779B97F4A7C15 * (2 * index + 1)) % 2**64 | 1 for index in range(_WORDS)], np.uint64)


def as_keys(keys: Iterable[bytes]) -> Keys:
    """Keys in one array."""
    return np.array(list(keys), f"S{KEY_BYTES}")


def as_bytes(key: np.bytes_) -> bytes:
    """One key out of an array, which does not keep zeros at the end."""
    return bytes(key).ljust(KEY_BYTES, b"\0")


def sealed(records: Records) -> Records:
    """The same records with their checks."""
    whole = records.copy()
    whole["check"] = _checks(whole)
    return whole


def sound(records: Records) -> NDArray[np.bool_]:
    """Which of the records are as they were written."""
    sums: NDArray[np.bool_] = records["check"] == _checks(records)
    return sums


def header(writer: int) -> Records:
    """The first record of an index file."""
    record = np.zeros(1, RECORD)
    record["kind"], record["part"], record["writer"] = HEADER, FORMAT, writer
    return sealed(record)


def is_header(record: Records) -> bool:
    """Whether a file that begins so can be read."""
    return bool(len(record) and sound(record[:1])[0] and record["kind"][0] == HEADER and record["part"][0] == FORMAT)


def _checks(records: Records) -> NDArray[np.uint64]:
    """An odd multiple of each word, summed: no change of a single word leaves the sum as it was."""
    words = np.ascontiguousarray(records).view(np.uint64).reshape(len(records), _WORDS + 1)[:, :_WORDS]
    sums: NDArray[np.uint64] = (words * _FACTORS).sum(axis=1, dtype=np.uint64)
    return sums ^ (sums >> np.uint64(29)) ^ np.uint64(0x4C6F72696B656574)  # nothing but zeros is no record
