"""Requests about the queue of runs: start, resume, stop and remove a run, and list the queue."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import UserError
from ..problems import report_file
from .jobs import JobQueue
from .new_run_pages import read_form
from .picture_pages import take_json
from .workbench import JSONAnswer, get_workbench, render_page


def add_job(request: Request, body: Mapping[str, Any]) -> Response:
    """Queue a run, which starts at once if no other one is running."""
    form, processes = read_form(request, body)
    if form.problems:
        raise UserError(*form.problems)
    job = _get_queue(request).add(form, processes)
    key = get_workbench(request).folders.make_key(Path(job.folder) / job.name)
    return JSONAnswer({"id": job.id, "run": key})


def resume_run(request: Request, body: Mapping[str, Any]) -> Response:
    """Queue a stopped run again, to go on from its checkpoint."""
    workbench = get_workbench(request)
    run = workbench.runs.get_run(str(body.get("run", "")))
    summary = workbench.runs.read_summary(run)
    if summary is None:
        raise UserError(report_file(run.name, "its settings are unknown", "it was started by an older version"))
    values = {**summary.all_settings, "output_dir": str(run.folder), "output_name": run.name}
    form = workbench.forms.check(values, is_resumed=True)
    if form.problems:
        raise UserError(*form.problems)
    return JSONAnswer({"id": _get_queue(request).add(form, summary.num_processes, is_resumed=True).id})


def stop_job(request: Request, body: Mapping[str, Any]) -> Response:
    return JSONAnswer({"status": _get_queue(request).stop(request.path_params["id"]).status})


def remove_job(request: Request, body: Mapping[str, Any]) -> Response:
    _get_queue(request).remove(request.path_params["id"])
    return JSONAnswer({})


def show_queue(request: Request) -> Response:
    """The queue as part of the page of runs."""
    return render_page(request, "queue.html", {"jobs": list_queue(request)})


def send_states(request: Request) -> Response:
    """Send the state of every run, for windows that tell when one ends."""
    runs = get_workbench(request).runs.list_overviews()
    return JSONAnswer({run.key: {"name": run.name, "status": run.status} for run in runs})


def send_load(request: Request) -> Response:
    """Send the load of the cards and of this computer."""
    return JSONAnswer(_get_queue(request).monitor.export_json())


def list_queue(request: Request) -> list[dict[str, Any]]:
    """List the queue with the address of each run."""
    folders = get_workbench(request).folders
    jobs = [job for job in _get_queue(request).list_jobs() if folders.contains(job.folder)]
    return [{"job": job, "key": folders.make_key(Path(job.folder) / job.name)} for job in jobs]


def _get_queue(request: Request) -> JobQueue:
    return get_workbench(request).queue


ROUTES = (
    Route("/api/queue", show_queue),
    Route("/api/load", send_load),
    Route("/api/states", send_states),
    Route("/api/jobs", take_json(add_job), methods=["POST"]),
    Route("/api/jobs/resume", take_json(resume_run), methods=["POST"]),
    Route("/api/jobs/{id}/stop", take_json(stop_job), methods=["POST"]),
    Route("/api/jobs/{id}/remove", take_json(remove_job), methods=["POST"]),
)
