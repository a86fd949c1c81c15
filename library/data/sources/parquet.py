"""Pictures and captions in the columns of parquet files, as HF datasets write them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..dataset_schema import SubsetConfig
from ..listing import CaptionLines, Listing, first_of
from ..origin import Origin, Row
from .arrow import failures, first_line, parquet_module
from .columns import lines_in
from .parquet_columns import Columns, columns_of
from .rows import RowReader
from .shards import shards_of

LARGE_GROUP = 256 * 2**20
_BATCH = 4096
_REWRITTEN = "import pyarrow.parquet as p; p.write_table(p.read_table('OLD'), 'NEW', row_group_size=100)"


def from_parquet(subset: SubsetConfig, dataset: int, index: int) -> Listing:
    """Every row of every file, in order."""
    listing = Listing(subset, dataset, index, wanted_ending="parquet")
    shards = shards_of(subset)
    listing.problems += shards.problems
    readers: dict[str, RowReader] = {}
    large: list[str] = []
    for path in shards.files:
        try:
            with parquet_module().ParquetFile(path) as file:
                columns = _columns(file, path, listing)
                if columns is None:
                    continue
                rows = list(_rows(file, path, columns))
                size = 0 if columns.has_paths else _largest_group(file.metadata, columns.image)
        except failures() as error:
            listing.absent.append(f"{path}: cannot be read as parquet: {first_line(error)}")
            continue
        large += [f"{path} ({size / 2**20:.0f} MiB)"] if size > LARGE_GROUP else []
        reader, folder = readers.setdefault(columns.image, RowReader(columns.image)), path.parent
        for number, (caption, name) in enumerate(rows):
            image = Origin(folder, path.name, Row(reader, number)) if name is None else Origin(folder, name)
            listing.add(image, f"{path.name} row {number}", caption)
    if not listing.found and not listing.problems and not listing.absent:
        listing.wrong("parquet", f"{len(shards.files)} files without a row")
    if large:
        listing.notes.append("for a picture its whole row group is read, and some are large; smaller ones are faster:"
                             f' python -c "{_REWRITTEN}": {first_of(large)}')  # fmt: skip
    listing.conclude(subset.source, "text")
    return listing


def _columns(file: Any, path: Path, listing: Listing) -> Columns | None:
    try:
        columns = columns_of(file.schema_arrow, listing.subset)
        if columns.has_paths:
            first = next(file.iter_batches(batch_size=1, columns=[columns.image], use_threads=False), None)
            name = str(first.column(0)[0].as_py()) if first else ""
            if "://" in name:
                raise ValueError(f"column {columns.image!r} holds addresses, such as {name!r}; download the pictures")
        return columns
    except ValueError as error:
        listing.wrong("parquet", f"{path}: {first_line(error)}")
        return None


def _rows(file: Any, path: Path, columns: Columns) -> Iterator[tuple[CaptionLines, str | None]]:
    """The caption of each row, and the path of its picture, if that is a file."""
    read = [columns.caption, *([columns.image] if columns.has_paths else [])]
    number = 0
    for batch in file.iter_batches(batch_size=_BATCH, columns=read, use_threads=False):
        texts = _values(batch.column(columns.caption))
        names = batch.column(columns.image).to_pylist() if columns.has_paths else [None] * len(texts)
        for text, name in zip(texts, names, strict=True):
            yield _caption(text, columns.caption, f"{path}: row {number}: {columns.caption}"), name or None
            number += 1


def _values(column: Any) -> list[Any]:
    """Text that is no UTF-8 as bytes, so that it is told for its row and not for the file."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(cell) for cell in column]


def _value(cell: Any) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return cell.as_buffer().to_pybytes() if hasattr(cell, "as_buffer") else b""


def _caption(text: object, column: str, where: str) -> CaptionLines:
    try:
        return CaptionLines(lines_in(text), column)
    except ValueError as error:
        return CaptionLines(problem=f"{where} {error}")


def _largest_group(metadata: Any, image: str) -> int:
    """Bytes of the pictures in a row group, unpacked."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    parts = [[group.column(number) for number in range(group.num_columns)] for group in groups]
    return max((sum(part.total_uncompressed_size for part in group if part.path_in_schema.split(".")[0] == image)
                for group in parts), default=0)  # fmt: skip
