"""What a subset holds, as far as it can be told before any picture is opened."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    absent: list[str] = field(default_factory=list)  # a line for each picture that is named and cannot be had
    problems: list[str] = field(default_factory=list)  # with the subset as a whole
    notes: list[str] = field(default_factory=list)
    wanted_ending: str = ""
    captions_from: Counter[str] = field(default_factory=Counter)  # ending or name of the file -> captions read from it
    with_lines: int = 0  # captions of several lines
    without: list[str] = field(default_factory=list)  # names of pictures that have no caption
    used: set[str] = field(default_factory=set)  # settings, by "file:line: key" and value
    unused: dict[str, str] = field(default_factory=dict)  # likewise, with a line for when no other subset uses them

    @property
    def captions(self) -> int:
        return sum(self.captions_from.values())

    @property
    def caption_ending(self) -> str:
        """Where captions were read from; if nowhere, where they were looked for."""
        if len(self.captions_from) < 2:
            return next(iter(self.captions_from), self.wanted_ending)
        return ", ".join(f"{count} {source}" for source, count in self.captions_from.most_common())

    def caption_of(self, lines: Sequence[str], source: str, subset: SubsetConfig) -> str:
        """Count a caption that was read, and return what of it may be shown."""
        self.captions_from[source] += 1
        if subset.joins_lines and not subset.enable_wildcard:
            return " ".join("\n".join(lines).split("\n"))
        self.with_lines += len(lines) > 1 or "\n" in lines[0]
        return "\n".join(lines) if subset.enable_wildcard else lines[0]

    def conclude(self, place: str, subset: SubsetConfig, caption: str = "caption") -> None:
        """Say what is to be said about all captions together; ``caption`` is what was looked for."""
        if self.with_lines and not subset.enable_wildcard:
            self.notes.append(f"{place}: {self.with_lines} captions have several lines, of which the first is used;"
                              " enable_wildcard takes one of them each time")  # fmt: skip
        if self.without:
            instead = f"{subset.class_tokens!r} is their caption" if subset.class_tokens else "their caption is empty"
            self.notes.append(f"{place}: {len(self.without)} of {len(self.found)} pictures have no"
                              f" {caption}, {instead}: {first_of(self.without)}")  # fmt: skip


def first_of(names: Sequence[str]) -> str:
    """The first few names, with dots when there are more."""
    return ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")


def is_picture(name: str) -> bool:
    """By its ending."""
    return name.lower().endswith(PICTURE_ENDINGS)
