"""Check every run of a sweep before the first one starts, and complete its settings: caches and evaluation."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config.options import iter_options
from ...config.parser import ParsedConfig
from ...config.schema import RunConfig
from ...errors import ConfigError, UserError
from ...evaluation.pictures import find_unsupported_reason
from ...models.base import Family
from ...models.detect import detect_model
from ...models.families import FAMILIES
from ...problems import Place, Problem, dedupe_problems, locate_problems
from ...training.preflight import (
    RunFacts,
    check_run_settings,
    find_installation_problems,
    find_settings_problems,
    load_settings,
)
from ...training.resume import serialize_settings
from .sweep_file import OWN_OPTIONS, Sweep, SweepRun

DISK_CACHES = (
    {"cache_latents_to_disk": True, "cache_text_encoder_outputs_to_disk": True},
    {"cache_latents_to_disk": True},
)
"""What runs share, where they cache nothing themselves: all, or what their settings allow."""

LENGTH_OPTIONS = {"max_train_steps", "max_train_epochs"}
"""Options with which a run may be resumed, but which make another run of a sweep."""

MEASUREMENTS = 4
"""How often a run is evaluated, where the file does not say."""


@dataclass(frozen=True)
class CheckedRun:
    """A run whose settings are complete and valid."""

    run: SweepRun
    argv: Sequence[str]
    config: RunConfig
    settings: Mapping[str, Any]
    """What it sets: in the sweep file, and of the run file what makes another run."""


def check_sweep(sweep: Sweep) -> list[CheckedRun]:
    """Check all runs, and raise with all their problems; one of several runs is told once."""
    checked, by_run = list[CheckedRun](), dict[str, list[Problem]]()
    for run in sweep.runs:
        found, by_run[run.name] = _check_run(sweep, run)
        checked.append(found)
    if any(by_run.values()):
        raise ConfigError(_scope_problems(by_run))
    if equal := list(_find_equal_runs(sweep, checked)):
        raise ConfigError(equal)
    return checked


def _find_equal_runs(sweep: Sweep, runs: Sequence[CheckedRun]) -> Iterator[Problem]:
    """Find runs with the settings of another, also where one writes a default or another spelling of a number."""
    first = dict[str, str]()
    for each in runs:
        settings = {name: value for name, value in serialize_settings(each.config).items() if name not in OWN_OPTIONS}
        name = first.setdefault(json.dumps(settings, sort_keys=True), each.run.name)
        if name != each.run.name:
            text = f"runs {name} and {each.run.name} have the same settings"
            yield Problem("", text, "remove one", Place(str(sweep.path)))


def _scope_problems(by_run: Mapping[str, Sequence[Problem]]) -> list[Problem]:
    """Name the run beside a problem that not all runs have."""
    every = dedupe_problems(problem for problems in by_run.values() for problem in problems)
    scoped = []
    for problem in every:
        names = [name for name, problems in by_run.items() if problem in problems]
        if len(names) < len(by_run):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            problem = replace(problem, scope=f"run {names[0]}{more}")
        scoped.append(problem)
    return scoped


def _check_run(sweep: Sweep, run: SweepRun) -> tuple[CheckedRun, list[Problem]]:
    run = replace(run, settings={**run.settings, **(_choose_caches(sweep, run) if sweep.share_caches else {})})
    parsed = load_settings(sweep.build_argv(run))
    problems = [*find_settings_problems(parsed), *_find_idle_axes(run, parsed), *find_installation_problems(parsed)]
    problems = [problem for problem in problems if problem.option != "output_name"]  # it is resumed
    if not problems:
        try:
            run, parsed = _add_evaluation(sweep, run, parsed)
            _check_model(parsed.config, sweep.num_processes)
        except UserError as error:
            problems = parsed.locate_problems(error.problems)
    checked = CheckedRun(run, sweep.build_argv(run), parsed.config, _list_settings(run, parsed))
    return checked, _locate(problems, run)


def _list_settings(run: SweepRun, parsed: ParsedConfig) -> dict[str, Any]:
    options = {each.name for each in iter_options(RunConfig) if each.changes_result or each.group == "evaluate"}
    compared = parsed.explicit & (options | LENGTH_OPTIONS) - {*OWN_OPTIONS}
    values = serialize_settings(parsed.config)
    return {**{name: values[name] for name in sorted(compared)}, **run.settings}


def _locate(problems: Iterable[Problem], run: SweepRun) -> list[Problem]:
    """Name the sweep file, line and key instead of the flag that they become."""
    flags = {f"no-{name}": place for name, place in run.places.items()}  # of a value false
    return dedupe_problems(locate_problems(problems, {**flags, **run.places}))


def _find_idle_axes(run: SweepRun, parsed: ParsedConfig) -> list[Problem]:
    """Find axes without effect, whose runs would all be the same."""
    reasons = {place.flag.removeprefix("--").removeprefix("no-"): reason for place, reason in parsed.unused}
    return [
        Problem(name, f"has no effect: {reasons[name]}", "the runs of this axis would be equal", run.places[name])
        for name in sorted(run.axes & reasons.keys())
    ]


def _choose_caches(sweep: Sweep, run: SweepRun) -> dict[str, Any]:
    """Choose caches on disk, which all runs read, for a run that asks for none and allows them."""
    parsed = load_settings(sweep.build_argv(run))
    asked = {name for names in DISK_CACHES for name in names} | {"cache_latents", "cache_text_encoder_outputs"}
    if parsed.explicit & asked or parsed.config.data.slider_prompts or find_settings_problems(parsed):
        return {}
    for caches in DISK_CACHES:
        tried = load_settings(sweep.build_argv(replace(run, settings={**run.settings, **caches})))
        if not find_settings_problems(tried) and len(tried.unused) == len(parsed.unused):
            return caches
    return {}


def _add_evaluation(sweep: Sweep, run: SweepRun, parsed: ParsedConfig) -> tuple[SweepRun, ParsedConfig]:
    """Let a run measure its pictures where it does not anyway, and its model allows it."""
    config = parsed.config
    family: Family = FAMILIES.get(detect_model(config.model).family)(config.model)
    if config.evaluate.is_active or config.data.slider_prompts or find_unsupported_reason(family):
        return run, parsed
    epochs, steps = config.train.max_train_epochs, config.train.max_train_steps
    measured = {"evaluate_every_n_steps": max(1, steps // MEASUREMENTS)}
    if epochs:
        measured = {"evaluate_every_n_epochs": max(1, epochs // MEASUREMENTS)}
    run = replace(run, settings={**run.settings, **measured})
    return run, load_settings(sweep.build_argv(run))


def _check_model(config: RunConfig, num_processes: int) -> None:
    """Run the checks that need the model, without its weights."""
    detected = detect_model(config.model)
    family: Family = FAMILIES.get(detected.family)(config.model)
    check_run_settings(config, RunFacts(family, detected, world_size=num_processes))
