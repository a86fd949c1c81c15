"""Split off the validation set: a hash of each image decides, independent of the other images.

So adding images does not change the set, and the copy of a validation image in another folder is not trained on.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..dataset.schema import DATASET_KEYS, DatasetConfig, SubsetConfig
from ..randomness import Purpose, derive_rng, derive_seed
from .caption_processing import process_caption
from .manifest import Sample

DEFAULT_VALIDATION_SEED = 0
"""The seed of the split without ``validation_seed``: the training seed does not change which images are set aside."""


@dataclass(frozen=True)
class ValidationSplit:
    """Training and validation samples, and notes for the log."""

    train_samples: tuple[Sample, ...]
    validation_samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()


def split_validation_samples(samples: Sequence[Sample], datasets: Sequence[DatasetConfig]) -> ValidationSplit:
    """Split ``validation_split`` off each subset, except for regularization images.

    The hash of the file decides, so that copies of an image are on one side and names do not matter.  If chance leaves
    one side of a small dataset empty, it gets one image.
    """
    held: dict[tuple[int, str], Sample] = {}  # each image once in a dataset
    for number, dataset in enumerate(datasets):
        if not any(subset.validation_split for subset in dataset.subsets):
            continue
        mine = [sample for sample in samples if sample.dataset_index == number and not sample.is_reg]
        for sample in _select_validation_samples(mine, dataset):
            held.setdefault((number, sample.identity), sample)
    if not held:
        return ValidationSplit(tuple(samples), ())
    contents = {sample.content_hash for sample in held.values()}
    training = tuple(sample for sample in samples if sample.content_hash not in contents)
    ordered = sorted(
        held.values(), key=lambda sample: (sample.dataset_index, sample.content_hash, _get_window_key(sample))
    )
    validation = tuple(_freeze_sample(sample, datasets) for sample in ordered)
    return ValidationSplit(training, validation, tuple(_format_notes(samples, held, datasets)))


def _get_window_key(sample: Sample) -> tuple[int, int]:
    return (0, 0) if sample.window is None else (sample.window.start, sample.window.length)


def disable_augmentations(dataset: DatasetConfig) -> DatasetConfig:
    """Turn off everything that varies an image or a caption from view to view."""
    off = {**_collect_defaults_of_varying_keys(), **_BAKED_IN_CAPTION_SETTINGS}
    return replace(dataset, subsets=tuple(replace(subset, **off) for subset in dataset.subsets))


def settle_caption_settings(subset: SubsetConfig) -> SubsetConfig:
    """Turn off what varies a caption from view to view, but the choice among its lines, which is drawn once."""
    is_drawn_once = {"enable_wildcard": subset.enable_wildcard}
    return replace(subset, **_collect_defaults_of_varying_keys() | is_drawn_once)


def _collect_defaults_of_varying_keys() -> dict[str, Any]:
    return {name: key.option.default for name, key in DATASET_KEYS.items() if key.option.varies}


_BAKED_IN_CAPTION_SETTINGS: Mapping[str, Any] = {
    "caption_prefix": None,
    "caption_suffix": None,
    "secondary_separator": None,
}
"""Already applied to the captions of validation images, as is the choice of ``enable_wildcard``."""


def _select_validation_samples(samples: Sequence[Sample], dataset: DatasetConfig) -> list[Sample]:
    """Select the samples with a hash below the split, correcting a side that is empty only by chance."""
    shares = [dataset.subsets[sample.subset_index].validation_split for sample in samples]
    numbers = [_hash_to_unit_interval(sample.content_hash, dataset) for sample in samples]
    drawn = [sample for sample, share, number in zip(samples, shares, numbers, strict=True) if number < share]
    by_chance = [
        (number / share, sample)
        for sample, share, number in zip(samples, shares, numbers, strict=True)
        if 0 < share < 1
    ]
    if len({sample.content_hash for _, sample in by_chance}) < 2:
        return drawn
    if not drawn:
        chosen = min(by_chance, key=lambda item: item[0])[1]
        windows = [sample for sample in samples if sample.content_hash == chosen.content_hash]
        return [chosen] if chosen.window is None else windows
    if len(drawn) == len(samples):
        spared = max(by_chance, key=lambda item: item[0])[1].content_hash
        return [sample for sample in drawn if sample.content_hash != spared]
    return drawn


def _hash_to_unit_interval(content_hash: str, dataset: DatasetConfig) -> float:
    """Map an image to 0..1."""
    return derive_seed(_get_validation_seed(dataset), f"{Purpose.HELD_OUT}/{content_hash}") / 2**63


def _get_validation_seed(dataset: DatasetConfig) -> int:
    return DEFAULT_VALIDATION_SEED if dataset.validation_seed is None else dataset.validation_seed


def _freeze_sample(sample: Sample, datasets: Sequence[DatasetConfig]) -> Sample:
    """Fix a validation sample: one repeat, weight 1, one caption."""
    dataset = datasets[sample.dataset_index]
    subset: SubsetConfig = dataset.subsets[sample.subset_index]
    settled = settle_caption_settings(subset)
    draw = derive_rng(_get_validation_seed(dataset), f"{Purpose.VALIDATION_CAPTION}/{sample.identity}")
    caption = process_caption(sample.caption, settled, draw, epoch=0, step=0, total_steps=0)
    return replace(sample, repeats=1, loss_weight=1.0, caption=caption)


def _format_notes(
    samples: Sequence[Sample], validation_samples: dict[tuple[int, str], Sample], datasets: Sequence[DatasetConfig]
) -> list[str]:
    found: defaultdict[int, int] = defaultdict(int)
    elsewhere: defaultdict[int, int] = defaultdict(int)
    contents = {sample.content_hash for sample in validation_samples.values()}
    for sample in samples:
        found[sample.dataset_index] += not sample.is_reg
        elsewhere[sample.dataset_index] += (
            sample.content_hash in contents and (sample.dataset_index, sample.identity) not in validation_samples
        )
    notes = []
    for number in range(len(datasets)):
        if count := sum(dataset == number for dataset, _ in validation_samples):
            notes.append(f"dataset {number + 1}: {count} of {found[number]} images are used for validation")
        if elsewhere[number]:
            notes.append(
                f"dataset {number + 1}: {elsewhere[number]} images are not trained on, because they are used for"
                " validation in another dataset"
            )
    return notes
