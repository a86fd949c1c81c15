"""Requests that mark runs with a star or a note, delete them, and put deleted ones back."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import UserError
from ..problems import report_file
from .deleted_runs import DELETED_FOLDER, delete_run, find_deleted_runs, list_run_files, open_deleted_run
from .jobs import FOLDER
from .picture_pages import take_json
from .run_notes import RunNotes
from .workbench import JSONAnswer, get_workbench, render_page

MAX_DELETED = 100
"""The largest number of runs that one request deletes."""


def save_notes(request: Request, body: Mapping[str, Any]) -> Response:
    """Take the star or the note of a run: ``{"run": key, "is_favorite": bool, "note": text}``."""
    run = get_workbench(request).runs.get_run(str(body.get("run", "")))
    notes = RunNotes.read(run.folder, run.name).change(body)
    notes.write(run.folder, run.name)
    return JSONAnswer({"is_favorite": notes.is_favorite, "note": notes.text})


def delete_runs(request: Request, body: Mapping[str, Any]) -> Response:
    """Delete runs, whose files can be put back; none if one of them still runs."""
    workbench, keys = get_workbench(request), body.get("runs")
    if not isinstance(keys, list) or not 0 < len(keys) <= MAX_DELETED:
        raise UserError(f"choose 1 to {MAX_DELETED} runs to delete")
    chosen = {key: workbench.runs.get_run(key) for key in dict.fromkeys(map(str, keys))}
    running = [run for key, run in chosen.items() if workbench.runs.describe(key, run).status == "running"]
    if running:
        raise UserError(*(report_file(run.name, "is running", "stop it first") for run in running))
    with workbench.deletions:
        for run in chosen.values():
            workbench.queue.check_ended(run.folder, run.name)
            workbench.folders.resolve(run.folder / FOLDER / DELETED_FOLDER)  # which may be a link
            for path in list_run_files(run):
                workbench.folders.resolve(path.parent)
        for run in chosen.values():
            delete_run(run)
            workbench.queue.forget_run(run.folder, run.name)
            workbench.runs.forget_list()
    return JSONAnswer({"count": len(chosen)})


def restore_run(request: Request, body: Mapping[str, Any]) -> Response:
    """Put the files of a deleted run back."""
    workbench = get_workbench(request)
    with workbench.deletions:
        open_deleted_run(workbench.folders, str(body.get("entry", ""))).restore()
    workbench.runs.forget_list()
    return JSONAnswer({})


def remove_run(request: Request, body: Mapping[str, Any]) -> Response:
    """Remove the files of a deleted run for good."""
    workbench = get_workbench(request)
    with workbench.deletions:
        open_deleted_run(workbench.folders, str(body.get("entry", ""))).remove()
    return JSONAnswer({})


def show_deleted(request: Request) -> Response:
    """The deleted runs as part of the page of runs."""
    return render_page(request, "deleted_rows.html", {"deleted": list_deleted(request)})


def list_deleted(request: Request) -> list[dict[str, Any]]:
    """List the deleted runs with their address, folder and size."""
    workbench = get_workbench(request)
    found = [run for run in find_deleted_runs(workbench.runs.list_folders()) if workbench.folders.contains(run.entry)]
    return [
        {"run": run, "key": workbench.folders.make_key(run.entry), "folder": workbench.folders.format_path(run.folder)}
        for run in found
    ]


ROUTES = (
    Route("/api/runs/notes", take_json(save_notes), methods=["POST"]),
    Route("/api/runs/delete", take_json(delete_runs), methods=["POST"]),
    Route("/api/deleted", show_deleted),
    Route("/api/deleted/restore", take_json(restore_run), methods=["POST"]),
    Route("/api/deleted/remove", take_json(remove_run), methods=["POST"]),
)
