"""Pages of pictures: dataset files, and the pictures of one with their captions."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import UserError
from .background import BackgroundWork
from .caption_edits import BUSY, build_tag_edit, plan_tag_edit
from .pictures import WARNINGS, PictureSet
from .thumbnails import load_thumbnail
from .workbench import JSONAnswer, get_workbench, render_page

MAX_ROWS = 400
MAX_EXAMPLES = 5


def show_datasets(request: Request) -> Response:
    workbench = get_workbench(request)
    files = [
        (workbench.folders.make_key(path), workbench.folders.format_path(path))
        for path in workbench.pictures.find_dataset_files()
    ]
    return render_page(request, "datasets.html", {"title": "Pictures", "files": files})


def show_pictures(request: Request) -> Response:
    workbench, key = get_workbench(request), request.path_params["key"]
    pictures = workbench.pictures.open(workbench.folders.resolve_key(key))
    values = {"title": pictures.path.name, "key": key, "path": workbench.folders.format_path(pictures.path)}
    return render_page(request, "pictures.html", values)


def send_state(request: Request) -> Response:
    """Say whether the scan is done, and what it found."""
    pictures = _open(request)
    if not pictures.is_ready:
        return JSONAnswer({"is_ready": False})
    editor = get_workbench(request).get_editor(pictures)
    state = {"is_ready": True, "problems": pictures.work.problems, "num_undo": editor.num_undo}
    return JSONAnswer({**state, "version": pictures.version, **pictures.summarize()})


def send_work(request: Request) -> Response:
    """Say how far the scan is, or the last edit of many captions."""
    work = _find_work(request)
    return JSONAnswer({"is_running": False} if work is None else work.export_json())


def stop_work(request: Request, body: Mapping[str, Any]) -> Response:
    """Stop the scan or the edit; what was done until then stays."""
    if (work := _find_work(request)) is not None:
        work.is_stopping = True
    return JSONAnswer({})


def _find_work(request: Request) -> BackgroundWork | None:
    pictures = _open(request)
    return get_workbench(request).get_editor(pictures).work if pictures.is_ready else pictures.work


def send_rows(request: Request) -> Response:
    """Send some of the pictures that the filter selects."""
    pictures, query = _open_ready(request), request.query_params
    selected = _select(pictures, query)
    start = max(0, _parse_number(query.get("from", "0")))
    count = min(MAX_ROWS, _parse_number(query.get("count", "100")))
    rows = [pictures.pictures[index].export_json(index, pictures.captions[index]) for index in selected[start:][:count]]
    return JSONAnswer({"total": len(selected), "from": start, "rows": rows})


def send_thumbnail(request: Request) -> Response:
    """A picture by its position; the address has its hash, so the browser may keep it."""
    pictures = _open_ready(request)
    index, is_large = _parse_number(request.path_params["index"]), "large" in request.query_params
    if not 0 <= index < len(pictures.pictures):
        raise UserError(f"picture {index}: there are {len(pictures.pictures)}")
    data = load_thumbnail(get_workbench(request).folders, pictures.pictures[index], is_large=is_large)
    return Response(data, media_type="image/webp", headers={"Cache-Control": "private, max-age=86400"})


def save_captions(request: Request, body: Mapping[str, Any]) -> Response:
    """Write captions: ``{"captions": {position: text}, "known": {position: what was shown}}``."""
    pictures = _open_ready(request)
    captions, known = (_parse_captions(pictures, body.get(name, {})) for name in ("captions", "known"))
    editor = get_workbench(request).get_editor(pictures)
    count = editor.edit(captions, known)
    return JSONAnswer({"count": count, "num_undo": editor.num_undo})


def edit_tags(request: Request, body: Mapping[str, Any]) -> Response:
    """Add, remove or replace a tag in all pictures that the filter selects; ``dry_run`` shows examples only."""
    pictures = _open_ready(request)
    editor = get_workbench(request).get_editor(pictures)
    action, tag, replacement = (str(body.get(name, "")) for name in ("action", "tag", "replacement"))
    edit = build_tag_edit(action, tag, replacement, is_at_start=bool(body.get("is_at_start")))
    selected = _select(pictures, body)
    if body.get("dry_run"):
        planned = plan_tag_edit(pictures, edit, selected)
        examples = [
            {"name": pictures.pictures[index].sample.key, "before": pictures.captions[index], "after": text}
            for index, text in list(planned.items())[:MAX_EXAMPLES]
        ]
        return JSONAnswer({"count": len(planned), "examples": examples})
    return JSONAnswer(editor.start_tag_edit(lambda: plan_tag_edit(pictures, edit, selected)).export_json())


def undo_edit(request: Request, body: Mapping[str, Any]) -> Response:
    editor = get_workbench(request).get_editor(_open_ready(request))
    return JSONAnswer(editor.start_undo().export_json())


def scan_again(request: Request, body: Mapping[str, Any]) -> Response:
    workbench = get_workbench(request)
    if workbench.get_editor(_open(request)).is_busy:
        raise UserError(BUSY)
    workbench.pictures.open(workbench.folders.resolve_key(request.path_params["key"]), is_again=True)
    return JSONAnswer({})


def take_json(handler: Callable[[Request, Mapping[str, Any]], Response]) -> Any:
    """Make a handler of posts: reads the body as a JSON object, and runs the handler in a thread."""

    async def handle(request: Request) -> Response:
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise UserError("expected a JSON object")
        return await run_in_threadpool(handler, request, body)

    return handle


def _open(request: Request) -> PictureSet:
    workbench = get_workbench(request)
    return workbench.pictures.open(workbench.folders.resolve_key(request.path_params["key"]))


def _open_ready(request: Request) -> PictureSet:
    pictures = _open(request)
    if not pictures.is_ready:
        raise UserError("the pictures are still being scanned")
    return pictures


def _select(pictures: PictureSet, query: Mapping[str, Any]) -> list[int]:
    warning = str(query.get("warning", ""))
    text, bucket = str(query.get("text", "")), str(query.get("bucket", ""))
    return pictures.select(text, warning if warning in WARNINGS else "", bucket)


def _parse_captions(pictures: PictureSet, values: Any) -> dict[int, str]:
    pairs = values.items() if isinstance(values, dict) else ()
    parsed = {_parse_number(index): text for index, text in pairs if isinstance(text, str)}
    if any(not 0 <= index < len(pictures.pictures) for index in parsed):
        raise UserError("no such picture; reload the page")
    return parsed


def _parse_number(text: str) -> int:
    if not str(text).isdecimal() or len(str(text)) > 9:
        raise UserError(f"{text!r}: expected a number")
    return int(text)


ROUTES = (
    Route("/pictures", show_datasets),
    Route("/pictures/{key:path}", show_pictures),
    Route("/api/pictures/state/{key:path}", send_state),
    Route("/api/pictures/work/{key:path}", send_work),
    Route("/api/pictures/stop/{key:path}", take_json(stop_work), methods=["POST"]),
    Route("/api/pictures/rows/{key:path}", send_rows),
    Route("/api/pictures/captions/{key:path}", take_json(save_captions), methods=["POST"]),
    Route("/api/pictures/tags/{key:path}", take_json(edit_tags), methods=["POST"]),
    Route("/api/pictures/undo/{key:path}", take_json(undo_edit), methods=["POST"]),
    Route("/api/pictures/scan/{key:path}", take_json(scan_again), methods=["POST"]),
    Route("/thumbnail/{index}/{key:path}", send_thumbnail),
)
