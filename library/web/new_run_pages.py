"""Pages of new runs: the form, its checks while one types, plan and memory estimate."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..config.operating_systems import join_words
from ..config.types import MemorySize
from ..errors import UserError
from ..problems import report_file
from .commands import CommandRunner
from .folders import format_setting_path
from .jobs import build_command
from .picture_pages import take_json
from .presets import CARD_MEMORIES, list_presets
from .run_form import CheckedForm, export_values, list_field_groups, read_settings_file
from .runs import Run
from .validate_requests import HEADER
from .workbench import JSONAnswer, get_workbench, render_page

MAX_PROCESSES = 64


def show_form(request: Request) -> Response:
    """The form, empty or with the settings of a run (``run``) or of a run TOML (``file``)."""
    workbench, query = get_workbench(request), request.query_params
    values: dict[str, Any] = {}
    if "run" in query:
        summary = workbench.runs.read_summary(workbench.runs.get_run(query["run"]))
        if summary is None:
            raise UserError("this run was started by an older version: its settings are unknown")
        values = export_values(summary.all_settings)
        if "continue" in query:
            values |= _continue_from(workbench.runs.get_run(query["run"]))
    elif "file" in query:
        path = workbench.folders.resolve_key(query["file"])
        if path.suffix != ".toml" or not path.is_file():
            raise UserError(report_file(path.name, "no run TOML"))
        values = export_values(read_settings_file(path))
    elif "dataset" in query:
        values = {"dataset_config": format_setting_path(workbench.folders.resolve_key(query["dataset"]))}
    page = {
        "title": "New run",
        "groups": list_field_groups(),
        "start": {"values": values, "presets": list_presets()},
        "datasets": [format_setting_path(path) for path in workbench.pictures.find_dataset_files()],
        "files": _list_settings_files(request),
        "cards": CARD_MEMORIES,
    }
    return render_page(request, "new_run.html", page)


def _continue_from(run: Run) -> dict[str, Any]:
    """Build the settings that train on from the LoRA of a finished run, under another name."""
    final = run.folder / f"{run.name}.safetensors"
    if not final.is_file():
        raise UserError(report_file(final.name, "is not there", "train on is for runs that are finished"))
    return {
        "network_weights": format_setting_path(final),
        "output_name": f"{run.name}-more",
        "output_dir": format_setting_path(run.folder),
    }


def check_form(request: Request, body: Mapping[str, Any]) -> Response:
    form, processes = read_form(request, body)
    settings_file = form.output_dir / f"{form.output_name}.toml"
    words = build_command(settings_file, processes, form.precision)
    return JSONAnswer(
        {
            "problems": form.export_problems(),
            "notices": list(form.notices),
            "toml": form.toml,
            "command": join_words(["python" if word == sys.executable else word for word in words]),
        }
    )


def start_plan(request: Request, body: Mapping[str, Any]) -> Response:
    """Start ``plan`` on the form: steps and buckets, and with ``memory`` the estimate for a GPU of that size."""
    form, processes = read_form(request, body)
    if form.problems:
        raise UserError(*form.problems)
    words = [sys.executable, "-m", "library", "plan", "--world_size", str(processes)]
    if memory := str(body.get("memory", "")).strip():
        try:
            words += ["--gpu_memory", str(MemorySize.parse(memory))]
        except ValueError as error:
            raise UserError(f"memory: {error}") from None
    return JSONAnswer({"id": _get_runner(request).start(words, form.toml)})


def send_plan(request: Request) -> Response:
    return JSONAnswer(_get_runner(request).describe(request.path_params["id"]))


def stop_plan(request: Request, body: Mapping[str, Any]) -> Response:
    _get_runner(request).stop(request.path_params["id"])
    return JSONAnswer({})


def read_form(request: Request, body: Mapping[str, Any]) -> tuple[CheckedForm, int]:
    """Check the values of the form, and read the number of processes."""
    values = body.get("values")
    if not isinstance(values, dict):
        raise UserError("expected the values of the form")
    text = str(body.get("processes", "1"))
    if not text.isdecimal() or not 1 <= int(text[:4]) <= MAX_PROCESSES:
        raise UserError(f"processes: {text!r}: expected a number from 1 to {MAX_PROCESSES}")
    return get_workbench(request).forms.check(values), int(text[:4])


def _list_settings_files(request: Request) -> list[tuple[str, str]]:
    """Run TOMLs below the opened folders: those that this page wrote, and those that look like one."""
    folders, found = get_workbench(request).folders, []
    for folder, entries in folders.walk():
        for name in sorted(entry.name for entry in entries if entry.name.endswith(".toml")):
            path = folder / name
            if not path.is_symlink() and _is_settings_file(path):
                found.append((folders.make_key(path), folders.format_path(path)))
    return found


def _is_settings_file(path: Path) -> bool:
    try:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            text = file.read(20_000)
    except OSError:
        return False
    return text.startswith(HEADER) or ("max_train_" in text and "datasets]]" not in text)


def _get_runner(request: Request) -> CommandRunner:
    return get_workbench(request).commands


ROUTES = (
    Route("/new", show_form),
    Route("/api/new/check", take_json(check_form), methods=["POST"]),
    Route("/api/new/plan", take_json(start_plan), methods=["POST"]),
    Route("/api/commands/{id}", send_plan),
    Route("/api/commands/{id}/stop", take_json(stop_plan), methods=["POST"]),
)
