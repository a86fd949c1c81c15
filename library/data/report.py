"""What cannot be used, told in one report: the first of each kind, how many there are, and where all of them stand."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..atomic_files import write_atomic
from ..dataset.image_inspection import TRAIT_DESCRIPTIONS, InspectedImage
from ..dataset.image_ref import ImageRef
from ..dataset.schema import DatasetConfig
from .buckets import BucketAssignment

if TYPE_CHECKING:
    from .manifest import Sample


MAX_LISTED_PROBLEMS = 100
"""So many lines are told in full."""

MAX_LISTED_PER_KIND = 5
"""Of one kind, when there are more."""

REPORT_FILENAME = "report.txt"


@dataclass(frozen=True, slots=True)
class DataProblem:
    """Something that keeps a picture from being used."""

    kind: str  # such as "truncated"; of the same kind are those with the same way out
    message: str


@dataclass(frozen=True, slots=True)
class DataNotice:
    """Something to know about pictures that are used."""

    text: str
    names: tuple[str, ...] = ()  # of all of them, when the text holds only the first


def summarize_problems(problems: Sequence[DataProblem]) -> list[str]:
    """All lines, kind by kind; of very many the first of each kind, and how many more there are of it."""
    by_kind: defaultdict[str, list[str]] = defaultdict(list)
    for problem in problems:
        by_kind[problem.kind].append(problem.message)
    shown = MAX_LISTED_PER_KIND if len(problems) > MAX_LISTED_PROBLEMS else MAX_LISTED_PROBLEMS
    lines = []
    for kind, members in by_kind.items():
        lines += members[:shown]
        if len(members) > shown:
            lines.append(f"... and {len(members) - shown} more like the last ({kind})")
    return lines


def format_problem_counts(problems: Iterable[DataProblem]) -> str:
    """``12 truncated, 3 empty``."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(problem.kind for problem in problems).most_common())


def is_summary_truncated(problems: Sequence[DataProblem], notices: Sequence[DataNotice]) -> bool:
    """Whether there is more than what is told."""
    most = max(Counter(problem.kind for problem in problems).values(), default=0)
    return (len(problems) > MAX_LISTED_PROBLEMS and most > MAX_LISTED_PER_KIND) or any(
        notice.names for notice in notices
    )


