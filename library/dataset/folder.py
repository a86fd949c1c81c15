"""Images or clips in a folder, with caption files or the metadata.jsonl, .csv or .parquet of HF's imagefolder."""

import os
import posixpath
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from ..config.operating_systems import format_path
from ..problems import Place, Problem, report_file
from ..storage.remote_path import is_remote, prefetch_files
from .caption_files import (
    CAPTION_COLUMNS,
    JSON_EXTENSION,
    CaptionColumnError,
    CaptionFiles,
    JsonCaptionReader,
    format_choices,
    format_columns,
    parse_caption_cell,
    read_caption_file,
    resolve_caption_column,
    unify_line_breaks,
)
from .clip_decoding import VIDEO_EXTENSIONS, is_video_file
from .controls import is_control_column, match_layers
from .file_discovery import DirectoryTree, select_paths, walk_directory
from .image_ref import ImageRef
from .kohya_folders import find_unused_folder_names, has_images, parse_folder_name
from .listing import IMAGE_EXTENSIONS, ImageCaption, SubsetListing, format_count, format_first_names, is_image_file
from .metadata_file import TABLE_EXTENSIONS, read_metadata_table, read_utf8_file, resolve_file_column
from .schema import SubsetConfig

METADATA_NAMES = tuple(f"metadata{extension}" for extension in TABLE_EXTENSIONS)
_FILE_COLUMN = "file_name"
_COMMON_CAPTION_EXTENSIONS = (".txt", ".caption")
_MAX_FOLDERS_SEARCHED = 50
"""Folders that are searched to suggest where the images are."""


def list_folder_images(subset: SubsetConfig, folder: Path, dataset: int, index: int) -> SubsetListing:
    """List the images of ``image_dir``, or the clips of ``video_dir``, in the order of their paths."""
    listing = SubsetListing(subset, dataset, index, has_clips=subset.video_dir is not None)
    tree = walk_directory(folder, recursive=subset.recursive)
    listing.problems += tree.problems
    images = _select_images(folder, tree, listing)
    files = CaptionFiles(tree.files, subset.normalized_caption_extensions, subset.can_fall_back_to_txt)
    listing.expected_source = " or ".join(files.extensions)
    layers = _find_layers(images, files, listing)
    images = [image for image in images if image in layers]
    caption_files = {image: files.find(image) for image in images}
    if subset.uses_musubi_captions and images:
        caption_files = _drop_uncaptioned(folder, caption_files, listing)
    has_column_setting = subset.caption_column is not None or subset.image_column is not None
    is_needed = has_column_setting or None in caption_files.values()
    tables = _read_folder_tables(folder, tree, caption_files.keys(), is_needed, listing)
    if listing.problems:
        return listing
    _add_images(folder, caption_files, table_captions=tables.captions, layers=layers, listing=listing)
    if files.is_fallback:
        extensions = " or ".join(subset.normalized_caption_extensions)
        listing.notes.append(f"{folder}: no {extensions} files; captions are read from {files.extensions[0]} files")
    in_tables = f" and no text in {', '.join(tables.names)}" if tables.names else ""
    listing.add_caption_notes(str(folder), f"{listing.expected_source} file{in_tables}")
    _suggest_caption_extension(folder, tree, files, listing)
    num_files, used_files = sum(map(len, files.by_stem.values())), {file for file in caption_files.values() if file}
    if num_files > len(used_files) and (stray := files.list_without_image(filter(get_file_test(listing), tree.files))):
        count, owner = format_count(len(stray), "caption file"), "a clip" if listing.has_clips else "an image"
        listing.notes.append(f"{folder}: {count} without {owner}, not used: {format_first_names(stray)}")
    listing.notes += find_unused_folder_names(listing, folder, tree.folders)
    for key in ("image_column", "caption_column"):
        listing.mark_unused(key, f"no effect: no metadata table in {folder.absolute()}")
    return listing


def get_file_test(listing: SubsetListing) -> Callable[[str], bool]:
    """Return the function that tells the images of a subset, or its clips, from other files."""
    return is_video_file if listing.has_clips else is_image_file


