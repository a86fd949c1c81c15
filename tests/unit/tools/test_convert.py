"""The converter imports little, and its table of known models is that of the models themselves."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapter_states import build_random_state
from safetensors.torch import load_file, save_file

from library.adapters.file_reader import read_header
from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.cli import run_tool
from library.models.known_models import TABLE_PATH, load_known_models, pack_known_model
from scripts.known_models import build_known_model, iter_model_sources

DATA = Path(__file__).resolve().parents[2] / "data"
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


@pytest.mark.slow
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
    found = dict(zip(SOURCES, load_known_models(), strict=True))["sd1_tiny"]
    built = build_known_model(SOURCES["sd1_tiny"])

    assert found.shapes == built.shapes


@pytest.mark.slow
def test_a_lora_of_another_size_is_converted_by_its_names(tmp_path, capsys):
    path, module = tmp_path / "in.safetensors", "lora_unet_mid_block_attentions_0_proj_in"
    save_file({f"{module}.lora_down.weight": torch.ones(1, 24), f"{module}.lora_up.weight": torch.ones(24, 1)}, path)

    assert run_tool(["convert", str(path), str(tmp_path / "out.safetensors"), "--to", "kohya"]) == 0

    assert "of unknown size" in capsys.readouterr().out
    assert len(load_file(tmp_path / "out.safetensors")) == 3


@pytest.mark.slow
def test_metadata_of_a_converted_file_is_that_of_its_tensors(tmp_path):
    """diffusers' files have alpha = rank, and other tensors than the file before."""
    source, there, back = (tmp_path / f"{name}.safetensors" for name in ("in", "there", "back"))
    state, alphas, parts = build_random_state("sd1")  # ranks 2 and 3
    arguments = json.dumps({"conv_dim": "2", "conv_alpha": "1.5", "verbose": "True"})
    stated = {"ss_network_dim": "3", "ss_network_alpha": "1.5", "ss_network_args": arguments, "ss_steps": "7"}
    hashes = {"modelspec.hash_sha256": "0xdead", "sshs_model_hash": "dead", "sshs_legacy_hash": "dead"}
    save_file(convert_to_file_format(state, alphas, parts, "kohya")[0], source, {**stated, **hashes})

    assert run_tool(["convert", str(source), str(there), "--to", "diffusers"]) == 0
    assert run_tool(["convert", str(there), str(back), "--to", "kohya"]) == 0

    found = read_header(there).metadata
    assert (found["ss_network_dim"], found["ss_network_alpha"], found["ss_steps"]) == ("3", "Dynamic", "7")
    assert json.loads(found["ss_network_args"]) == {"conv_dim": "2", "verbose": "True"}
    content = there.read_bytes()
    digest = hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()
    assert (found["modelspec.hash_sha256"], found["sshs_model_hash"]) == (f"0x{digest}", digest)
    assert read_header(back).metadata["ss_network_alpha"] == "1.5"


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["kohya", "comfy"])
def test_metadata_stays_where_ranks_and_alphas_do(file_format, tmp_path):
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    state, alphas, parts = build_random_state("sd1")
    stated = {"ss_network_dim": "3", "ss_network_alpha": "1.50", "ss_network_args": '{"conv_alpha": "1"}'}
    save_file(convert_to_file_format(state, alphas, parts, "kohya")[0], source, stated)

    assert run_tool(["convert", str(source), str(target), "--to", file_format]) == 0

    assert stated.items() <= read_header(target).metadata.items()


MEASURE = """
import resource, sys
from pathlib import Path
import library.adapters.kohya_diffusers_comfyui_keys, library.adapters.file_writer
from library.tools.convert import convert_lora_file

__all__ = ["known_models"]  # a fixture
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_lora_file(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["kohya", "diffusers"])
def test_a_conversion_needs_at_most_twice_the_memory_of_the_file(file_format, tmp_path):
    """And 150 MB, for the table of models and a part of the written file."""
    source, tensors = tmp_path / "in.safetensors", {}
    for key, shape in json.loads((DATA / "kohya_keys_sdxl.json").read_text()).items():
        small = [32 if axis == ("lora_up" in key) else size for axis, size in enumerate(shape)]
        tensors[key] = torch.randn(small).bfloat16() if shape else torch.tensor(16.0)
    save_file(tensors, source)
    words = (str(source), str(tmp_path / "out.safetensors"), file_format)

    ran = subprocess.run([sys.executable, "-c", MEASURE, *words], capture_output=True, text=True, check=True)

    assert int(ran.stdout.splitlines()[-1]) < 2 * source.stat().st_size + 150e6


@pytest.mark.parametrize(
    ("model", "kind", "file_format", "advised"),
    [
        pytest.param("sd1", "loha", "diffusers", "comfy", marks=pytest.mark.slow),
        pytest.param("flux", "lokr", "diffusers", "comfy", marks=pytest.mark.slow),
        ("flux", "loha", "kohya", "comfy"),
        pytest.param("sd1", "oft", "kohya", "diffusers", marks=pytest.mark.slow),
        ("sd1", "glora", "diffusers", "comfy"),
    ],
)
def test_a_refused_format_names_one_that_this_command_writes(model, kind, file_format, advised, tmp_path, capsys):
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    if kind == "oft":
        tensors = {"unet.mid_block.attentions.0.proj_in.oft_R.weight": torch.ones(32, 190)}
    elif kind == "glora":
        names, name = ("a1", "a2", "b1", "b2"), "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
        shapes = ((1280, 1), (1, 1280), (1280, 1), (1, 1280))
        tensors = {f"{name}.{end}.weight": torch.ones(shape) for end, shape in zip(names, shapes, strict=True)}
    else:
        state, alphas, parts = build_random_state(model, kind)
        tensors, _ = convert_to_file_format(state, alphas, parts, "comfy")
    save_file(tensors, source, {"ss_base_model_version": {"flux": "flux1", "sd1": "sd_v1"}[model]})

    assert run_tool(["convert", str(source), str(target), "--to", file_format]) == 2

    text = capsys.readouterr().err
    assert f"use {advised}" in text and "auto" not in text and "save_format" not in text
    assert run_tool(["convert", str(source), str(target), "--to", advised]) == 0


@pytest.mark.slow
def test_an_update_of_fused_layers_that_cannot_be_split_is_refused_with_a_command_that_takes_it(tmp_path, capsys):
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {f"{name}.lokr_w1": torch.rand(4, 4), f"{name}.lokr_w2": torch.rand(48, 16)}
    save_file(tensors, source, {"ss_base_model_version": "flux1"})

    assert run_tool(["convert", str(source), str(target), "--to", "comfy"]) == 2

    assert "lora resize" in capsys.readouterr().err
    assert run_tool(["lora", "resize", str(source), "--rank", "2", "--output", str(target)]) == 0
    assert run_tool(["convert", str(target), str(tmp_path / "there.safetensors"), "--to", "diffusers"]) == 0
