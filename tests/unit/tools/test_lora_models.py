"""LoRAs merged into models and extracted from them: folders and single files of every family."""

import pytest
import torch
from adapter_states import build_random_state
from adapter_tensors import merge
from original_checkpoints import add_prefix, build_checkpoint, convert_flux_transformer
from safetensors.torch import load_file, save_file
from tiny_pipelines import TINY

from library.adapters.formats import convert_to_file_format
from library.cli import run_tool
from library.tools.convert import read_lora_file
from library.tools.lora.low_rank import compute_difference, compute_norm, factor_update

FAMILIES = ["sd1", "sd2", "sdxl", "sd3", "flux", "z_image", "qwen_image"]
FORMATS = {"sd3": "diffusers", "z_image": "diffusers"}


def save_model(name, pipe, path):
    """As a folder, or with the keys of the original code."""
    if path.suffix != ".safetensors":
        pipe.save_pretrained(path)
        return
    if name == "flux":
        tensors = add_prefix("model.diffusion_model.", convert_flux_transformer(pipe.transformer))
    else:
        tensors = build_checkpoint(name, pipe)
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, path)


def save_lora(path, name, pipe, kind="lora", components=None, **options):
    state, alphas, parts = build_random_state(name, kind, pipe=pipe, **options)
    if components is not None:
        state = {key: each for key, each in state.items() if key.partition(".")[0] in components}
        alphas = {key: each for key, each in alphas.items() if key.partition(".")[0] in components}
    state = {key: each if "magnitude" in key else each * 0.1 for key, each in state.items()}
    tensors, metadata = convert_to_file_format(state, alphas, parts, FORMATS.get(name, "kohya"))
    save_file(tensors, path, metadata)
    return state, alphas


def run(*words):
    assert run_tool(["lora", *map(str, words)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_file", [False, True], ids=["folder", "file"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_merged_model_has_the_weights_of_one_with_the_lora_applied_and_gives_the_lora_back(name, is_file, tmp_path):
    pipe, end = TINY[name]().pipe, ".safetensors" if is_file else ""
    base, merged, expected = (tmp_path / f"{each}{end}" for each in ("base", "merged", "expected"))
    components = ("transformer",) if name == "flux" and is_file else None
    save_model(name, pipe, base)
    state, alphas = save_lora(tmp_path / "lora.safetensors", name, pipe, components=components)

    run("merge", tmp_path / "lora.safetensors", "--model", base, "--output", merged, "--math", "float64")
    run("extract", base, merged, "--energy", "0.99999999", "--output", tmp_path / "back.safetensors")

    merge(pipe, state, alphas)
    save_model(name, pipe, expected)
    files = [each.relative_to(expected) for each in expected.rglob("*")] if not is_file else ["."]
    for file in files:
        if str(file).endswith(".safetensors") or is_file:
            wanted, found = (
                load_file(expected / file if not is_file else expected),
                load_file(merged / file if not is_file else merged),
            )
            assert wanted.keys() == found.keys()
            for key, tensor in wanted.items():
                assert torch.allclose(found[key], tensor, rtol=0, atol=1e-6), key
    before, after = (read_lora_file(tmp_path / f"{each}.safetensors").contents.updates for each in ("lora", "back"))
    assert before.keys() == after.keys()
    for module, update in before.items():
        wanted, found = factor_update(update), factor_update(after[module])
        assert compute_difference(wanted, found) < 1e-4 * compute_norm(wanted) + 1e-6, module
