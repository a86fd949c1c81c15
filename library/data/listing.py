"""What a subset holds, as far as it can be told before any picture is opened."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..dataset.schema import SubsetConfig
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


@dataclass(frozen=True)
class CaptionLines:
    """What was found as the caption of a picture: its lines, if any, where from, and what is wrong with it."""

    lines: Sequence[str] = ()
    source: str = ""  # ending of the file, its name, or the column
    problem: str | None = None  # a whole line


@dataclass
class Listing:
    """The pictures of one subset, and what there is to say about them."""

    subset: SubsetConfig
    dataset: int  # its position
    index: int  # that of the subset in it
    found: list[FoundPicture] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)  # a line for each picture that is named and cannot be had
    problems: list[str] = field(default_factory=list)  # with the subset as a whole
    notes: list[str] = field(default_factory=list)
    wanted_ending: str = ""  # where captions were looked for
    captions_from: Counter[str] = field(default_factory=Counter)
    with_lines: int = 0  # captions of several lines
    without: list[str] = field(default_factory=list)  # names of pictures that have no caption
    used: set[str] = field(default_factory=set)  # settings that had an effect
    unused: dict[str, str] = field(default_factory=dict)  # those without; what to say if they have none anywhere

    @property
    def captions(self) -> int:
        return sum(self.captions_from.values())

    @property
    def caption_ending(self) -> str:
        """Where captions were read from; if nowhere, where they were looked for."""
        if len(self.captions_from) < 2:
            return next(iter(self.captions_from), self.wanted_ending)
        return ", ".join(f"{count} {source}" for source, count in self.captions_from.most_common())

    def add(self, image: Origin, name: str, caption: CaptionLines) -> None:
        """A picture, called ``name`` if there is something to say about it."""
        text = self.subset.class_tokens or ""
        if caption.lines:
            text = self._text_of(caption)
        elif caption.problem is None:
            self.without.append(name)
        self.found.append(FoundPicture(image, text, self.dataset, self.index, caption.problem))

    def _text_of(self, caption: CaptionLines) -> str:
        self.captions_from[caption.source] += 1
        if self.subset.joins_lines and not self.subset.enable_wildcard:
            return " ".join("\n".join(caption.lines).split("\n"))
        self.with_lines += len(caption.lines) > 1 or "\n" in caption.lines[0]
        return "\n".join(caption.lines) if self.subset.enable_wildcard else caption.lines[0]

    def wrong(self, key: str, message: str) -> None:
        """Something is wrong with the subset as a whole."""
        self.problems.append(f"{self.subset.place(key)}: {key}: {message}")

    def uses(self, key: str, value: str = "") -> None:
        """A key, or one value of its list, had an effect."""
        self.used.add(f"{self.subset.place(key)}: {key}: {value}")

    def has_no_use_for(self, key: str, message: str, value: str = "") -> None:
        """It had none, which is a mistake unless it has one in another subset for which it was written, too."""
        if key in self.subset.places:
            setting = f"{self.subset.places[key]}: {key}"
            self.unused[f"{setting}: {value}"] = f"{setting}: {message}"

    def conclude(self, place: str, caption: str = "caption") -> None:
        """Say what is to be said about all captions together; ``caption`` is what was looked for."""
        if self.with_lines and not self.subset.enable_wildcard:
            self.notes.append(f"{place}: {self.with_lines} captions have several lines, of which the first is used;"
                              " enable_wildcard takes one of them each time")  # fmt: skip
        if self.without:
            tokens = self.subset.class_tokens
            instead = f"{tokens!r} is their caption" if tokens else "their caption is empty"
            self.notes.append(f"{place}: {len(self.without)} of {len(self.found)} pictures have no {caption},"
                              f" {instead}: {first_of(self.without)}")  # fmt: skip


def first_of(names: Sequence[str]) -> str:
    """The first few names, with dots when there are more."""
    return ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")


def is_picture(name: str) -> bool:
    """By its ending."""
    return name.lower().endswith(PICTURE_ENDINGS)
