"""Tables that name pictures and captions: .jsonl, .csv and .parquet, row by row, with the place of each row."""

import csv
import io
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UserError
from ..caption_files import decoded
from .arrow import failures, first_line, parquet_module

TABLE_ENDINGS = (".jsonl", ".csv", ".parquet")


@dataclass
class Table:
    """All columns by name, and of each row those that were asked for."""

    path: Path
    columns: list[str] = field(default_factory=list)
    rows: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)  # line, or number of the row

    def place(self, number: int) -> str:
        """For the start of a message."""
        return f"{self.path}: row {number}" if self.path.suffix.lower() == ".parquet" else f"{self.path}:{number}"


def read_table(path: Path, wanted: Collection[str]) -> Table:
    """The ``wanted`` columns, as far as they are there; ``ValueError`` when the file cannot be understood."""
    table = Table(path)
    ending = path.suffix.lower()
    reader = {".csv": _csv_rows, ".parquet": _parquet_rows}.get(ending, _json_rows)
    seen: dict[str, None] = {}
    for number, values in reader(path, wanted):
        seen.update(dict.fromkeys(values))
        table.rows.append((number, {name: values[name] for name in values if name in wanted}))
    table.columns = list(seen)
    return table


def text_of(path: Path) -> str:
    """``ValueError`` with the path when the file is no text or cannot be read."""
    try:
        return decoded(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def parsed(text: str, place: str) -> dict[str, Any]:
    """One JSON object."""
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{place} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{place}: expected an object {{...}}")
    return values


def _json_rows(path: Path, wanted: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text_of(path).split("\n"), start=1):
        if line.strip():
            yield number, parsed(line, f"{path}:{number}")


def _csv_rows(path: Path, wanted: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(text_of(path), newline=""), strict=True)
    try:
        head = [name.strip() for name in next(reader, [])]
        if len(set(head)) < len(head):
            raise ValueError(f"{path}:1: two columns have the same name: {', '.join(head)}")
        start = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(head):
                raise ValueError(f"{path}:{start}: {len(cells)} cells under {len(head)} columns; a text with a comma"
                                 ' stands in quotes: "a cat, sitting"')  # fmt: skip
            if cells:
                yield start, dict(zip(head, cells, strict=True))
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: is no CSV: {error}") from None


def _parquet_rows(path: Path, wanted: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        parquet = parquet_module()
    except UserError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            read = [name for name in columns if name in wanted]
            number = 0
            for batch in file.iter_batches(columns=read, use_threads=False):
                for values in batch.to_pylist():
                    yield number, {**dict.fromkeys(columns), **values}
                    number += 1
    except failures() as error:
        raise ValueError(f"{path} cannot be read as parquet: {first_line(error)}") from None
