"""The runs and LoRA files that ``evaluate`` is given: their steps, their settings, and the losses they recorded."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config.options import iter_options
from ..config.schema import RunConfig
from ..name_suggestions import suggest_name
from ..problems import Problem, report_argument, report_file
from ..report.metric_series import is_plain_number, read_metrics
from ..report.page import RunSummary

SUMMARY_END, METRICS_END, FILE_END = ".run.json", ".metrics.jsonl", ".safetensors"
EMA_END = "-ema"
_STEP_PATTERN = re.compile(r"(?P<name>.+?)(-(?P<epoch>\d{6})|-step(?P<step>\d{8}))?(?P<ema>-ema)?")
SHARED_GROUPS = ("model", "data")
"""The groups of options that have to be the same for all runs: the base model, and the pictures to compare with."""


@dataclass(frozen=True)
class EvaluatedFile:
    """A LoRA file of a run."""

    path: Path
    step: int
    """The training step, 0 if neither the file nor its name tells."""
    epoch: int | None = None
    """The epoch in its name."""

    @property
    def order(self) -> tuple[bool, int, int]:
        """What files of a run are sorted by: step, or epoch; a file of neither is the last one that a run saves."""
        return self.step == 0 and self.epoch is None, self.step, self.epoch or 0


@dataclass(frozen=True)
class EvaluatedRun:
    """A run with the files that are evaluated; files of other programs are a run without a summary.

    The files of the EMA are a run of their own, ``NAME-ema``, with the summary of NAME.
    """

    folder: Path
    name: str
    files: tuple[EvaluatedFile, ...]
    summary: RunSummary | None
    recorded_name: str
    """The name of its summary and metrics."""

    def find_validation_loss(self, step: int) -> float | None:
        """Return the last validation loss that the run recorded until a step, of the weights that its files hold."""
        if self.summary is None:
            return None
        is_beside_ema = self.name == self.recorded_name and self.summary.all_settings.get("ema_decay") is not None
        name = "validation/without_ema/loss" if is_beside_ema else "validation/loss"
        lines = read_metrics(self.folder / f"{self.recorded_name}{METRICS_END}")
        found = [line[name] for line in lines if name in line and line["step"] <= step]
        return float(found[-1]) if found and is_plain_number(found[-1]) else None


def find_runs(words: Sequence[str], problems: list[Problem], *, needs_files: bool = True) -> list[EvaluatedRun]:
    """Find the runs and files that words name, in their order; append the problems of words that name none.

    ``needs_files``: a run that has saved no LoRA file is a problem.
    """
    runs = dict[tuple[Path, str], list[Path] | None]()  # None: all files of the run
    folders = dict[Path, Path]()
    for word in words:
        for given, name, file in _resolve_word(word, problems):
            folder = folders.setdefault(given.resolve(), given)  # one run, however its folder is written
            known = runs.get((folder, name), [])
            runs[folder, name] = None if file is None or known is None else [*known, file]
    found = []
    for (folder, name), paths in runs.items():
        recorded_name = _find_recorded_name(folder, name)
        summary = RunSummary.read(folder / f"{recorded_name}{SUMMARY_END}")
        chosen = _list_files(folder, name, summary) if paths is None else paths
        if not chosen and needs_files:
            text = "the run has no LoRA file"
            problems.append(report_file(folder / name, text, "it may not have saved yet, or have trained a model"))
            continue
        files = sorted((_describe_file(path) for path in dict.fromkeys(chosen)), key=lambda file: file.order)
        found.append(EvaluatedRun(folder, name, tuple(files), summary, recorded_name))
    return found


def _find_recorded_name(folder: Path, name: str) -> str:
    """Return the name of the run that wrote the summary: for files of the EMA the one without ``-ema``."""
    trained = name.removesuffix(EMA_END)
    is_ema = trained and not (folder / f"{name}{SUMMARY_END}").is_file()
    return trained if is_ema and (folder / f"{trained}{SUMMARY_END}").is_file() else name


def _resolve_word(word: str, problems: list[Problem]) -> Iterator[tuple[Path, str, Path | None]]:
    """Yield folder and name of each run that a word names, and the file if it names one."""
    path = Path(word).expanduser()
    summary = path.with_name(f"{path.name}{SUMMARY_END}")
    if path.name.endswith(SUMMARY_END) and path.is_file():
        yield path.parent, path.name.removesuffix(SUMMARY_END), None
    elif path.name.endswith(FILE_END) and path.is_file():
        yield path.parent, _parse_run_name(path), path
    elif summary.is_file():
        yield path.parent, path.name, None
    elif path.is_dir():
        names = sorted(each.name.removesuffix(SUMMARY_END) for each in path.glob(f"*{SUMMARY_END}"))
        if not names:
            problems.append(report_argument(word, f"no run in this folder (NAME{SUMMARY_END})", "name its LoRA files"))
        yield from ((path, name, None) for name in names)
    else:
        siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        found = [each for each in siblings if each.endswith((SUMMARY_END, FILE_END))]
        known = [each.removesuffix(SUMMARY_END).removesuffix(FILE_END) for each in found]
        problems.append(report_argument(word, f"no such run or LoRA file{suggest_name(path.name, known)}"))


def _parse_run_name(path: Path) -> str:
    """Return the name of the run of a file; of the EMA it is another one, so that both can be compared."""
    match = _STEP_PATTERN.fullmatch(path.name.removesuffix(FILE_END))
    return path.name.removesuffix(FILE_END) if match is None else match["name"] + (match["ema"] or "")


def _list_files(folder: Path, name: str, summary: RunSummary | None) -> list[Path]:
    """List the files that a run has saved, without those of earlier runs of its name and those of the EMA."""
    pattern = re.compile(rf"{re.escape(name)}(-\d{{6}}|-step\d{{8}})?{re.escape(FILE_END)}")
    since = 0.0 if summary is None else summary.started_at - 1
    found = (path for path in folder.iterdir() if pattern.fullmatch(path.name) and path.is_file())
    return [path for path in found if path.stat().st_mtime >= since]


def _describe_file(path: Path) -> EvaluatedFile:
    """Read the step from the metadata, or from the name, and the epoch from the name."""
    match = _STEP_PATTERN.fullmatch(path.name.removesuffix(FILE_END))
    step = (match and match["step"]) or _read_metadata(path).get("ss_steps", "")
    epoch = int(match["epoch"]) if match and match["epoch"] else None
    return EvaluatedFile(path, int(step) if str(step).isdecimal() else 0, epoch)


def _read_metadata(path: Path) -> Mapping[str, str]:
    """Read the metadata of a safetensors file without its tensors; empty if it cannot be read, which is found later."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 2**26)))
    except (OSError, ValueError, RecursionError):
        return {}
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}


