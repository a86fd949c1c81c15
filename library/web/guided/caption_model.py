"""Captions by a model, from the page: ``python -m library caption`` on each folder, with progress, a stop and undo."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...captioning.onnx_tagger import MODEL_FILE, TAGS_FILE
from ...errors import UserError
from ..background import BackgroundWork, WorkStopped
from ..caption_edits import BUSY, CaptionEditor
from ..commands import CommandRunner
from ..folders import OpenedFolders
from ..pictures import PictureSet
from ..undo_log import CaptionChange
from .project import Project

IF_EXISTS = ("keep", "overwrite", "append")
POLL_SECONDS = 0.3
MAX_OUTPUT_LINES = 12
CAPTIONING_CLASSES = ("ForConditionalGeneration", "ForImageTextToText", "ForVision2Seq", "Florence2")
"""Parts of the architectures of models that write captions, as their ``config.json`` names them."""

KNOWN_MODELS: Mapping[str, str] = {
    "SmilingWolf/wd-eva02-large-tagger-v3": "tags, best for drawings (1.2 GB)",
    "Salesforce/blip-image-captioning-large": "a short sentence (1.9 GB)",
    "Qwen/Qwen2.5-VL-7B-Instruct": "a long description (16 GB)",
}
"""Models of the hub that are offered, and what they write."""


def find_caption_models(folders: OpenedFolders) -> list[Path]:
    """Find the models below the opened folders that write captions or tags."""
    found = []
    for folder, entries in folders.walk():
        names = {entry.name for entry in entries}
        if {MODEL_FILE, TAGS_FILE} <= names or ("config.json" in names and _writes_captions(folder, names)):
            found.append(folder)
    return found


def _writes_captions(folder: Path, names: set[str]) -> bool:
    if not names & {"preprocessor_config.json", "processor_config.json"}:
        return False
    try:
        architectures = json.loads((folder / "config.json").read_text("utf-8"))["architectures"]
        return any(part in each for each in architectures for part in CAPTIONING_CLASSES)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def build_caption_command(project: Project, model: str, trigger_word: str, if_exists: str) -> list[str]:
    """Build the command that captions all folders but those of regularization pictures."""
    if if_exists not in IF_EXISTS:
        raise UserError("choose what happens to captions that are there")
    folders = [str(each.path) for each in project.list_folders() if not each.is_reg]
    if not folders:
        raise UserError("there are no pictures yet")
    words = [sys.executable, "-m", "library.web.background", "caption", *folders, f"--model={model}"]
    words += [f"--caption_extension={project.find_caption_extension()}", f"--if_exists={if_exists}"]
    return words + ([f"--trigger_word={trigger_word.strip()}"] if trigger_word.strip() else [])


def start_captioning(
    editor: CaptionEditor, runner: CommandRunner, words: Sequence[str], extension: str
) -> BackgroundWork:
    """Run the command in the background; what it writes is one edit, which Undo puts back."""
    if editor.is_busy:
        raise UserError(BUSY)
    work = editor.work = BackgroundWork("loading the caption model", "Undo puts back what was written")

    def run(work: BackgroundWork) -> Mapping[str, Any]:
        before = {index: _read_file(path) for index, path in _iter_caption_files(editor.pictures, extension)}
        name = runner.start(words)
        try:
            answer = _wait_for_command(runner, name, work)
        finally:
            changes = list(_list_changes(editor.pictures, extension, before))
            if changes:
                editor.log.add(changes)
                for change in changes:
                    editor.pictures.set_caption(change.image, change.old_caption, change.new_caption)
                editor.pictures.version += 1
        if answer["code"] and not changes:
            raise UserError("\n".join(str(answer["output"]).strip().splitlines()[-MAX_OUTPUT_LINES:]))
        return {"count": len(changes)}

    return work.start(run)


def _wait_for_command(runner: CommandRunner, name: str, work: BackgroundWork) -> Mapping[str, Any]:
    while True:
        answer = runner.describe(name)
        if not answer["is_running"]:
            return answer
        progress = answer["progress"] or {}
        title = "writing captions" if progress else f"loading the caption model, {answer['seconds']:.0f} s"
        try:
            work.report(title, int(progress.get("completed", 0)), int(progress.get("total", 0)))
        except WorkStopped:
            runner.stop(name)
            while runner.describe(name)["is_running"]:
                time.sleep(POLL_SECONDS)
            raise
        time.sleep(POLL_SECONDS)


def _iter_caption_files(pictures: PictureSet, extension: str) -> Iterator[tuple[int, Path]]:
    for index, picture in enumerate(pictures.pictures):
        if picture.is_editable and not picture.sample.is_reg:
            yield index, Path(os.path.splitext(picture.sample.image.path)[0] + extension)


def _list_changes(pictures: PictureSet, extension: str, before: Mapping[int, bytes | None]) -> Iterator[CaptionChange]:
    seen = set[Path]()
    for index, path in _iter_caption_files(pictures, extension):
        content = _read_file(path)
        if content is not None and not content.strip():  # a tagger that found nothing; training refuses an empty file
            path.unlink()
            content = None
        if path not in seen and content != before.get(index):
            seen.add(path)
            new = "" if content is None else content.decode("utf-8", "replace").rstrip("\n")
            image = pictures.pictures[index].sample.image
            yield CaptionChange(image, path, before.get(index), pictures.captions[index], new)


def _read_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
