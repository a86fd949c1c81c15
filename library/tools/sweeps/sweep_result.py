"""The result of a sweep: which run is the best, and whether that is more than chance, as table, JSON and picture."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...atomic_files import write_atomic
from ...evaluation.recorded_steps import find_basis_problems
from ...evaluation.seed_bootstrap import Resampler
from ..recorded_evaluation import RecordedRun, judge_recorded_runs, load_recorded_runs, write_result
from .check_runs import CheckedRun
from .early_stopping import ValidatedStep, read_measurements
from .run_queue import RunState, SweepState
from .sweep_file import Sweep

LOSS_COLUMNS = ("", "run", "step", "gain over the base model", "status")


def write_sweep_result(sweep: Sweep, runs: Sequence[CheckedRun], state: SweepState) -> Iterator[str]:
    """Compare the runs that have measured anything, write the result, and yield its lines."""
    words = [str(sweep.get_folder(each.run) / each.run.name) for each in runs]
    begun = [word for word, each in zip(words, runs, strict=True) if state.get(each.run.name).settings is not None]
    recorded = [each for each in load_recorded_runs(begun, []) if each.steps]
    differing = find_basis_problems({each.label: each.steps for each in recorded})
    if recorded and not differing:
        yield from _write_evaluation(sweep, recorded, _list_runs(runs, state))
    else:
        yield from map(str, differing)
        yield from _write_validation(sweep, runs, state)


def _write_evaluation(
    sweep: Sweep, recorded: Sequence[RecordedRun], runs: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    resampler = Resampler()
    verdict = judge_recorded_runs(recorded, resampler)
    result = write_result(verdict, resampler, sweep.output_dir, {"recorded": True, "runs": list(runs)})
    yield result.table
    for run in runs:
        if run["reason"]:
            yield f"{run['name']}: {run['status']}: {run['reason']}"
    yield result.sentence
    yield f"chart: {result.chart}"


def _write_validation(sweep: Sweep, runs: Sequence[CheckedRun], state: SweepState) -> Iterator[str]:
    """Compare the validation losses of runs that do not measure pictures, or not the same ones."""
    found = {each.run.name: read_measurements(sweep.get_folder(each.run), each.run.name).validation for each in runs}
    last = {name: (max(steps), steps[max(steps)]) for name, steps in found.items() if steps}
    exported = {"verdict": "", "runs": list(_list_runs(runs, state)), "validation": {}}
    if last:
        exported["verdict"] = _compare_validation(last)
        exported["validation"] = {name: {"step": step, **vars(each)} for name, (step, each) in last.items()}
        order = sorted(last, key=lambda name: -last[name][1].gain)
        rows = [
            ("*" if name == order[0] else "", name, str(step), f"{each.gain:.4g} +- {each.interval:.2g}")
            for name, (step, each) in ((name, last[name]) for name in order)
        ]
        table = [LOSS_COLUMNS, *((*row, state.get(row[1]).status) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        yield from (line.rstrip() for line in lines)
    yield str(exported["verdict"] or "no run has measured pictures or a validation loss")
    sweep.output_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(exported, indent=1, ensure_ascii=False) + "\n"
    write_atomic(sweep.output_dir / "evaluation.json", text.encode())


def _compare_validation(last: Mapping[str, tuple[int, ValidatedStep]]) -> str:
    """Say which run has the lowest validation loss, and whether its interval touches that of the next."""
    best, *others = sorted(last, key=lambda name: -last[name][1].gain)
    text = f"the lowest validation loss is that of {best}"
    if not others:
        return f"{text}."
    first, second = last[best][1], last[others[0]][1]
    is_apart = first.gain - first.interval > second.gain + second.interval
    chance = "its interval does not touch" if is_apart else "which may be chance: its interval touches"
    return f"{text}; {chance} that of {others[0]}. It hardly tells likeness, and neither copying nor drift."


def _list_runs(runs: Sequence[CheckedRun], state: SweepState) -> list[dict[str, Any]]:
    rows: list[tuple[CheckedRun, RunState]] = [(each, state.get(each.run.name)) for each in runs]
    return [
        {
            "name": each.run.name,
            "settings": dict(each.run.settings),
            "status": found.status,
            "reason": found.reason,
            "seconds": found.seconds,
        }
        for each, found in rows
    ]
