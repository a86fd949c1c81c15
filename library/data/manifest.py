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
from .bad_data import Problem, counted, in_short, is_cut_short, written_in_full
from .buckets import Placement, place_for
from .dataset_rules import unused
from .held_out import parted
from .inspection import Seen, pictures_inspected
from .mask_audit import MaskAudit, audit_masks, without_masks
from .notices import noted
from .sample import Sample
from .stages import pieces_of


@dataclass(frozen=True)
class Manifest:
    """The pictures of a run and what has to be said about them."""

    datasets: tuple[DatasetConfig, ...]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]
    endings: tuple[tuple[int, int, str, int, int], ...]  # dataset, subset, caption ending, captions found, pictures
    held_out: tuple[Sample, ...] = ()  # for validation; none of them is trained on

    def fingerprint(self) -> str:
        """Changes when anything changes that training sees: pictures, masks, captions, repeats, weights, settings.

        Where files lie does not count, and neither does the batch size, in which processes may divide the work anew.
        """
        digest = hashlib.blake2b(digest_size=16)
        for dataset in self.datasets:
            rows = [_settings(dataset), *map(_settings, dataset.subsets)]
            digest.update(ascii(rows).encode())
            if dataset.from_step or dataset.to_step is not None:
                digest.update(ascii((dataset.from_step, dataset.to_step)).encode())
        for sample in (*self.samples, *self.held_out):
            row = (sample.key, sample.content, sample.size, sample.caption, sample.dataset, sample.subset,
                   sample.repeats, sample.weight)  # fmt: skip
            mask = sample.mask and (sample.mask.is_alpha, sample.mask.content)
            digest.update(ascii((*row, mask)).encode())
        return digest.hexdigest()


