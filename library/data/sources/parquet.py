"""Pictures and captions in the columns of parquet files, as HF datasets write them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dataset_schema import SubsetConfig
from ..listing import FoundPicture, Listing
from ..origin import Origin, Row
from .arrow import failures, first_line, parquet_module
from .columns import caption_column, known, lines_in
from .rows import RowReader
from .shards import shards_of

IMAGE_COLUMN = "image"
_LARGE_GROUP = 256 * 2**20
_BATCH = 4096
_INSTEAD = "python -c \"import pyarrow.parquet as p; p.write_table(p.read_table('OLD'), 'NEW', row_group_size=100)\""


@dataclass(frozen=True)
class Columns:
    """Which columns of one file are used."""

    image: str
    caption: str


def from_parquet(subset: SubsetConfig, dataset: int, index: int) -> Listing:
    """Every row of every file, in order."""
    listing = Listing(wanted_ending="parquet")
    shards = shards_of(subset)
    listing.problems += shards.problems
    readers: dict[str, RowReader] = {}
    large: list[str] = []
    for path in shards.files:
        try:
            with parquet_module().ParquetFile(path) as file:
                columns = _columns(file.schema_arrow, subset)
                reader = readers.setdefault(columns.image, RowReader(columns.image))
                rows = list(_rows(file, path, columns))
                size = _largest_group(file, columns.image)
        except _ColumnError as error:
            listing.problems.append(f"{subset.place('parquet')}: parquet: {path}: {error}")
            continue
        except failures() as error:
            listing.absent.append(f"{path}: cannot be read as parquet: {first_line(error)}")
            continue
        if size > _LARGE_GROUP:
            large.append(f"{path} ({size / 2**20:.0f} MiB)")
        folder = path.parent
        for number, (lines, problem) in enumerate(rows):
            caption = subset.class_tokens or ""
            if lines:
                caption = listing.caption_of(lines, columns.caption, subset)
            elif problem is None:
                listing.without.append(f"{path.name} row {number}")
            origin = Origin(folder, path.name, Row(reader, number))
            listing.found.append(FoundPicture(origin, caption, dataset, index, problem))
    if not listing.found and not listing.problems and not listing.absent:
        listing.problems.append(f"{subset.place('parquet')}: parquet: no rows in {len(shards.files)} files")
    if large:
        listing.notes.append(f"row groups are large, and one is read for every picture that is not in the one before;"
                             f" smaller ones are faster ({_INSTEAD}): {', '.join(large[:3])}")  # fmt: skip
    listing.conclude(subset.source, subset, "text")
    return listing


class _ColumnError(Exception):
    """A file does not have the columns that are needed, which is a matter of the settings."""


def _columns(schema: Any, subset: SubsetConfig) -> Columns:
    kinds = {field.name: str(field.type) for field in schema}
    names = list(kinds)
    try:
        image = _image_column(kinds, subset.image_column)
        caption = caption_column([name for name in names if name != image], subset.caption_column)
    except ValueError as error:
        raise _ColumnError(str(error)) from None
    if not _may_be_pictures(kinds[image]):
        raise _ColumnError(f"column {image!r} holds {kinds[image]}, no pictures; image_column names another one")
    if not _may_be_text(kinds[caption]):
        raise _ColumnError(f"column {caption!r} holds {kinds[caption]}, no text; caption_column names another one")
    return Columns(image, caption)


def _image_column(kinds: dict[str, str], wanted: str | None) -> str:
    """The named one, or ``image``, or the only one that holds bytes."""
    if wanted is not None:
        return known(list(kinds), wanted, "image_column")
    if IMAGE_COLUMN in kinds:
        return IMAGE_COLUMN
    found = [name for name, kind in kinds.items() if "binary" in kind and _may_be_pictures(kind)]
    if len(found) == 1:
        return found[0]
    described = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    raise ValueError(f"which column holds pictures? there are {described or 'none'}; say so: image_column = 'NAME'")


def _may_be_pictures(kind: str) -> bool:
    """Bytes, paths, or a pair of these."""
    if kind.startswith("struct<"):
        return "bytes: " in kind or "path: " in kind
    return not kind.startswith("list") and ("binary" in kind or "string" in kind)


def _may_be_text(kind: str) -> bool:
    return ("string" in kind and not kind.startswith("struct")) or kind == "null"


def _rows(file: Any, path: Path, columns: Columns) -> Iterator[tuple[Sequence[str], str | None]]:
    """Caption of each row, and what is wrong with it."""
    number = 0
    for batch in file.iter_batches(batch_size=_BATCH, columns=[columns.caption], use_threads=False):
        for cell in batch.column(0).to_pylist():
            try:
                yield lines_in(cell), None
            except ValueError as error:
                yield (), f"{path}: row {number}: {columns.caption} {error}"
            number += 1


def _largest_group(file: Any, image: str) -> int:
    """Bytes of the pictures in a row group, unpacked."""
    groups = (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups))
    return max((sum(group.column(index).total_uncompressed_size for index in range(group.num_columns)
                    if group.column(index).path_in_schema.split(".")[0] == image) for group in groups), default=0)  # fmt: skip
