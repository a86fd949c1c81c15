"""Images and captions in tables, read with pyarrow: parquet files, Arrow files, and folders saved by HF datasets."""

import importlib
import importlib.util
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..problems import Place, Problem, report_file
from ..storage.filesystems import RemoteOutage
from ..storage.remote_path import is_remote
from .caption_files import parse_caption_cell, require_column, resolve_caption_column
from .controls import sort_control_columns
from .file_discovery import resolve_shards
from .image_ref import ImageRef, TableRow, build_image_ref
from .listing import ImageCaption, SubsetListing, format_count, format_first_names
from .schema import SubsetConfig

PYARROW_NEEDED = "parquet files need pyarrow: pip install 'pyarrow>=17'"
IMAGE_COLUMN = "image"
ROW_GROUP_CACHE_BYTES = 128 * 2**20
"""Row groups that a process keeps in memory; at least two, whatever their size."""

LARGE_ROW_GROUP_BYTES = 256 * 2**20
_ARROW_EXTENSION = ".arrow"
_BATCH_ROWS = 4096
_MAPPED_FILE_BYTES = 2 * 2**20
"""The size at which a mapped file counts in the cache of row groups: small, so that many stay open, but not all."""

_REWRITE_SCRIPT = "import pyarrow.parquet as p; p.write_table(p.read_table('OLD'), 'NEW', row_group_size=100)"


def is_pyarrow_installed() -> bool:
    """Whether pyarrow can be found; imports nothing."""
    return importlib.util.find_spec("pyarrow") is not None


def _import_pyarrow(module: str = "pyarrow") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{PYARROW_NEEDED} ({error})") from None


def _list_read_errors() -> tuple[type[Exception], ...]:
    """List what pyarrow raises for a broken file."""
    arrow_exception: type[Exception] = _import_pyarrow().ArrowException
    return arrow_exception, OSError, ValueError


def _format_error(error: Exception) -> str:
    """Return the first line, without pyarrow's details."""
    return str(error).partition("\n")[0]


class ParquetTable:
    """A parquet file, opened for each read: thousands of shards would be too many open files."""

    def __init__(self, path: Path):
        self.path = path

    def _open(self) -> Any:
        source = self.path.open("rb") if is_remote(self.path) else self.path
        return _import_pyarrow("pyarrow.parquet").ParquetFile(source)

    def read_schema(self) -> Any:
        with self._open() as file:
            return file.schema_arrow

    def count_group_rows(self) -> list[int]:
        return [group.num_rows for group in self._read_group_metadata()]

    def read_group(self, group: int, column: str) -> tuple[Any, int]:
        """Read a column of a row group; return its cells and their size in memory."""
        with self._open() as file:
            cells = file.read_row_group(group, columns=[column], use_threads=False).column(0)
        return cells, cells.nbytes

    def read_batches(self, columns: Sequence[str]) -> Iterator[Any]:
        with self._open() as file:
            yield from file.iter_batches(batch_size=_BATCH_ROWS, columns=list(columns), use_threads=False)

    def compute_largest_group_bytes(self, column: str) -> int:
        """Compute how many bytes are read at most for one cell."""
        largest = 0
        for group in self._read_group_metadata():
            chunks = [group.column(index) for index in range(group.num_columns)]
            sizes = [chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == column]
            largest = max(largest, sum(sizes))
        return largest

    def _read_group_metadata(self) -> list[Any]:
        with self._open() as file:
            return [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]


class ArrowTable:
    """An Arrow stream as ``save_to_disk`` of HF datasets writes it: memory-mapped, all rows are one group."""

    def __init__(self, path: Path):
        arrow = _import_pyarrow()
        self._table = arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()

    def read_schema(self) -> Any:
        return self._table.schema

    def count_group_rows(self) -> list[int]:
        return [self._table.num_rows]

    def read_group(self, group: int, column: str) -> tuple[Any, int]:
        return self._table.column(column), _MAPPED_FILE_BYTES

    def read_batches(self, columns: Sequence[str]) -> Iterator[Any]:
        return iter(self._table.select(list(columns)).to_batches(max_chunksize=_BATCH_ROWS))

    def compute_largest_group_bytes(self, column: str) -> int:
        return 0


def open_table(path: Path) -> ParquetTable | ArrowTable:
    """Open a table by its extension."""
    return ArrowTable(path) if path.suffix.lower() == _ARROW_EXTENSION else ParquetTable(path)


