"""Which pictures a subset means and what their captions are, before any picture is opened."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .captions import caption_ending, caption_names, read_caption
from .dataset_schema import SubsetConfig
from .origin import Origin

PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".jxl")
SHOWN_NAMES = 3


@dataclass(frozen=True)
class FoundPicture:
    """A picture file and its caption."""

    image: Origin
    caption: str
    dataset: int
    subset: int
    problem: str | None = None  # with the caption: a whole line


@dataclass
class Listing:
    """What one subset holds."""

    found: list[FoundPicture] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)  # a line for each picture that is named and not there
    problems: list[str] = field(default_factory=list)  # with the subset as a whole
    notes: list[str] = field(default_factory=list)
    caption_ending: str = ""
    captions: int = 0


def find_pictures(subset: SubsetConfig, dataset: int, index: int) -> Listing:
    """The pictures of a subset in the order of their names."""
    metadata = subset.metadata()
    if metadata is not None:
        return _from_metadata(subset, metadata, dataset, index)
    folder = subset.folder()
    if folder is None:
        raise AssertionError("a subset without metadata_file has an image_dir")
    return _from_folder(subset, folder, dataset, index)


def _from_folder(subset: SubsetConfig, folder: Path, dataset: int, index: int) -> Listing:
    listing = Listing()
    names = sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir())
    names = [name for name in names if not name.startswith(".")]  # such as the "._a.png" that macOS leaves behind
    pictures = [name for name in names if name.lower().endswith(PICTURE_ENDINGS)]
    if not pictures:
        listing.problems.append(f"{subset.place('image_dir')}: image_dir: no pictures; {_what_is_there(folder, names)}")
        return listing
    present = set(names)
    listing.caption_ending, is_fallback = caption_ending(subset, present)
    without, several = [], 0
    for name in pictures:
        text = next((folder / other for other in caption_names(name.rpartition(".")[0], listing.caption_ending)
                     if other in present), None)  # fmt: skip
        caption, problem = subset.class_tokens or "", None
        if text is None:
            without.append(name)
        else:
            listing.captions += 1
            try:
                lines = read_caption(text)
                several += len(lines) > 1
                caption = "\n".join(lines) if subset.enable_wildcard else lines[0]
            except ValueError as error:
                problem = f"{text}: {error}"
        listing.found.append(FoundPicture(Origin(folder, name), caption, dataset, index, problem))
    if is_fallback:
        listing.notes.append(f"{folder}: no {subset.caption_ending} files; captions are read from .txt")
    if several and not subset.enable_wildcard:
        listing.notes.append(f"{folder}: {several} captions have several lines, of which the first is used;"
                             " enable_wildcard takes one of them each time")  # fmt: skip
    if without:
        instead = f"{subset.class_tokens!r} is their caption" if subset.class_tokens else "their caption is empty"
        listing.notes.append(f"{folder}: {len(without)} of {len(pictures)} pictures have no {listing.caption_ending}"
                             f" file, {instead}: {_first(without)}")  # fmt: skip
    return listing


def _what_is_there(folder: Path, names: list[str]) -> str:
    """What was seen in a folder without pictures, and the way out."""
    folders = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    kinds = Counter(Path(name).suffix.lower() or "without an ending" for name in names)
    seen = [f"{count} {kind}" for kind, count in kinds.most_common(4)]
    below = {}
    for name in folders[:50]:
        count = sum(item.name.lower().endswith(PICTURE_ENDINGS) for item in os.scandir(folder / name))
        if count:
            below[name] = count
    seen += [f"{count} pictures one level down in {name}/" for name, count in list(below.items())[:3]]
    seen += [f"folder {name}/" for name in folders[:3] if name not in below]
    what = f"{folder.absolute()} has {', '.join(seen) if seen else 'nothing in it'}"
    if below:
        return f"{what}; folders are not searched below: set image_dir = {str(folder / next(iter(below)))!r}"
    return f"{what}; pictures end in {' '.join(PICTURE_ENDINGS)}"


def _first(names: list[str]) -> str:
    return ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")


def _from_metadata(subset: SubsetConfig, metadata: Path, dataset: int, index: int) -> Listing:
    """Pictures and captions as a .json or .jsonl file names them; the caption is followed by the tags."""
    listing = Listing(caption_ending=metadata.suffix.lower())
    try:
        entries = list(_entries(metadata))
    except ValueError as error:
        listing.problems.append(f"{subset.place('metadata_file')}: metadata_file: {error}")
        return listing
    if not entries:
        listing.problems.append(f"{subset.place('metadata_file')}: metadata_file: {metadata} names no pictures")
    folder = subset.folder()
    for name, values, place in entries:
        image = _located(name, folder, metadata)
        if image is None:
            listing.absent.append(f"{place}: {name!r} is not there; looked in {_folders(folder, metadata)}")
            continue
        caption, problem = "", None
        try:
            caption = _with_tags(values, subset)
            listing.captions += 1
        except ValueError as error:
            problem = f"{place}: {name!r}: {error}"
        listing.found.append(FoundPicture(Origin(image.parent, image.name), caption, dataset, index, problem))
    return listing


def _entries(metadata: Path) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Name, values and place of each picture; ``ValueError`` when the file cannot be understood."""
    try:
        text = metadata.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{metadata} is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"{metadata} cannot be read: {error.strerror}") from None
    if metadata.suffix.lower() == ".jsonl":
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                values = _parsed(line, f"{metadata}:{number}")
                name = values.get("image_path")
                if not isinstance(name, str):
                    raise ValueError(f"{metadata}:{number} has no image_path")
                yield name, values, f"{metadata}:{number}"
        return
    for name, values in _parsed(text, str(metadata)).items():
        if not isinstance(values, dict):
            raise ValueError(f"{metadata}: {name!r}: expected an object with caption or tags")
        yield name, values, str(metadata)


def _parsed(text: str, place: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{place}: expected an object {{...}}")
    return values


def _located(name: str, folder: Path | None, metadata: Path) -> Path | None:
    """The file meant by a path, or by a name without its ending, as seen from each of the folders in turn."""
    for base in [Path(), *([folder] if folder is not None else []), metadata.parent]:
        path = base / name
        if path.is_file():
            return path
        for ending in PICTURE_ENDINGS:
            if (longer := path.with_name(path.name + ending)).is_file():
                return longer
    return None


def _folders(folder: Path | None, metadata: Path) -> str:
    bases = [Path.cwd(), *([folder.absolute()] if folder is not None else []), metadata.parent.absolute()]
    return ", ".join(dict.fromkeys(map(str, bases)))


def _with_tags(values: Mapping[str, Any], subset: SubsetConfig) -> str:
    """Caption and tags in one; of several lines, which are alternatives, each gets the tags."""
    for name in ("caption", "tags"):
        if values.get(name) is not None and not isinstance(values[name], str):
            raise ValueError(f"{name} is no text: {values[name]!r}")
    caption, tags = (str(values.get(name) or "").strip() for name in ("caption", "tags"))
    if not caption and not tags:
        raise ValueError("has neither caption nor tags")
    lines = [line.strip() for line in caption.split("\n") if line.strip()] if subset.enable_wildcard else [caption]
    return "\n".join(subset.caption_separator.join(filter(None, (line, tags))) for line in lines or [""])
