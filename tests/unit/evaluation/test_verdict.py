"""The right step is named among planted ones that are too short, copied or drifted, and chance is told from more."""

import numpy as np

from library.evaluation.file_metrics import COPYING, DRIFT, LIKENESS, FileMetrics, MetricStatistic
from library.evaluation.result_table import export_verdict, format_table
from library.evaluation.seed_bootstrap import MeanStatistic, Resampler
from library.evaluation.verdict import judge_steps

RESAMPLER = Resampler(num_resamples=500)


def plant_step(run: str, step: int, likeness: float, copying: float, drift: float, noise: int = 0) -> FileMetrics:
    """A step with these values, and some variation between seeds."""
    values = {LIKENESS: likeness, COPYING: copying, DRIFT: drift}
    generator = np.random.default_rng(noise)
    statistics = {
        name: MetricStatistic(MeanStatistic(value + 0.05 * generator.normal(size=(3, 4))), name)
        for name, value in values.items()
    }
    return FileMetrics(run, step, f"{run}.safetensors", statistics)


SHORT, RIGHT = plant_step("short", 20, 0.3, 0.0, 0.02, 1), plant_step("right", 300, 0.9, 0.1, 0.1, 2)
LONG = plant_step("long", 3000, 0.95, 0.9, 0.6, 3)


def test_the_step_with_likeness_and_without_copying_and_drift_is_the_best():
    verdict = judge_steps([SHORT, RIGHT, LONG], RESAMPLER)

    assert verdict.best.name == "right step 300"
    assert verdict.best.is_good
    assert [each.describe() for each in verdict.steps] == [
        "no likeness, no copying, no drift",
        "likeness, no copying, no drift",
        "likeness, copying, drift",
    ]
    assert all(each.is_more_than_chance for each in verdict.comparisons)
    assert verdict.format_sentence().startswith(
        "Best is right step 300: likeness has come, copying and drift have not; right step 300 is ahead of "
    )


def test_a_later_step_with_more_likeness_and_drift_is_not_taken():
    later = plant_step("right", 600, 1.0, 0.1, 0.4)

    assert judge_steps([RIGHT, later], RESAMPLER).best.metrics is RIGHT


def test_runs_that_differ_by_the_noise_of_seeds_may_be_chance():
    again = plant_step("again", 300, 0.9, 0.1, 0.1, 7)

    (comparison,) = judge_steps([RIGHT, again], RESAMPLER).comparisons

    assert not comparison.is_more_than_chance
    assert "which may be chance" in str(comparison)


def test_where_no_step_is_good_the_sentence_says_why():
    verdict = judge_steps([SHORT], RESAMPLER)

    assert verdict.format_sentence() == "No step is good; the best is short step 20, but likeness has not come."


def test_the_table_marks_the_best_and_the_json_has_all_intervals():
    verdict = judge_steps([SHORT, RIGHT, LONG], RESAMPLER)

    lines, exported = format_table(verdict, RESAMPLER), export_verdict(verdict, RESAMPLER, {"seconds": 1})

    assert [line[0] for line in lines[1:4]] == ["+", "*", "+"]
    assert exported["best"] == {"run": "right", "step": 300}
    right = exported["steps"][1]["metrics"][LIKENESS]
    assert right["low"] < right["value"] < right["high"]


def test_what_was_not_measured_is_not_said_to_have_not_come():
    statistics = {name: each for name, each in RIGHT.statistics.items() if name != DRIFT}
    verdict = judge_steps([FileMetrics("right", 300, "right.safetensors", statistics)], RESAMPLER)

    assert verdict.format_sentence() == (
        "Best is right step 300: likeness has come, copying has not, drift was not measured."
    )
    assert verdict.best.describe() == "likeness, no copying"


def test_likeness_that_was_not_measured_is_not_said_to_have_not_come():
    statistics = {name: each for name, each in RIGHT.statistics.items() if name != LIKENESS}
    verdict = judge_steps([FileMetrics("right", 300, "right.safetensors", statistics)], RESAMPLER)

    assert verdict.format_sentence() == ("No step is good; the best is right step 300, but likeness was not measured.")


def test_a_good_step_of_a_lower_balance_is_not_said_to_be_ahead():
    good, drifted = plant_step("good", 1, 0.9, 0.12, 0.29, 1), plant_step("drifted", 2, 1.0, 0.0, 0.37, 2)

    verdict = judge_steps([drifted, good], RESAMPLER)

    (comparison,) = verdict.comparisons
    assert verdict.best.metrics is good and comparison.difference.high < 0
    assert not comparison.is_more_than_chance
    difference = comparison.difference
    assert str(comparison) == (
        "good step 1 is preferred to drifted step 2, where captions without the subject have drifted, although its "
        f"balance is lower by {-difference.value:.2f} ({-difference.high:.2f} to {-difference.low:.2f})"
    )


def test_steps_of_which_nothing_can_be_measured_are_judged_too():
    unknown = [FileMetrics(run, 100, f"{run}.safetensors", {}) for run in ("one", "other")]  # of one training picture

    verdict = judge_steps(unknown, RESAMPLER)

    assert [each.describe() for each in verdict.steps] == ["nothing to judge by"] * 2
    assert "likeness was not measured" in verdict.format_sentence()


def test_equal_runs_are_not_said_to_be_preferred_for_rounding():
    likeness, copying, drift = 0.26 * 0.4, 0.5, 0.45
    assert likeness - copying - drift - likeness + copying + drift < 0
    values = {LIKENESS: likeness, COPYING: copying, DRIFT: drift}
    statistics = {name: MetricStatistic(MeanStatistic(np.full((1, 2), each)), name) for name, each in values.items()}

    verdict = judge_steps([FileMetrics(run, 100, "", statistics) for run in ("one", "other")], RESAMPLER)

    assert str(verdict.comparisons[0]) == (
        "one step 100 is ahead of other step 100 by 0.00 (-0.00 to -0.00), which may be chance"
    )
