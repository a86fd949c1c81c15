"""Run the sections one after another, each in a process with a limit; keep their results in one JSON file.

The file is written after each section, and a later call goes on with the sections that are not in it: a call that is
cut off has lost one section at most.  ``--list`` prints what would run, ``--table`` the file as Markdown.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from library.atomic_files import write_atomic
from library.errors import UserError

from ..processes import ROOT, TAIL
from ..report import Measurement, describe_machine, format_number
from .sections import OPEN_SECTIONS, SECTIONS, Section, SectionContext

DONE = "done"
NO_TIME = "not run: no time left"
LIMIT_FACTOR = 1.5
"""Limit of a section, by its expected time."""
SPARE_SECONDS = 5
"""Of the time limit, for ending the last section."""
NAMES = [section.name for section in SECTIONS]
OPEN_NAMES = [section.name for section in OPEN_SECTIONS]
ALL = "all"
Results = dict[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--minutes", type=_parse_minutes, default=9.0, help="time limit of this call (default 9)")
    parser.add_argument("--output", type=Path, default=Path("gpu_benchmark.json"), help="file of all results")
    parser.add_argument(
        "--sections", nargs="+", choices=[*NAMES, ALL], default=OPEN_NAMES, help=f"what to run ({' '.join(OPEN_NAMES)})"
    )
    parser.add_argument("--again", action="store_true", help="run sections again that are in the file")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps, as always without a device")
    parser.add_argument("--list", action="store_true", help="print the sections and their limits, and run nothing")
    parser.add_argument("--table", action="store_true", help="print the results of the file as Markdown")
    parser.add_argument("--sd_scripts", type=Path, help="folder with train_network.py, for the section peers")
    parser.add_argument("--sd_scripts_python", default=sys.executable, help="its Python interpreter")
    parser.add_argument("--diffusers", type=Path, help="checkout of diffusers, for peers_sdxl and peers_flux")
    parser.add_argument("--diffusers_python", default=sys.executable, help="its Python interpreter")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> Iterator[Measurement]:
    """Run the sections that are not done, as far as the time suffices."""
    if training_options:
        raise UserError(f"unknown options: {' '.join(training_options)}; the sections have their own settings")
    end = time.monotonic() + 60 * options.minutes
    results = _read_results(options.output)
    sections = [section for section in SECTIONS if {section.name, ALL} & {*options.sections}]
    if options.list or options.table:
        text = _format_list(sections, results, options) if options.list else format_table(results)
        sys.stdout.write(text + "\n")
        raise SystemExit(0)
    results |= {"command": shlex.join(sys.argv[1:]), **describe_machine()}
    saved = results["sections"]
    for section in _list_remaining(sections, saved, again=options.again):
        seconds = end - time.monotonic() - SPARE_SECONDS
        # A section that would only be begun is left to the next call.
        if seconds < section.seconds:
            result = saved.setdefault(section.name, {"status": NO_TIME, "measurements": []})
        else:
            folder = directory / section.name
            result = _run_section(section, options, folder, min(seconds, section.seconds * LIMIT_FACTOR))
            shutil.rmtree(folder, ignore_errors=True)  # whole models of some sections fill a small disk
            saved[section.name] = _choose_result(saved.get(section.name), result)
        write_atomic(options.output, json.dumps(results, indent=1).encode())
        yield from _list_measurements(section, result)


def _list_remaining(sections: Sequence[Section], saved: Mapping[str, Any], *, again: bool) -> list[Section]:
    """List what is to be run; whatever was never begun is first, or a section that takes too long starves it."""
    remaining = [section for section in sections if again or not _is_measured(saved.get(section.name))]
    return sorted(remaining, key=lambda section: saved.get(section.name, {}).get("status", NO_TIME) != NO_TIME)


def _choose_result(before: Mapping[str, Any] | None, result: Results) -> Mapping[str, Any]:
    """Choose the result to keep: that of a section which did not end replaces none with more measurements."""
    if before is None or result["status"] == DONE or before.get("tiny") != result["tiny"]:
        return result
    return before if _count_measured(before) > _count_measured(result) else result


def _count_measured(result: Mapping[str, Any]) -> int:
    return sum(bool(each["values"]) for each in result["measurements"])


def _is_measured(result: Mapping[str, Any] | None) -> bool:
    """Whether a section ended and measured something: one that lacked the folder of another trainer did not."""
    return result is not None and result["status"] == DONE and _count_measured(result) > 0


def _run_section(section: Section, options: Namespace, directory: Path, seconds: float) -> Results:
    """Run a section in a process group of its own, which is killed at the limit; keep what it had measured."""
    directory.mkdir()
    request, output, log = directory / "request.json", directory / "measurements.jsonl", directory / "log.txt"
    context = build_context(section, options, directory)
    context_values = {**asdict(context), "directory": str(directory)}
    values = {"function": section.function, "output": str(output), "context": context_values}
    request.write_text(json.dumps(values), encoding="utf-8")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", str(request)],
            stdout=stream,
            stderr=stream,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
            status = DONE if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped at its limit of {seconds:.0f} s"
        finally:
            _kill_with_workers(process)
            process.wait()
    lines = output.read_text("utf-8").splitlines() if output.exists() else []
    result = {"status": status, "seconds": round(time.monotonic() - started, 1)}
    if status != DONE:
        result["log"] = _cut_middle(log.read_text("utf-8", "replace"))
    return {**result, "tiny": context.is_tiny, "measurements": [json.loads(line) for line in lines]}


def _kill_with_workers(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all others of the session; on Windows, where there are none, itself."""
    if sys.platform == "win32":
        process.kill()
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _cut_middle(text: str) -> str:
    """Keep both ends: the first error is the cause, the last lines say how the process ended."""
    return text if len(text) <= 2 * TAIL else f"{text[:TAIL]}\n[...]\n{text[-TAIL:]}"


