"""Metadata files that list images and captions: .json and .jsonl of sd-scripts, .jsonl, .csv and .parquet tables."""

import csv
import io
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..problems import Place, Problem
from ..storage.filesystems import RemoteError, RemoteOutage
from ..storage.remote_path import build_remote_path, is_remote, is_remote_url, prefetch_infos, strip_query
from .caption_files import (
    CAPTION_COLUMNS,
    decode_utf8,
    parse_caption_cell,
    parse_json_object,
    resolve_caption_column,
    resolve_column,
    split_lines,
)
from .clip_decoding import VIDEO_EXTENSIONS
from .controls import CONTROL_COLUMN, ColumnsWithControls, is_control_column, sort_control_columns
from .image_ref import ImageRef
from .listing import IMAGE_EXTENSIONS, ImageCaption, SubsetListing
from .schema import SubsetConfig
from .tables import read_parquet_metadata

TABLE_EXTENSIONS = (".jsonl", ".csv", ".parquet")
VIDEO_COLUMN = "video_path"
"""Column of the paths of clips, as in musubi-tuner: video files, or folders of images."""

FILE_COLUMNS = ("image_path", "file_name", VIDEO_COLUMN)
"""Columns of image paths: of sd-scripts and musubi-tuner, and of HF datasets; and that of clips."""

_KOHYA_COLUMNS = ("caption", "tags")
_UNSUPPORTED_COLUMNS = ("image_path_0",)
"""Columns of musubi-tuner that change what is trained."""


@dataclass
class MetadataTable:
    """The names of all columns, and the values of the requested ones for each row."""

    path: Path
    columns: list[str] = field(default_factory=list)
    rows: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)  # number of the line or row

    def locate_row(self, number: int) -> Place:
        """Return the place of a row, or of the line that holds it."""
        if self.path.suffix.lower() == ".parquet":
            return Place(str(self.path), part=f"row {number}")
        return Place(str(self.path), number)


def read_metadata_table(path: Path, wanted: Container[str]) -> MetadataTable:
    """Read the ``wanted`` columns that exist; raise ``ValueError`` if the file is not valid."""
    table = MetadataTable(path)
    readers = {".csv": _read_csv_rows, ".parquet": read_parquet_metadata}
    columns: dict[str, None] = {}
    for number, values in readers.get(path.suffix.lower(), _read_jsonl_rows)(path, wanted):
        columns.update(dict.fromkeys(values))
        table.rows.append((number, {name: values[name] for name in values if name in wanted}))
    table.columns = list(columns)
    return table


