"""The images of one subset with their captions, as listed before any image is opened."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..problems import Place, Problem
from .image_ref import ImageRef
from .schema import SubsetConfig

IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".jxl")
SHOWN_NAMES = 3


@dataclass(frozen=True)
class ListedImage:
    """An image and its caption."""

    image: ImageRef
    caption: str
    dataset: int
    subset: int
    problem: Problem | None = None  # a problem with the caption
    controls: tuple[ImageRef, ...] = ()  # control images that a metadata file lists, or layers
    is_clip: bool = False  # a video file, or a folder of its frames


@dataclass(frozen=True)
class ImageCaption:
    """The caption of an image as it was read: its lines, if any, where they come from, and what is wrong with it."""

    lines: Sequence[str] = ()
    source: str = ""  # extension or name of the file, or name of the column
    problem: Problem | None = None


@dataclass
class SubsetListing:
    """The images of one subset, with the problems and notes about it."""

    subset: SubsetConfig
    dataset: int  # index of the dataset
    index: int  # the number of the subset in the dataset
    images: list[ListedImage] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)  # one for each image that is listed but cannot be read
    problems: list[Problem] = field(default_factory=list)  # problems with the subset as a whole
    notes: list[str] = field(default_factory=list)
    expected_source: str = ""  # where captions are looked for
    caption_sources: Counter[str] = field(default_factory=Counter)
    multiline_captions: int = 0
    uncaptioned: list[str] = field(default_factory=list)  # names of the images without a caption
    used_settings: set[tuple[Place, str]] = field(default_factory=set)  # those with an effect, and the value of a list
    unused_settings: dict[tuple[Place, str], Problem] = field(default_factory=dict)  # if no other subset uses them

    @property
    def num_captions(self) -> int:
        return sum(self.caption_sources.values())

    @property
    def caption_source(self) -> str:
        """The place that captions were read from, or that they were expected in if there are none."""
        if len(self.caption_sources) < 2:
            return next(iter(self.caption_sources), self.expected_source)
        return ", ".join(f"{count} {source}" for source, count in self.caption_sources.most_common())

    has_clips: bool = False  # video files or folders of frames instead of images

    @property
    def noun(self) -> str:
        """What the subset has, for messages."""
        return "clip" if self.has_clips else "image"

    def add_image(self, image: ImageRef, name: str, caption: ImageCaption, controls: tuple[ImageRef, ...] = ()) -> None:
        """Add an image; messages about it use ``name``."""
        text = self.subset.class_tokens or ""
        if caption.lines:
            text = self._choose_text(caption)
        elif caption.problem is None:
            self.uncaptioned.append(name)
        self.images.append(
            ListedImage(
                image=image,
                caption=text,
                dataset=self.dataset,
                subset=self.index,
                problem=caption.problem,
                controls=controls,
                is_clip=self.has_clips,
            )
        )

    def _choose_text(self, caption: ImageCaption) -> str:
        self.caption_sources[caption.source] += 1
        if self.subset.uses_musubi_captions and not self.subset.enable_wildcard:
            return "\n".join(caption.lines)
        self.multiline_captions += len(caption.lines) > 1 or "\n" in caption.lines[0]
        return "\n".join(caption.lines) if self.subset.enable_wildcard else caption.lines[0]

    def add_problem(self, key: str, text: str, fix: str = "") -> None:
        """Add a problem with the subset as a whole."""
        self.problems.append(self.subset.report(key, text, fix))

    def mark_used(self, key: str, value: str = "") -> None:
        """Note that a key, or one value of its list, had an effect."""
        self.used_settings.add((self.subset.locate(key), value))

    def mark_unused(self, key: str, message: str, value: str = "") -> None:
        """Note that it had none: an error unless it is also set for another subset, where it has one."""
        if key in self.subset.locations:
            self.unused_settings[self.subset.locate(key), value] = self.subset.report(key, message)

    def add_caption_notes(self, location: str, caption: str = "caption") -> None:
        """Add the notes about all captions together; ``caption`` says what was looked for."""
        if self.multiline_captions and not self.subset.enable_wildcard:
            self.notes.append(
                f"{location}: {format_count(self.multiline_captions, 'caption')} with several lines: only the first"
                " line is used; set enable_wildcard = true to pick a random one each time"
            )
        if self.uncaptioned:
            tokens = self.subset.class_tokens
            fallback = f"the caption {tokens!r}" if tokens else "an empty caption"
            self.notes.append(
                f"{location}: no {caption} for {len(self.uncaptioned)} of {format_count(len(self.images), self.noun)},"
                f" using {fallback}: {format_first_names(self.uncaptioned)}"
            )


def format_count(count: int, noun: str) -> str:
    """Format a number and its noun, as ``1 image`` or ``2 images``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_first_names(names: Sequence[str], max_names: int = SHOWN_NAMES) -> str:
    """Join the first few names, with dots if there are more."""
    return ", ".join(names[:max_names]) + (", ..." if len(names) > max_names else "")


def is_image_file(name: str) -> bool:
    """Whether the file has the extension of an image format."""
    return name.lower().endswith(IMAGE_EXTENSIONS)
