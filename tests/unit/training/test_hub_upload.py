"""Upload to the Hub, with a local server instead; a failed upload does not end a run."""

import base64
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from problem_lines import format_lines, format_unused

from library.config import parse_config
from library.config.schema_output import SaveConfig
from library.training.hub_upload import HubUploader


class Hub(BaseHTTPRequestHandler):
    """The endpoints of the Hub API that uploads of small files use."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub = self.server
        hub.requests.append((self.path, self.headers.get("authorization")))
        if hub.refuses and hub.refuses in self.path:
            return self._answer(403, {"error": "no"})
        if self.path.endswith("/create"):
            hub.created_repos.append(json.loads(body))
            return self._answer(200, {"url": f"{hub.url}/me/loras"})
        if "/preupload/" in self.path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for each in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        return self._answer(200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.url}/me/loras/commit/0"})

    def _answer(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.requests, server.created_repos, server.files, server.refuses = [], [], {}, ""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()


@pytest.mark.parametrize("is_async", [False, True])
def test_files_are_uploaded_to_the_folder_of_the_repository(hub, is_async, tmp_path):
    paths = [tmp_path / f"{name}.safetensors" for name in ("a", "b")]
    for path in paths:
        path.write_bytes(path.name.encode())
    save = SaveConfig(huggingface_path_in_repo="/loras/", huggingface_repo_visibility="public", async_upload=is_async)
    upload = HubUploader(save, "me/loras")
    upload.create_repo()
    upload.upload(paths)
    upload.wait()
    assert hub.files == {f"loras/{path.name}": path.name.encode() for path in paths}
    (repository,) = hub.created_repos
    assert (repository["name"], repository["organization"]) == ("loras", "me")
    assert not repository.get("private") and repository.get("visibility", "public") == "public"
    assert {token for _, token in hub.requests} == {"Bearer hf_test"}


def test_a_repository_is_private_unless_public_is_set(hub):
    HubUploader(SaveConfig(), "me/loras").create_repo()
    assert hub.created_repos[0].get("private") is True or hub.created_repos[0].get("visibility") == "private"


@pytest.mark.parametrize("refuses", ["/create", "/commit/"])
def test_a_failed_upload_is_only_logged(hub, refuses, tmp_path, caplog):
    hub.refuses = refuses
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"a")
    upload = HubUploader(SaveConfig(async_upload=True), "me/loras")
    with caplog.at_level(logging.WARNING):
        upload.create_repo()
        upload.upload([path])
        upload.wait()
    assert not hub.files and "training continues" in caplog.text and "hf_test" not in caplog.text
    hub.refuses = ""
    upload.upload([path])
    upload.wait()
    assert hub.files == {"a.safetensors": b"a"}, "the next file is tried again"


def test_hub_options_without_a_repository_and_invalid_names_are_reported():
    unused = format_unused(parse_config(["--async_upload", "--huggingface_repo_type", "model"]).unused)
    assert unused == (("--async_upload", "huggingface_repo_id is not set"),)
    problems = " ".join(
        format_lines(parse_config(["--huggingface_repo_id", "a/b/c", "--huggingface_path_in_repo", "../x"]).problems)
    )
    assert "is not a repository id; expected OWNER/NAME" in problems and "outside the repository" in problems
