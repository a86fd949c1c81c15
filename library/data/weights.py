"""How often pictures are shown when the datasets of a file have weights: as shares of an epoch, reached by repeats."""

from collections.abc import Sequence
from dataclasses import replace

from ..dataset.schema import DatasetConfig
from ..errors import ConfigError
from .sample import Sample

MAX_SAMPLES_PER_EPOCH = 100_000_000
"""In an epoch; a weight far out of proportion asks for more."""


def apply_dataset_weights(samples: Sequence[Sample], datasets: Sequence[DatasetConfig]) -> tuple[tuple[Sample, ...], list[str]]:
    """The samples with the repeats that give each dataset its share, and what came of it.

    No picture is shown less often than its own repeats say: the dataset that has most of them for its weight stays as
    it is, and the others are shown more often.
    """
    weights = [dataset.weight for dataset in datasets]
    shown = [0.0] * len(datasets)
    for sample in samples:
        shown[sample.dataset_index] += sample.repeats
    present = [(number, weight) for number, weight in enumerate(weights) if weight is not None and shown[number]]
    if not present:
        return tuple(samples), []
    scale = max(shown[number] / weight for number, weight in present)
    total = sum(weight * scale for _, weight in present)
    if total > MAX_SAMPLES_PER_EPOCH:
        heaviest = max(present, key=lambda item: item[1] / shown[item[0]])[0]
        raise ConfigError([
            f"{datasets[heaviest].locate('weight')}: weight: for these shares an epoch would show {total:.3g} pictures,"
            f" repeats counted; at most {MAX_SAMPLES_PER_EPOCH}: choose weights nearer to each other"
        ])  # fmt: skip
    factors = {number: weight * scale / shown[number] for number, weight in present}
    found = tuple(replace(sample, repeats=_scale_repeats(sample.repeats, factors[sample.dataset_index])) for sample in samples)
    notes = [f"dataset {number + 1}: weight {weight:g} is {weight * scale / total:.1%} of an epoch: pictures are shown"
             f" {factors[number]:.4g} times as often as by their repeats" for number, weight in present]  # fmt: skip
    return found, notes


def _scale_repeats(repeats: float, factor: float) -> float:
    """A whole number where only the arithmetic of floats is in the way of one."""
    exact = repeats * factor
    return round(exact) if abs(exact - round(exact)) < 1e-9 * exact else exact
