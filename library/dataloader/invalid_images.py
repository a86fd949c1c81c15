"""Report images that cannot be used, and notices about those that can: a summary, and a file with all of them."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..atomic_files import write_atomic
from ..dataset.clip_inspection import CLIP_TRAIT_DESCRIPTIONS
from ..dataset.clip_windows import FrameRule, FrameSettings
from ..dataset.image_inspection import TRAIT_DESCRIPTIONS, InspectedImage
from ..dataset.image_ref import ImageRef
from ..dataset.schema import DatasetConfig
from ..problems import Problem
from .buckets import BucketAssignment

if TYPE_CHECKING:
    from .manifest import ClipSummary, Sample


MAX_LISTED_PROBLEMS = 100
"""The number of problems up to which all are listed."""

MAX_LISTED_PER_KIND = 5
"""The number of problems of each kind that are listed, if there are more than ``MAX_LISTED_PROBLEMS`` in all."""

REPORT_FILENAME = "report.txt"


@dataclass(frozen=True, slots=True)
class DataProblem:
    """An image that cannot be used, and the reason."""

    kind: str  # a word such as "truncated"; problems of one kind have the same fix
    problem: Problem


@dataclass(frozen=True, slots=True)
class DataNotice:
    """A notice about images that are used."""

    text: str
    names: tuple[str, ...] = ()  # the names of all images, if the text has only the first ones


def summarize_bad_data(problems: Sequence[DataProblem]) -> list[Problem]:
    """List problems by kind; of many, the first ones of each kind and a count."""
    by_kind: defaultdict[str, list[Problem]] = defaultdict(list)
    for each in problems:
        by_kind[each.kind].append(each.problem)
    shown = MAX_LISTED_PER_KIND if len(problems) > MAX_LISTED_PROBLEMS else MAX_LISTED_PROBLEMS
    listed = list[Problem]()
    for kind, members in by_kind.items():
        listed += members[:shown]
        if len(members) > shown:
            listed.append(Problem("", f"... and {len(members) - shown} more like the last ({kind})"))
    return listed


def format_problem_counts(problems: Iterable[DataProblem]) -> str:
    """``12 truncated, 3 empty``."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(problem.kind for problem in problems).most_common())


def is_summary_truncated(problems: Sequence[DataProblem], notices: Sequence[DataNotice]) -> bool:
    """Whether the summary leaves something out."""
    most = max(Counter(problem.kind for problem in problems).values(), default=0)
    return (len(problems) > MAX_LISTED_PROBLEMS and most > MAX_LISTED_PER_KIND) or any(
        notice.names for notice in notices
    )


