"""Every picture that will be trained, looked at once: decoded, measured, with its caption, or named as unusable."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from ..dataset.image_ref import ImageRef
from ..dataset.listing import ListedImage
from ..dataset.scan import ImageDefect, scan_images
from ..dataset.scan_cache import ScanRoots
from ..dataset.schema import DatasetConfig, SubsetConfig
from ..dataset.sources import list_all_images
from ..errors import ConfigError
from .bad_data import DataProblem, format_problem_counts, summarize_problems, is_summary_truncated, write_full_report
from .buckets import BucketAssignment, build_bucket_assigner
from .dataset_rules import find_unused_keys
from .held_out import split_validation_samples
from .inspection import InspectedImage, build_image_inspector
from .mask_audit import MaskScanResult, scan_masks, find_subsets_without_masks
from .notices import collect_notices
from .sample import Sample
from .stages import expand_resolution_schedule


@dataclass(frozen=True)
class Manifest:
    """The pictures of a run and what has to be said about them."""

    datasets: tuple[DatasetConfig, ...]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]
    caption_counts: tuple[tuple[int, int, str, int, int], ...]  # dataset, subset, caption ending, captions found, pictures
    validation_samples: tuple[Sample, ...] = ()  # for validation; none of them is trained on

    def compute_fingerprint(self) -> str:
        """Changes when anything changes that training sees: pictures, masks, captions, repeats, weights, settings.

        Where files lie does not count, and neither does the batch size, in which processes may divide the work anew.
        """
        digest = hashlib.blake2b(digest_size=16)
        for dataset in self.datasets:
            rows = [_list_fingerprint_settings(dataset), *map(_list_fingerprint_settings, dataset.subsets)]
            digest.update(ascii(rows).encode())
            if dataset.from_step or dataset.to_step is not None:
                digest.update(ascii((dataset.from_step, dataset.to_step)).encode())
        for sample in (*self.samples, *self.validation_samples):
            row = (sample.key, sample.content_hash, sample.size, sample.caption, sample.dataset_index, sample.subset_index,
                   sample.repeats, sample.loss_weight)  # fmt: skip
            mask = sample.mask and (sample.mask.is_alpha, sample.mask.content_hash)
            digest.update(ascii((*row, mask)).encode())
        return digest.hexdigest()


_FINGERPRINT_EXCLUDED = {
    *("subsets", "places", "file", "batch_size", "number", "resolution_schedule", "from_step", "to_step"),
    *(
        "image_dir",
        "metadata_file",
        "conditioning_data_dir",
        "parquet",
        "webdataset",
        "recursive",
        "include",
        "exclude",
    ),
    *("image_column", "caption_column", "caption_extension"),
    *("class_tokens", "cache_info", "cache_directory"),
    *("weight", "num_repeats", "is_reg", "prior_loss_weight"),
}
"""Fields of datasets and subsets that change nothing beside what their samples say."""


def _list_fingerprint_settings(table: DatasetConfig | SubsetConfig) -> list[tuple[str, Any]]:
    return [(item.name, getattr(table, item.name)) for item in fields(table) if item.name not in _FINGERPRINT_EXCLUDED]


def build_manifest(datasets: Sequence[DatasetConfig], on_bad_data: Literal["fail", "skip"],
         cache_dir: Path | None = None) -> Manifest:  # fmt: skip
    """Look at every picture and caption; all that cannot be used are named together, or skipped and noted.

    Datasets with a schedule of resolutions are in the manifest as they are in the end.
    What was found out is kept in ``cache_dir``, or else beside the pictures.
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
    if broken or ((bad or masks.unmatched) and on_bad_data == "fail"):  # a folder as a whole is nothing to skip
        raise ConfigError([*broken, *_format_bad_data(bad, masks.unmatched, unusable, total, audit.cache_folders)])
    notices = collect_notices(datasets, sorted_out.samples, sorted_out.assignments, audit.images)
    notes = list(dict.fromkeys(notes))  # two datasets may show the same folder
    notes += dict.fromkeys([*audit.notes, *masks.notes, *(notice.text for notice in notices)])
    if is_summary_truncated(bad, notices) and (where := write_full_report(bad, notices, audit.cache_folders)):
        notes.append(f"not all names are shown above{where}")
    if bad:
        notes.append("\n  ".join([f"{unusable} pictures are skipped ({format_problem_counts(bad)}):", *summarize_problems(bad)]))
    notes += masks.unmatched
    parts = split_validation_samples(sorted_out.samples, datasets)
    samples = list(parts.train_samples)
    notes += parts.notes
    for number in range(len(datasets)):
        samples, more = balance_regularization_images(samples, number)
        notes += more
    if not any(not sample.is_reg for sample in samples):
        why = "; validation_split keeps all of them for validation" if parts.validation_samples else ""
        raise ConfigError([*summarize_problems(bad), f"no picture is left to train on{why}"])
    if maskless := find_subsets_without_masks(datasets, [sample.mask for sample in (*samples, *parts.validation_samples)]):
        raise ConfigError([*summarize_problems(bad), *maskless])
    return Manifest(tuple(datasets), tuple(samples), tuple(notes), tuple(endings), parts.validation_samples)


