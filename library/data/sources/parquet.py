"""Pictures and captions in the columns of parquet files, and of what HF datasets save to disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...dataset.schema import SubsetConfig
from ..listing import CaptionLines, Listing, first_of
from ..origin import Origin, Row
from .arrow import failures, first_line
from .columns import lines_in
from .parquet_columns import Columns, columns_of
from .rows import RowReader
from .shards import shards_of
from .table_files import ARROW, TableFile, table_file

LARGE_GROUP = 256 * 2**20
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
            file = table_file(path)
            columns = _columns(file, file.schema, path, listing)
            if columns is None:
                continue
            rows = list(_rows(file, path, columns))
            size = 0 if columns.has_paths else file.largest_group(columns.image)
        except failures() as error:
            kind = "what save_to_disk writes" if path.suffix.lower() == ARROW else "parquet"
            listing.absent.append(f"{path}: cannot be read as {kind}: {first_line(error)}")
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


def _columns(file: TableFile, schema: Any, path: Path, listing: Listing) -> Columns | None:
    try:
        columns = columns_of(schema, listing.subset)
        if columns.has_paths:
            first = next((batch for batch in file.batches([columns.image]) if len(batch)), None)
            name = str(first.column(0)[0].as_py()) if first else ""
            if "://" in name:
                raise ValueError(f"column {columns.image!r} holds addresses, such as {name!r}; download the pictures")
        return columns
    except ValueError as error:
        listing.wrong("parquet", f"{path}: {first_line(error)}")
        return None


def _rows(file: TableFile, path: Path, columns: Columns) -> Iterator[tuple[CaptionLines, str | None]]:
    """The caption of each row, and the path of its picture, if that is a file."""
    read = [columns.caption, *([columns.image] if columns.has_paths else [])]
    number = 0
    for batch in file.batches(read):
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
