"""What all pages share: the opened folders, what was read so far, and how a page is rendered."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from .. import __version__
from ..report.rendering import build_environment
from .folders import OpenedFolders
from .runs import RunReader
from .sessions import Sessions

SECTIONS = (("runs", "Runs"),)
"""Address and title of the entries of the navigation."""


@dataclass
class Workbench:
    """The state of one server."""

    folders: OpenedFolders
    sessions: Sessions

    def __post_init__(self) -> None:
        self.templates = build_environment("library.web")
        self.runs = RunReader(self.folders)


def get_workbench(request: Request) -> Workbench:
    workbench: Workbench = request.app.state.workbench
    return workbench


def render_page(request: Request, template: str, values: Mapping[str, Any], status: int = 200) -> Response:
    """Render a template with what every page shows."""
    workbench = get_workbench(request)
    section = request.url.path.split("/")[1]
    page = workbench.templates.get_template(template).render(
        **values,
        sections=SECTIONS,
        section=section,
        has_token=workbench.sessions.token_hash is not None,
        version=__version__,
        now=time.time(),
    )
    return HTMLResponse(page, status)
