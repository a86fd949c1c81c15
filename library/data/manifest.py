"""Every picture that will be trained, looked at once: decoded, measured, with its caption, or named as unusable."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import ConfigError
from .buckets import Place, place_for
from .dataset_rules import unused
from .dataset_schema import DatasetConfig
from .files import FoundPicture, find_all
from .inspection import Seen, look_at_all
from .mask_audit import MaskAudit, audit_masks, without_masks
from .mask_files import Mask
from .origin import Origin

SHOWN_NAMES = 5


@dataclass(frozen=True)
class Sample:
    """One picture of one subset."""

    key: str  # folder and file name; unique, and free of the rest of the path
    image: Origin
    size: tuple[int, int]  # (width, height) as it is seen, after EXIF orientation
    caption: str  # lines are alternatives
    dataset: int
    subset: int
    repeats: float  # in an epoch; 2.5 is twice and three times, in turns
    weight: float  # of its loss
    is_reg: bool
    content: str  # hash of the file
    mask: Mask | None = None


@dataclass(frozen=True)
class Manifest:
    """The pictures of a run and what has to be said about them."""

    datasets: tuple[DatasetConfig, ...]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]
    endings: tuple[tuple[int, int, str, int, int], ...]  # dataset, subset, caption ending, captions found, pictures

    def fingerprint(self) -> str:
        """Changes when anything changes that training sees: pictures, masks, captions, repeats, weights."""
        digest = hashlib.blake2b(digest_size=16)
        for sample in self.samples:
            row = (sample.key, sample.content, sample.size, sample.caption, sample.dataset, sample.subset,
                   sample.repeats, sample.weight)  # fmt: skip
            mask = sample.mask and (sample.mask.is_alpha, sample.mask.content)
            digest.update(json.dumps((*row, mask)).encode())
        return digest.hexdigest()


def scan(datasets: Sequence[DatasetConfig], on_bad_data: Literal["fail", "skip"]) -> Manifest:
    """Look at every picture and caption; all that cannot be used are named together, or skipped and noted."""
    problems: list[str] = []
    notes = list(dict.fromkeys(unused(datasets)))
    endings = []
    found: list[FoundPicture] = []
    absent: list[str] = []
    for number, index, listing in find_all(datasets):
        problems += listing.problems
        notes += listing.notes
        endings.append((number, index, listing.caption_ending, listing.captions, len(listing.found)))
        found += listing.found
        absent += listing.absent
    if problems:  # nothing to skip: a folder or a metadata file as a whole cannot be used
        raise ConfigError(problems)
    seen = look_at_all(list(dict.fromkeys(item.image for item in found)))
    masks = audit_masks(datasets, found, seen)
    notes += masks.notes
    samples, unusable = _samples(datasets, found, seen, masks)
    bad = [*absent, *dict.fromkeys(unusable)]
    if (bad or masks.strays) and on_bad_data == "fail":
        way_out = "mend or remove them, or leave them out with --on_bad_data skip"
        count = [f"{len(bad)} of {len(found) + len(absent)} pictures cannot be used; {way_out}"] if bad else []
        raise ConfigError([*bad, *masks.strays, *count])
    notes += [*_skipped(bad), *masks.strays]
    for number in range(len(datasets)):
        samples, more = balanced(samples, number)
        notes += more
    if not any(not sample.is_reg for sample in samples):
        raise ConfigError([*bad, "no picture is left to train on"])
    if maskless := without_masks(datasets, [sample.mask for sample in samples]):
        raise ConfigError([*bad, *maskless])
    return Manifest(tuple(datasets), tuple(samples), tuple(notes), tuple(endings))


def _samples(datasets: Sequence[DatasetConfig], found: Iterable[FoundPicture],
             seen: dict[Origin, Seen], masks: MaskAudit) -> tuple[list[Sample], list[str]]:  # fmt: skip
    """What was found, as samples; and a line for each that cannot be one."""
    places = [place_for(dataset) for dataset in datasets]
    names: Counter[str] = Counter()
    samples, bad = [], []
    for item in found:
        picture = seen[item.image]
        place = (item.dataset, item.subset, item.image)
        reasons = [picture.problem or _misfit(places[item.dataset], picture.size), masks.problems.get(place)]
        problems = [*(f"{item.image}: {reason}" for reason in reasons if reason), *filter(None, [item.problem])]
        if problems:
            bad += problems
            continue
        dataset = datasets[item.dataset]
        subset = dataset.subsets[item.subset]
        name = item.image.key
        names[name] += 1
        key = name if names[name] == 1 else f"{name}#{names[name]}"
        samples.append(Sample(key, item.image, picture.size, item.caption, item.dataset, item.subset,
                              subset.num_repeats, dataset.prior_loss_weight if subset.is_reg else 1.0, subset.is_reg,
                              picture.content, masks.masks.get(place)))  # fmt: skip
    return samples, bad


def _misfit(place: Place, size: tuple[int, int]) -> str | None:
    try:
        place(*size)
    except ValueError as error:
        return str(error)
    return None


def _skipped(bad: Sequence[str]) -> list[str]:
    if not bad:
        return []
    more = f"\n  and {len(bad) - SHOWN_NAMES} more" if len(bad) > SHOWN_NAMES else ""
    lines = "".join(f"\n  {line}" for line in bad[:SHOWN_NAMES])
    return [f"{len(bad)} problems, whose pictures are skipped:{lines}{more}"]


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