def write_full_report(
    problems: Sequence[DataProblem], notices: Sequence[DataNotice], directories: Sequence[Path]
) -> str:
    """Write the full report to the first writable directory; return a suffix for messages that says where it is."""
    lines = [str(each.problem) for each in problems]
    for notice in notices:
        lines += ["", notice.text, *(f"  {name}" for name in notice.names)] if notice.names else []
    for folder in directories:
        path = folder / REPORT_FILENAME
        try:
            write_atomic(path, ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
        except OSError:
            continue
        return f"; full list in {path}"
    return ""


MAX_NAMES_SHOWN = 3
UPSCALE_WARNING_FACTOR = 2.0
"""The factor from which upscaling is reported."""

CROP_WARNING_FRACTION = 1 / 3
"""The fraction of an image from which cropping is reported."""

SLOW_CLIP_FRACTION = 0.95
"""The fraction of the model's frames per second below which a clip is reported."""

UNSUPPORTED_EXTENSIONS = (
    *(".heic", ".heif", ".tif", ".tiff", ".gif", ".jfif", ".jpe", ".jp2", ".psd", ".svg", ".tga", ".ico", ".exr"),
    *(".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"),
)
"""Image formats that are not read."""


def collect_notices(
    datasets: Sequence[DatasetConfig],
    samples: "Sequence[Sample]",
    assignments: Sequence[BucketAssignment],
    inspected: Mapping[ImageRef, InspectedImage],
) -> list[DataNotice]:
    """Collect notices about the images, a line each."""
    seen = set[tuple[int, int, ImageRef]]()
    pairs = [
        (sample, assignment)
        for sample, assignment in zip(samples, assignments, strict=True)
        if sample.window is None or _is_new((sample.dataset_index, sample.subset_index, sample.image), seen)
    ]
    samples, assignments = [sample for sample, _ in pairs], [assignment for _, assignment in pairs]
    return [
        *_find_unsupported_files(samples),
        *_find_shared_caption_files(datasets, samples),
        *_find_duplicate_images(datasets, samples),
        *_find_unusual_images(datasets, samples, inspected),
        *_find_upscaled_images(samples, assignments),
        *_find_heavily_cropped_images(datasets, samples, assignments),
    ]


def _is_new(key: tuple[int, int, ImageRef], seen: set[tuple[int, int, ImageRef]]) -> bool:
    """Whether the key comes for the first time, as that of the first window of a clip."""
    is_new = key not in seen
    seen.add(key)
    return is_new


def collect_clip_notices(
    datasets: Sequence[DatasetConfig], clips: "Sequence[ClipSummary]", rule: FrameRule
) -> list[DataNotice]:
    """Collect notices about windows that the model does not take, clips without a window, and rates below its own."""
    short = _find_short_windows(datasets, clips, rule)
    return [*short, *_find_clips_without_windows(datasets, clips, rule), *_find_slow_clips(clips)]


def _find_short_windows(
    datasets: Sequence[DatasetConfig], clips: "Sequence[ClipSummary]", rule: FrameRule
) -> Iterator[DataNotice]:
    """Find lengths of windows below the fewest frames of the model, and those that become single frames."""
    for dataset, subset in dict.fromkeys((clip.dataset_index, clip.subset_index) for clip in clips):
        settings = datasets[dataset].subsets[subset].frame_settings
        short = sorted({length for length in settings.target_frames if rule.round_down(length) < rule.least})
        if short and settings.frame_extraction != "full":
            text = f"target_frames {short} left out: the model is trained on at least {rule.least} frames"
            yield DataNotice(f"dataset {dataset + 1}: {text}")
        single = sorted({length for length in settings.target_frames if length > 1 == rule.round_down(length)})
        if single and rule.least == 1 and settings.frame_extraction != "full":
            text = f"target_frames {single} trained as single frames: the model's shortest clip has"
            yield DataNotice(f"dataset {dataset + 1}: {text} {rule.round_up(2)} frames")


def _find_clips_without_windows(
    datasets: Sequence[DatasetConfig], clips: "Sequence[ClipSummary]", rule: FrameRule
) -> Iterator[DataNotice]:
    """Find clips that are shorter than every window that the model takes, unless there is none."""
    for number, dataset in enumerate(datasets):
        names = []
        for clip in clips:
            settings = dataset.subsets[clip.subset_index].frame_settings if clip.dataset_index == number else None
            if settings is None or clip.windows:
                continue
            taken = [length for length in settings.target_frames if rule.round_down(length) >= rule.least]
            if settings.frame_extraction == "full":
                taken = [rule.least]
            if taken:
                names.append(f"{clip.image.key} ({_format_frames(clip)}; the shortest window has {min(taken)})")
        fix = "set a shorter target_frames, or frame_extraction = 'full'"
        yield from _build_notice(
            names, f"dataset {number + 1}: {{}} too short for any window, and not trained; {fix}", "clip"
        )


def explain_lack_of_windows(
    datasets: Sequence[DatasetConfig], clips: "Sequence[ClipSummary]", rule: FrameRule
) -> tuple[str, str]:
    """Say why none of the clips gives a window, and the fix; both are empty where it is not for their frames."""
    clips = [clip for clip in clips if not datasets[clip.dataset_index].subsets[clip.subset_index].is_reg]
    if not clips or any(clip.windows for clip in clips):
        return "", ""
    whole, shortest = FrameSettings(frame_extraction="full"), rule.least
    longest = max(clip.frames.count_frames(whole, rule) for clip in clips)
    settings = [datasets[clip.dataset_index].subsets[clip.subset_index].frame_settings for clip in clips]
    if rule.least == 1:
        shortest = min(length for each in settings for length in each.round_target_frames(rule) or (1,))
    of_model = "of the model" if rule.least > 1 else "asked for"
    text = f"{len(clips)} clip{'s' * (len(clips) != 1)} of at most {longest} frames at {rule.fps:g} per second"
    text = f"{text}, and the shortest window {of_model} has {shortest}"
    if longest >= shortest:
        return text, f"set target_frames = [{rule.round_down(longest)}]"
    longer = f"use clips of at least {shortest / rule.fps:.2g} s ({shortest} frames)"
    return text, longer if rule.least > 1 else f"set a shorter target_frames, or {longer}"


def _format_frames(clip: "ClipSummary") -> str:
    count = f"{clip.frames.num_frames} frame{'s' * (clip.frames.num_frames != 1)}"
    if clip.num_frames != clip.frames.num_frames:
        return f"{count}, of which {clip.num_frames} at the model's rate"
    return count


def _find_slow_clips(clips: "Sequence[ClipSummary]") -> Iterator[DataNotice]:
    """Find clips with fewer frames per second than the model."""
    by_rate: defaultdict[tuple[float, bool], list[str]] = defaultdict(list)
    for clip in clips:
        frames = clip.frames
        target = frames.conversion.target_fps
        rate = frames.conversion.source_fps or float(frames.rate or 0) or _compute_mean_rate(clip)
        if target is not None and rate and rate < target * SLOW_CLIP_FRACTION:
            by_rate[target, frames.is_timed].append(f"{clip.image.key} ({rate:.4g})")
    for (target, is_timed), names in by_rate.items():
        effect = "frames are shown again" if is_timed else "all frames are used, so that motion is faster"
        yield from _build_notice(
            names, f"{{}} with fewer frames per second than the model's {target:g}: {effect}", "clip"
        )


def collect_sound_notices(samples: "Sequence[Sample]", rule: FrameRule | None) -> list[DataNotice]:
    """Tell how many windows have sound, of a run that trains it, and which clips have windows without."""
    if rule is None or not rule.sound_rate:
        return []
    windows = [sample for sample in samples if sample.num_frames > 1]
    heard = DataNotice(f"sound: {sum(sample.has_sound for sample in windows)} of {len(windows)} windows have sound")
    counts: Counter[str] = Counter(sample.image.key for sample in windows if not sample.has_sound)
    names = [f"{name} ({count} window{'s' * (count != 1)})" for name, count in counts.items()]
    text = "{} with windows that have no sound, or in less than half of their time, trained on frames alone"
    return [heard, *_build_notice(names, text, "clip")]


def _compute_mean_rate(clip: "ClipSummary") -> float:
    return float(clip.frames.num_frames / clip.frames.duration) if clip.frames.duration else 0.0


def _find_unsupported_files(samples: "Sequence[Sample]") -> Iterator[DataNotice]:
    """Find image files of unsupported formats next to the images."""
    images = [sample.image for sample in samples if sample.image.part is None]
    parents = dict.fromkeys((image.folder, image.file.rpartition("/")[0]) for image in images)
    for folder in dict.fromkeys(root / parent for root, parent in parents):
        try:
            names = sorted(name for name in os.listdir(folder) if name.lower().endswith(UNSUPPORTED_EXTENSIONS))
        except OSError:
            continue
        yield from _build_notice(
            names, f"{folder}: {{}} in unsupported formats ignored; convert to PNG or JPEG", "file"
        )


def _find_shared_caption_files(datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]") -> Iterator[DataNotice]:
    """Find images that share a caption file."""
    by_stem: defaultdict[tuple[int, int, Path, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        if (
            sample.image.part is None
            and datasets[sample.dataset_index].subsets[sample.subset_index].metadata_file is None
        ):
            stem = sample.image.file.rpartition(".")[0]
            by_stem[sample.dataset_index, sample.subset_index, sample.image.folder, stem].append(sample)
    groups = [" and ".join(sample.image.name for sample in group) for group in by_stem.values() if len(group) > 1]
    yield from _build_notice(groups, "{} shared by images whose names differ only in the extension", "caption file")


def _find_duplicate_images(datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]") -> Iterator[DataNotice]:
    """Find identical files in one dataset."""
    for number in range(len(datasets)):
        by_content: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            if sample.dataset_index == number:
                by_content[sample.content_hash].append(sample)
        twins = [
            f"{_format_name(sample)} = {_format_name(group[0])}"
            for group in by_content.values()
            for sample in group[1:]
        ]
        yield from _build_notice(twins, f"dataset {number + 1}: {{}} identical to another image", "image")


def _format_name(sample: "Sample") -> str:
    return sample.key if sample.window is None else sample.image.key


def _find_unusual_images(
    datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]", inspected: Mapping[ImageRef, InspectedImage]
) -> Iterator[DataNotice]:
    """Find transparency and other traits; an alpha channel that is used as a mask is not reported."""
    by_trait: defaultdict[str, dict[ImageRef, str]] = defaultdict(dict)
    for sample in samples:
        for trait in inspected[sample.image].traits:
            if trait != "transparent" or not datasets[sample.dataset_index].subsets[sample.subset_index].alpha_mask:
                by_trait[trait][sample.image] = sample.key if sample.window is None else sample.image.key
    for noun, descriptions in (("image", TRAIT_DESCRIPTIONS), ("clip", CLIP_TRAIT_DESCRIPTIONS)):
        for trait, what in descriptions.items():
            yield from _build_notice(list(by_trait[trait].values()), f"{{}} {what}", noun)


def _find_upscaled_images(samples: "Sequence[Sample]", assignments: Sequence[BucketAssignment]) -> Iterator[DataNotice]:
    factors = (
        (placement.resized_size[0] / sample.size[0], sample)
        for sample, placement in zip(samples, assignments, strict=True)
    )
    small = sorted((item for item in factors if item[0] >= UPSCALE_WARNING_FACTOR), key=lambda item: -item[0])
    names = [
        f"{_format_name(sample)} ({sample.size[0]}x{sample.size[1]}, {factor:.3g} times)" for factor, sample in small
    ]
    yield from _build_notice(
        names, f"{{}} upscaled {UPSCALE_WARNING_FACTOR:g} times or more, and blurred by that", "small image"
    )


def _find_heavily_cropped_images(
    datasets: Sequence[DatasetConfig], samples: "Sequence[Sample]", assignments: Sequence[BucketAssignment]
) -> Iterator[DataNotice]:
    """Find images with extreme aspect ratios that lose much to cropping."""
    for number, dataset in enumerate(datasets):
        losses = (
            (placement.cropped_fraction, sample)
            for sample, placement in zip(samples, assignments, strict=True)
            if sample.dataset_index == number
        )
        narrow = sorted((item for item in losses if item[0] >= CROP_WARNING_FRACTION), key=lambda item: -item[0])
        names = [f"{_format_name(sample)} ({sample.size[0]}x{sample.size[1]}, {loss:.0%})" for loss, sample in narrow]
        fix = "crop them yourself" if dataset.enable_bucket else "set enable_bucket = true, or crop them yourself"
        yield from _build_notice(names, f"dataset {number + 1}: cropping takes a third or more of {{}}; {fix}", "image")


def _build_notice(names: Sequence[str], text: str, noun: str) -> Iterator[DataNotice]:
    """Build a notice with a count of ``noun`` and the first names, if there are any."""
    if names:
        shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
        counted = f"{len(names)} {noun}" + ("" if len(names) == 1 else "s")
        yield DataNotice(f"{text.format(counted)}: {shown}", tuple(names) if len(names) > MAX_NAMES_SHOWN else ())