def build_context(section: Section, options: Namespace, directory: Path) -> SectionContext:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    is_tiny = options.tiny or device is None
    return SectionContext(
        device_type="cpu" if device is None else device.type,
        is_tiny=is_tiny,
        directory=directory,
        training_options=section.build_training_options(is_tiny),
        sd_scripts="" if options.sd_scripts is None else str(options.sd_scripts.resolve()),
        sd_scripts_python=options.sd_scripts_python,
        diffusers="" if options.diffusers is None else str(options.diffusers.resolve()),
        diffusers_python=options.diffusers_python,
    )


def _list_measurements(section: Section, result: Mapping[str, Any]) -> Iterator[Measurement]:
    if result["status"] != DONE:
        yield Measurement(section.name, [], note=result["status"])
    for values in result["measurements"]:
        measurement = Measurement(**values)
        yield Measurement(**{**values, "name": f"{section.name}: {measurement.name}"})


def _format_list(sections: Sequence[Section], results: Results, options: Namespace) -> str:
    """List what would run, with limits that add up; whatever does not fit is left to the next call."""
    lines, total, call = [], 0.0, 1
    for section in _list_remaining(sections, results["sections"], again=options.again):
        if total + section.seconds > 60 * options.minutes - SPARE_SECONDS:
            total, call = 0, call + 1
        total += section.seconds
        lines.append(f"call {call}  {section.seconds:4d} s  {section.name:<22}{section.description}")
    return "\n".join(
        [*lines, f"{call} calls of at most {options.minutes:g} minutes" if lines else "nothing left to run"]
    )


def format_table(results: Results) -> str:
    """Format all results as Markdown."""
    sections: Mapping[str, Any] = results["sections"]
    if not sections:
        raise UserError("--table: the file of --output has no results yet")
    lines = [f"Measured by `python -m {results['command']}` on {results['accelerator']}, {results['versions']}.", ""]
    lines += ["| section | | median | target | |", "|---|---|---|---|---|"]
    for name, result in sections.items():
        tiny = ", tiny models" if result.get("tiny") else ""
        if result["status"] != DONE or not result["measurements"]:
            lines.append(f"| {name}{tiny} | {result['status']} | | | |")
        for values in result["measurements"]:
            measurement = Measurement(**values)
            title, median, unit, _, target, note = measurement.format_cells()
            lines.append(f"| {name}{tiny} | {title} | {f'{median} {unit}'.strip()} | {target} | {note} |")
        if result["status"] == DONE:
            lines.append(f"| {name}{tiny} | whole section | {format_number(result['seconds'])} s | | |")
    return "\n".join(lines)


def _read_results(path: Path) -> Results:
    if not path.exists():
        return {"sections": {}}
    try:
        results = json.loads(path.read_text("utf-8"))
        return {**results, "sections": dict(results["sections"])}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--output {path}: is no file of results; give another name") from error


def _parse_minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise ArgumentTypeError(f"expected a positive number of minutes, got {text!r}")
    return minutes
