"""A hub of Hugging Face on this machine with one model repository, ``me/tiny``, whose connections can be cut."""

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "b" * 40


@dataclass
class ModelHub:
    """The files, and what was asked of them."""

    files: dict[str, bytes]
    endpoint: str = ""
    cut_after: int | None = None
    """The number of bytes of an answer after which the connection is cut; None sends all."""

    is_range_ignored: bool = False
    ranges: list[tuple[str, int]] = field(default_factory=list)
    """The file and the first byte of every download of weights."""

    num_sent: int = 0

    def describe(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": hash_small(data)}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {
            "id": "me/tiny",
            "modelId": "me/tiny",
            "sha": COMMIT,
            "private": False,
            "siblings": siblings,
            "tags": [],
        }


def hash_small(data: bytes) -> str:
    """The checksum of git."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@contextmanager
def run_model_hub(files: dict[str, bytes]) -> Iterator[ModelHub]:
    """Serve the files as the hub does."""
    hub = ModelHub(files)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            resolved = re.fullmatch(r"/me/tiny/resolve/[^/]+/(.*)", path)
            if re.fullmatch(r"/api/models/me/tiny(/revision/[^/]+)?", path):
                self.send(json.dumps(hub.describe()).encode(), {"Content-Type": "application/json"})
            elif resolved and resolved[1] in hub.files:
                self.send_file(resolved[1])
            else:
                self.send(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

        do_HEAD = do_GET

        def send_file(self, name: str) -> None:
            data, asked = hub.files[name], self.headers.get("Range", "")
            is_weight = name.endswith(".safetensors")
            checksum = hashlib.sha256(data).hexdigest() if is_weight else hash_small(data)
            headers = {"ETag": f'"{checksum}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            start = int(asked.removeprefix("bytes=").split("-")[0]) if asked and not hub.is_range_ignored else 0
            if is_weight and self.command == "GET":
                hub.ranges.append((name, start))
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.send(data[start:], headers, 206 if start else 200, may_cut=is_weight)

        def send(self, data: bytes, headers: dict[str, str], status: int = 200, *, may_cut: bool = False) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            is_cut = may_cut and hub.cut_after is not None and len(data) > hub.cut_after
            sent = data[: hub.cut_after] if is_cut else data
            self.wfile.write(sent)
            if may_cut:
                hub.num_sent += len(sent)
            if is_cut:
                self.close_connection = True

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
