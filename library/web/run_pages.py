"""Pages of runs: the list, one run with charts, previews, settings, log and files, and several runs compared."""

import glob
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..errors import UserError
from ..problems import report_file
from ..report.charts import build_comparison_charts, build_curves, build_group_charts, build_validation_charts
from ..report.page import (
    RunSummary,
    collect_update_norms,
    describe_progress,
    describe_validation,
    format_report_page,
)
from .job_pages import list_queue
from .languages.chart_texts import export_charts
from .run_edit_pages import list_deleted
from .run_previews import export_compared_previews, export_previews
from .runs import Run, RunOverview, RunReader, compare_settings
from .workbench import JSONAnswer, get_translator, get_workbench, render_page

MAX_COMPARED = 8


def show_runs(request: Request) -> Response:
    runs = _get_reader(request).list_overviews()
    folders = [str(folder) for folder in get_workbench(request).folders.folders]
    values = {"title": "Runs", "runs": runs, "folders": folders, "jobs": list_queue(request)}
    values["deleted"] = list_deleted(request)
    return render_page(request, "runs.html", values)


def show_run_rows(request: Request) -> Response:
    """The rows of the list, for the page to replace its own."""
    return render_page(request, "run_rows.html", {"runs": _get_reader(request).list_overviews()})


def show_run(request: Request) -> Response:
    key, reader = request.path_params["key"], _get_reader(request)
    run = reader.get_run(key)
    folders, overview = get_workbench(request).folders, reader.describe(key, run)
    files = [(path, folders.make_key(path), path.stat().st_size) for path in run.list_files() if folders.contains(path)]
    values = {
        "title": run.name,
        "run": overview,
        "summary": reader.read_summary(run),
        "files": files,
        "job": get_workbench(request).queue.find_job(run.folder, run.name),
        "state": _describe_state(request, run, overview),
        "has_lora": overview.status == "finished" and (run.folder / f"{run.name}.safetensors").is_file(),
        "has_state": any(run.folder.glob(f"{glob.escape(run.name)}*-state")),
    }
    return render_page(request, "run.html", values)


def send_charts(request: Request) -> Response:
    """Charts of a run; ``is_complete`` says whether to ask again at once for the rest of a long file."""
    key, reader = request.path_params["key"], _get_reader(request)
    run = reader.get_run(key)
    table, is_complete = reader.read_table(run)
    overview, summary = reader.describe(key, run), reader.read_summary(run)
    job = get_workbench(request).queue.find_job(run.folder, run.name)
    translate = get_translator(request)
    return JSONAnswer(
        {
            "is_complete": is_complete,
            "read": table.offset / max(table.size, 1),
            "status": overview.status,
            "state": _describe_state(request, run, overview),
            "seconds_left": overview.seconds_left,
            "watt_hours": job.watt_hours if job is not None else None,
            "facts": describe_progress(summary or _build_unknown_summary(run), table) if table.num_lines else "",
            "curves": export_charts(build_curves(table), translate),
            "validation": export_charts(build_validation_charts(table), translate),
            "verdict": describe_validation(table),
            "groups": export_charts(build_group_charts(table), translate),
            "norms": collect_update_norms(table),
        }
    )


def send_previews(request: Request) -> Response:
    """The files of the previews, by prompt and by step or epoch."""
    run = _get_reader(request).get_run(request.path_params["key"])
    return JSONAnswer(export_previews(get_workbench(request).folders, run, _get_reader(request).read_summary(run)))


def send_compared_previews(request: Request) -> Response:
    """The files of the previews of several runs, by prompt and by run."""
    reader = _get_reader(request)
    runs = {key: reader.get_run(key) for key in _get_compared(request)}
    with_summaries = {key: (run, reader.read_summary(run)) for key, run in runs.items()}
    return JSONAnswer(export_compared_previews(get_workbench(request).folders, with_summaries))


def send_log(request: Request) -> Response:
    run = _get_reader(request).get_run(request.path_params["key"])
    path = _get_reader(request).find_log(run)
    return PlainTextResponse(run.read_log(path) if path is not None else "")


def send_report(request: Request) -> Response:
    """The one-file report of now, to download: a page of its own must not be shown within this one."""
    reader = _get_reader(request)
    run = reader.get_run(request.path_params["key"])
    table, _ = reader.read_table(run, float("inf"))
    summary = reader.read_summary(run) or _build_unknown_summary(run)
    page = format_report_page(summary, run.read_previews(summary.started_at), table)
    return Response(page, media_type="text/html", headers=_build_download_headers(f"{run.name}.report.html"))


