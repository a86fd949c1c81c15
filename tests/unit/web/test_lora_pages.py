"""The page of LoRA files runs the tools on files below the opened folders, and writes beside them."""

import time
from pathlib import Path

import pytest
import torch
from adapter_states import build_random_state
from safetensors.torch import save_file
from tiny_pipelines import TINY
from web_pages import open_page

from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
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


def start(page, command: str, *files: str, output: str = "", models: object = (), **values: object) -> str:
    body = {"command": command, "files": [f"0/{name}.safetensors" for name in files], "values": values}
    answer = page.post("/api/lora", json={**body, "output": output, "models": dict(models)})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def run(page, *words: str, **options: object) -> dict:
    return wait_until(page, start(page, *words, **options), lambda state: not state["is_running"])


def wait_until(page, command: str, is_reached) -> dict:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        state = page.get(f"/api/commands/{command}").json()
        if is_reached(state):
            return state
        time.sleep(0.02)
    raise AssertionError("the command does not end")


def test_lora_files_and_commands_with_their_options_are_listed(root):
    text = open_page(root).get("/lora").text

    assert "one.safetensors" in text and "two.safetensors" in text
    assert 'data-name="model.safetensors"' not in text and "link.safetensors" not in text
    assert '<option value="0/model.safetensors">' in text and '<option value="0/one.safetensors">' not in text
    assert [command.name for command in list_commands()] == list(SHOWN)
    assert "sv_ratio" in text and "kohya: sd-scripts&#39; keys" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": ["0/link.safetensors"]}, "outside of the opened folders"),
        ({"files": ["0/../secret.safetensors"]}, "outside of the opened folders"),
        ({"files": []}, "choose one or more files"),
        ({"command": "shell"}, "choose one or more files"),
        ({"command": "extract", "output": "new"}, "choose the model before and the model after"),
        ({"command": "extract", "models": {"base": "0/link.safetensors", "tuned": "0/one.safetensors"}}, "outside of"),
        ({"command": "merge into a model", "models": {"model": "0/../secret.safetensors"}}, "outside of"),
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


@pytest.mark.slow
def test_a_lora_is_merged_into_a_model_and_extracted_and_a_stopped_merge_leaves_nothing(tmp_path):
    state, alphas, parts = build_random_state("sd1", pipe=(pipe := TINY["sd1"]().pipe))
    save_file(convert_to_file_format(state, alphas, parts, "kohya")[0], tmp_path / "lora.safetensors")
    pipe.save_pretrained(tmp_path / "model")
    page = open_page(tmp_path)
    assert '<option value="0/model">model</option>' in page.get("/lora").text
    assert "0/model/unet" not in page.get("/lora").text

    chosen = {"model": "0/model"}
    assert run(page, "merge into a model", "lora", models=chosen, output="merged", weights="0.5")["code"] == 0
    chosen = {"base": "0/model", "tuned": "0/merged"}
    assert run(page, "extract", models=chosen, output="back", rank="3")["code"] == 0
    state = run(page, "inspect", "lora", "back")
    assert "1.000" in state["output"], state["output"]  # the cosine of their updates
    with (tmp_path / "model" / "a_large_file").open("wb") as file:
        file.truncate(2**31)

    command = start(page, "merge into a model", "lora", models={"model": "0/model"}, output="stopped")
    wait_until(page, command, lambda state: list(tmp_path.glob(".stopped*")) or not state["is_running"])
    page.post(f"/api/commands/{command}/stop", json={})
    state = wait_until(page, command, lambda state: not state["is_running"])
    assert state["is_stopped"] and "interrupted" in state["output"], state
    assert {path.name for path in tmp_path.iterdir()} == {"model", "merged", "lora.safetensors", "back.safetensors"}
