"""The converter imports little, and its table of known models is that of the models themselves."""

import json
import subprocess
import sys

import pytest
import torch
from adapter_states import build_random_state
from safetensors.torch import load_file, save_file

from library.adapters.formats import convert_to_file_format
from library.checkpoint.known_models import TABLE_PATH, iter_known_models, pack_known_model
from library.cli import run_tool
from scripts.known_models import build_known_model, iter_model_sources

SOURCES = dict(iter_model_sources())
COUNT_IMPORTS = """
import sys
from library.cli import run_tool
code = run_tool(sys.argv[1:])
print({"diffusers", "transformers", "peft", "accelerate"} & set(sys.modules), code)
"""


def save_lora(path, name="sd1"):
    state, alphas, parts = build_random_state(name)
    save_file(convert_to_file_format(state, alphas, parts, "kohya")[0], path)


def test_a_file_is_converted_without_diffusers_transformers_and_peft(tmp_path):
    """Their import takes many times as long as the conversion."""
    save_lora(tmp_path / "in.safetensors")
    words = ["convert", str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors"), "--to", "diffusers"]

    ran = subprocess.run([sys.executable, "-c", COUNT_IMPORTS, *words], capture_output=True, text=True, check=True)

    assert ran.stdout.splitlines()[-1] == "set() 0"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "tiny" in name or name == "demo" else pytest.mark.slow) for name in SOURCES]
)
def test_the_table_has_the_layers_of_the_model(name):
    """If not: python -m scripts.known_models"""
    table = json.loads(TABLE_PATH.read_text())

    assert list(table) == list(SOURCES)
    assert table[name] == json.loads(json.dumps(pack_known_model(build_known_model(SOURCES[name]))))


def test_the_packed_names_are_the_names_of_the_layers():
    found = dict(zip(SOURCES, iter_known_models(), strict=True))["sd1_tiny"]
    built = build_known_model(SOURCES["sd1_tiny"])

    assert found.shapes == built.shapes


def test_a_lora_of_another_size_is_converted_by_its_names(tmp_path, capsys):
    path, module = tmp_path / "in.safetensors", "lora_unet_mid_block_attentions_0_proj_in"
    save_file({f"{module}.lora_down.weight": torch.ones(1, 24), f"{module}.lora_up.weight": torch.ones(24, 1)}, path)

    assert run_tool(["convert", str(path), str(tmp_path / "out.safetensors"), "--to", "kohya"]) == 0

    assert "of unknown size" in capsys.readouterr().out
    assert len(load_file(tmp_path / "out.safetensors")) == 3