def _select_images(folder: Path, tree: DirectoryTree, listing: SubsetListing) -> list[str]:
    """Return the images or clips that ``include`` and ``exclude`` select."""
    subset, noun = listing.subset, listing.noun
    images = list(filter(get_file_test(listing), tree.files))
    if not images and not tree.problems and listing.has_clips:
        listing.add_problem("video_dir", f"no clips; {_describe_content_without_clips(folder, tree)}")
    elif not images and not tree.problems:
        listing.add_problem("image_dir", f"no images; {_describe_content(folder, tree)}")
    if tree.loops:
        loops = format_first_names(tree.loops)
        listing.notes.append(f"{folder}: links to folders that are searched anyway are not followed: {loops}")
    selection = select_paths(images, subset.include, subset.exclude)
    count, names = format_count(len(images), noun), format_first_names(images)
    all_images = f"the {noun}s in {folder.absolute()} ({count}: {names})"
    if images and not selection.paths:
        key = "include" if subset.include else "exclude"
        listing.add_problem(key, f"include and exclude select none of {all_images}")
        return []
    for key, text in selection.matched:
        listing.mark_used(key, text)
    for key, text in selection.unmatched if images else ():
        listing.mark_unused(key, f"{text!r} matches none of {all_images}", text)
    if subset.include or subset.exclude:
        listing.notes.append(f"{folder}: include and exclude select {len(selection.paths)} of {len(images)} {noun}s")
    if (
        not subset.recursive
        and images
        and not listing.has_clips
        and (below := _list_image_folders(folder, tree.folders))
    ):
        subfolders = format_first_names([f"{name}/" for name in below])
        hint = "set recursive = true to use them"
        listing.notes.append(f"{folder}: images in subfolders are not used; {hint}: {subfolders}")
    return selection.paths


def _drop_uncaptioned(
    folder: Path, caption_files: Mapping[str, tuple[str, str] | None], listing: SubsetListing
) -> dict[str, tuple[str, str] | None]:
    """Leave out the images without a caption file, which musubi-tuner does not train on; of clips it wants one."""
    found: dict[str, tuple[str, str] | None] = {
        image: file for image, file in caption_files.items() if file is not None
    }
    missing = [image for image in caption_files if image not in found]
    if listing.has_clips:
        fix = f"write one ({listing.expected_source}), which may be empty"
        listing.missing += [report_file(folder / clip, "has no caption file", fix) for clip in missing]
    elif missing:
        text = f"{format_count(len(missing), 'image')} without a caption file ({listing.expected_source})"
        if not found:
            fix = "" if listing.subset.caption_extension else "set caption_extension"
            listing.add_problem("image_dir", f"{text} in {folder.absolute()}, and none with one", fix)
        listing.notes.append(f"{folder}: {text} left out, as in musubi-tuner: {format_first_names(missing)}")
    return found


def _find_layers(images: Sequence[str], files: CaptionFiles, listing: SubsetListing) -> dict[str, tuple[str, ...]]:
    """Return the pictures with their layers, of which only ``multiple_target`` makes some."""
    if not listing.subset.multiple_target:
        return dict.fromkeys(images, ())
    try:
        layers = match_layers(images, lambda image: files.find(image) is not None)
    except ValueError as error:
        listing.add_problem("multiple_target", str(error))
        return dict.fromkeys(images, ())
    if not any(layers.values()) and images:
        listing.add_problem("multiple_target", "no image has layers: no NAME_0.png without a caption beside NAME.png")
    return layers


def _add_images(
    folder: Path,
    caption_files: Mapping[str, tuple[str, str] | None],
    *,
    table_captions: Mapping[str, ImageCaption],
    layers: Mapping[str, tuple[str, ...]],
    listing: SubsetListing,
) -> None:
    json_reader = JsonCaptionReader(listing.subset.caption_column)
    if is_remote(folder):
        prefetch_files(cast(Path, folder / file[0]) for file in caption_files.values() if file is not None)
    for image, file in caption_files.items():
        try:
            if file is None:
                caption = table_captions.get(image, ImageCaption())
            elif listing.subset.uses_musubi_captions and not listing.subset.enable_wildcard:
                caption = _read_whole_caption(folder, *file)
            else:
                caption = _read_caption(folder, *file, json_reader)
        except CaptionColumnError as error:
            listing.add_problem("caption_extension", str(error))
            listing.mark_used("caption_column")
            return
        controls = tuple(ImageRef(folder, layer) for layer in layers[image])
        listing.add_image(ImageRef(folder, image), image, caption, controls)
    if json_reader.column is not None:
        listing.mark_used("caption_column")