def show_comparison(request: Request) -> Response:
    reader, keys = _get_reader(request), _get_compared(request)
    runs = [reader.get_run(key) for key in keys]
    summaries = [reader.read_summary(run) for run in runs]
    rows = compare_settings([{} if each is None else each.all_settings for each in summaries])
    values: dict[str, Any] = {"title": "Compare"}
    values |= {"runs": [reader.describe(key, run) for key, run in zip(keys, runs, strict=True)]}
    missing = [run.name for run, summary in zip(runs, summaries, strict=True) if summary is None]
    compared = [{"key": key, "name": run.name} for key, run in zip(keys, runs, strict=True)]
    values |= {"settings": rows, "missing": missing, "compared": compared}
    return render_page(request, "compare.html", values)


def send_comparison(request: Request) -> Response:
    reader, tables, is_complete = _get_reader(request), {}, True
    for key in _get_compared(request):
        run = reader.get_run(key)
        table, has_all = reader.read_table(run)
        name = run.name if run.name not in tables else f"{run.name} ({run.folder.name})"
        tables[name if name not in tables else key], is_complete = table, is_complete and has_all
    charts = export_charts(build_comparison_charts(tables), get_translator(request), names_are_runs=True)
    return JSONAnswer({"is_complete": is_complete, "curves": charts})


def send_image(request: Request) -> Response:
    """A preview, an image or a clip, as it is on disk."""
    path = get_workbench(request).folders.resolve_key(request.path_params["key"])
    kinds = {
        ".png": "image/png",
        ".jpg": "image/jpeg",
        ".jpeg": "image/jpeg",
        ".webp": "image/webp",
        ".mp4": "video/mp4",
    }
    if path.suffix.lower() not in kinds or not path.is_file():
        raise UserError(report_file(path.name, "no such image"))
    return FileResponse(path, media_type=kinds[path.suffix.lower()], headers={"Cache-Control": "private, max-age=3600"})


def send_file(request: Request) -> Response:
    """A file of a run, to download."""
    folders, reader = get_workbench(request).folders, _get_reader(request)
    path = folders.resolve_key(request.path_params["key"])
    run = reader.get_run(request.query_params.get("run", ""))
    if path not in [folders.resolve(file) for file in run.list_files() if folders.contains(file)]:
        raise UserError(report_file(path.name, "no file of this run"))
    return FileResponse(path, media_type="application/octet-stream", headers=_build_download_headers(path.name))


def _describe_state(request: Request, run: Run, overview: RunOverview) -> str:
    """Describe what the buttons of a run depend on."""
    queue = get_workbench(request).queue
    queue.list_jobs()
    job = queue.find_job(run.folder, run.name)
    return f"{overview.status}, {job.status if job is not None else 'not started here'}"


def _build_download_headers(name: str) -> dict[str, str]:
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "_" for letter in name)
    return {"Content-Disposition": f'attachment; filename="{plain}"'}


def _get_reader(request: Request) -> RunReader:
    return get_workbench(request).runs


def _get_compared(request: Request) -> list[str]:
    keys = list(dict.fromkeys(request.query_params.getlist("run")))
    if not 1 <= len(keys) <= MAX_COMPARED:
        raise UserError(f"choose 2 to {MAX_COMPARED} runs to compare")
    return keys


def _build_unknown_summary(run: Run) -> RunSummary:
    return RunSummary(
        name=run.name,
        steps=0,
        plan="",
        settings={},
        started_at=run.metrics_time,
        num_processes=1,
        mixed_precision="unknown",
    )


ROUTES = (
    Route("/runs", show_runs),
    Route("/runs/compare", show_comparison),
    Route("/runs/{key:path}", show_run),
    Route("/api/runs/rows", show_run_rows),
    Route("/api/compare", send_comparison),
    Route("/api/compare/previews", send_compared_previews),
    Route("/api/charts/{key:path}", send_charts),
    Route("/api/previews/{key:path}", send_previews),
    Route("/api/log/{key:path}", send_log),
    Route("/image/{key:path}", send_image),
    Route("/file/{key:path}", send_file),
    Route("/report/{key:path}", send_report),
)
