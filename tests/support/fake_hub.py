"""A hub of Hugging Face on this machine with one dataset repository, ``me/set``, of the files of a folder."""

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "a" * 40


@contextmanager
def run_fake_hub(folder: Path) -> Iterator[str]:
    """Serve the folder as the hub does, and yield the endpoint; other repositories do not exist."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    folders = {name.rsplit("/", depth)[0] for name in files for depth in range(1, name.count("/") + 1)}

    def describe(name: str) -> dict[str, Any]:
        if name in files:
            oid = hashlib.sha1(files[name]).hexdigest()
            return {"type": "file", "path": name, "size": len(files[name]), "oid": oid}
        return {"type": "directory", "path": name, "size": 0, "oid": COMMIT}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlsplit(self.path)
            path, is_recursive = unquote(parts.path), "true" in parse_qs(parts.query).get("recursive", [])
            tree = re.fullmatch(r"/api/datasets/me/set/tree/[^/]+(?:/(.*))?", path)
            resolved = re.fullmatch(r"/datasets/me/set/resolve/[^/]+/(.*)", path)
            if re.fullmatch(r"/api/datasets/me/set(/revision/[^/]+)?", path):
                self.send({"id": "me/set", "sha": COMMIT, "siblings": []})
            elif tree and (not tree[1] or tree[1] in folders):
                start = f"{tree[1]}/" if tree[1] else ""
                names = sorted(name for name in (*files, *folders) if name.startswith(start))
                self.send([describe(name) for name in names if is_recursive or "/" not in name[len(start) :]])
            elif resolved and resolved[1] in files:
                first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                data = files[resolved[1]]
                span = f"bytes {first}-{last}/{len(data)}"
                self.send(data[first : last + 1], 206, {"Content-Range": span, "X-Repo-Commit": COMMIT})
            else:
                self.send({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound" if tree else "RepoNotFound"})

        def send(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
