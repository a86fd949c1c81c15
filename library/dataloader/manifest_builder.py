"""Build the manifest: list and inspect all images, report those that cannot be used, assign the rest to buckets."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..dataset.clip_inspection import InspectedClip, build_clip_inspector
from ..dataset.clip_windows import DEFAULT_FRAME_RULE, FrameRule, FrameWindow, list_frame_windows
from ..dataset.controls import ControlScanResult, scan_controls
from ..dataset.image_inspection import InspectedImage, build_image_inspector
from ..dataset.image_ref import ImageRef, describe_remote_images
from ..dataset.listing import ListedImage, SubsetListing
from ..dataset.mask_files import MaskScanResult, find_subsets_without_masks, scan_masks
from ..dataset.resolution_stages import build_stages, expand_resolution_schedule
from ..dataset.scan import ImageDefect, ScanResult, scan_images
from ..dataset.scan_cache import ScanRoots
from ..dataset.schema import DatasetConfig, SubsetConfig
from ..dataset.sources import list_all_images
from ..dataset.validate import (
    find_untimed_clips,
    find_unused_keys,
    report_clips,
    validate_epoch_length,
    validate_stages_not_empty,
)
from ..errors import ConfigError, FileError
from ..problems import Problem, report_file
from ..storage.filesystems import RemoteOutage
from .buckets import BucketAssignment, build_bucket_assigner, merge_small_buckets
from .invalid_images import (
    DataNotice,
    DataProblem,
    collect_clip_notices,
    collect_notices,
    collect_sound_notices,
    explain_lack_of_windows,
    format_problem_counts,
    is_summary_truncated,
    summarize_bad_data,
    write_full_report,
)
from .manifest import ClipSummary, Manifest, Sample
from .repeats import apply_dataset_weights, balance_regularization_images, compute_weight_factors
from .validation_split import split_validation_samples


def build_manifest(
    datasets: Sequence[DatasetConfig],
    on_invalid_images: Literal["fail", "skip"],
    cache_dir: Path | None = None,
    frame_rule: FrameRule | None = None,
) -> Manifest:
    """Inspect every image and caption; unusable ones are reported all together, or skipped with a notice.

    A dataset with a resolution schedule has its last resolution in the manifest.  Scan results are cached in
    ``cache_dir``, by default next to the images.  Without a ``frame_rule``, the model makes images and takes no clips.
    """
    notes = list(dict.fromkeys(find_unused_keys(datasets)))
    stages = [expand_resolution_schedule(dataset) for dataset in datasets]
    datasets = [expanded[-1] for expanded in stages]
    listings = list(list_all_images(datasets))
    listing_problems = [problem for listing in listings for problem in listing.problems]
    listing_problems += _find_unsuited_clips([each.subset for each in listings if each.has_clips], frame_rule)
    notes += [note for listing in listings for note in listing.notes]
    found = [image for listing in listings for image in listing.images]
    bad = [DataProblem("missing", problem) for listing in listings for problem in listing.missing]
    roots = ScanRoots(datasets, cache_dir)
    try:
        scan = _scan_all(found, roots)
        masks = scan_masks(datasets, found, scan.images, roots)
        controls = scan_controls(datasets, found, scan.images, roots, frame_rule)
    except RemoteOutage as error:
        raise FileError([*listing_problems, Problem("", str(error), "what was scanned is kept")]) from None
    notes += describe_remote_images(item.image for item in found)
    listing_problems += dict.fromkeys(controls.settings)
    unmatched = [*masks.unmatched, *controls.unmatched]
    built = _SampleBuilder(stages, scan.images, masks, controls, frame_rule or DEFAULT_FRAME_RULE)
    samples, assignments = built.add_all(found)
    num_unusable, total = built.num_unusable + len(bad), len(found) + len(bad)
    bad += built.problems
    if listing_problems or ((bad or unmatched) and on_invalid_images == "fail"):  # folders are not skipped
        bad_data = _collect_bad_data(bad, unmatched, num_unusable, total, scan.cache_folders)
        raise FileError([*listing_problems, *bad_data])
    clip_notices = collect_clip_notices(datasets, built.clips, built.frame_rule)
    clip_notices += collect_sound_notices(samples, frame_rule)
    notices = [*collect_notices(datasets, samples, assignments, scan.images), *clip_notices]
    notes = list(dict.fromkeys(notes))  # two datasets may use the same folder
    notes += dict.fromkeys([*scan.notes, *masks.notes, *controls.notes, *(notice.text for notice in notices)])
    notes += _describe_skipped(bad, num_unusable, notices, scan.cache_folders)
    split = split_validation_samples(samples, datasets)
    notes += [*map(str, unmatched), *split.notes]
    samples = list(split.train_samples)
    for number in range(len(datasets)):
        samples, added = balance_regularization_images(samples, number)
        notes += added
    if problems := list(_find_missing_samples(datasets, samples, split.validation_samples, built.clips, frame_rule)):
        told = [Problem("", notice.text) for notice in clip_notices]  # such as which clips are too short
        raise FileError([*summarize_bad_data(bad), *told, *problems])
    return Manifest(
        datasets=tuple(datasets),
        samples=tuple(samples),
        notes=tuple(notes),
        caption_counts=tuple(map(_count_captions, listings)),
        validation_samples=split.validation_samples,
        clips=tuple(built.clips),
    )


def _describe_skipped(
    bad: Sequence[DataProblem], num_unusable: int, notices: Sequence[DataNotice], directories: Sequence[Path]
) -> Iterator[str]:
    """Yield notes about what is not listed, and about the images that are skipped."""
    if is_summary_truncated(bad, notices) and (location := write_full_report(bad, notices, directories)):
        yield f"not all names are listed above{location}"
    if bad:
        skipped = f"{_count_images(num_unusable)} skipped ({format_problem_counts(bad)}):"
        yield "\n  ".join([skipped, *map(str, summarize_bad_data(bad))])


def _count_captions(listing: SubsetListing) -> tuple[int, int, str, int, int]:
    return listing.dataset, listing.index, listing.caption_source, listing.num_captions, len(listing.images)


def _find_unsuited_clips(subsets: Sequence[SubsetConfig], frame_rule: FrameRule | None) -> Iterator[Problem]:
    """Yield problems of clips for a model that takes none, or that needs the times of their sound."""
    if frame_rule is None:
        yield from map(report_clips, subsets)
    elif frame_rule.sound_rate:
        yield from find_untimed_clips(subsets)


def _find_missing_samples(
    datasets: Sequence[DatasetConfig],
    samples: Sequence[Sample],
    validation_samples: Sequence[Sample],
    clips: Sequence[ClipSummary],
    frame_rule: FrameRule | None,
) -> Iterator[Problem]:
    """Yield a problem if nothing is left to train on, or nothing has the mask or the sound that it should have."""
    if all(sample.is_reg for sample in samples):
        reason, fix = explain_lack_of_windows(datasets, clips, frame_rule or DEFAULT_FRAME_RULE)
        if reason:
            yield Problem("", f"no images left to train on: {reason}", fix)
        else:
            fix = "validation_split takes all of them" if validation_samples else ""
            yield Problem("", "no images left to train on", fix)
    else:
        masks = [sample.mask for sample in (*samples, *validation_samples)]
        yield from find_subsets_without_masks(datasets, masks)
    if frame_rule is not None and frame_rule.sound_rate and not any(sample.has_sound for sample in samples):
        reason = "no window that is trained has sound for at least half of its time"
        yield Problem("train_audio", reason, "remove it to train frames alone")


def _scan_all(found: Sequence[ListedImage], roots: ScanRoots) -> ScanResult[InspectedImage]:
    """Scan the images and the clips."""
    clips = [item for item in found if item.is_clip]
    images = [item for item in found if not item.is_clip]
    scan = scan_images(build_image_inspector(), roots.group_by_root(images), roots.get_cache_dir)
    if not clips:
        return scan
    others = scan_images(build_clip_inspector(), roots.group_by_root(clips), roots.get_cache_dir)
    return ScanResult(
        {**scan.images, **others.images}, [*scan.notes, *others.notes], [*scan.cache_folders, *others.cache_folders]
    )


@dataclass
class _SampleBuilder:
    """Builds the samples with their bucket assignments, and collects the problems of unusable images."""

    dataset_stages: Sequence[Sequence[DatasetConfig]]
    inspected: Mapping[ImageRef, InspectedImage]
    masks: MaskScanResult
    controls: ControlScanResult
    frame_rule: FrameRule
    samples: list[Sample] = field(default_factory=list)
    assignments: list[BucketAssignment] = field(default_factory=list)
    problems: list[DataProblem] = field(default_factory=list)
    clips: list[ClipSummary] = field(default_factory=list)
    num_unusable: int = 0

    def __post_init__(self) -> None:
        self._assigners = [list(map(build_bucket_assigner, stages)) for stages in self.dataset_stages]
        self._names: Counter[str] = Counter()
        self._reported: set[tuple[ImageRef, str]] = set()

    def add_all(self, found: Iterable[ListedImage]) -> tuple[list[Sample], list[BucketAssignment]]:
        """Add all images and clips."""
        for item in found:
            self.add(item)
        return self.samples, self.assignments

    def add(self, item: ListedImage) -> None:
        """Add the sample of an image, or those of all windows of a clip."""
        image = self.inspected[item.image]
        defect, assignment = image.defect, None
        try:
            # An image has to fit the buckets of all stages; the last one counts.
            for assign in self._assigners[item.dataset] if defect is None else ():
                assignment = assign(*image.size)
        except ValueError as error:
            defect, assignment = ImageDefect("of a size that fits no bucket", str(error)), None
        if defect is not None and (item.image, defect.text) not in self._reported:
            self._reported.add((item.image, defect.text))
            self.problems.append(DataProblem(defect.kind, report_file(item.image, defect.text)))
        mask_key, noun = (item.dataset, item.subset, item.image), "clip" if item.is_clip else "image"
        if mask_problem := self.masks.problems.get(mask_key):
            self.problems.append(DataProblem("mask", report_file(item.image, mask_problem)))
        if control_problem := self.controls.problems.get(mask_key):
            self.problems.append(DataProblem(f"control {noun}", report_file(item.image, control_problem)))
        if item.problem:
            self.problems.append(DataProblem("caption", item.problem))
        if not item.is_clip and self.frame_rule.least > 1:
            text = f"is an image; the model is trained on clips of at least {self.frame_rule.least} frames"
            self.problems.append(DataProblem("an image", report_file(item.image, text)))
            assignment = None
        if assignment is None or mask_problem or control_problem or item.problem:
            self.num_unusable += 1
            return
        for window in self._list_windows(item, image) if isinstance(image, InspectedClip) else [None]:
            self.samples.append(self._build_sample(item, image, window))
            self.assignments.append(assignment)

    def _list_windows(self, item: ListedImage, image: InspectedClip) -> list[FrameWindow]:
        subset, rule = self.dataset_stages[item.dataset][-1].subsets[item.subset], self.frame_rule
        clip = replace(image.frames, conversion=subset.build_rate_conversion(rule))
        num_frames = clip.count_frames(subset.frame_settings, rule)
        windows = list_frame_windows(num_frames, subset.frame_settings, rule)
        self.clips.append(
            ClipSummary(
                image=item.image,
                size=image.size,
                dataset_index=item.dataset,
                subset_index=item.subset,
                frames=clip,
                num_frames=num_frames,
                windows=tuple(sorted(Counter(length for _, length in windows).items())),
            )
        )
        found = [FrameWindow(start, length, clip) for start, length in windows]
        return [replace(window, has_sound=window.is_heard()) for window in found] if rule.sound_rate else found

    def _build_sample(self, item: ListedImage, image: InspectedImage, window: FrameWindow | None) -> Sample:
        dataset = self.dataset_stages[item.dataset][-1]
        subset, mask_key = dataset.subsets[item.subset], (item.dataset, item.subset, item.image)
        name = item.image.key
        if window is not None:
            name += f" frame {window.start}" + (f" to {window.last}" if window.length > 1 else "")
        self._names[name] += 1
        return Sample(
            key=name if self._names[name] == 1 else f"{name}#{self._names[name]}",
            image=item.image,
            size=image.size,
            caption=item.caption,
            dataset_index=item.dataset,
            subset_index=item.subset,
            repeats=subset.num_repeats,
            loss_weight=dataset.prior_loss_weight if subset.is_reg else 1.0,
            is_reg=subset.is_reg,
            content_hash=image.content_hash,
            mask=self.masks.masks.get(mask_key),
            controls=self.controls.controls.get(mask_key, ()),
            window=window,
        )


def _collect_bad_data(
    problems: Sequence[DataProblem],
    unmatched: Sequence[Problem],
    num_unusable: int,
    total: int,
    directories: Sequence[Path],
) -> list[Problem]:
    """List the problems of a run that does not start."""
    if not problems:
        return list(unmatched)
    text = f"{num_unusable} of {_count_images(total)} cannot be used"
    fix = "fix or remove them, or skip them with --on_invalid_images skip"
    if is_summary_truncated(problems, []):
        fix += f" ({format_problem_counts(problems)}){write_full_report(problems, [], directories)}"
    return [*summarize_bad_data(problems), *unmatched, Problem("", text, fix)]


def _count_images(count: int) -> str:
    return f"{count} image{'s' * (count != 1)}"


def assign_buckets(
    manifest: Manifest, datasets: Sequence[DatasetConfig]
) -> tuple[Manifest, tuple[BucketAssignment, ...]]:
    """Expand the manifest to the datasets of all stages, in order, and assign each image to a bucket."""
    stages = build_stages(datasets)
    all_datasets, samples, assignments = list[DatasetConfig](), list[Sample](), list[BucketAssignment]()
    notes, problems = list(manifest.notes), list[Problem]()
    latest: dict[int, int] = {}  # dataset of the file -> its index in the last stage so far
    for stage in stages:
        used = {dataset.dataset_index_in_file: dataset for dataset in stage.datasets}
        stage_datasets = [used.get(number, dataset) for number, dataset in enumerate(manifest.datasets)]
        assigners = {number: build_bucket_assigner(dataset) for number, dataset in used.items()}
        stage_samples = [sample for sample in manifest.samples if sample.dataset_index in used]
        alone = [assigners[sample.dataset_index](*sample.size) for sample in stage_samples]
        merged, bucket_notes = merge_small_buckets(stage_samples, alone, stage_datasets)
        factors = compute_weight_factors(stage_samples, stage_datasets)
        weighted, weight_notes = apply_dataset_weights(stage_samples, stage_datasets, factors)
        problems += validate_epoch_length(stage_datasets, factors, sum(sample.repeats for sample in weighted))
        prefix = "" if len(stages) == 1 else f"from step {stage.first_step}: "
        notes += [f"{prefix}{note}" for note in (*bucket_notes, *weight_notes)]
        latest |= {number: len(all_datasets) + index for index, number in enumerate(used)}
        all_datasets += stage.datasets
        samples += [replace(sample, dataset_index=latest[sample.dataset_index]) for sample in weighted]
        assignments += merged
    counts = tuple((latest[row[0]], *row[1:]) for row in manifest.caption_counts)
    expanded = replace(
        manifest,
        datasets=tuple(all_datasets),
        samples=tuple(samples),
        notes=tuple(notes),
        caption_counts=counts,
        clips=tuple(replace(clip, dataset_index=latest[clip.dataset_index]) for clip in manifest.clips),
    )
    if problems := [*problems, *validate_stages_not_empty(all_datasets, expanded.trained_datasets)]:
        raise ConfigError(problems)
    return expanded, tuple(assignments)
