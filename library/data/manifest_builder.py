"""Build the manifest: list and inspect all images, report those that cannot be used, assign the rest to buckets."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..dataset.image_inspection import InspectedImage, build_image_inspector
from ..dataset.image_ref import ImageRef
from ..dataset.listing import ListedImage
from ..dataset.masks import MaskScanResult, find_subsets_without_masks, scan_masks
from ..dataset.scan import ImageDefect, scan_images
from ..dataset.scan_cache import ScanRoots
from ..dataset.schema import DatasetConfig
from ..dataset.sources import list_all_images
from ..dataset.stages import Stage, build_stages, expand_resolution_schedule
from ..dataset.validate import find_unused_keys
from ..errors import ConfigError
from .buckets import BucketAssignment, build_bucket_assigner, merge_small_buckets
from .manifest import Manifest, Sample
from .repeats import apply_dataset_weights, balance_regularization_images
from .report import (
    DataProblem,
    collect_notices,
    format_problem_counts,
    is_summary_truncated,
    summarize_problems,
    write_full_report,
)
from .validation_split import split_validation_samples


def build_manifest(
    datasets: Sequence[DatasetConfig], on_invalid_images: Literal["fail", "skip"], cache_dir: Path | None = None
) -> Manifest:
    """Inspect every image and caption; unusable ones are reported all together, or skipped with a notice.

    A dataset with a resolution schedule has its last resolution in the manifest.  Scan results are cached in
    ``cache_dir``, by default next to the images.
    """
    broken: list[str] = []
    notes = list(dict.fromkeys(find_unused_keys(datasets)))
    stages = [expand_resolution_schedule(dataset) for dataset in datasets]
    datasets = [pieces[-1] for pieces in stages]
    endings = []
    found: list[ListedImage] = []
    bad: list[DataProblem] = []
    for listing in list_all_images(datasets):
        broken += listing.problems
        notes += listing.notes
        endings.append(
            (listing.dataset, listing.index, listing.caption_source, listing.num_captions, len(listing.images))
        )
        found += listing.images
        bad += [DataProblem("missing", line) for line in listing.missing]
    roots = ScanRoots(datasets, cache_dir)
    audit = scan_images(build_image_inspector(), roots.group_by_root(found), roots.get_cache_dir)
    masks = scan_masks(datasets, found, audit.images, roots)
    total = len(found) + len(bad)
    sorted_out = _build_samples(stages, found, audit.images, masks)
    bad += sorted_out.problems
    unusable = len(found) - len(sorted_out.samples) + len(bad) - len(sorted_out.problems)
    if broken or ((bad or masks.unmatched) and on_invalid_images == "fail"):  # whole folders are not skipped
        raise ConfigError([*broken, *_format_bad_data(bad, masks.unmatched, unusable, total, audit.cache_folders)])
    notices = collect_notices(datasets, sorted_out.samples, sorted_out.assignments, audit.images)
    notes = list(dict.fromkeys(notes))  # two datasets may use the same folder
    notes += dict.fromkeys([*audit.notes, *masks.notes, *(notice.text for notice in notices)])
    if is_summary_truncated(bad, notices) and (where := write_full_report(bad, notices, audit.cache_folders)):
        notes.append(f"not all names are listed above{where}")
    if bad:
        skipped = f"{_count_images(unusable)} skipped ({format_problem_counts(bad)}):"
        notes.append("\n  ".join([skipped, *summarize_problems(bad)]))
    notes += masks.unmatched
    parts = split_validation_samples(sorted_out.samples, datasets)
    samples = list(parts.train_samples)
    notes += parts.notes
    for number in range(len(datasets)):
        samples, more = balance_regularization_images(samples, number)
        notes += more
    if not any(not sample.is_reg for sample in samples):
        why = "; validation_split takes all of them" if parts.validation_samples else ""
        raise ConfigError([*summarize_problems(bad), f"no images left to train on{why}"])
    if maskless := find_subsets_without_masks(
        datasets, [sample.mask for sample in (*samples, *parts.validation_samples)]
    ):
        raise ConfigError([*summarize_problems(bad), *maskless])
    return Manifest(tuple(datasets), tuple(samples), tuple(notes), tuple(endings), parts.validation_samples)


@dataclass
class _BuiltSamples:
    """The samples with their bucket assignments, and the problems of images that cannot be one."""

    samples: list[Sample] = field(default_factory=list)
    assignments: list[BucketAssignment] = field(default_factory=list)
    problems: list[DataProblem] = field(default_factory=list)


def _build_samples(
    dataset_stages: Sequence[Sequence[DatasetConfig]],
    found_images: Iterable[ListedImage],
    inspected: Mapping[ImageRef, InspectedImage],
    mask_scan: MaskScanResult,
) -> _BuiltSamples:
    result = _BuiltSamples()
    assigners = [list(map(build_bucket_assigner, stages)) for stages in dataset_stages]
    names: Counter[str] = Counter()
    reported: set[tuple[ImageRef, str]] = set()
    for item in found_images:
        image = inspected[item.image]
        defect, placement = image.defect, None
        try:
            for assign in (
                assigners[item.dataset] if defect is None else ()
            ):  # it has to fit the buckets of all stages; the last one counts
                placement = assign(*image.size)
        except ValueError as error:
            defect, placement = ImageDefect("of a size that fits no bucket", str(error)), None
        if defect is not None and (item.image, defect.text) not in reported:
            reported.add((item.image, defect.text))
            result.problems.append(DataProblem(defect.kind, f"{item.image}: {defect.text}"))
        mask = (item.dataset, item.subset, item.image)
        if reason := mask_scan.problems.get(mask):
            result.problems.append(DataProblem("mask", f"{item.image}: {reason}"))
        if item.problem:
            result.problems.append(DataProblem("caption", item.problem))
        if placement is None or reason or item.problem:
            continue
        dataset = dataset_stages[item.dataset][-1]
        subset = dataset.subsets[item.subset]
        name = item.image.key
        names[name] += 1
        key = name if names[name] == 1 else f"{name}#{names[name]}"
        weight = dataset.prior_loss_weight if subset.is_reg else 1.0
        result.samples.append(
            Sample(
                key,
                item.image,
                image.size,
                item.caption,
                item.dataset,
                item.subset,
                subset.num_repeats,
                weight,
                subset.is_reg,
                image.content_hash,
                mask_scan.masks.get(mask),
            )
        )
        result.assignments.append(placement)
    return result


def _format_bad_data(
    problems: Sequence[DataProblem],
    unmatched_masks: Sequence[str],
    num_unusable: int,
    total: int,
    directories: Sequence[Path],
) -> list[str]:
    """Format the error of a run that does not start."""
    if not problems:
        return list(unmatched_masks)
    end = (
        f"{num_unusable} of {_count_images(total)} cannot be used; fix or remove them, or skip them with"
        " --on_invalid_images skip"
    )
    if is_summary_truncated(problems, []):
        end += f" ({format_problem_counts(problems)}){write_full_report(problems, [], directories)}"
    return [*summarize_problems(problems), *unmatched_masks, end]


def assign_buckets(
    manifest: Manifest, datasets: Sequence[DatasetConfig]
) -> tuple[Manifest, tuple[BucketAssignment, ...]]:
    """Expand the manifest to the datasets of all stages, in order, and assign each image to a bucket."""
    stages = build_stages(datasets)
    whole = replace(manifest, datasets=(), samples=())
    placements: list[BucketAssignment] = []
    latest: dict[int, int] = {}
    for stage in stages:
        part, places = _assign_stage_buckets(manifest, stage)
        first = len(whole.datasets)
        latest |= {dataset.dataset_number: first + index for index, dataset in enumerate(stage.datasets)}
        shifted = [replace(sample, dataset_index=latest[sample.dataset_index]) for sample in part.samples]
        said = part.notes if len(stages) == 1 else [f"from step {stage.first_step}: {note}" for note in part.notes]
        whole = replace(
            whole,
            datasets=(*whole.datasets, *stage.datasets),
            samples=(*whole.samples, *shifted),
            notes=(*whole.notes, *said),
        )
        placements += places
    endings = tuple((latest[ending[0]], *ending[1:]) for ending in manifest.caption_counts)
    whole = replace(whole, caption_counts=endings)
    check_stages_not_empty(whole)
    return whole, tuple(placements)


def _count_images(count: int) -> str:
    return f"{count} image{'s' * (count != 1)}"


def check_stages_not_empty(manifest: Manifest) -> None:
    """Raise ``ConfigError`` if a stage has no images, as all of them are used for validation or skipped."""
    used = {manifest.datasets[sample.dataset_index].from_step for sample in manifest.samples if not sample.is_reg}
    if empty := {dataset.from_step for dataset in manifest.datasets} - used:
        when = f" from step {min(empty)} on" if max(empty) else ""
        raise ConfigError([f"no images left to train on{when}"])


def _assign_stage_buckets(manifest: Manifest, stage: Stage) -> tuple[Manifest, tuple[BucketAssignment, ...]]:
    """Assign the images of one stage; dataset indices are those of the file."""
    here = {dataset.dataset_number: dataset for dataset in stage.datasets}
    datasets = [here.get(number, dataset) for number, dataset in enumerate(manifest.datasets)]
    places = {number: build_bucket_assigner(dataset) for number, dataset in here.items()}
    mine = [sample for sample in manifest.samples if sample.dataset_index in here]
    alone = [places[sample.dataset_index](*sample.size) for sample in mine]
    placements, notes = merge_small_buckets(mine, alone, datasets)
    samples, shares = apply_dataset_weights(mine, datasets)
    return replace(manifest, samples=samples, notes=(*notes, *shares)), placements
