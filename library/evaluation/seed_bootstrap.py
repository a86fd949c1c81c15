"""Confidence intervals from seeds: statistics of pictures, computed again with seeds that are drawn with replacement.

The seeds of each caption are drawn independently.  All steps and runs are computed with the same draws, since their
pictures begin with the same noise: so the interval of a difference knows what both have in common.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .embedding_metrics import Array

Indices = NDArray[np.int64]
NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
MIN_SHARE_OF_ROOM = 0.2
"""The least part of the way from the base model to equality (cosine 1) that the unit of likeness is."""


class Statistic(Protocol):
    """A number that is computed from the pictures of some captions and seeds."""

    @property
    def shape(self) -> tuple[int, int]:
        """Captions and seeds."""

    def compute(self, indices: Indices) -> Array:
        """Compute the number for each choice of seeds: (choices, captions, seeds) to (choices)."""


@dataclass(frozen=True)
class MeanStatistic:
    """The mean of a value of each picture, divided by a constant."""

    values: Array  # (captions, seeds)
    divisor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def compute(self, indices: Indices) -> Array:
        mean: Array = _select_seeds(self.values, indices).mean(axis=(1, 2)) / self.divisor
        return mean


@dataclass(frozen=True)
class ShareStatistic:
    """The way that a mean cosine has gone from that of the base model, 0, to a ceiling, 1.

    The ceiling can be near that of the base model or below it: pictures of a varied dataset are less like each other
    than a picture of their average is to all of them.  The unit is therefore never less than ``MIN_SHARE_OF_ROOM`` of
    the way from the base model to equality: so a larger mean is always a larger share.
    """

    values: Array  # (captions, seeds)
    base_values: Array  # of the same captions and seeds
    ceiling: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def compute(self, indices: Indices) -> Array:
        mean, base = (_select_seeds(each, indices).mean(axis=(1, 2)) for each in (self.values, self.base_values))
        return self._scale(mean, base)

    @property
    def reaches_ceiling(self) -> bool:
        """Whether 1 is the ceiling, and not a part of the way to equality, which is further from the base model."""
        base = float(self.base_values.mean())
        return self.ceiling - base >= MIN_SHARE_OF_ROOM * (1 - base)

    def _scale(self, mean: Array, base: Array) -> Array:
        if not np.isfinite(self.ceiling):
            return np.full_like(mean, np.nan)
        unit = np.maximum(self.ceiling - base, MIN_SHARE_OF_ROOM * (1 - base))
        has_room = unit > 1e-9
        share: Array = np.where(has_room, (mean - base) / np.where(has_room, unit, 1), np.nan)
        return share


@dataclass(frozen=True)
class PairStatistic:
    """The mean of a value of all pairs of different seeds of a caption."""

    values: Array  # (captions, seeds, seeds)

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def compute(self, indices: Indices) -> Array:
        captions = np.arange(self.values.shape[0])[None, :, None, None]
        first, second = indices[:, :, :, None], indices[:, :, None, :]
        values = self.values[captions, first, second]
        is_pair = first != second
        counts = is_pair.sum(axis=(1, 2, 3))
        sums = (values * is_pair).sum(axis=(1, 2, 3))
        mean: Array = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        return mean


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval, which is unknown (None) with one seed."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_above_zero(self) -> bool:
        """Whether all of the interval is above 0."""
        return self.low is not None and self.low > 0


@dataclass(frozen=True)
class Resampler:
    """Draws seeds, the same for each group of captions whatever is computed from them."""

    seed: int = 0
    num_resamples: int = NUM_RESAMPLES
    _draws: dict[tuple[str, int, int], Indices] = field(default_factory=dict, compare=False, repr=False)

    def estimate(self, statistic: Statistic, group: str, confidence: float = CONFIDENCE) -> Estimate:
        """Estimate one statistic of the pictures of a group of captions."""
        return self.estimate_sum([(1.0, statistic, group)], confidence)

    def estimate_sum(self, terms: Sequence[tuple[float, Statistic, str]], confidence: float = CONFIDENCE) -> Estimate:
        """Estimate a weighted sum of statistics, each with its group; a difference has the weights 1 and -1."""
        value = float(sum(weight * each.compute(_list_all_seeds(each.shape))[0] for weight, each, _ in terms))
        num_seeds = min((each.shape[1] for _, each, _ in terms), default=0)  # of no terms, where nothing is measured
        if num_seeds < 2:
            return Estimate(value)
        samples = np.zeros(self.num_resamples)
        for weight, each, group in terms:
            samples = samples + weight * each.compute(self._draw(group, *each.shape))
        samples = samples[np.isfinite(samples)]
        if not len(samples):
            return Estimate(value)
        # A resampled mean varies as if there were n seeds with the variance of the n, which is too small by (n-1)/n.
        widening = (num_seeds / (num_seeds - 1)) ** 0.5
        low, high = np.quantile(samples, [(1 - confidence) / 2, (1 + confidence) / 2])
        return Estimate(value, value + widening * (float(low) - value), value + widening * (float(high) - value))

    def _draw(self, group: str, num_captions: int, num_seeds: int) -> Indices:
        key = group, num_captions, num_seeds
        if key not in self._draws:
            generator = np.random.default_rng([self.seed, *group.encode()])
            self._draws[key] = generator.integers(0, num_seeds, (self.num_resamples, num_captions, num_seeds))
        return self._draws[key]


def _list_all_seeds(shape: tuple[int, int]) -> Indices:
    """Choose each seed of each caption once."""
    return np.broadcast_to(np.arange(shape[1]), (1, *shape)).astype(np.int64)


def _select_seeds(values: Array, indices: Indices) -> Array:
    selected: Array = values[np.arange(values.shape[0])[None, :, None], indices]
    return selected
