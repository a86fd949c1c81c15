"""The state that all pages share: the opened folders, what was read of them, and the rendering of a page."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from .. import __version__
from .caption_edits import CaptionEditor
from .commands import CommandRunner
from .folders import OpenedFolders
from .guided.picture_check import PictureCheck
from .guided.project import Project, ProjectShelf
from .jobs import JobQueue
from .languages.catalogue import (
    LANGUAGES,
    build_translated_environment,
    build_translator,
    choose_language,
    list_script_texts,
    read_catalogue,
)
from .login_sessions import Sessions
from .pictures import PictureSet, PictureShelf
from .run_form import FormChecker
from .runs import RunReader
from .undo_log import UndoLog

SECTIONS = (
    ("train", "Train"),
    ("runs", "Runs"),
    ("pictures", "Pictures"),
    ("new", "New run"),
    ("lora", "LoRA files"),
)
"""Address and title of the entries of the navigation."""


@dataclass
class Workbench:
    """The state of one server."""

    folders: OpenedFolders
    sessions: Sessions

    def __post_init__(self) -> None:
        self.templates: dict[str, Any] = {}
        self.script_texts: dict[str, Mapping[str, str]] = {}
        self.translators: dict[str, Callable[..., str]] = {}
        self.runs = RunReader(self.folders)
        self.pictures = PictureShelf(self.folders)
        self.forms = FormChecker(self.folders)
        self.queue = JobQueue(self.folders.folders[0])
        self.commands = CommandRunner()
        self.deletions = threading.Lock()  # one request at a time moves the files of runs
        self.editors: dict[int, CaptionEditor] = {}
        self.undo_logs: dict[Path, UndoLog] = {}
        self.projects = ProjectShelf(self.folders)
        self.checks: dict[Path, PictureCheck] = {}

    def get_templates(self, language: str) -> Any:
        """Return the templates of a language, and remember the texts of its scripts."""
        if language not in self.templates:
            catalogue = read_catalogue(language)
            self.script_texts[language] = {text: catalogue[text] for text in list_script_texts() if text in catalogue}
            self.templates[language] = build_translated_environment(language)
        return self.templates[language]

    def get_translator(self, language: str) -> Callable[..., str]:
        """Return the function that looks texts up in a language."""
        if language not in self.translators:
            self.translators[language] = build_translator(language)
        return self.translators[language]

    def get_editor(self, pictures: PictureSet) -> CaptionEditor:
        """Return the editor of a picture set; a new scan has a new one, which can undo the edits of the one before."""
        for key in [key for key, editor in self.editors.items() if not self.pictures.holds(editor.pictures)]:
            self.editors.pop(key, None)
        if pictures.path not in self.undo_logs:
            self.undo_logs.setdefault(pictures.path, UndoLog(pictures.path, self.folders))
        return self.editors.setdefault(id(pictures), CaptionEditor(pictures, self.undo_logs[pictures.path]))

    def get_check(self, project: Project) -> PictureCheck:
        """Return the check of a project's pictures, which goes by the choices as they are now."""
        check = self.checks.setdefault(project.folder, PictureCheck(project))
        check.update(project)
        return check


class JSONAnswer(JSONResponse):
    """JSON in ASCII: names of files may hold bytes that are no UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def get_workbench(request: Request) -> Workbench:
    workbench: Workbench = request.app.state.workbench
    return workbench


def _get_language(request: Request) -> str:
    return choose_language(request.cookies, request.headers.get("accept-language", ""))


def get_translator(request: Request) -> Callable[..., str]:
    """Return what translates texts into the language of a request."""
    return get_workbench(request).get_translator(_get_language(request))


def render_page(request: Request, template: str, values: Mapping[str, Any], status: int = 200) -> Response:
    """Render a template with what every page shows."""
    workbench = get_workbench(request)
    section = request.url.path.split("/")[1]
    language = _get_language(request)
    page = (
        workbench.get_templates(language)
        .get_template(template)
        .render(
            **values,
            sections=SECTIONS,
            section=section,
            has_token=workbench.sessions.token_hash is not None,
            version=__version__,
            now=time.time(),
            language=language,
            languages=LANGUAGES,
            script_texts=workbench.script_texts[language],
        )
    )
    return HTMLResponse(page.encode("utf-8", "replace"), status)
