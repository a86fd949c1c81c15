"""A model of the hub is downloaded file by file; a cut connection costs no byte twice, and a wrong file is refused."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from model_hub import ModelHub, run_model_hub
from web_pages import open_page

from library.errors import UserError
from library.models.model_configs import list_cached_models
from library.models.model_download import download_model, select_model_files

WEIGHTS = bytes(range(256)) * 12_000  # 3 MB
FILES = {
    "model_index.json": b'{"_class_name": "StableDiffusionPipeline"}',
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.safetensors": WEIGHTS,
    "unet/diffusion_pytorch_model.fp16.safetensors": b"half",
    "unet/diffusion_pytorch_model.bin": b"pickle",
    "tiny.safetensors": b"of other programs",
}


def allow_hub(patch: pytest.MonkeyPatch, hub: ModelHub, cache: Path) -> None:
    """Let huggingface_hub ask this hub, with this cache."""
    patch.setenv("HF_ENDPOINT", hub.endpoint)
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for module in ("utils._cache_manager", "constants"):  # the first copies from the second when it is imported
        patch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(cache))
    patch.setattr("library.models.model_download.WAIT_SECONDS", 0.01)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ("unet/a.safetensors unet/a.fp16.safetensors unet/a.bin b.safetensors", "unet/a.safetensors"),
        ("unet/a.fp16.safetensors unet/a.non_ema.safetensors unet/a.msgpack", "unet/a.fp16.safetensors"),
        ("te/m-00001-of-00002.safetensors te/m-00002-of-00002.safetensors te/m.safetensors.index.json te/m.ckpt",) * 2,
        (
            "README.md model_index.json tokenizer/merges.txt tokenizer/spiece.model",
            "model_index.json tokenizer/merges.txt tokenizer/spiece.model",
        ),
    ],
)
def test_what_loading_reads_is_selected(names, chosen):
    found = {file.name for file in select_model_files(dict.fromkeys(names.split(), 1))}
    assert found == {name for name in chosen.split() if not name.endswith(".ckpt")}


def test_connections_that_are_cut_are_gone_on_with_and_no_byte_comes_twice(tmp_path, monkeypatch):
    with run_model_hub(dict(FILES)) as hub:
        allow_hub(monkeypatch, hub, tmp_path)
        hub.cut_after = 1_000_000
        folder = download_model("me/tiny")

    expected = {name: FILES[name] for name in list(FILES)[:3]}
    assert read_files(folder) == expected and hub.num_sent == len(WEIGHTS)
    assert [start for _, start in hub.ranges] == [0, 1_000_000, 2_000_000, 3_000_000]
    assert not list(tmp_path.rglob("*-part"))


def test_a_server_without_ranges_and_one_that_cuts_at_once(tmp_path, monkeypatch):
    with run_model_hub(dict(FILES)) as hub:
        allow_hub(monkeypatch, hub, tmp_path)
        hub.cut_after = 0
        with pytest.raises(UserError, match=r"the connection was cut 5 times at 0 of 3,072,000 bytes"):
            download_model("me/tiny")
        hub.cut_after = 2_000_000
        hub.is_range_ignored = True
        with pytest.raises(UserError, match="at 2,000,000 of"):  # never comes beyond what it sends at a time
            download_model("me/tiny")
        assert list_cached_models() == [], "what is cut is not taken for a whole model"
        (cached,) = (tmp_path / "models--me--tiny" / "snapshots").iterdir()
        (cached / "model_index.json").write_text("{}")  # as after a look at the model
        assert list_cached_models() == []
        (cached / "model_index.json").unlink()
        hub.cut_after = None
        assert read_files(download_model("me/tiny"))["unet/diffusion_pytorch_model.safetensors"] == WEIGHTS
        assert [name for name, _ in list_cached_models()] == ["me/tiny"]


def test_a_file_that_is_not_what_the_hub_has_is_removed(tmp_path, monkeypatch):
    with run_model_hub(dict(FILES)) as hub:
        allow_hub(monkeypatch, hub, tmp_path)
        hub.cut_after = 1_000_000
        monkeypatch.setattr("library.models.model_download.MAX_ATTEMPTS", 1)
        hub.is_range_ignored = True
        with pytest.raises(UserError, match="cut"):
            download_model("me/tiny")
        (part,) = tmp_path.rglob("*-part")
        part.write_bytes(b"?" * 1_000_000)
        hub.cut_after, hub.is_range_ignored = None, False
        with pytest.raises(UserError, match="not what the hub has"):
            download_model("me/tiny")
        assert read_files(download_model("me/tiny"))["unet/diffusion_pytorch_model.safetensors"] == WEIGHTS


@pytest.mark.parametrize("name", ["me/none", "me/tiny"])
def test_a_repository_without_weights_or_access_is_one_line(tmp_path, monkeypatch, name):
    with run_model_hub({"README.md": b"x"}) as hub:
        allow_hub(monkeypatch, hub, tmp_path)
        with pytest.raises(UserError, match=rf"{name}(: cannot be downloaded| has no folders)"):
            download_model(name)


@pytest.mark.slow
def test_a_download_from_the_page_is_stopped_and_gone_on_with(tmp_path, monkeypatch):
    """The page runs the command as a process, whose end leaves what has come."""
    weights = WEIGHTS * 8
    with run_model_hub(FILES | {"unet/diffusion_pytorch_model.safetensors": weights}) as hub:
        for name, value in {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
        }.items():
            monkeypatch.setenv(name, value)
        command = [sys.executable, "-m", "library.web.background", "models", "--download", "me/tiny"]
        environment = os.environ | {"LORIKEET_PROGRESS_FILE": str(tmp_path / "progress.json")}
        hub.cut_after = 4_000_000  # every connection brings so much: the first process is ended in between
        first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while len(hub.ranges) < 3 and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        first.terminate()
        first.wait(60)
        num_before = len(hub.ranges)
        hub.cut_after = None
        runner = open_page(tmp_path).app.state.workbench.commands
        name = runner.start(command)
        while (answer := runner.describe(name))["is_running"]:
            time.sleep(0.05)

    assert answer["code"] == 0, answer["output"]
    assert json.loads((tmp_path / "progress.json").read_text())["total"] > len(weights)
    assert num_before == len(hub.ranges) or hub.ranges[num_before][1] > 0, "the second process went on"
    (file,) = (tmp_path / "hf").rglob("diffusion_pytorch_model.safetensors")
    assert file.read_bytes() == weights
