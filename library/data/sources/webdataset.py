"""Pictures and captions in tar shards, as webdataset and img2dataset write them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..caption_files import DEFAULT, FALLBACK, decoded, lines_of
from ..dataset_schema import SubsetConfig
from ..listing import PICTURE_ENDINGS, FoundPicture, Listing
from ..origin import Origin, Part
from .json_captions import ColumnError, JsonCaptions
from .shards import shards_of
from .tar import Member, read_archive

_OBJECT = ".json"


@dataclass
class Group:
    """Members with one key: their path up to the first dot of the name; by what follows, in lower case."""

    members: dict[str, Member] = field(default_factory=dict)

    def with_ending(self, endings: Sequence[str]) -> list[str]:
        """Endings of its members that are among these; if there are none, those that end so."""
        plain = [ending for ending in self.members if ending in endings]
        return plain or [ending for ending in self.members if ending.endswith(tuple(endings))]


def from_webdataset(subset: SubsetConfig, dataset: int, index: int) -> Listing:
    """Every picture of every shard, in the order of the shards and of their members."""
    listing = Listing(wanted_ending=" or ".join(subset.caption_endings))
    shards = shards_of(subset)
    listing.problems += shards.problems
    objects = JsonCaptions(subset.caption_column)
    others: Counter[str] = Counter()
    for path in shards.files:
        archive = read_archive(path)
        listing.absent += archive.problems
        groups = dict(_groups(archive.members, path, listing))
        try:
            with path.open("rb") as file:
                _add(subset, path, file, groups, objects, others, dataset, index, listing)
        except OSError as error:
            listing.absent.append(f"{path}: cannot be read: {error.strerror}")
        except ColumnError as error:
            listing.problems.append(f"{subset.place('webdataset')}: webdataset: {error}")
            break
    if not listing.found and not listing.problems and not listing.absent:
        seen = ", ".join(f"{count} {ending}" for ending, count in others.most_common(4)) or "nothing"
        listing.problems.append(f"{subset.place('webdataset')}: webdataset: no pictures in {len(shards.files)} files,"
                                f" which hold {seen}; pictures end in {' '.join(PICTURE_ENDINGS)}")  # fmt: skip
    elif others:
        seen = ", ".join(f"{count} {ending}" for ending, count in others.most_common(4))
        listing.notes.append(f"{subset.source}: also holds what is not used: {seen}")
    listing.conclude(subset.source, subset)
    if "caption_column" in subset.places:
        line = f"{subset.places['caption_column']}: caption_column: no caption was read from .json in {subset.source}"
        setting = f"{subset.places['caption_column']}: caption_column"
        listing.unused[setting] = line
        listing.used |= {setting} if objects.column is not None else set()
    return listing


def _groups(members: Sequence[Member], path: Path, listing: Listing) -> Iterator[tuple[str, Group]]:
    groups: dict[str, Group] = {}
    for member in members:
        folder, slash, name = member.name.rpartition("/")
        stem, dot, ending = name.partition(".")
        group = groups.setdefault(f"{folder}{slash}{stem}", Group())
        if dot + ending.lower() in group.members:
            listing.absent.append(f"{path}: member {member.name!r} stands twice in it; give it a name of its own")
        group.members.setdefault(dot + ending.lower(), member)
    yield from groups.items()


def _add(subset: SubsetConfig, path: Path, file: BinaryIO, groups: dict[str, Group], objects: JsonCaptions,
         others: Counter[str], dataset: int, index: int, listing: Listing) -> None:  # fmt: skip
    endings = _caption_endings(subset.caption_endings, groups)
    folder = path.parent
    for key, group in groups.items():
        pictures = group.with_ending(PICTURE_ENDINGS)
        text, source = next(((found[0], ending) for ending in endings if (found := group.with_ending([ending]))),
                            (None, ""))  # fmt: skip
        others.update(ending for ending in group.members if ending != text and ending not in pictures[:1])
        if len(pictures) > 1:
            listing.absent.append(f"{path}: {key!r} has several pictures: {', '.join(pictures)}; what stands before the"
                                  " first dot of a name tells pictures apart")  # fmt: skip
        if len(pictures) != 1:
            continue
        picture = group.members[pictures[0]]
        caption, problem = subset.class_tokens or "", None
        lines: Sequence[str] = ()
        try:
            if text is not None:
                lines = _lines(group.members[text], text, file, path, objects)
        except ColumnError:
            raise
        except ValueError as error:
            problem = str(error)
        if lines:
            caption = listing.caption_of(lines, source, subset)
        elif problem is None:
            listing.without.append(picture.name)
        origin = Origin(folder, path.name, Part(picture.name, picture.offset, picture.size))
        listing.found.append(FoundPicture(origin, caption, dataset, index, problem))


def _caption_endings(wanted: Sequence[str], groups: dict[str, Group]) -> Sequence[str]:
    """Those that were asked for; where .caption was and none of a shard's members has one, .txt, or else .json."""
    for endings in (wanted, *(([FALLBACK], [_OBJECT]) if DEFAULT in wanted else ())):
        if any(group.with_ending(endings) for group in groups.values()):
            return [ending.lower() for ending in endings]
    return wanted


def _lines(member: Member, ending: str, file: BinaryIO, path: Path, objects: JsonCaptions) -> Sequence[str]:
    file.seek(member.offset)
    place = f"{path}: member {member.name!r}"
    try:
        text = decoded(file.read(member.size))
    except ValueError as error:
        raise ValueError(f"{place} {error}") from None
    if ending.endswith(_OBJECT):
        return objects.lines(text, place)
    lines = lines_of(text)
    if not lines:
        raise ValueError(f"{place} is empty; write a caption, or leave it out if the picture has none")
    return lines
