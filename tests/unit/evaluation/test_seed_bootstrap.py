"""Confidence intervals from seeds have the width that statistics predicts, and cover what they should."""

import numpy as np
import pytest

from library.evaluation.seed_bootstrap import Estimate, MeanStatistic, PairStatistic, Resampler, ShareStatistic

RESAMPLER = Resampler(num_resamples=4000)


def draw_values(captions: int, seeds: int, seed: int = 0) -> np.ndarray:
    """Values whose captions have means of their own, which seeds do not vary."""
    generator = np.random.default_rng(seed)
    return 10 * generator.normal(size=(captions, 1)) + generator.normal(size=(captions, seeds))


def test_the_interval_of_a_mean_is_that_of_the_variance_between_seeds():
    values = draw_values(captions=3, seeds=12)
    standard_error = (values.var(axis=1, ddof=1) / 12).sum() ** 0.5 / 3

    found = RESAMPLER.estimate(MeanStatistic(values, divisor=2.0), "a")

    assert found.value == pytest.approx(values.mean() / 2)
    assert found.high - found.low == pytest.approx(2 * 1.96 * standard_error / 2, rel=0.05)
    assert (found.high + found.low) / 2 == pytest.approx(found.value, abs=standard_error / 4)


def test_intervals_of_few_seeds_cover_the_true_mean_nearly_as_often_as_they_say():
    resampler, covered = Resampler(num_resamples=300), 0
    for number in range(300):
        values = np.random.default_rng(number).normal(size=(4, 4))
        found = resampler.estimate(MeanStatistic(values), "a")
        covered += found.low <= 0 <= found.high

    assert 0.9 <= covered / 300 <= 0.98


def test_the_interval_of_a_difference_knows_that_both_have_the_same_noise():
    first = draw_values(captions=4, seeds=4)
    terms = [(1.0, MeanStatistic(first + 0.1), "a"), (-1.0, MeanStatistic(first), "a")]

    found = RESAMPLER.estimate_sum(terms)

    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert found.is_above_zero
    unpaired = RESAMPLER.estimate_sum([terms[0], (-1.0, MeanStatistic(first), "other noise")])
    assert unpaired.low < 0 < unpaired.high


def test_a_share_is_0_for_the_base_model_and_1_at_the_ceiling():
    base = draw_values(captions=2, seeds=4)
    ceiling = base.mean() + 5

    assert RESAMPLER.estimate(ShareStatistic(base, base, ceiling), "a") == Estimate(0.0, 0.0, 0.0)
    assert RESAMPLER.estimate(ShareStatistic(np.full((2, 4), ceiling), base, ceiling), "a").value == pytest.approx(1)
    assert RESAMPLER.estimate(ShareStatistic(base + 1, base, ceiling), "a").value == pytest.approx(0.2)


def test_pairs_are_of_different_seeds_also_where_one_is_drawn_twice():
    values = np.full((2, 3, 3), 0.25)
    values[:, range(3), range(3)] = 99.0

    assert RESAMPLER.estimate(PairStatistic(values), "a") == Estimate(0.25, 0.25, 0.25)


def test_one_seed_has_no_interval():
    assert RESAMPLER.estimate(MeanStatistic(np.ones((3, 1))), "a") == Estimate(1.0)
    assert not RESAMPLER.estimate(MeanStatistic(np.ones((3, 1))), "a").is_above_zero


@pytest.mark.parametrize("ceiling", [0.9, 0.6, 0.54 + 1e-9, 0.54, 0.48, -0.2])
def test_more_alike_is_always_a_larger_share_also_where_real_pictures_are_less_alike_than_those_of_the_base(ceiling):
    generator = np.random.default_rng(0)
    base = 0.54 + 0.02 * generator.normal(size=(3, 4))
    means = [0.2, 0.5, 0.54, 0.6, 0.66, 0.9]

    found = [
        RESAMPLER.estimate(ShareStatistic(mean + 0.02 * generator.normal(size=(3, 4)), base, ceiling), "a")
        for mean in means
    ]

    values = [each.value for each in found]
    assert values == sorted(values) and values[0] < 0 < values[-1]
    assert all(each.low <= each.value <= each.high and each.high - each.low < 1 for each in found)
    assert ShareStatistic(base, base, ceiling).reaches_ceiling == (ceiling == 0.9)


def test_a_share_is_unknown_without_a_ceiling_or_where_the_base_model_makes_the_real_pictures():
    ones = np.ones((2, 3))

    for statistic in (ShareStatistic(ones / 2, ones / 2, float("nan")), ShareStatistic(ones, ones, 1.0)):
        assert np.isnan(RESAMPLER.estimate(statistic, "a").value)