def label_runs(runs: Sequence[EvaluatedRun]) -> dict[int, str]:
    """Name runs by their output names, with as many of their folders as tell them apart; by position.

    They also name folders of pictures: so they differ in more than case.
    """
    paths = [(*run.folder.resolve().parts[1:], run.name) for run in runs]
    lengths = [1] * len(runs)
    while True:
        labels = ["/".join(path[-length:]) for path, length in zip(paths, lengths, strict=True)]
        keys = [label.casefold() for label in labels]
        same = [index for index, key in enumerate(keys) if keys.count(key) > 1 and lengths[index] < len(paths[index])]
        if not same:
            return dict(enumerate(labels))
        for index in same:
            lengths[index] += 1


def read_run_settings(run: EvaluatedRun) -> tuple[dict[str, Any], list[Problem]]:
    """Read the settings of a run that differ from the defaults, as parsed values by option."""
    options = {option.name: option for option in iter_options(RunConfig)}
    values, problems = dict[str, Any](), list[Problem]()
    for name, value in (run.summary.all_settings if run.summary is not None else {}).items():
        try:
            if name in options:
                values[name] = options[name].parse_lenient_toml_value(value)
        except ValueError as error:
            place = run.folder / f"{run.recorded_name}{SUMMARY_END}"
            problems.append(report_file(place, f"{name}: {error}", "it was written by another version"))
    return values, problems


def list_group_options(*groups: str) -> set[str]:
    """List the options of some groups."""
    known = {field.name for field in fields(RunConfig)}
    if unknown := set(groups) - known:
        raise AssertionError(f"no groups {unknown}")
    return {option.name for option in iter_options(RunConfig) if option.group in groups}
