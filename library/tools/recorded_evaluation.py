"""Judge what runs have measured of themselves (``--evaluate_every_n_steps``): no model is loaded, no picture made."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..atomic_files import find_write_error, write_atomic
from ..config.parser import ParsedConfig
from ..errors import ConfigError
from ..evaluation.recorded_steps import (
    RECORD_END,
    RecordedStep,
    find_basis_problems,
    read_recorded_steps,
    report_unrecorded,
)
from ..evaluation.result_chart import draw_result
from ..evaluation.result_table import export_verdict, format_table
from ..evaluation.seed_bootstrap import Resampler
from ..evaluation.verdict import EvaluationVerdict, judge_steps
from ..problems import Problem, dedupe_problems
from .evaluated_runs import EvaluatedRun, find_runs, label_runs


@dataclass(frozen=True)
class RecordedRun:
    """A run with the steps that it has evaluated itself."""

    label: str
    run: EvaluatedRun
    steps: list[RecordedStep]


def load_recorded_runs(words: Sequence[str], problems: list[Problem]) -> list[RecordedRun]:
    """Find the runs and read what they have recorded; append the problems of those that cannot be compared."""
    runs = find_runs(words, problems, needs_files=False)
    labels = label_runs(runs)
    found = []
    for index, run in enumerate(runs):
        started_at = None if run.summary is None else run.summary.started_at
        steps = read_recorded_steps(run.folder / f"{run.name}{RECORD_END}", started_at)
        if not steps:
            problems.append(report_unrecorded(run.folder, run.name))
        found.append(RecordedRun(labels[index], run, steps))
    problems += find_basis_problems({each.label: each.steps for each in found})
    return found


def judge_recorded_runs(runs: Sequence[RecordedRun], resampler: Resampler) -> EvaluationVerdict:
    """Judge the recorded steps of all runs by the rule for LoRA files."""
    metrics = [
        step.to_metrics(each.label, _find_file(each.run, step.step), each.run.find_validation_loss(step.step))
        for each in runs
        for step in each.steps
        if step.basis == each.steps[-1].basis  # a resumed run may be measured otherwise
    ]
    return judge_steps(metrics, resampler)


def compare_recorded(
    words: Sequence[str], folder: str | None, own: ParsedConfig, training: ParsedConfig
) -> "WrittenResult":
    """Judge the runs that words name, and write the result."""
    problems = [*own.problems, *_find_unused(own, training)]
    if not words:
        problems.append(Problem("", "no run given", "name OUTPUT_DIR/OUTPUT_NAME, or OUTPUT_DIR"))
    runs = load_recorded_runs(words, problems)
    output_dir = Path(folder).expanduser() if folder is not None else None
    if output_dir is None and runs:
        output_dir = runs[0].run.folder / f"{runs[0].run.name}.evaluation"
    if output_dir is not None and (error := find_write_error(output_dir)):
        problems.append(Problem("evaluation_dir", f"cannot write to {output_dir}: {error}"))
    if problems or output_dir is None:
        raise ConfigError(own.locate_problems(dedupe_problems(problems)))
    resampler = Resampler()
    verdict = judge_recorded_runs(runs, resampler)
    basis = {name: value for name, value in runs[0].steps[-1].basis.items() if not name.endswith(" pictures")}
    return write_result(verdict, resampler, output_dir, {"recorded": True, **basis})


def _find_unused(own: ParsedConfig, training: ParsedConfig) -> list[Problem]:
    """Find the options that say how pictures are made, of which none are."""
    names = sorted({*(own.explicit - {"recorded", "evaluation_dir", "json"}), *training.explicit})
    return [Problem(name, "has no effect with --recorded: the runs have made their pictures") for name in names]


@dataclass(frozen=True)
class WrittenResult:
    """The result of judging runs, as it was written to files."""

    verdict: EvaluationVerdict
    sentence: str
    table: str
    json: str
    chart: Path


def write_result(
    verdict: EvaluationVerdict, resampler: Resampler, folder: Path, settings: dict[str, Any]
) -> WrittenResult:
    """Write table, JSON and picture to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sentence, table = verdict.format_sentence(), "\n".join(format_table(verdict, resampler))
    exported = json.dumps(export_verdict(verdict, resampler, settings), indent=1, ensure_ascii=False)
    chart = folder / "evaluation.png"
    write_atomic(folder / "evaluation.json", f"{exported}\n".encode())
    write_atomic(folder / "evaluation.txt", f"{sentence}\n\n{table}\n".encode())
    draw_result(verdict, resampler, None).save(chart, optimize=True)
    return WrittenResult(verdict, sentence, table, exported, chart)


def _find_file(run: EvaluatedRun, step: int) -> str:
    """Return the name of the LoRA file that was saved at a step; empty if none was."""
    return next((file.path.name for file in run.files if file.step == step), "")
