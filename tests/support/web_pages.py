"""The web application on folders of a test, and clients that ask it as browsers do."""

from pathlib import Path

from starlette.testclient import TestClient

from library.web.app import build_app
from library.web.folders import OpenedFolders
from library.web.guard import HostNames
from library.web.sessions import Sessions

ORIGIN = "http://127.0.0.1"


def open_page(*folders: Path, sessions: Sessions | None = None, host: str = "127.0.0.1") -> TestClient:
    """A client of the page on these folders; its posts come from the page itself."""
    app = build_app(OpenedFolders.open([*map(str, folders)]), sessions or Sessions(None), HostNames.build(host, []))
    return TestClient(app, base_url=ORIGIN, headers={"Origin": ORIGIN}, follow_redirects=False)
