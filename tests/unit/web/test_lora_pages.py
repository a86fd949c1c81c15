"""The page of LoRA files runs the tools on files below the opened folders, and writes beside them."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from web_pages import open_page

from library.web.lora_pages import SHOWN, list_commands


@pytest.fixture
def root(tmp_path) -> Path:
    folder = tmp_path / "open"
    folder.mkdir()
    draw = torch.Generator().manual_seed(1)
    for name in ("one", "two"):
        module = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
        tensors = {
            f"{module}.lora_down.weight": torch.randn(4, 320, generator=draw),
            f"{module}.lora_up.weight": torch.randn(320, 4, generator=draw),
            f"{module}.alpha": torch.tensor(4.0),
        }
        save_file(tensors, folder / f"{name}.safetensors")
    save_file({"model.weight": torch.zeros(4)}, folder / "model.safetensors")
    save_file({"a.lora_down.weight": torch.zeros(4)}, tmp_path / "secret.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    return folder


def run(page, command: str, *files: str, output: str = "", **values: object) -> dict:
    body = {"command": command, "files": [f"0/{name}.safetensors" for name in files], "values": values}
    answer = page.post("/api/lora", json={**body, "output": output})
    assert answer.status_code == 200, answer.text
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        state = page.get(f"/api/commands/{answer.json()['id']}").json()
        if not state["is_running"]:
            return state
        time.sleep(0.1)
    raise AssertionError("the command does not end")


def test_lora_files_and_commands_with_their_options_are_listed(root):
    text = open_page(root).get("/lora").text

    assert "one.safetensors" in text and "two.safetensors" in text
    assert "model.safetensors" not in text and "link.safetensors" not in text
    assert [command.name for command in list_commands()] == list(SHOWN)
    assert "sv_ratio" in text and "kohya: sd-scripts&#39; keys" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": ["0/link.safetensors"]}, "outside of the opened folders"),
        ({"files": ["0/../secret.safetensors"]}, "outside of the opened folders"),
        ({"files": []}, "choose one or more files"),
        ({"command": "extract"}, "choose one or more files"),
        ({"output": "../new"}, "without folders"),
        ({"output": ""}, "give a name"),
        ({"output": "--overwrite"}, "without folders"),
        ({"values": {"blocks": "a --overwrite"}}, "begins with a dash"),
        ({"values": {"weights": "1 --model /tmp"}}, "begins with a dash"),
    ],
)
def test_requests_that_lead_elsewhere_are_refused(root, change, said):
    body = {"command": "merge", "files": ["0/one.safetensors", "0/two.safetensors"], "values": {}, "output": "new"}
    answer = open_page(root).post("/api/lora", json={**body, **change})

    assert answer.status_code in (400, 403) and said in answer.json()["error"]


@pytest.mark.slow
def test_files_are_inspected_converted_merged_and_resized(root):
    page = open_page(root)

    state = run(page, "inspect", "one")
    assert state["code"] == 0 and "one.safetensors" in state["output"], state
    assert run(page, "merge", "one", "two", output="both")["code"] == 0 and (root / "both.safetensors").is_file()
    assert run(page, "resize", "both", output="small", rank="2")["code"] == 0 and (root / "small.safetensors").is_file()
    state = run(page, "convert", "one", output="theirs", to="diffusers")
    assert state["code"] == 0 and (root / "theirs.safetensors").is_file(), state
    state = run(page, "convert", "one", output="theirs", to="diffusers")
    assert state["code"] == 2 and "already exists" in state["output"]