class RowReader:
    """Reads images from rows of a column; equal to every reader of this column, and pickled as its name.

    Rows that are read one after the other share one read of their row group.  At least two groups are kept, because
    threads that read ahead are in two of them where one ends.
    """

    def __init__(self, column: str):
        self.column = column
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._group_ends: dict[Path, list[int]] = {}
        self._groups: OrderedDict[tuple[Path, int], tuple[Any, int]] = OrderedDict()
        self._cached_bytes = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowReader) and self.column == other.column

    def __hash__(self) -> int:
        return hash(self.column)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.column,)

    def read(self, path: Path, row: int) -> bytes:
        """Read the image of a row; raise ``OSError`` if there is none."""
        if self._process != os.getpid():  # forked, perhaps while another thread held the lock
            self._reset()
        try:
            with self._lock:
                cell = self._read_cell(path, row)
        except RemoteOutage:
            raise
        except _list_read_errors() as error:
            raise _make_read_error(f"{path}: row {row}: {_format_error(error)}") from error
        return _read_image_cell(cell, path)

    def _read_cell(self, path: Path, row: int) -> Any:
        if path not in self._group_ends:
            self._group_ends[path] = list(accumulate(open_table(path).count_group_rows()))
        ends = self._group_ends[path]
        group = bisect_right(ends, row)
        if group == len(ends):
            raise ValueError("no longer exists")
        key = path, group
        if key not in self._groups:
            self._groups[key] = open_table(path).read_group(group, self.column)
            self._cached_bytes += self._groups[key][1]
        self._groups.move_to_end(key)
        while len(self._groups) > 2 and self._cached_bytes > ROW_GROUP_CACHE_BYTES:
            self._cached_bytes -= self._groups.popitem(last=False)[1][1]
        first = ends[group - 1] if group else 0
        return self._groups[key][0][row - first].as_py()


def _read_image_cell(cell: Any, table: Path) -> bytes:
    """Return the image of a cell: bytes, HF's pair of bytes and path, or a path relative to the table."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if not cell:
        raise _make_read_error("the cell is empty")
    return (table.parent / cell).read_bytes() if isinstance(cell, str) else bytes(cell)


def _make_read_error(reason: str) -> OSError:
    error = OSError(reason)
    error.strerror = reason
    return error


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table that are used."""

    image: str
    caption: str
    has_paths: bool  # the images are files, the column holds their paths
    controls: Mapping[str, bool]  # columns of control images, and whether they hold paths


def list_table_images(subset: SubsetConfig, dataset: int, index: int) -> SubsetListing:
    """List every row of the files of ``parquet``, in order."""
    listing = SubsetListing(subset, dataset, index, expected_source="parquet")
    shards = resolve_shards(subset)
    listing.problems += shards.problems
    read_errors = _list_read_errors()
    readers: dict[str, RowReader] = {}
    large: list[str] = []
    for path in shards.files:
        try:
            table = open_table(path)
            columns = _resolve_columns(table, table.read_schema(), path, listing)
            if columns is None:
                continue
            rows = list(_read_rows(table, path, columns))
            largest = 0 if columns.has_paths else table.compute_largest_group_bytes(columns.image)
        except RemoteOutage as error:  # no fault of the file, whose images are not left out
            raise RemoteOutage(f"{path}: {error}") from error
        except read_errors as error:
            kind = "an Arrow stream of save_to_disk" if path.suffix.lower() == _ARROW_EXTENSION else "parquet"
            listing.missing.append(report_file(path, f"cannot be read as {kind}: {_format_error(error)}"))
            continue
        large += [f"{path} ({largest / 2**20:.0f} MiB)"] if largest > LARGE_ROW_GROUP_BYTES else []
        folder = path.parent
        for row, (caption, files) in enumerate(rows):
            refs = []
            for column, file in files.items():
                reader = readers.setdefault(column, RowReader(column))
                image = ImageRef(folder, path.name, TableRow(reader, row))
                refs.append(image if file is None else build_image_ref(folder, file, subset.remote))
            listing.add_image(refs[0], f"{path.name} row {row}", caption, tuple(refs[1:]))
    if not listing.images and not listing.problems and not listing.missing:
        listing.add_problem("parquet", f"no rows in {format_count(len(shards.files), 'file')}")
    if large:
        listing.notes.append(
            "large row groups, and a whole one is read for each image; smaller ones are faster:"
            f' python -c "{_REWRITE_SCRIPT}": {format_first_names(large)}'
        )
    listing.add_caption_notes(subset.source, "text")
    return listing