@dataclass
class _BuiltSamples:
    """What was found, as samples with their places; and a line for each that cannot be one."""

    samples: list[Sample] = field(default_factory=list)
    assignments: list[BucketAssignment] = field(default_factory=list)
    problems: list[DataProblem] = field(default_factory=list)


def _build_samples(dataset_stages: Sequence[Sequence[DatasetConfig]], found_images: Iterable[ListedImage],
                inspected: Mapping[ImageRef, InspectedImage], mask_scan: MaskScanResult) -> _BuiltSamples:  # fmt: skip
    result = _BuiltSamples()
    places = [list(map(build_bucket_assigner, pieces)) for pieces in dataset_stages]
    names: Counter[str] = Counter()
    told: set[tuple[ImageRef, str]] = set()
    for item in found_images:
        picture = inspected[item.image]
        flaw, placement = picture.defect, None
        try:
            for place in places[item.dataset] if flaw is None else ():  # it has to fit in all; the last one counts
                placement = place(*picture.size)
        except ValueError as error:
            flaw, placement = ImageDefect("of a size that fits no bucket", str(error)), None
        if flaw is not None and (item.image, flaw.text) not in told:
            told.add((item.image, flaw.text))
            result.problems.append(DataProblem(flaw.kind, f"{item.image}: {flaw.text}"))
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
        result.samples.append(Sample(key, item.image, picture.size, item.caption, item.dataset, item.subset,
                                     subset.num_repeats, weight, subset.is_reg, picture.content_hash,
                                     mask_scan.masks.get(mask)))  # fmt: skip
        result.assignments.append(placement)
    return result


def _format_bad_data(problems: Sequence[DataProblem], unmatched_masks: Sequence[str], num_unusable: int, total: int,
             directories: Sequence[Path]) -> list[str]:  # fmt: skip
    """The report of a run that does not start."""
    if not problems:
        return list(unmatched_masks)
    end = f"{num_unusable} of {total} pictures cannot be used; mend or remove them, or leave them out with" \
          " --on_bad_data skip"  # fmt: skip
    if is_summary_truncated(problems, []):
        end += f" ({format_problem_counts(problems)}){write_full_report(problems, [], directories)}"
    return [*summarize_problems(problems), *unmatched_masks, end]


def balance_regularization_images(samples: Sequence[Sample], dataset_index: int) -> tuple[list[Sample], list[str]]:
    """As many regularisation pictures as training pictures in a dataset, repeats counted, as sd-scripts does it.

    They are taken in turn: first each with its repeats, then each once more, until there are enough.
    """
    mine = [sample for sample in samples if sample.dataset_index == dataset_index]
    regularisation = [sample for sample in mine if sample.is_reg]
    wanted = sum(sample.repeats for sample in mine if not sample.is_reg)
    if not regularisation:
        return list(samples), []
    repeats: list[float] = []
    have = 0.0
    for sample in regularisation:
        if have >= wanted:
            break
        repeats.append(sample.repeats)
        have += sample.repeats
    rounds, rest = divmod(int(max(wanted - have, 0)), len(regularisation))
    repeats = [count + rounds + (index < rest) for index, count in enumerate(repeats)]
    used = {sample.key: count for sample, count in zip(regularisation, repeats, strict=False)}
    left_out = {sample.key for sample in regularisation[len(used) :]}
    kept = [replace(sample, repeats=used.get(sample.key, sample.repeats)) for sample in samples
            if sample.key not in left_out]  # fmt: skip
    dropped = len(regularisation) - len(used)
    note = (f"dataset {dataset_index + 1}: {len(used)} regularisation pictures, shown {sum(repeats)} times an epoch beside"
            f" {wanted} training pictures")  # fmt: skip
    if dropped:
        note += f"; {dropped} more are not needed and not used, the first of them {regularisation[len(used)].image}"
    return kept, [note]
