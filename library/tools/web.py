"""``python -m library web``: serve the page of pictures, runs, new runs and LoRA files."""

import socket
import threading
import webbrowser
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ..config import parse_config
from ..config.options import define_option, iter_options
from ..errors import UserError
from ..problems import Problem
from .validate_arguments import check_web_arguments

if TYPE_CHECKING:
    from starlette.applications import Starlette

USAGE = "usage: python -m library web [--root FOLDER ...] [--port 7860]"


@dataclass(frozen=True)
class WebOptions:
    """The options of this tool."""

    root: tuple[str, ...] = define_option(
        (".",), "folders to open, with datasets, models and outputs; nothing outside of them is read or written"
    )
    host: str = define_option("127.0.0.1", "address to bind to; all but 127.0.0.1, ::1 and localhost need a token")
    port: int = define_option(7860, "port; 0 takes a free one", minimum=0, maximum=65_535)
    allow_host: tuple[str, ...] = define_option(
        (), "additional host names under which the page is reached, such as that of a proxy"
    )
    session_hours: float = define_option(12.0, "hours until the token has to be given again", minimum=0.01, maximum=720)
    open_browser: bool = define_option(False, "open the page in the browser of this machine, as scripts/start does")
    token: bool = define_option(False, "ask for a token also on 127.0.0.1, where other users have accounts")


@dataclass(frozen=True)
class _Arguments:
    web: WebOptions = field(default_factory=WebOptions)


def run_web(argv: Sequence[str]) -> tuple[str, int] | Generator[str, None, int]:
    """Serve until Ctrl-C."""
    if set(argv) & {"--help", "-h"}:
        return _format_help(), 0
    parsed = parse_config(argv, _Arguments)
    options: WebOptions = cast(Any, parsed.config).web
    check_web_arguments(options, parsed.problems)
    return _serve(options)


def _serve(options: WebOptions) -> Generator[str, None, int]:
    try:
        import uvicorn

        from ..web.app import build_app
        from ..web.folders import OpenedFolders
        from ..web.guard import HostNames, is_loopback
        from ..web.login_sessions import Sessions
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise UserError(f"{error.name} is missing; install it with: pip install -e '.[web]'") from None
    folders, sessions = OpenedFolders.open(options.root), Sessions(None)
    if options.token or not is_loopback(options.host):
        sessions, token = Sessions.build_with_token(options.session_hours * 3600)
        yield f"token, shown only once: {token}"
    app: Starlette = build_app(folders, sessions, HostNames.build(options.host, options.allow_host))
    with bind_listener(options.host, options.port) as listener:
        name = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{name}:{listener.getsockname()[1]}/"
        yield f"open {address} in a browser; Ctrl-C ends the page, not its runs"
        if options.open_browser:  # in a thread, since some browsers return only when they are closed
            threading.Thread(target=webbrowser.open, args=[address], name="browser", daemon=True).start()
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="on")
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def bind_listener(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # who opens the address as soon as it is printed waits, and is not refused
    except OSError as error:
        raise UserError(
            Problem("port", f"cannot listen at {host}: {error.strerror}", "give another --port", value=str(port))
        ) from None
    return listener


def _format_help() -> str:
    lines = [USAGE, "", "A page to look at pictures and runs, to start runs, and for LoRA files.", ""]
    for option in iter_options(_Arguments):
        value = "" if option.value_type is bool else f" {option.syntax}{' ...' if option.is_list else ''}"
        lines.append(f"  {'--' + option.name + value:<24} {option.help}")
    return "\n".join(lines)
