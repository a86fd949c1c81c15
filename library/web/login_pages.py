"""Logging in with the token, and out."""

import asyncio
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from .sessions import WRONG_TOKEN_DELAY_SECONDS
from .workbench import get_workbench, render_page


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


ROUTES = (
    Route("/login", show_login),
    Route("/login", log_in, methods=["POST"]),
    Route("/logout", log_out, methods=["POST"]),
)
