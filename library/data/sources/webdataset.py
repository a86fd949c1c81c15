"""Pictures and captions in tar shards, as webdataset and img2dataset write them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ...dataset.schema import SubsetConfig
from ..caption_files import DEFAULT, FALLBACK, decoded, lines_of
from ..listing import PICTURE_ENDINGS, CaptionLines, Listing
from ..origin import Origin, Part
from .json_captions import ENDING, ColumnError, JsonCaptions
from .shards import shards_of
from .tar import Member, read_archive


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
    listing = Listing(subset, dataset, index, wanted_ending=" or ".join(subset.caption_endings))
    shards = shards_of(subset)
    listing.problems += shards.problems
    objects = JsonCaptions(subset.caption_column)
    others: Counter[str] = Counter()
    for path in shards.files:
        archive = read_archive(path)
        listing.absent += archive.problems
        groups = _groups(archive.members, path, listing)
        try:
            with path.open("rb") as file:
                others += _add_pictures(path, file, groups, objects, listing)
        except OSError as error:
            listing.absent.append(f"{path}: cannot be read: {error.strerror}")
        except ColumnError as error:
            listing.wrong("webdataset", str(error))
            listing.uses("caption_column")
            break
    seen = ", ".join(f"{count} {ending}" for ending, count in others.most_common(4)) or "nothing"
    if not listing.found and not listing.problems and not listing.absent:
        listing.wrong("webdataset", f"no pictures in {len(shards.files)} files, which hold {seen}; pictures end in"
                      f" {' '.join(PICTURE_ENDINGS)}")  # fmt: skip
    elif others:
        listing.notes.append(f"{subset.source}: also holds what is not used: {seen}")
    listing.conclude(subset.source)
    listing.has_no_use_for("caption_column", f"no caption was read from {ENDING} in {subset.source}")
    if objects.column is not None:
        listing.uses("caption_column")
    return listing


def _groups(members: Sequence[Member], path: Path, listing: Listing) -> Mapping[str, Group]:
    groups: dict[str, Group] = {}
    for member in members:
        folder, slash, name = member.name.rpartition("/")
        stem, dot, ending = name.partition(".")
        group = groups.setdefault(f"{folder}{slash}{stem}", Group())
        if dot + ending.lower() in group.members:
            listing.absent.append(f"{path}: member {member.name!r} stands twice in it; give it a name of its own")
        group.members.setdefault(dot + ending.lower(), member)
    return groups


def _add_pictures(path: Path, file: BinaryIO, groups: Mapping[str, Group], objects: JsonCaptions,
                  listing: Listing) -> Counter[str]:  # fmt: skip
    """The pictures of one shard; returns the endings of members that are not used."""
    endings = _caption_endings(listing.subset.caption_endings, groups)
    folder, others = path.parent, Counter[str]()
    for key, group in groups.items():
        pictures = group.with_ending(PICTURE_ENDINGS)
        text, wanted = next(((found[0], ending) for ending in endings if (found := group.with_ending([ending]))),
                            (None, ""))  # fmt: skip
        others.update(ending for ending in group.members if ending != text and ending not in pictures[:1])
        if len(pictures) > 1:
            listing.absent.append(f"{path}: {key!r} has several pictures: {', '.join(pictures)}; what stands before the"
                                  " first dot of a name tells pictures apart")  # fmt: skip
        if len(pictures) != 1:
            continue
        picture = group.members[pictures[0]]
        caption = CaptionLines() if text is None else _caption(group.members[text], wanted, file, path, objects)
        origin = Origin(folder, path.name, Part(picture.name, picture.offset, picture.size))
        listing.add(origin, picture.name, caption)
    return others


def _caption_endings(wanted: Sequence[str], groups: Mapping[str, Group]) -> Sequence[str]:
    """Those that were asked for; where .caption was and none of a shard's members has one, .txt, or else .json."""
    asked_for = [ending.lower() for ending in wanted if ending]
    instead = [[FALLBACK], [ENDING]] if DEFAULT in asked_for else []
    for endings in [asked_for, *instead]:
        if any(group.with_ending(endings) for group in groups.values()):
            return endings
    return asked_for


def _caption(member: Member, ending: str, file: BinaryIO, path: Path, objects: JsonCaptions) -> CaptionLines:
    place = f"{path}: member {member.name!r}"
    file.seek(member.offset)
    data = file.read(member.size)
    try:
        if ending == ENDING:
            return CaptionLines(objects.lines(decoded(data), place), ending)
        lines = lines_of(decoded(data))
    except ValueError as error:
        told = str(error)
        return CaptionLines(problem=told if told.startswith(place) else f"{place} {told}")
    if not lines:
        return CaptionLines(problem=f"{place} is empty; write a caption, or leave it out if the picture has none")
    return CaptionLines(lines, ending)
