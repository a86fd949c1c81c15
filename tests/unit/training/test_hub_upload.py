"""Upload to the Hub, with a local server instead; a failed upload does not end a run."""

import base64
import hashlib
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
import torch
from problem_lines import format_lines, format_unused
from safetensors.torch import load_file
from training_runs import train, write_images

from library.config import parse_config
from library.config.schema_output import SaveConfig
from library.errors import UserError
from library.training.checkpoint_dir import load_checkpoint_tensors, read_checkpoint_info, write_checkpoint
from library.training.hub_download import download_checkpoint
from library.training.hub_upload import HubUploader

COMMIT = "b" * 40


class Hub(BaseHTTPRequestHandler):
    """The endpoints of the Hub API that uploads and downloads of small files use."""

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

    def do_GET(self):
        hub, path = self.server, urlsplit(self.path).path
        if path.startswith("/api/models/me/loras/tree/"):
            sizes = {name: len(content) for name, content in hub.files.items()}
            listed = [{"type": "file", "path": name, "size": size, "oid": COMMIT} for name, size in sizes.items()]
            return self._answer(200, listed)
        if path.startswith("/api/models/me/loras"):
            siblings = [{"rfilename": name} for name in hub.files]
            return self._answer(200, {"id": "me/loras", "sha": COMMIT, "siblings": siblings})
        name = unquote(path.removeprefix(f"/me/loras/resolve/{COMMIT}/"))
        if name not in hub.files:
            return self._answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
        tag = hashlib.sha1(hub.files[name]).hexdigest()
        return self._answer(200, hub.files[name], {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def _answer(self, code, body, headers=()):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
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


def test_an_uploaded_checkpoint_is_downloaded_again(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "lora-step00000002-state"
    write_checkpoint(path, {"step": 2, "saved_at": 1.0}, {"adapter/a": torch.arange(3.0)})
    HubUploader(SaveConfig(huggingface_path_in_repo="states"), "me/loras").upload_checkpoint(path)
    assert set(hub.files) == {f"states/{path.name}/{each.name}" for each in path.iterdir()}
    for name in ("", ":main", f":{COMMIT}:model"):
        found = download_checkpoint(f"me/loras/states/{path.name}{name}")
        info = read_checkpoint_info(found)
        assert info.step == 2 and load_checkpoint_tensors(info)["adapter/a"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(UserError, match="me/loras has no folder other"):
        download_checkpoint("me/loras/other")
    with pytest.raises(UserError, match="cannot be downloaded"):
        download_checkpoint("me/nothing/state")


@pytest.mark.parametrize(
    ("name", "is_valid"),
    [
        ("me/loras/a-state", True),
        ("me/loras/b/a-state:main", True),
        ("me/loras/a-state:main:dataset", True),
        ("me/loras", False),
        ("latest", False),
        ("me/loras/../x", False),
        ("me/loras/a-state:main:file", False),
    ],
)
def test_the_name_of_a_checkpoint_on_the_hub_is_checked(name, is_valid):
    problems = format_lines(parse_config(["--resume", name, "--resume_from_huggingface"]).problems)
    assert not any(line.startswith("--resume") for line in problems) == is_valid


def test_states_on_the_hub_need_a_repository_and_a_checkpoint():
    parsed = parse_config(["--save_state_to_huggingface", "--save_state", "--resume_from_huggingface"])
    unused = dict(format_unused(parsed.unused))
    assert "huggingface_repo_id" in unused["--save_state_to_huggingface"]
    assert "resume" in unused["--resume_from_huggingface"]


@pytest.mark.slow
def test_a_run_resumes_from_the_checkpoint_that_another_run_uploaded(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    dataset = write_images(tmp_path / "images", {(64, 64): 3})
    flags = [
        "--dataset_config",
        str(dataset),
        "--network_dim",
        "2",
        "--max_train_steps",
        "4",
        "--learning_rate",
        "1e-2",
    ]
    more = "--save_every_n_steps 2 --save_state --save_state_to_huggingface --huggingface_repo_id me/loras".split()
    train(*flags, *more, "--output_dir", str(tmp_path / "whole"))
    names = {name.split("/")[0] for name in hub.files}
    assert {"lora-step00000002-state", "lora-state", "lora-step00000002.safetensors", "lora.safetensors"} <= names
    resume = ["--resume", "me/loras/lora-step00000002-state:main", "--resume_from_huggingface"]
    train(*flags, *resume, "--output_dir", str(tmp_path / "resumed"))
    metrics = (tmp_path / "resumed" / "lora.metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in metrics if "loss/current" in line] == [3, 4]
    first, second = (load_file(tmp_path / name / "lora.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(first[key], second[key]) for key in first)