_NOT_SEEN = {
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


def _settings(table: DatasetConfig | SubsetConfig) -> list[tuple[str, Any]]:
    return [(item.name, getattr(table, item.name)) for item in fields(table) if item.name not in _NOT_SEEN]


def scan(datasets: Sequence[DatasetConfig], on_bad_data: Literal["fail", "skip"],
         cache_dir: Path | None = None) -> Manifest:  # fmt: skip
    """Look at every picture and caption; all that cannot be used are named together, or skipped and noted.

    Datasets with a schedule of resolutions are in the manifest as they are in the end.
    What was found out is kept in ``cache_dir``, or else beside the pictures.
    """
    broken: list[str] = []
    notes = list(dict.fromkeys(unused(datasets)))
    stages = [pieces_of(dataset) for dataset in datasets]
    datasets = [pieces[-1] for pieces in stages]
    endings = []
    found: list[ListedImage] = []
    bad: list[Problem] = []
    for listing in list_all_images(datasets):
        broken += listing.problems
        notes += listing.notes
        endings.append(
            (listing.dataset, listing.index, listing.caption_source, listing.num_captions, len(listing.images))
        )
        found += listing.images
        bad += [Problem("missing", line) for line in listing.missing]
    roots = ScanRoots(datasets, cache_dir)
    audit = scan_images(pictures_inspected(), roots.group_by_root(found), roots.get_cache_dir)
    masks = audit_masks(datasets, found, audit.images, roots)
    total = len(found) + len(bad)
    sorted_out = _sorted_out(stages, found, audit.images, masks)
    bad += sorted_out.problems
    unusable = len(found) - len(sorted_out.samples) + len(bad) - len(sorted_out.problems)
    if broken or ((bad or masks.strays) and on_bad_data == "fail"):  # a folder as a whole is nothing to skip
        raise ConfigError([*broken, *_refusal(bad, masks.strays, unusable, total, audit.cache_folders)])
    notices = noted(datasets, sorted_out.samples, sorted_out.placements, audit.images)
    notes = list(dict.fromkeys(notes))  # two datasets may show the same folder
    notes += dict.fromkeys([*audit.notes, *masks.notes, *(notice.text for notice in notices)])
    if is_cut_short(bad, notices) and (where := written_in_full(bad, notices, audit.cache_folders)):
        notes.append(f"not all names are shown above{where}")
    if bad:
        notes.append("\n  ".join([f"{unusable} pictures are skipped ({counted(bad)}):", *in_short(bad)]))
    notes += masks.strays
    parts = parted(sorted_out.samples, datasets)
    samples = list(parts.training)
    notes += parts.notes
    for number in range(len(datasets)):
        samples, more = balanced(samples, number)
        notes += more
    if not any(not sample.is_reg for sample in samples):
        why = "; validation_split keeps all of them for validation" if parts.held_out else ""
        raise ConfigError([*in_short(bad), f"no picture is left to train on{why}"])
    if maskless := without_masks(datasets, [sample.mask for sample in (*samples, *parts.held_out)]):
        raise ConfigError([*in_short(bad), *maskless])
    return Manifest(tuple(datasets), tuple(samples), tuple(notes), tuple(endings), parts.held_out)


@dataclass
class _SortedOut:
    """What was found, as samples with their places; and a line for each that cannot be one."""

    samples: list[Sample] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def _sorted_out(stages: Sequence[Sequence[DatasetConfig]], found: Iterable[ListedImage],
                seen: Mapping[ImageRef, Seen], masks: MaskAudit) -> _SortedOut:  # fmt: skip
    result = _SortedOut()
    places = [list(map(place_for, pieces)) for pieces in stages]
    names: Counter[str] = Counter()
    told: set[tuple[ImageRef, str]] = set()
    for item in found:
        picture = seen[item.image]
        flaw, placement = picture.flaw, None
        try:
            for place in places[item.dataset] if flaw is None else ():  # it has to fit in all; the last one counts
                placement = place(*picture.size)
        except ValueError as error:
            flaw, placement = ImageDefect("of a size that fits no bucket", str(error)), None
        if flaw is not None and (item.image, flaw.text) not in told:
            told.add((item.image, flaw.text))
            result.problems.append(Problem(flaw.kind, f"{item.image}: {flaw.text}"))
        mask = (item.dataset, item.subset, item.image)
        if reason := masks.problems.get(mask):
            result.problems.append(Problem("mask", f"{item.image}: {reason}"))
        if item.problem:
            result.problems.append(Problem("caption", item.problem))
        if placement is None or reason or item.problem:
            continue
        dataset = stages[item.dataset][-1]
        subset = dataset.subsets[item.subset]
        name = item.image.key
        names[name] += 1
        key = name if names[name] == 1 else f"{name}#{names[name]}"
        weight = dataset.prior_loss_weight if subset.is_reg else 1.0
        result.samples.append(Sample(key, item.image, picture.size, item.caption, item.dataset, item.subset,
                                     subset.num_repeats, weight, subset.is_reg, picture.content,
                                     masks.masks.get(mask)))  # fmt: skip
        result.placements.append(placement)
    return result


def _refusal(bad: Sequence[Problem], strays: Sequence[str], unusable: int, total: int,
             folders: Sequence[Path]) -> list[str]:  # fmt: skip
    """The report of a run that does not start."""
    if not bad:
        return list(strays)
    end = f"{unusable} of {total} pictures cannot be used; mend or remove them, or leave them out with" \
          " --on_bad_data skip"  # fmt: skip
    if is_cut_short(bad, []):
        end += f" ({counted(bad)}){written_in_full(bad, [], folders)}"
    return [*in_short(bad), *strays, end]


def balanced(samples: Sequence[Sample], dataset: int) -> tuple[list[Sample], list[str]]:
    """As many regularisation pictures as training pictures in a dataset, repeats counted, as sd-scripts does it.

    They are taken in turn: first each with its repeats, then each once more, until there are enough.
    """
    mine = [sample for sample in samples if sample.dataset == dataset]
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
    note = (f"dataset {dataset + 1}: {len(used)} regularisation pictures, shown {sum(repeats)} times an epoch beside"
            f" {wanted} training pictures")  # fmt: skip
    if dropped:
        note += f"; {dropped} more are not needed and not used, the first of them {regularisation[len(used)].image}"
    return kept, [note]