def read_utf8_file(path: str | Path) -> str:
    """Read a UTF-8 file; raise ``ValueError`` with the path if that fails."""
    try:
        return decode_utf8((Path(path) if isinstance(path, str) else path).read_bytes())
    except RemoteOutage as error:
        raise RemoteOutage(f"{path}: {error}") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_jsonl_rows(path: Path, wanted: Container[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_utf8_file(path).split("\n"), start=1):
        if line.strip():
            try:
                yield number, parse_json_object(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def _read_csv_rows(path: Path, wanted: Container[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(read_utf8_file(path), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) < len(header):
            raise ValueError(f"{path}:1: duplicate column name: {', '.join(header)}")
        line = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(header):
                raise ValueError(
                    f"{path}:{line}: {len(cells)} cells for {len(header)} columns; text with a comma needs quotes:"
                    ' "a cat, sitting"'
                )
            if cells:
                yield line, dict(zip(header, cells, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: not valid CSV: {error}") from None


@dataclass(frozen=True)
class _Entry:
    """One image of a metadata file."""

    name: str
    values: Mapping[str, Any]
    location: Place

    @property
    def shown_name(self) -> str:
        return repr(strip_query(self.name))


@dataclass(frozen=True)
class _Metadata:
    """The entries of a metadata file, the folders in which their images are searched, and the caption column."""

    entries: Sequence[_Entry]
    folders: Sequence[Path]
    caption_column: str | None  # None means the caption followed by the tags
    has_controls: bool = False  # entries list control images
    has_clips: bool = False  # entries list clips

    @property
    def extensions(self) -> tuple[str, ...]:
        """The extensions that a path in the file may leave out."""
        return VIDEO_EXTENSIONS if self.has_clips else IMAGE_EXTENSIONS


def list_metadata_images(subset: SubsetConfig, path: Path, dataset: int, index: int) -> SubsetListing:
    """List the images of a metadata file in its order."""
    listing = SubsetListing(subset, dataset, index, expected_source=path.suffix.lower())
    try:
        metadata = _read_metadata(subset, path)
    except ValueError as error:
        listing.add_problem("metadata_file", str(error))
        return listing
    listing.has_clips = metadata.has_clips
    if not metadata.entries:
        listing.add_problem("metadata_file", f"{path}: no images listed")
    if metadata.has_clips and (problem := find_missing_frame_keys(subset)):
        listing.problems.append(problem)
    if any(map(is_remote, metadata.folders)) or any(is_remote_url(entry.name) for entry in metadata.entries):
        prefetch_infos(path for entry in metadata.entries for path in _iter_candidates(entry.name, metadata, subset))
    for entry in metadata.entries:
        if metadata.has_clips and is_remote_url(entry.name):
            text = f"{entry.shown_name}: clips cannot be read from URLs"
            listing.missing.append(Problem("", text, "download them", place=entry.location))
            continue
        image = _find_file(_iter_candidates(entry.name, metadata, subset), metadata)
        if image is None:
            listing.missing.append(Problem("", _describe_missing(entry.name, metadata, subset), place=entry.location))
            continue
        try:
            controls = _find_controls(entry, metadata, subset) if metadata.has_controls else ()
        except ValueError as error:
            listing.missing.append(Problem("", f"{entry.shown_name}: {error}", place=entry.location))
            continue
        try:
            lines = _parse_caption(entry.values, metadata.caption_column, subset)
            caption = ImageCaption(lines, listing.expected_source)
        except ValueError as error:
            caption = ImageCaption(problem=Problem("", f"{entry.shown_name}: {error}", place=entry.location))
        listing.add_image(ImageRef(image.parent, image.name), strip_query(entry.name), caption, controls)
    listing.add_caption_notes(str(path))
    return listing


def _read_metadata(subset: SubsetConfig, path: Path) -> _Metadata:
    """Read all entries; raise ``ValueError`` if the file is not valid."""
    image_dir = subset.resolve_image_dir()
    folders = [*([image_dir] if image_dir is not None else []), path.parent]
    if path.suffix.lower() == ".json":
        if subset.image_column is not None:
            raise ValueError(f"{path}: image_column has no effect for .json, whose keys are the images")
        entries = list(_read_json_entries(path))
        columns = dict.fromkeys(name for entry in entries for name in entry.values)
        caption_column = _resolve_captions(list(columns), subset, path)
        return _Metadata(entries, [Path(), *folders], caption_column, any(map(is_control_column, columns)))
    options = filter(None, (subset.image_column, subset.caption_column))
    names = {*FILE_COLUMNS, *CAPTION_COLUMNS, *_KOHYA_COLUMNS, *options}
    table = read_metadata_table(path, ColumnsWithControls(names))
    if not table.rows:
        return _Metadata([], folders, None)
    name = resolve_file_column(table, subset.image_column)
    for unsupported in _UNSUPPORTED_COLUMNS:
        if unsupported in table.columns:
            raise ValueError(f"{path}: column {unsupported} of musubi-tuner is not supported yet; remove it")
    entries = list(_read_table_entries(table, name))
    # sd-scripts resolves paths from the working directory, HF datasets from the file
    folders = folders if name == "file_name" else [Path(), *folders]
    has_controls = any(map(is_control_column, table.columns))
    captions = _resolve_captions(table.columns, subset, path)
    return _Metadata(entries, folders, captions, has_controls, has_clips=name == VIDEO_COLUMN)


def find_missing_frame_keys(subset: SubsetConfig) -> Problem | None:
    """Return the problem of a source of clips whose windows have no length."""
    if subset.target_frames or subset.frame_extraction == "full":
        return None
    return subset.report("target_frames", "missing", "set the lengths of windows, such as target_frames = [81]")


def resolve_file_column(table: MetadataTable, image_column: str | None) -> str:
    """Return the column of file names; raise ``ValueError`` if it is missing or ambiguous."""
    try:
        return resolve_column(table.columns, "image_column", image_column, FILE_COLUMNS)
    except ValueError as error:
        raise ValueError(f"{table.path}: {error}") from None


def _resolve_captions(columns: Sequence[str], subset: SubsetConfig, path: Path) -> str | None:
    is_kohya_format = path.suffix.lower() in (".json", ".jsonl")
    others = [name for name in CAPTION_COLUMNS if name != "caption" and name in columns]
    # sd-scripts' format: an image with neither caption nor tags is reported by itself
    if subset.caption_column is None and is_kohya_format and not others:
        return None
    try:
        return resolve_caption_column(columns, subset.caption_column)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_json_entries(path: Path) -> Iterator[_Entry]:
    text = read_utf8_file(path)
    try:
        entries = parse_json_object(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, values in entries.items():
        if not isinstance(values, dict):
            raise ValueError(f"{path}: {name!r}: expected an object with caption or tags")
        yield _Entry(name, values, Place(str(path)))


def _read_table_entries(table: MetadataTable, column: str) -> Iterator[_Entry]:
    for number, values in table.rows:
        name, location = values.get(column), table.locate_row(number)
        if not isinstance(name, str) or not name:
            raise ValueError(f"{location}: no {column}")
        yield _Entry(name, values, location)


def _find_controls(entry: _Entry, metadata: _Metadata, subset: SubsetConfig) -> tuple[ImageRef, ...]:
    """Find the control images of an entry; ``ValueError`` if one is missing."""
    cells = {name: entry.values[name] for name in entry.values if is_control_column(name) and entry.values[name]}
    if not cells:
        raise ValueError(f"no {CONTROL_COLUMN}, which other images of the file have; list those without it elsewhere")
    found = []
    for column in sort_control_columns(cells):
        if not isinstance(cells[column], str):
            raise ValueError(f"{column}: expected a path, got {cells[column]!r}")
        path = _find_file(_iter_candidates(cells[column], metadata, subset), metadata)
        if path is None:
            raise ValueError(f"{column}: {_describe_missing(cells[column], metadata, subset)}")
        found.append(ImageRef(path.parent, path.name))
    return tuple(found)


def _iter_candidates(name: str, metadata: _Metadata, subset: SubsetConfig) -> Iterator[Path]:
    """Yield where the file of a path may be: relative to each of the folders in turn."""
    if is_remote_url(name):
        yield build_remote_path(name, subset.remote)
    else:
        yield from (folder / name for folder in metadata.folders)


def _find_file(candidates: Iterable[Path], metadata: _Metadata) -> Path | None:
    """Find the first file that exists, with or without its extension; a clip may be a folder of images."""
    for path in candidates:
        if path.is_file() or (metadata.has_clips and path.is_dir()):
            return path
        for extension in [] if is_remote(path) and not path.can_list else metadata.extensions:  # each a request
            if (longer := path.with_name(path.name + extension)).is_file():
                return longer
    return None


def _describe_missing(name: str, metadata: _Metadata, subset: SubsetConfig) -> str:
    """Return why no file was found: what the server says of a URL, or where a path was searched."""
    path = next(iter(_iter_candidates(name, metadata, subset)))
    if is_remote_url(name) and is_remote(path):
        try:
            path.get_info()
        except RemoteError as error:
            return f"{path}: {error}"
    searched = ", ".join(dict.fromkeys(str(folder.absolute()) for folder in metadata.folders))
    return f"{name!r} not found in {searched}"


def _parse_caption(values: Mapping[str, Any], column: str | None, subset: SubsetConfig) -> list[str]:
    """Return the lines of the caption; raise ``ValueError`` if there are none."""
    if column is None:
        return _join_caption_and_tags(values, subset)
    if subset.uses_musubi_captions and not subset.enable_wildcard and isinstance(values.get(column), str):
        return [values[column]]
    lines = parse_caption_cell(values.get(column), column)
    if not lines:
        raise ValueError(f"no text in {column}")
    return lines


def _join_caption_and_tags(values: Mapping[str, Any], subset: SubsetConfig) -> list[str]:
    """Join caption and tags as sd-scripts does; with ``enable_wildcard``, each line of the caption gets the tags."""
    caption, tags = (_parse_text(values, name) for name in _KOHYA_COLUMNS)
    if not caption and not tags:
        raise ValueError("no caption and no tags")
    lines = split_lines(caption) if subset.enable_wildcard else [caption]
    return [subset.caption_separator.join(filter(None, (line, tags))) for line in lines or [""]]


def _parse_text(values: Mapping[str, Any], name: str) -> str:
    parse_caption_cell(values.get(name), name)  # raises for other types
    cell = values.get(name) or ""
    return (cell if isinstance(cell, str) else "\n".join(filter(None, cell))).strip()
