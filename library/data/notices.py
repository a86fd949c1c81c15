"""What is worth knowing about pictures that can be used: twins, names, transparency, small and narrow ones."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..dataset.image_ref import ImageRef
from ..dataset.schema import DatasetConfig
from .bad_data import Notice
from .buckets import Placement
from .inspection import TRAITS, Seen

if TYPE_CHECKING:
    from .sample import Sample

SHOWN_NAMES = 3
ENLARGED = 2.0
"""From this factor on, a picture counts as small."""
CUT_AWAY = 1 / 3
"""From this share on, a picture counts as narrow."""

UNREAD = (
    *(".heic", ".heif", ".tif", ".tiff", ".gif", ".jfif", ".jpe", ".jp2", ".psd", ".svg", ".tga", ".ico", ".exr"),
    *(".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"),
)
"""Endings of pictures that are not looked for."""


def noted(datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]", placements: Sequence[Placement],
          seen: Mapping[ImageRef, Seen]) -> list[Notice]:  # fmt: skip
    """Everything that is worth knowing, a line each."""
    return [
        *_left_out(samples),
        *_same_names(datasets, samples),
        *_twins(datasets, samples),
        *_traits(datasets, samples, seen),
        *_small(samples, placements),
        *_narrow(datasets, samples, placements),
    ]


def _left_out(samples: "Sequence[Sample]") -> Iterator[Notice]:
    """Files beside the pictures that look like pictures, of kinds that are not looked for."""
    places = dict.fromkeys((sample.image.folder, sample.image.file.rpartition("/")[0])
                           for sample in samples if sample.image.part is None)  # fmt: skip
    for folder in dict.fromkeys(folder / below for folder, below in places):
        try:
            names = sorted(name for name in os.listdir(folder) if name.lower().endswith(UNREAD))
        except OSError:
            continue
        yield from _notice(
            names, f"{folder}: {{}} of kinds that are not read, left out; convert to PNG or JPEG", "file"
        )


def _same_names(datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]") -> Iterator[Notice]:
    """Pictures that share a caption file."""
    by_stem: defaultdict[tuple[int, int, Path, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.image.part is None and datasets[sample.dataset].subsets[sample.subset].metadata_file is None:
            stem = sample.image.file.rpartition(".")[0]
            by_stem[sample.dataset, sample.subset, sample.image.folder, stem].append(sample)
    groups = [" and ".join(sample.image.name for sample in group) for group in by_stem.values() if len(group) > 1]
    yield from _notice(groups, "{} shared by pictures whose names differ only in their endings", "caption file")


def _twins(datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]") -> Iterator[Notice]:
    """The same bytes several times in one dataset."""
    for number in range(len(datasets)):
        by_content: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            if sample.dataset == number:
                by_content[sample.content].append(sample)
        twins = [f"{sample.key} = {group[0].key}" for group in by_content.values() for sample in group[1:]]
        yield from _notice(twins, f"dataset {number + 1}: {{}} too many, byte for byte the same as another", "picture")


def _traits(datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]",
            seen: Mapping[ImageRef, Seen]) -> Iterator[Notice]:  # fmt: skip
    """Transparency and the like; opacity that is a mask is no matter."""
    by_trait: defaultdict[str, dict[ImageRef, str]] = defaultdict(dict)
    for sample in samples:
        for trait in seen[sample.image].traits:
            if trait != "transparent" or not datasets[sample.dataset].subsets[sample.subset].alpha_mask:
                by_trait[trait][sample.image] = sample.key
    for trait, what in TRAITS.items():
        yield from _notice(list(by_trait[trait].values()), f"{{}} {what}", "picture")


def _small(samples: "Sequence[Sample]", placements: Sequence[Placement]) -> Iterator[Notice]:
    factors = ((placement.resized[0] / sample.size[0], sample)
               for sample, placement in zip(samples, placements, strict=True))  # fmt: skip
    small = sorted((item for item in factors if item[0] >= ENLARGED), key=lambda item: -item[0])
    names = [f"{sample.key} ({sample.size[0]}x{sample.size[1]}, {factor:.3g} times)" for factor, sample in small]
    yield from _notice(names, f"{{}} enlarged {ENLARGED:g} times or more, and blurred by that", "small picture")


def _narrow(datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]",
            placements: Sequence[Placement]) -> Iterator[Notice]:  # fmt: skip
    """Extreme aspect ratios, as far as they matter."""
    for number, dataset in enumerate(datasets):
        losses = ((placement.crop_loss, sample) for sample, placement in zip(samples, placements, strict=True)
                  if sample.dataset == number)  # fmt: skip
        narrow = sorted((item for item in losses if item[0] >= CUT_AWAY), key=lambda item: -item[0])
        names = [f"{sample.key} ({sample.size[0]}x{sample.size[1]}, {loss:.0%})" for loss, sample in narrow]
        way_out = "cut them yourself" if dataset.enable_bucket else "set enable_bucket = true, or cut them yourself"
        yield from _notice(names, f"dataset {number + 1}: cropping takes a third or more of {{}}; {way_out}", "picture")


def _notice(names: Sequence[str], text: str, what: str) -> Iterator[Notice]:
    """``text`` with how many there are of ``what``, and the first of them."""
    if names:
        shown = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
        counted = f"{len(names)} {what}" + ("" if len(names) == 1 else "s")
        yield Notice(f"{text.format(counted)}: {shown}", tuple(names) if len(names) > SHOWN_NAMES else ())
