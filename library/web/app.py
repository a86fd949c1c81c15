"""The web application: routes, login, errors, and the guard around them.

The routes of each page are the ``ROUTES`` of its ``*_pages.py``; runs are started and stopped in job_pages.py.

Pages are rendered on the server, with a few kB of script written by hand: there is nothing to build.  Starlette is the
core under FastAPI, whose schemas have no use here, since options have their own; NiceGUI and Gradio keep the state of
each browser in the process and change their front end from version to version.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ..errors import UserError
from ..problems import Problem, report_file
from ..report.rendering import STATIC_DIR
from . import import_pages, job_pages, lora_pages, new_run_pages, picture_pages, run_edit_pages, run_pages
from .folders import OpenedFolders, OutsideFolders
from .guard import Guard, HostNames
from .guided import step_pages
from .login_sessions import WRONG_TOKEN_DELAY_SECONDS, Sessions
from .workbench import JSONAnswer, Workbench, get_workbench, render_page

WEB_STATIC_DIR = Path(__file__).parent / "static"


def build_app(folders: OpenedFolders, sessions: Sessions, hosts: HostNames) -> Starlette:
    """Build the application; where a server runs it, runs are looked for at once, before the first request."""
    workbench = Workbench(folders, sessions)

    @asynccontextmanager
    async def serve(app: Starlette) -> AsyncIterator[None]:
        threading.Thread(target=workbench.runs.list_overviews, name="first list of runs", daemon=True).start()
        yield
        workbench.commands.stop_all()

    app = Starlette(
        lifespan=serve,
        routes=_list_routes(),
        middleware=[Middleware(Guard, hosts=hosts, sessions=sessions)],
        exception_handlers={
            OutsideFolders: _answer_outside,
            UserError: _answer_user_error,
            OSError: _answer_os_error,
            HTTPException: _answer_http_error,
        },
    )
    app.state.workbench = workbench
    return app


def _list_routes() -> Sequence[Route | Mount]:
    return [
        Route("/", _go_to_runs),
        Route("/login", show_login),
        Route("/login", log_in, methods=["POST"]),
        Route("/logout", log_out, methods=["POST"]),
        *step_pages.ROUTES,
        *run_edit_pages.ROUTES,
        *run_pages.ROUTES,
        *picture_pages.ROUTES,
        *new_run_pages.ROUTES,
        *job_pages.ROUTES,
        *lora_pages.ROUTES,
        *import_pages.ROUTES,
        Mount("/static/report", StaticFiles(directory=STATIC_DIR)),
        Mount("/static/web", StaticFiles(directory=WEB_STATIC_DIR)),
    ]


async def _go_to_runs(request: Request) -> Response:
    return RedirectResponse("/runs", 303)


async def show_login(request: Request) -> Response:
    """Ask for the token, if there is one."""
    if get_workbench(request).sessions.is_open(request.headers.get("cookie", "")):
        return RedirectResponse("/", 303)
    return render_page(request, "login.html", {"title": "Log in", "is_wrong": False})


async def log_in(request: Request) -> Response:
    """Start a session if the token is right; a wrong one is answered late, so that guessing is slow."""
    sessions = get_workbench(request).sessions
    form = parse_qs((await request.body()).decode("utf-8", "replace"))
    if not sessions.matches_token(form.get("token", [""])[0]):
        await asyncio.sleep(WRONG_TOKEN_DELAY_SECONDS)
        return render_page(request, "login.html", {"title": "Log in", "is_wrong": True}, 401)
    return RedirectResponse("/", 303, headers={"Set-Cookie": sessions.start_session()})


async def log_out(request: Request) -> Response:
    sessions = get_workbench(request).sessions
    cookie = sessions.end_session(request.headers.get("cookie", ""))
    return RedirectResponse("/login", 303, headers={"Set-Cookie": cookie})


async def _answer_outside(request: Request, error: Exception) -> Response:
    return _answer_error(request, [Problem("", str(error))], 403)


async def _answer_user_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    return _answer_error(request, error.problems, 400)


async def _answer_os_error(request: Request, error: Exception) -> Response:
    """A file that is gone, broken or not to be read, since it was listed."""
    assert isinstance(error, OSError)
    problem = report_file(error.filename, error.strerror) if error.strerror else Problem("", str(error))
    return _answer_error(request, [problem], 404)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _answer_error(request, [Problem("", error.detail)], error.status_code)


def _answer_error(request: Request, problems: Sequence[Problem], status: int) -> Response:
    """Answer with JSON to the page's script, and with a page otherwise."""
    if request.url.path.startswith("/api/"):
        exported = [{**problem.export_json(), "line": str(problem)} for problem in problems]
        return JSONAnswer({"error": "\n".join(map(str, problems)), "problems": exported}, status)
    return render_page(request, "error.html", {"problems": problems, "title": "Not possible"}, status)
