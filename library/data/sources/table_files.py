"""Files that hold tables: parquet, read by groups of rows, and Arrow as ``save_to_disk`` of HF datasets writes it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from .arrow import arrow_module, parquet_module

ARROW = ".arrow"
_BATCH = 4096
_STATE = "state.json"
_MAPPED_BYTES = 2 * 2**20
"""What an open file counts as that is mapped into memory: little, so that many stay open, but not any number."""


class TableFile(Protocol):
    """One file."""

    @property
    def schema(self) -> Any:
        """Its columns, as Arrow describes them."""

    @property
    def group_rows(self) -> Sequence[int]:
        """How many rows each group has."""

    def group(self, number: int, column: str) -> tuple[Any, int]:
        """The cells of a column, and how many bytes of memory they keep."""

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """All rows, some at a time."""

    def largest_group(self, column: str) -> int:
        """Bytes that have to be read for one cell."""


def table_file(path: Path) -> TableFile:
    """A file of the kind that its ending says."""
    return _Arrow(path) if path.suffix.lower() == ARROW else _Parquet(path)


def saved_by_datasets(folder: Path, names: Sequence[str]) -> list[Path]:
    """The files that ``save_to_disk`` wrote, among ``names`` in ``folder``; others beside them are HF's own cache."""
    found = []
    for name in names:
        if PurePosixPath(name).name != _STATE:
            continue
        try:
            state = json.loads((folder / name).read_text(encoding="utf-8"))
            found += [(folder / name).with_name(item["filename"]) for item in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError):  # a file of this name, and of somebody else's
            continue
    return found


class _Parquet:
    """Open only while it is read, so that thousands of shards need no thousands of open files."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def schema(self) -> Any:
        with parquet_module().ParquetFile(self.path) as file:
            return file.schema_arrow

    @property
    def group_rows(self) -> Sequence[int]:
        return [group.num_rows for group in self._groups()]

    def group(self, number: int, column: str) -> tuple[Any, int]:
        with parquet_module().ParquetFile(self.path) as file:
            cells = file.read_row_group(number, columns=[column], use_threads=False).column(0)
        return cells, cells.nbytes

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        with parquet_module().ParquetFile(self.path) as file:
            yield from file.iter_batches(batch_size=_BATCH, columns=list(columns), use_threads=False)

    def largest_group(self, column: str) -> int:
        parts = [[group.column(number) for number in range(group.num_columns)] for group in self._groups()]
        return max((sum(part.total_uncompressed_size for part in group if part.path_in_schema.split(".")[0] == column)
                    for group in parts), default=0)  # fmt: skip

    def _groups(self) -> list[Any]:
        with parquet_module().ParquetFile(self.path) as file:
            return [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]


class _Arrow:
    """Mapped into memory, so that a cell costs no more than its own bytes; all rows are one group."""

    def __init__(self, path: Path):
        arrow = arrow_module()
        self._table = arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()
        self.schema: Any = self._table.schema
        self.group_rows: Sequence[int] = [self._table.num_rows]

    def group(self, number: int, column: str) -> tuple[Any, int]:
        return self._table.column(column), _MAPPED_BYTES

    def batches(self, columns: Sequence[str]) -> Iterator[Any]:
        return iter(self._table.select(list(columns)).to_batches(max_chunksize=_BATCH))

    def largest_group(self, column: str) -> int:
        return 0
