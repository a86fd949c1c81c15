"""The middleware around every request: host names, origin of posts, sessions, size of bodies, response headers.

It is one middleware around all routes, so that no new page can be without it.
"""

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .login_sessions import Sessions

MAX_BODY_BYTES = 2**20
"""The limit of all requests but uploads: the largest is an edit of many captions."""

UPLOAD_PREFIX = "/api/train/upload/"
MAX_UPLOAD_BYTES = 2**26
"""The address to which pictures are uploaded, one a request, and the limit of its size."""

PUBLIC_PATHS = ("/login", "/static/", "/favicon.ico")
RESPONSE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self';"
        " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, forms would be posted with Origin: null
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class HostNames:
    """The names under which the page may be asked for.

    A page elsewhere whose name is suddenly resolved to this machine (DNS rebinding) still sends its own name.  An
    address instead of a name cannot be rebound.
    """

    names: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def build(cls, bound_to: str, allowed: Sequence[str]) -> "HostNames":
        own = {"localhost", bound_to, socket.gethostname(), socket.getfqdn()} if not is_loopback(bound_to) else set()
        return cls(frozenset(name.lower().rstrip(".") for name in {"localhost", *own, *allowed}))

    def accept(self, host_header: str) -> bool:
        try:
            name = (urlsplit(f"//{host_header}").hostname or "").rstrip(".")
            ipaddress.ip_address(name)
        except ValueError:
            return bool(host_header) and _strip_port(host_header) in self.names
        return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _strip_port(host_header: str) -> str:
    return host_header.rpartition(":")[0].lower() or host_header.lower()


class Guard:
    """Refuses requests before any page sees them, and sets the headers of every response."""

    def __init__(self, app: ASGIApp, hosts: HostNames, sessions: Sessions):
        self.app, self.hosts, self.sessions = app, hosts, sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._find_refusal(scope, headers)
        send_guarded = _add_headers(send)
        if refusal is not None:
            await refusal(scope, receive, send_guarded)
            return
        limit = _get_body_limit(scope["path"])
        body = _LimitedBody(receive, limit)
        try:
            await self.app(scope, body.receive, send_guarded)
        except _BodyTooLarge:
            await _answer_too_large(limit)(scope, receive, send_guarded)

    def _find_refusal(self, scope: Scope, headers: Headers) -> Response | None:
        path, host = scope["path"], headers.get("host", "")
        if not self.hosts.accept(host):
            text = f"{host!r} is not a name of this page; add it with --allow_host, or use the address"
            return PlainTextResponse(text, 421)
        if scope["method"] not in ("GET", "HEAD") and not _is_same_origin(headers, host):
            return PlainTextResponse("refused: this request came from another page", 403)
        length = headers.get("content-length", "0")
        limit = _get_body_limit(path)
        if not length.isdecimal() or int(length) > limit:
            return _answer_too_large(limit)
        if path.startswith(PUBLIC_PATHS) or self.sessions.is_open(headers.get("cookie", "")):
            return None
        if path.startswith("/api/") or scope["method"] not in ("GET", "HEAD"):
            return JSONResponse({"error": "log in first: reload the page"}, 401)
        return RedirectResponse("/login", 303)


def _is_same_origin(headers: Headers, host: str) -> bool:
    """Whether a post comes from this page.  Browsers send ``Origin`` with every post; without it, it is refused."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = urlsplit(headers.get("origin", ""))
    return origin.scheme in ("http", "https") and origin.netloc.lower() == host.lower() and bool(host)


def _get_body_limit(path: str) -> int:
    return MAX_UPLOAD_BYTES if path.startswith(UPLOAD_PREFIX) else MAX_BODY_BYTES


def _answer_too_large(limit: int) -> Response:
    return JSONResponse({"error": f"the request is larger than {limit // 2**20} MiB"}, 413)


def _add_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in RESPONSE_HEADERS.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return send_with_headers


class _BodyTooLarge(Exception):
    """A body without a length, or longer than it said."""


class _LimitedBody:
    """Counts the bytes of a request as they come."""

    def __init__(self, receive: Receive, limit: int):
        self._receive, self._limit, self._count = receive, limit, 0

    async def receive(self) -> Any:
        message = await self._receive()
        self._count += len(message.get("body", b""))
        if self._count > self._limit:
            raise _BodyTooLarge
        return message