def write_full_report(
    problems: Sequence[DataProblem], notices: Sequence[DataNotice], directories: Sequence[Path]
) -> str:
    """Write everything into the first of ``folders`` that takes it; returns the words that say where it stands."""
    lines = [problem.message for problem in problems]
    for notice in notices:
        lines += ["", notice.text, *(f"  {name}" for name in notice.names)] if notice.names else []
    for folder in directories:
        path = folder / REPORT_FILENAME
        try:
            write_atomic(path, ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
        except OSError:
            continue
        return f"; all of them stand in {path}"
    return ""


MAX_NAMES_SHOWN = 3

UPSCALE_WARNING_FACTOR = 2.0
"""From this factor on, a picture counts as small."""

CROP_WARNING_FRACTION = 1 / 3
"""From this share on, a picture counts as narrow."""

UNSUPPORTED_EXTENSIONS = (
    *(".heic", ".heif", ".tif", ".tiff", ".gif", ".jfif", ".jpe", ".jp2", ".psd", ".svg", ".tga", ".ico", ".exr"),
    *(".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"),
)
"""Endings of pictures that are not looked for."""


def collect_notices(
    datasets: Sequence[DatasetConfig],
    samples: "Sequence[Sample]",
    assignments: Sequence[BucketAssignment],
    inspected: Mapping[ImageRef, InspectedImage],
) -> list[DataNotice]:
    """Everything that is worth knowing, a line each."""
    return [
        *_find_unsupported_files(samples),
        *_find_shared_caption_files(datasets, samples),
        *_find_duplicate_images(datasets, samples),
        *_find_unusual_images(datasets, samples, inspected),
        *_find_upscaled_images(samples, assignments),
        *_find_heavily_cropped_images(datasets, samples, assignments),
    ]


def _find_unsupported_files(samples: "Sequence[Sample]") -> Iterator[DataNotice]:
    """Files beside the pictures that look like pictures, of kinds that are not looked for."""
    places = dict.fromkeys(
        (sample.image.folder, sample.image.file.rpartition("/")[0]) for sample in samples if sample.image.part is None
    )
    for folder in dict.fromkeys(folder / below for folder, below in places):
        try:
            names = sorted(name for name in os.listdir(folder) if name.lower().endswith(UNSUPPORTED_EXTENSIONS))
        except OSError:
            continue
        yield from _build_notice(
            names, f"{folder}: {{}} of kinds that are not read, left out; convert to PNG or JPEG", "file"
        )


def _find_shared_caption_files(datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]") -> Iterator[DataNotice]:
    """Pictures that share a caption file."""
    by_stem: defaultdict[tuple[int, int, Path, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        if (
            sample.image.part is None
            and datasets[sample.dataset_index].subsets[sample.subset_index].metadata_file is None
        ):
            stem = sample.image.file.rpartition(".")[0]
            by_stem[sample.dataset_index, sample.subset_index, sample.image.folder, stem].append(sample)
    groups = [" and ".join(sample.image.name for sample in group) for group in by_stem.values() if len(group) > 1]
    yield from _build_notice(groups, "{} shared by pictures whose names differ only in their endings", "caption file")


def _find_duplicate_images(datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]") -> Iterator[DataNotice]:
    """The same bytes several times in one dataset."""
    for number in range(len(datasets)):
        by_content: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            if sample.dataset_index == number:
                by_content[sample.content_hash].append(sample)
        twins = [f"{sample.key} = {group[0].key}" for group in by_content.values() for sample in group[1:]]
        yield from _build_notice(
            twins, f"dataset {number + 1}: {{}} too many, byte for byte the same as another", "picture"
        )


def _find_unusual_images(
    datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]", inspected: Mapping[ImageRef, InspectedImage]
) -> Iterator[DataNotice]:
    """Transparency and the like; opacity that is a mask is no matter."""
    by_trait: defaultdict[str, dict[ImageRef, str]] = defaultdict(dict)
    for sample in samples:
        for trait in inspected[sample.image].traits:
            if trait != "transparent" or not datasets[sample.dataset_index].subsets[sample.subset_index].alpha_mask:
                by_trait[trait][sample.image] = sample.key
    for trait, what in TRAIT_DESCRIPTIONS.items():
        yield from _build_notice(list(by_trait[trait].values()), f"{{}} {what}", "picture")


def _find_upscaled_images(samples: "Sequence[Sample]", assignments: Sequence[BucketAssignment]) -> Iterator[DataNotice]:
    factors = (
        (placement.resized_size[0] / sample.size[0], sample)
        for sample, placement in zip(samples, assignments, strict=True)
    )
    small = sorted((item for item in factors if item[0] >= UPSCALE_WARNING_FACTOR), key=lambda item: -item[0])
    names = [f"{sample.key} ({sample.size[0]}x{sample.size[1]}, {factor:.3g} times)" for factor, sample in small]
    yield from _build_notice(
        names, f"{{}} enlarged {UPSCALE_WARNING_FACTOR:g} times or more, and blurred by that", "small picture"
    )


def _find_heavily_cropped_images(
    datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]", assignments: Sequence[BucketAssignment]
) -> Iterator[DataNotice]:
    """Extreme aspect ratios, as far as they matter."""
    for number, dataset in enumerate(datasets):
        losses = (
            (placement.cropped_fraction, sample)
            for sample, placement in zip(samples, assignments, strict=True)
            if sample.dataset_index == number
        )
        narrow = sorted((item for item in losses if item[0] >= CROP_WARNING_FRACTION), key=lambda item: -item[0])
        names = [f"{sample.key} ({sample.size[0]}x{sample.size[1]}, {loss:.0%})" for loss, sample in narrow]
        way_out = "cut them yourself" if dataset.enable_bucket else "set enable_bucket = true, or cut them yourself"
        yield from _build_notice(
            names, f"dataset {number + 1}: cropping takes a third or more of {{}}; {way_out}", "picture"
        )


def _build_notice(names: Sequence[str], text: str, noun: str) -> Iterator[DataNotice]:
    """``text`` with how many there are of ``what``, and the first of them."""
    if names:
        shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
        counted = f"{len(names)} {noun}" + ("" if len(names) == 1 else "s")
        yield DataNotice(f"{text.format(counted)}: {shown}", tuple(names) if len(names) > MAX_NAMES_SHOWN else ())
