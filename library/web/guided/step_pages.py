"""The pages of the five steps, and what their scripts ask: pictures, captions, model, card, start."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...atomic_files import write_atomic
from ...config.operating_systems import join_words
from ...config.types import MemorySize
from ...errors import UserError
from ..jobs import build_command
from ..picture_pages import take_json
from ..run_form import list_field_groups
from ..thumbnails import LARGE_SIDE, THUMBNAIL_SIDE, load_file_thumbnail
from ..workbench import JSONAnswer, get_workbench, render_page
from .caption_model import KNOWN_MODELS, build_caption_command, find_caption_models, start_captioning
from .card import describe_duration, describe_plan, format_devices
from .model_choices import DEMO, build_demo_choice, build_model_values, find_choice, list_choices
from .picture_check import CheckedPicture, build_assigner, export_folder, export_picture, find_picture
from .picture_repairs import (
    CropChoice,
    MendLog,
    convert_picture,
    crop_picture,
    list_side_files,
    remove_picture,
    rotate_picture,
)
from .plain_words import FIRST_FIELDS
from .project import PROMPTS_FILE, Project
from .run_settings import build_run_values, check_run, list_speeds
from .uploads import resolve_upload, write_upload

STEPS = (
    ("pictures", "Pictures"),
    ("captions", "Captions"),
    ("model", "Model"),
    ("card", "Card"),
    ("start", "Start"),
)
MAX_FOLDERS_LISTED = 300
HIDDEN_FOLDERS = ("sample", "mask", "masks")
"""Folders of previews and masks, of which nobody makes a LoRA."""

MAX_MENDED, MAX_DIGITS = 5000, 9


def show_first_step(request: Request) -> Response:
    """The first step of a new LoRA, and those that were begun before."""
    shelf = get_workbench(request).projects
    folders = get_workbench(request).folders
    projects = [(folders.make_key(path), path.name) for path in shelf.list_projects()]
    return render_page(request, "step_pictures.html", {**_build_frame("pictures", None, ""), "projects": projects})


def show_step(request: Request) -> Response:
    """One step of a LoRA that was begun."""
    step, key = request.path_params["step"], request.path_params["key"]
    if step not in dict(STEPS):
        raise UserError(f"{step!r}: no such step")
    project = get_workbench(request).projects.open(key)
    values = {**_build_frame(step, project, key), "projects": [], **_STEP_VALUES[step](request, project)}
    return render_page(request, f"step_{step}.html", values)


def _build_frame(step: str, project: Project | None, key: str) -> dict[str, Any]:
    names = [name for name, _ in STEPS]
    number = names.index(step)
    return {
        "title": dict(STEPS)[step] if project is None else f"{project.name}: {dict(STEPS)[step]}",
        "steps": STEPS,
        "step": step,
        "key": key,
        "project": project,
        "number": number + 1,
        "before": names[number - 1] if number else "",
        "after": names[number + 1] if number + 1 < len(names) else "",
    }


def _list_captions_values(request: Request, project: Project) -> dict[str, Any]:
    workbench = get_workbench(request)
    if not project.count_pictures():
        raise UserError("there are no pictures yet: go back to the first step")
    project.write_dataset()
    pictures = workbench.pictures.open(project.dataset_path)
    if not workbench.get_editor(pictures).is_busy:  # pictures may have been mended since
        workbench.pictures.open(project.dataset_path, is_again=True)
    found = find_caption_models(workbench.folders)
    models = [(workbench.folders.make_key(path), workbench.folders.format_path(path)) for path in found]
    return {"models": models, "known_models": KNOWN_MODELS, "dataset": workbench.folders.make_key(project.dataset_path)}


def _list_model_values(request: Request, project: Project) -> dict[str, Any]:
    choices = list_choices(get_workbench(request).folders)
    groups = [
        ("To try it", [each for each in choices if each.place == "built in"]),
        ("On this computer", [each for each in choices if each.place in ("here", "cache")]),
        ("From the hub, downloaded when the run starts, or now", [each for each in choices if each.place == "hub"]),
    ]
    return {"groups": groups, "chosen": project.model or DEMO}


def _list_card_values(request: Request, project: Project) -> dict[str, Any]:
    steps = _parse_steps(build_run_values(get_workbench(request), project).get("max_train_steps"))
    speeds = list_speeds(get_workbench(request), project) if steps else ()
    durations = [(name, describe_duration(steps / speed)) for name, speed in speeds]
    return {"memory": str(project.values.get("gpu_memory", "")), "durations": durations, "model": _name_model(project)}


def _parse_steps(value: Any) -> int:
    """Parse what the field of the steps has; 0 if that is no number of steps, which the last step tells."""
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else 0


def _list_start_values(request: Request, project: Project) -> dict[str, Any]:
    groups = list_field_groups()
    fields = {each.option.name: each for _, _, members in groups for each in members}
    first = [(fields[name], *words) for name, words in FIRST_FIELDS.items()]
    others = [
        (name, title, [each for each in members if each.option.name not in FIRST_FIELDS])
        for name, title, members in groups
    ]
    values = build_run_values(get_workbench(request), project)
    start = {"values": values, "prompts": project.prompts}
    return {"first": first, "groups": others, "start": start, "model": _name_model(project)}


def _name_model(project: Project) -> str:
    return str(project.values.get("pretrained_model_name_or_path", "")) or "the demo model"


_STEP_VALUES: Mapping[str, Callable[[Request, Project], dict[str, Any]]] = {
    "pictures": lambda request, project: {},
    "captions": _list_captions_values,
    "model": _list_model_values,
    "card": _list_card_values,
    "start": _list_start_values,
}


def create_project(request: Request, body: Mapping[str, Any]) -> Response:
    """Begin a new LoRA, with pictures that are dropped or with a folder of this machine."""
    workbench = get_workbench(request)
    source = None
    if folder := str(body.get("folder", "")):
        source = workbench.folders.resolve_key(folder)
        if not source.is_dir():
            raise UserError("this folder is no longer there; reload the page")
    name = str(body.get("name", "")) or (source.name if source is not None else "my-lora")
    project = workbench.projects.create(name, source, build_model_values(build_demo_choice()))
    return JSONAnswer({"key": workbench.folders.make_key(project.folder), "name": project.name})


async def upload_file(request: Request) -> Response:
    """Take one file, whose bytes are the body of the request."""
    workbench, path = get_workbench(request), request.query_params.get("path", "")
    project = await run_in_threadpool(workbench.projects.open, request.path_params["key"])
    if not project.is_uploaded:
        raise UserError("the pictures of this LoRA are in a folder of this machine; add them there")
    target = resolve_upload(project.source, path)
    workbench.folders.resolve(target)
    is_new = await write_upload(target, request.stream())
    workbench.get_check(project).invalidate()
    return JSONAnswer({"is_new": is_new, "path": target.relative_to(project.source).as_posix()})


def list_machine_folders(request: Request) -> Response:
    """List the folders with pictures below the opened ones."""
    folders = get_workbench(request).folders
    found = []
    for path, count in _iter_machine_folders(request):
        found.append({"key": folders.make_key(path), "path": folders.format_path(path) or ".", "count": count})
        if len(found) >= MAX_FOLDERS_LISTED:
            break
    return JSONAnswer({"folders": found})


def _iter_machine_folders(request: Request) -> Iterator[tuple[Path, int]]:
    workbench = get_workbench(request)
    for folder, entries in workbench.folders.walk():
        is_own = workbench.projects.root in (folder, *folder.parents)
        project = Project(folder, folder)
        if entries and not is_own and folder.name.lower() not in HIDDEN_FOLDERS and project.has_own_pictures():
            yield folder, project.count_pictures()


def send_pictures(request: Request) -> Response:
    """Send the pictures with their faults, and how far the check is."""
    workbench = get_workbench(request)
    project = workbench.projects.open(request.path_params["key"])
    check = workbench.get_check(project)
    check.start()
    state = check.work.export_json()
    if state["is_running"]:
        return JSONAnswer(state)
    project, assign = check.project, build_assigner(check.project)
    unused = [each.path for each in project.plan_datasets().unused]
    return JSONAnswer(
        {
            **state,
            "pictures": [export_picture(each, project.source, assign) for each in check.pictures],
            "folders": [
                export_folder(each, project.source, is_used=each.path not in unused) for each in project.list_folders()
            ],
            "num_undo": len(MendLog(project.folder).list_mends()),
            "is_uploaded": project.is_uploaded,
        }
    )


def send_picture(request: Request) -> Response:
    """A picture of a project as a thumbnail; its address has the time of its file, so the browser may keep it."""
    workbench = get_workbench(request)
    project = workbench.projects.open(request.path_params["key"])
    path = find_picture(project, workbench.folders, request.query_params.get("path", ""))
    workbench.get_check(project).require_readable(path)
    data = load_file_thumbnail(path, LARGE_SIDE if "large" in request.query_params else THUMBNAIL_SIDE)
    return Response(data, media_type="image/webp", headers={"Cache-Control": "private, max-age=86400"})


def mend_pictures(request: Request, body: Mapping[str, Any]) -> Response:
    """Mend pictures: ``{"mend": name, "paths": [...], "position": 0..1}``."""
    workbench = get_workbench(request)
    project = workbench.projects.open(request.path_params["key"])
    paths, mend = body.get("paths"), str(body.get("mend", ""))
    if not isinstance(paths, list) or not 0 < len(paths) <= MAX_MENDED or mend not in _MENDS:
        raise UserError("choose pictures, and what to do with them")
    check = workbench.get_check(project)
    wanted = {find_picture(project, workbench.folders, str(path)) for path in paths}
    chosen = [each for each in check.pictures if each.path in wanted]
    if len(chosen) != len(wanted):
        raise UserError("the pictures have changed; reload the page")
    for path in (each for picture in chosen for each in (picture.path, picture.mask)):
        if mend != "remove" and path is not None:
            check.require_readable(path)
    shared = {file for each in check.pictures if each.path not in wanted for file in list_side_files(each)}
    crop = CropChoice(build_assigner(project), _parse_position(body.get("position", 0.5)), shared)
    log = MendLog(project.folder)
    log.run(lambda log: [_MENDS[mend](log, picture, crop) for picture in chosen])
    check.invalidate()
    return JSONAnswer({"count": len(chosen), "num_undo": len(log.list_mends())})


_MENDS: Mapping[str, Callable[[MendLog, CheckedPicture, CropChoice], None]] = {
    "rotate": rotate_picture,
    "convert": convert_picture,
    "remove": remove_picture,
    "crop": crop_picture,
}


def _parse_position(value: Any) -> float:
    try:
        return min(1.0, max(0.0, float(value)))
    except (TypeError, ValueError):
        raise UserError(f"position: {value!r}: expected a number from 0 to 1") from None


def undo_mend(request: Request, body: Mapping[str, Any]) -> Response:
    """Undo the last mend."""
    workbench = get_workbench(request)
    project = workbench.projects.open(request.path_params["key"])
    log = MendLog(project.folder)
    count = log.undo()
    workbench.get_check(project).invalidate()
    return JSONAnswer({"count": count, "num_undo": len(log.list_mends())})


def start_caption_model(request: Request, body: Mapping[str, Any]) -> Response:
    """Write captions with a model in the background."""
    workbench = get_workbench(request)
    project = workbench.projects.open(request.path_params["key"])
    model, pictures = str(body.get("model", "")), workbench.pictures.open(project.dataset_path)
    if not pictures.is_ready:
        raise UserError("the pictures are still being scanned")
    name = model.removeprefix("hub:")
    if model.startswith("path:"):
        name = str(workbench.folders.resolve_key(model.removeprefix("path:")))
    elif name not in KNOWN_MODELS:
        raise UserError("choose a model that writes captions")
    words = build_caption_command(project, name, str(body.get("trigger_word", "")), str(body.get("if_exists", "keep")))
    editor = workbench.get_editor(pictures)
    return JSONAnswer(
        start_captioning(editor, workbench.commands, words, project.find_caption_extension()).export_json()
    )


def choose_model(request: Request, body: Mapping[str, Any]) -> Response:
    """Take a model; the settings begin with those that suit it."""
    workbench = get_workbench(request)
    project = workbench.projects.open(request.path_params["key"])
    choice = find_choice(workbench.folders, str(body.get("model", "")))
    if not choice.is_usable:
        raise UserError(f"{choice.title}: {choice.sentence}")
    if choice.id != project.model:
        project.values = build_model_values(choice, str(project.values.get("gpu_memory", "")))
        project.model = choice.id
        project.save()
        workbench.get_check(project).invalidate()
    return JSONAnswer({"title": choice.title})


def start_download(request: Request, body: Mapping[str, Any]) -> Response:
    """Download a model of the list, in a process that can be stopped and gone on with; go on showing one that runs."""
    workbench = get_workbench(request)
    choice = find_choice(workbench.folders, str(body.get("model", "")))
    if choice.place != "hub":
        raise UserError(f"{choice.title} is on this computer already")
    words = [sys.executable, "-m", "library.web.background", "models", "--download", choice.where]
    return JSONAnswer({"id": workbench.commands.find_running(words) or workbench.commands.start(words)})


def find_card(request: Request, body: Mapping[str, Any]) -> Response:
    """Look for the cards of this machine, in a process of its own."""
    return JSONAnswer({"id": get_workbench(request).commands.start([sys.executable, "-m", "library.web.guided.card"])})


def send_card(request: Request) -> Response:
    """Say what cards were found."""
    answer = get_workbench(request).commands.describe(request.path_params["id"])
    if answer["is_running"]:
        return JSONAnswer({"is_running": True})
    lines = str(answer["output"]).strip().splitlines()
    try:
        text, memory = format_devices(json.loads(lines[-1]))
    except (ValueError, IndexError, KeyError):
        raise UserError(f"the card was not found: {lines[-1] if lines else 'no answer'}") from None
    return JSONAnswer({"is_running": False, "text": text, "memory": memory})


def start_card_plan(request: Request, body: Mapping[str, Any]) -> Response:
    """Ask the planner what fits into a memory, and take it as the memory of the card."""
    workbench = get_workbench(request)
    project = workbench.projects.open(request.path_params["key"])
    memory = _take_memory(project, body)
    form = check_run(workbench, project, build_run_values(workbench, project))
    if form.problems:
        raise UserError(*form.problems)
    words = [sys.executable, "-m", "library", "plan", "--json", "--world_size", "1", "--gpu_memory", memory]
    return JSONAnswer({"id": workbench.commands.start(words, form.toml), "memory": memory})


def take_card(request: Request, body: Mapping[str, Any]) -> Response:
    """Take the memory of the card, by which the run chooses what makes it fit."""
    project = get_workbench(request).projects.open(request.path_params["key"])
    return JSONAnswer({"memory": _take_memory(project, body)})


def _take_memory(project: Project, body: Mapping[str, Any]) -> str:
    try:
        memory = str(MemorySize.parse(str(body.get("memory", ""))))
    except ValueError as error:
        raise UserError(f"memory: {error}") from None
    if project.model not in ("", DEMO) and project.values.get("gpu_memory") != memory:
        project.values["gpu_memory"] = memory
        project.save()
    return memory


def send_card_plan(request: Request) -> Response:
    """Send the advice of the planner in words."""
    answer = get_workbench(request).commands.describe(request.path_params["id"])
    if answer["is_running"]:
        return JSONAnswer({"is_running": True, "seconds": answer["seconds"]})
    output = str(answer["output"])
    start = output.find("\n{") + 1 if "\n{" in output else output.find("{")
    try:
        plan, _ = json.JSONDecoder().raw_decode(output[max(0, start) :])
        lines = describe_plan(plan, request.query_params.get("memory", ""))
    except (ValueError, KeyError, TypeError):
        raise UserError(output.strip().splitlines()[-1] if output.strip() else "the planner gave no answer") from None
    return JSONAnswer({"is_running": False, "lines": lines})


def check_project(request: Request, body: Mapping[str, Any]) -> Response:
    """Check the settings, keep them, and show the files that they become."""
    workbench = get_workbench(request)
    project = workbench.projects.open(request.path_params["key"])
    _take_settings(project, body)
    form = check_run(workbench, project, build_run_values(workbench, project))
    settings_file = form.output_dir / f"{form.output_name}.toml"
    words = build_command(settings_file, 1, form.precision)
    return JSONAnswer(
        {
            "problems": form.export_problems(),
            "notices": list(form.notices),
            "dataset": project.format_dataset(),
            "run": form.toml,
            "files": [str(project.dataset_path), str(settings_file)],
            "command": join_words(["python" if word == sys.executable else word for word in words]),
        }
    )


def start_project(request: Request, body: Mapping[str, Any]) -> Response:
    """Write the dataset file and the run file, and queue the run."""
    workbench = get_workbench(request)
    project = workbench.projects.open(request.path_params["key"])
    _take_settings(project, body)
    form = check_run(workbench, project, build_run_values(workbench, project))
    if form.problems:
        raise UserError(*form.problems)
    job = workbench.queue.add(form, 1)
    return JSONAnswer({"id": job.id, "run": workbench.folders.make_key(Path(job.folder) / job.name)})


def _take_settings(project: Project, body: Mapping[str, Any]) -> None:
    values, prompts = body.get("values"), body.get("prompts", "")
    if not isinstance(values, dict) or not isinstance(prompts, str):
        raise UserError("expected the values of the form")
    kept = {name: value for name, value in values.items() if isinstance(value, (str, bool))}
    project.values, project.prompts = kept, prompts
    project.save()
    if lines := project.list_prompts():
        write_atomic(project.folder / PROMPTS_FILE, ("\n".join(lines) + "\n").encode())


ROUTES = (
    Route("/train", show_first_step),
    Route("/train/{step}/{key:path}", show_step),
    Route("/train-picture/{key:path}", send_picture),
    Route("/api/train/new", take_json(create_project), methods=["POST"]),
    Route("/api/train/upload/{key:path}", upload_file, methods=["POST"]),
    Route("/api/train/folders", list_machine_folders),
    Route("/api/train/pictures/{key:path}", send_pictures),
    Route("/api/train/mend/{key:path}", take_json(mend_pictures), methods=["POST"]),
    Route("/api/train/undo/{key:path}", take_json(undo_mend), methods=["POST"]),
    Route("/api/train/caption/{key:path}", take_json(start_caption_model), methods=["POST"]),
    Route("/api/train/model/{key:path}", take_json(choose_model), methods=["POST"]),
    Route("/api/train/download", take_json(start_download), methods=["POST"]),
    Route("/api/train/card", take_json(find_card), methods=["POST"]),
    Route("/api/train/card/{id}", send_card),
    Route("/api/train/memory/{key:path}", take_json(take_card), methods=["POST"]),
    Route("/api/train/plan/{key:path}", take_json(start_card_plan), methods=["POST"]),
    Route("/api/train/advice/{id}", send_card_plan),
    Route("/api/train/check/{key:path}", take_json(check_project), methods=["POST"]),
    Route("/api/train/start/{key:path}", take_json(start_project), methods=["POST"]),
)
