"""Write captions for the images of folders with a model: in batches, resumable, keeping what is there unless told."""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..dataset.image_decoding import load_rgb_image, silence_pillow_warnings
from ..log import ProgressBar
from ..problems import Problem, report_file
from .caption_folder import CaptionedImage, write_caption
from .tag_edits import split_tags

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)
DRY_RUN_EXAMPLES = 3


class Captioner(Protocol):
    """A model that writes captions."""

    def write_captions(self, images: Sequence["Image"]) -> list[str]:
        """Return the caption of each image."""
        ...


@dataclass(frozen=True)
class CaptionFormat:
    """The texts that are put around the model's caption."""

    caption_prefix: str = ""
    caption_suffix: str = ""
    trigger_word: str = ""
    """A text that begins each caption that does not contain it as whole words."""
    if_exists: str = "keep"

    def build(self, text: str, existing: str | None) -> str:
        """Build the content of the caption file; ``append`` adds the tags that the existing caption lacks."""
        text = f"{self.caption_prefix}{text}{self.caption_suffix}".strip()
        if self.if_exists == "append" and existing and existing.strip():
            has = split_tags(existing)
            added = [tag for tag in split_tags(text) if tag not in has]
            text = ", ".join([existing.strip().rstrip(","), *added])
        if self.trigger_word and not _contains_words(text, self.trigger_word):
            text = f"{self.trigger_word}, {text}" if text else self.trigger_word
        return text


def _contains_words(text: str, words: str) -> bool:
    """Tell whether a text has these words as they are, and not as a part of longer words, as ``cathedral`` has cat."""
    return re.search(rf"(?<![\w-]){re.escape(words)}(?![\w-])", text) is not None


@dataclass
class CaptionSummary:
    """The number of captions written and kept, and the images that could not be decoded."""

    written: int
    kept: int
    problems: list[Problem]


def select_images(images: Sequence[CaptionedImage], if_exists: str) -> list[CaptionedImage]:
    """Return the images that get a caption; with ``keep``, a run that was stopped goes on where it was."""
    return [image for image in images if if_exists != "keep" or not image.has_caption]


def write_folder_captions(
    images: Sequence[CaptionedImage], build_captioner: Callable[[], Captioner], style: CaptionFormat, batch_size: int
) -> CaptionSummary:
    """Write the caption file of each image."""
    chosen, problems, written = select_images(images, style.if_exists), list[Problem](), 0
    if not chosen:
        return CaptionSummary(0, len(images), problems)
    captioner = build_captioner()
    with ProgressBar(len(chosen), 0, "captions", enabled=True, unit="image") as progress:
        for batch, pixels in _load_batches(chosen, batch_size, problems):
            for image, text in zip(batch, captioner.write_captions(pixels), strict=True):
                write_caption(image.caption_file, style.build(text, image.text))
                written += 1
            progress.update({}, len(batch))
    return CaptionSummary(written, len(images) - len(chosen), problems)


def preview_captions(
    images: Sequence[CaptionedImage], build_captioner: Callable[[], Captioner], style: CaptionFormat
) -> Iterator[str]:
    """Yield the captions that the first images would get."""
    chosen, problems = select_images(images, style.if_exists)[:DRY_RUN_EXAMPLES], list[Problem]()
    captioner = build_captioner() if chosen else None
    for batch, pixels in _load_batches(chosen, 1, problems):
        assert captioner is not None
        for image, text in zip(batch, captioner.write_captions(pixels), strict=True):
            yield f"{image.caption_file}:"
            if image.has_caption:
                yield f"  - {(image.text or '').strip()}"
            yield f"  + {style.build(text, image.text)}"
    yield from map(str, problems)


def _load_batches(
    images: Sequence[CaptionedImage], batch_size: int, problems: list[Problem]
) -> Iterator[tuple[list[CaptionedImage], list["Image"]]]:
    """Yield images with their pixels; those that cannot be decoded become problems."""
    silence_pillow_warnings()
    batch: list[CaptionedImage] = []
    pixels: list[Image] = []
    for each in images:
        loaded = _load_image(each.image, problems)
        if loaded is not None:
            batch.append(each)
            pixels.append(loaded)
        if len(batch) == batch_size:
            yield batch, pixels
            batch, pixels = [], []
    if batch:
        yield batch, pixels


def _load_image(path: Path, problems: list[Problem]) -> "Image | None":
    try:
        return load_rgb_image(path)
    except Exception as error:  # Pillow's decoders raise almost anything on damaged data
        problems.append(report_file(path, f"cannot be decoded: {error}"))
        return None