def _resolve_columns(
    table: ParquetTable | ArrowTable, schema: Any, path: Path, listing: SubsetListing
) -> TableColumns | None:
    """Determine the columns by name and type; add a problem to the listing if they are missing or ambiguous."""
    types = {column.name: str(column.type) for column in schema}
    try:
        image = _resolve_image_column(types, listing.subset.image_column)
        others = [name for name in types if name != image]
        caption = resolve_caption_column(others, listing.subset.caption_column)
        if not _is_image_type(types[image]):
            raise ValueError(
                f"column {image!r} has type {types[image]}, not images; set image_column to another column"
            )
        if not _is_text_type(types[caption]):
            raise ValueError(
                f"column {caption!r} has type {types[caption]}, not text; set caption_column to another column"
            )
        controls = _resolve_control_columns(types, listing.subset.control_column)
    except ValueError as error:
        listing.add_problem("parquet", f"{path}: {_format_error(error)}")
        return None
    unused = [name for name in others if name not in controls and "binary" in types[name] and name != caption]
    if unused:
        note = "columns of images that are not used"
        listing.notes.append(f"{path}: {note}: {format_first_names(unused)}; for control images set control_column")
    return TableColumns(image, caption, _has_paths(types[image]), {name: _has_paths(types[name]) for name in controls})


def _resolve_control_columns(types: Mapping[str, str], control_columns: Sequence[str]) -> list[str]:
    """Return the columns that are set, or those named as control images; ``ValueError`` if they hold none."""
    names = [require_column(list(types), name, "control_column") for name in control_columns]
    names = names or sort_control_columns(types)
    for name in names:
        if not _is_image_type(types[name]):
            raise ValueError(f"column {name!r} has type {types[name]}, not images; set control_column to other columns")
    return names


def _has_paths(kind: str) -> bool:
    return "binary" not in kind and not kind.startswith("struct<")


def _resolve_image_column(types: Mapping[str, str], image_column: str | None) -> str:
    """Return the column that is set, or ``image``, or the only one with bytes."""
    if image_column is not None:
        return require_column(list(types), image_column, "image_column")
    if IMAGE_COLUMN in types:
        return IMAGE_COLUMN
    candidates = [name for name, kind in types.items() if "binary" in kind and _is_image_type(kind)]
    if len(candidates) == 1:
        return candidates[0]
    columns = ", ".join(f"{name} ({kind})" for name, kind in types.items()) or "none"
    raise ValueError(f"no column {IMAGE_COLUMN}; columns are {columns}; set image_column = 'NAME'")


def _is_image_type(kind: str) -> bool:
    """Whether a column may hold bytes, paths, or pairs of them."""
    if kind.startswith("struct<"):
        return "bytes: " in kind or "path: " in kind
    return "list<" not in kind and ("binary" in kind or "string" in kind)


def _is_text_type(kind: str) -> bool:
    return kind == "null" or ("string" in kind and not kind.startswith("struct<"))


def _read_rows(
    table: ParquetTable | ArrowTable, path: Path, columns: TableColumns
) -> Iterator[tuple[ImageCaption, dict[str, str | None]]]:
    """Yield the caption of each row, and the paths of its image and control images by column, if these are files."""
    images = {columns.image: columns.has_paths, **columns.controls}
    names = [columns.caption, *(column for column, has_paths in images.items() if has_paths)]
    row = 0
    for batch in table.read_batches(names):
        texts = _read_text_cells(batch.column(columns.caption))
        none = [None] * len(texts)
        files = [batch.column(name).to_pylist() if has_paths else none for name, has_paths in images.items()]
        for text, *paths in zip(texts, *files, strict=True):
            try:
                caption = ImageCaption(parse_caption_cell(text, columns.caption), columns.caption)
            except ValueError as error:
                caption = ImageCaption(problem=Problem("", str(error), place=Place(str(path), part=f"row {row}")))
            yield caption, {column: path or None for column, path in zip(images, paths, strict=True)}
            row += 1


def _read_text_cells(column: Any) -> list[Any]:
    """Convert to Python; text that is not UTF-8 stays bytes, so that it is reported for its row, not for the file."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_read_text_cell(cell) for cell in column]


def _read_text_cell(cell: Any) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return cell.as_buffer().to_pybytes() if hasattr(cell, "as_buffer") else b""


def read_parquet_metadata(path: Path, wanted: Container[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the values of each row; columns that are not ``wanted`` are None."""
    try:
        read_errors = _list_read_errors()
    except UserError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        table = ParquetTable(path)
        columns = table.read_schema().names
        row = 0
        for batch in table.read_batches([name for name in columns if name in wanted]):
            for values in batch.to_pylist():
                yield row, {**dict.fromkeys(columns), **values}
                row += 1
    except read_errors as error:
        raise ValueError(f"{path}: cannot be read as parquet: {_format_error(error)}") from None
