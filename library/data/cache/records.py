"""The index of a cache: records of one width, each with a check of its own, so that a torn or damaged one is no record.

An index file belongs to one writer, which only ever appends to it.  Its first record is a header.  Whatever else
stands in it counts only when it is whole: a reader takes the records whose check fits and passes over the others.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16
FORMAT_VERSION = 1
"""Raised when old files cannot be read any more; files of another format are left alone."""

HEADER_RECORD, ENTRY_RECORD, TOMBSTONE_RECORD = 1, 2, 3
"""Kinds of records: the first of a file; where an entry lies; that the entry at a place is not to be used any more."""

RECORD_DTYPE: np.dtype[Any] = np.dtype(
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
RecordArray = NDArray[np.void]
KeyArray = NDArray[np.bytes_]

_NUM_CHECKED_WORDS = RECORD_DTYPE.itemsize // 8 - 1
_CHECKSUM_FACTORS = np.array([(0x9E3779B97F4A7C15 * (2 * index + 1)) % 2**64 | 1 for index in range(_NUM_CHECKED_WORDS)], np.uint64)


def stack_keys(keys: Iterable[bytes]) -> KeyArray:
    """Keys in one array."""
    return np.array(list(keys), f"S{KEY_BYTES}")


def get_key_bytes(key: np.bytes_) -> bytes:
    """One key out of an array, which does not keep zeros at the end."""
    return bytes(key).ljust(KEY_BYTES, b"\0")


def add_checksums(records: RecordArray) -> RecordArray:
    """The same records with their checks."""
    whole = records.copy()
    whole["check"] = _compute_checksums(whole)
    return whole


def verify_checksums(records: RecordArray) -> NDArray[np.bool_]:
    """Which of the records are as they were written."""
    sums: NDArray[np.bool_] = records["check"] == _compute_checksums(records)
    return sums


def build_header(writer_id: int) -> RecordArray:
    """The first record of an index file."""
    record = np.zeros(1, RECORD_DTYPE)
    record["kind"], record["part"], record["writer"] = HEADER_RECORD, FORMAT_VERSION, writer_id
    return add_checksums(record)


def is_valid_header(record: RecordArray) -> bool:
    """Whether a file that begins so can be read."""
    return bool(len(record) and verify_checksums(record[:1])[0] and record["kind"][0] == HEADER_RECORD and record["part"][0] == FORMAT_VERSION)


def _compute_checksums(records: RecordArray) -> NDArray[np.uint64]:
    """An odd multiple of each word, summed: no change of a single word leaves the sum as it was."""
    words = np.ascontiguousarray(records).view(np.uint64).reshape(len(records), _NUM_CHECKED_WORDS + 1)[:, :_NUM_CHECKED_WORDS]
    sums: NDArray[np.uint64] = (words * _CHECKSUM_FACTORS).sum(axis=1, dtype=np.uint64)
    return sums ^ (sums >> np.uint64(29)) ^ np.uint64(0x4C6F72696B656574)  # nothing but zeros is no record