def _read_caption(folder: Path, name: str, extension: str, json_reader: JsonCaptionReader) -> ImageCaption:
    path = cast(Path, folder / name) if is_remote(folder) else os.path.join(folder, name)
    if extension.lower() == JSON_EXTENSION:
        try:
            text = read_utf8_file(path)
        except ValueError as error:
            return ImageCaption((), extension, Problem("", str(error)))
        try:
            return ImageCaption(json_reader.read_lines(text), extension)
        except ValueError as error:
            return ImageCaption((), extension, report_file(path, str(error)))
        except CaptionColumnError as error:
            raise CaptionColumnError(f"{path}: {error}") from None
    try:
        return ImageCaption(read_caption_file(path), extension)
    except ValueError as error:
        return ImageCaption((), extension, report_file(path, str(error)))


def _read_whole_caption(folder: Path, name: str, extension: str) -> ImageCaption:
    """Read a caption file as one caption, with its line breaks; an empty one is an empty caption."""
    try:
        text = read_utf8_file(cast(Path, folder / name) if is_remote(folder) else os.path.join(folder, name))
    except ValueError as error:
        return ImageCaption((), extension, Problem("", str(error)))
    return ImageCaption((unify_line_breaks(text).strip(),), extension)


@dataclass
class _FolderTables:
    """Captions from the metadata tables in a folder and its subfolders."""

    captions: dict[str, ImageCaption] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # the names of the tables that were read
    deeper: list[str] = field(default_factory=list)  # images in subfolders that are not searched


def _read_folder_tables(
    folder: Path, tree: DirectoryTree, images: Collection[str], is_needed: bool, listing: SubsetListing
) -> _FolderTables:
    """Read the metadata tables if captions are needed from them; problems and notes go into the listing."""
    tables = _FolderTables()
    files = set(tree.files)
    by_folder: defaultdict[str, list[str]] = defaultdict(list)
    for path in tree.files:
        if posixpath.basename(path) in METADATA_NAMES:
            by_folder[posixpath.dirname(path)].append(path)
    # a table in a subfolder overwrites those above it
    for parent in sorted(by_folder, key=lambda path: path.count("/") + bool(path)):
        paths = by_folder[parent]
        if not is_needed:
            listing.notes.append(f"{folder}: {', '.join(paths)} is not used: every image has a caption file")
        elif len(paths) > 1:
            hint = "keep one of them, or set metadata_file = 'FILE'"
            listing.add_problem(
                listing.subset.source_key, f"several metadata tables in {folder}: {', '.join(paths)}; {hint}"
            )
        else:
            try:
                _read_folder_table(folder, path=paths[0], files=files, images=images, tables=tables, listing=listing)
            except ValueError as error:
                listing.add_problem(listing.subset.source_key, str(error))
    if tables.deeper:
        names = format_first_names(tables.deeper)
        listing.notes.append(
            f"{folder}: not used: {format_count(len(tables.deeper), 'image')} in subfolders, listed in"
            f" {tables.names[0]}; set recursive = true to use them: {names}"
        )
    return tables


def _read_folder_table(
    folder: Path,
    path: str,
    files: set[str],
    images: Collection[str],
    tables: _FolderTables,
    listing: SubsetListing,
) -> None:
    """Read one table; raise ``ValueError`` if it is not valid."""
    subset = listing.subset
    options = filter(None, (subset.image_column, subset.caption_column))
    table = read_metadata_table(folder / path, {_FILE_COLUMN, *CAPTION_COLUMNS, *options})
    if controls := [name for name in table.columns if is_control_column(name)]:
        raise ValueError(f"{table.path}: column {controls[0]}: read only from a metadata_file; set it instead")
    if subset.image_column is None and _FILE_COLUMN not in table.columns:
        hint = "set metadata_file to read other formats"
        listing.notes.append(f"{table.path}: not used: no column {_FILE_COLUMN}; {hint}")
        return
    file_column = _FILE_COLUMN if subset.image_column is None else resolve_file_column(table, subset.image_column)
    if subset.caption_column is None and subset.class_tokens and not set(CAPTION_COLUMNS) & set(table.columns):
        names, columns = format_choices(CAPTION_COLUMNS), format_columns(table.columns)
        listing.notes.append(f"{table.path}: not used: no column {names}; columns are {columns}")
        return
    try:
        caption_column = resolve_caption_column(table.columns, subset.caption_column)
    except ValueError as error:
        raise ValueError(f"{table.path}: {error}") from None
    for key in ("image_column", "caption_column"):
        listing.mark_used(key)
    tables.names.append(path)
    first_locations: dict[str, Place] = {}
    for number, values in table.rows:
        name, location = values.get(file_column), table.locate_row(number)
        image = posixpath.normpath(posixpath.join(posixpath.dirname(path), str(name)))
        if not isinstance(name, str) or not name:
            listing.missing.append(Problem("", f"no {file_column}", place=location))
        elif image in first_locations:
            listing.missing.append(
                Problem("", f"{name!r} is already listed in {first_locations[image]}", "remove one", place=location)
            )
        elif image in images:
            tables.captions[image] = _parse_table_caption(values, caption_column, table.path.name, location)
        elif image not in files and is_image_file(image) and (folder / image).is_file():
            tables.deeper.append(image)
        elif image not in files:
            listing.missing.append(Problem("", f"{name!r} not found in {folder.absolute()}", place=location))
        first_locations.setdefault(image, location)


