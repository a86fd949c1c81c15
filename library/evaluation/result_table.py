"""The result of an evaluation as a table of text and as JSON."""

from collections.abc import Sequence
from typing import Any

from .file_metrics import (
    COMPOSED_FOLLOWING,
    COMPOSED_LIKENESS,
    COPYING,
    DIVERSITY,
    DRIFT,
    FOLLOWING,
    LIKENESS,
    METRICS,
)
from .seed_bootstrap import Estimate, Resampler
from .verdict import EvaluationVerdict, JudgedStep

COLUMNS = (LIKENESS, COPYING, DRIFT, COMPOSED_LIKENESS, FOLLOWING, COMPOSED_FOLLOWING, DIVERSITY)
"""The metrics of the table; the JSON has all of them."""


def format_table(verdict: EvaluationVerdict, resampler: Resampler) -> list[str]:
    """Format a line for each step, with confidence intervals of 95 % in brackets; an asterisk marks the best."""
    names = [name for name in COLUMNS if any(name in each.metrics.statistics for each in verdict.steps)]
    has_loss = any(each.metrics.validation_loss is not None for each in verdict.steps)
    rows = [["", "run", "step", *names, *(["validation loss"] if has_loss else []), "what has come"]]
    for each in verdict.steps:
        estimates = each.metrics.estimate_all(resampler)
        loss = each.metrics.validation_loss
        mark = "*" if each is verdict.best else "+" if each in verdict.best_by_run.values() else ""
        cells = [mark, each.metrics.run, str(each.metrics.step), *(format_estimate(estimates.get(n)) for n in names)]
        cells += [("" if loss is None else f"{loss:.4g}")] if has_loss else []
        rows.append([*cells, each.describe()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, "* the best step of all, + the best step of its run; in brackets: 95 % intervals from seeds"]


def format_estimate(estimate: Estimate | None) -> str:
    """Format a value with its interval; empty for a metric that a step does not have."""
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def export_verdict(verdict: EvaluationVerdict, resampler: Resampler, settings: dict[str, Any]) -> dict[str, Any]:
    """Export everything as plain data."""
    return {
        "verdict": verdict.format_sentence(),
        "best": _name_step(verdict.best),
        "best_of_each_run": [_name_step(each) for each in verdict.best_by_run.values()],
        "comparisons": [
            {
                "winner": _name_step(each.winner),
                "other": _name_step(each.other),
                "difference": _export_estimate(each.difference),
                "is_more_than_chance": each.is_more_than_chance,
            }
            for each in verdict.comparisons
        ],
        "metrics": dict(METRICS),
        "steps": [_export_step(each, resampler) for each in verdict.steps],
        "settings": settings,
    }


def _export_step(step: JudgedStep, resampler: Resampler) -> dict[str, Any]:
    estimates = step.metrics.estimate_all(resampler)
    return {
        **_name_step(step),
        "file": step.metrics.file,
        "metrics": {name: _export_estimate(each) for name, each in estimates.items()},
        "balance": _export_estimate(step.balance),
        "validation_loss": step.metrics.validation_loss,
        "has_likeness": step.has_likeness,
        "has_copying": step.has_copying,
        "has_drift": step.has_drift,
        "is_good": step.is_good,
    }


def _name_step(step: JudgedStep) -> dict[str, Any]:
    return {"run": step.metrics.run, "step": step.metrics.step}


def _export_estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def list_missing_metrics(verdict: EvaluationVerdict) -> Sequence[str]:
    """List the metrics that no step has."""
    return [name for name in METRICS if not any(name in each.metrics.statistics for each in verdict.steps)]