def _parse_table_caption(values: Mapping[str, Any], column: str, source: str, location: Place) -> ImageCaption:
    try:
        return ImageCaption(parse_caption_cell(values.get(column), column), source)
    except ValueError as error:
        return ImageCaption((), source, Problem("", str(error), place=location))


def _suggest_caption_extension(folder: Path, tree: DirectoryTree, files: CaptionFiles, listing: SubsetListing) -> None:
    """Note images without a caption that have a file with the other common extension."""
    for extension in _COMMON_CAPTION_EXTENSIONS:
        if not listing.uncaptioned or extension in files.extensions:
            continue
        others = CaptionFiles(tree.files, [extension])
        if extension not in others.extensions:  # it fell back to another one
            continue
        count = sum(others.find(name) is not None for name in listing.uncaptioned)
        if count:
            used = files.extensions if any(files.by_stem.values()) or listing.subset.caption_extension else ()
            listing.notes.append(
                f"{folder}: there are {extension} files for {count} of the images without a caption; use them with"
                f" {_format_caption_extension(listing.subset, [*used, extension])}"
            )


def _format_caption_extension(subset: SubsetConfig, extensions: Sequence[str]) -> str:
    """Format the setting as it is written in the dataset file, or as a flag if there is none."""
    if subset.dataset_file is None:
        return f"--caption_extension {' '.join(extensions)}"
    return f"caption_extension = {list(extensions) if len(extensions) > 1 else extensions[0]!r}"


def _describe_content(folder: Path, tree: DirectoryTree) -> str:
    """Describe a folder without images, and suggest where they may be."""
    kinds = Counter(PurePosixPath(name).suffix.lower() or "without extension" for name in tree.files)
    content = [f"{count} {kind}" for kind, count in kinds.most_common(4)]
    below = {name: _count_images(folder / name) for name in _list_image_folders(folder, tree.folders)}
    content += [f"{format_count(count, 'image')} in {name}/" for name, count in list(below.items())[:3]]
    content += [f"folder {name}/" for name in tree.folders[:3] if name not in below]
    description = f"{folder.absolute()} contains {', '.join(content) if content else 'nothing'}"
    if below and all(parse_folder_name(name) for name in below):
        return (
            f"{description}; give --train_data_dir {str(folder)!r} instead of the dataset file, or a subset with"
            " num_repeats and class_tokens for each subfolder"
        )
    if below:
        nested = format_path(folder / next(iter(below)))
        return f"{description}; subfolders are not searched: set recursive = true, or image_dir = {nested}"
    for key, extension in (("parquet", ".parquet"), ("parquet", ".arrow"), ("webdataset", ".tar")):
        if kinds[extension]:
            return f"{description}; for {extension} files set {key} = {str(folder)!r} instead of image_dir"
    return f"{description}; image extensions are {' '.join(IMAGE_EXTENSIONS)}"


def _describe_content_without_clips(folder: Path, tree: DirectoryTree) -> str:
    """Describe a folder without video files, and what to do about it."""
    hint = "; set recursive = true to search its folders" if tree.folders else ""
    extensions = f"video extensions are {' '.join(VIDEO_EXTENSIONS)}"
    return f"{folder.absolute()} contains {tree.format_content()}{hint}; {extensions}"


def _list_image_folders(folder: Path, names: Sequence[str]) -> list[str]:
    """List the subfolders that contain images."""
    return [name for name in names[:_MAX_FOLDERS_SEARCHED] if has_images(folder / name)]


def _count_images(folder: Path) -> int:
    if is_remote(folder):
        return sum(map(is_image_file, folder.list_folder(recursive=False).files))
    with os.scandir(folder) as entries:
        return sum(is_image_file(entry.name) for entry in entries)
