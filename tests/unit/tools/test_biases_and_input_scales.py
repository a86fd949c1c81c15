"""LoRA files with changes of biases (``diff_b``), with a ``dora_scale`` per input, and with tensors that nothing reads."""

import pytest
import torch
from adapter_states import build_random_state
from known_models_once import known_models
from safetensors.torch import load, load_file, save_file
from tiny_pipelines import TINY

from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.cli import run_tool
from library.config.schema import AdapterConfig
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.tools.lora.identification import identify_lora
from library.training.network_weights import merge_base_weights, read_initial_weights

__all__ = ["known_models"]  # a fixture

PREFIX = "lora_unet_mid_block_"
BIASED = {
    f"{PREFIX}resnets_0_conv1": "mid_block.resnets.0.conv1",
    f"{PREFIX}attentions_0_transformer_blocks_0_attn1_to_out_0": (
        "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0"
    ),
    f"{PREFIX}attentions_0_norm": "mid_block.attentions.0.norm",  # a bias alone
}
QKV, AXES = "lora_unet_double_blocks_0_img_attn_qkv", ("to_q", "to_k", "to_v")
MODULATION = "lora_unet_final_layer_adaLN_modulation_1"


def build_lora(name, seed=0):
    """Tensors as in a file of sd-scripts, of the denoiser."""
    state, alphas, parts = build_random_state(name, seed=seed)
    tensors, _ = convert_to_file_format(state, alphas, parts, "kohya")
    return {key: 0.1 * each if "lora_" in key.partition(".")[2] else each for key, each in tensors.items()}


def add_biases(tensors, pipe, seed=0):
    """Add changes of biases to some layers, and return them by module."""
    draw, biases = torch.Generator().manual_seed(seed), {}
    if hasattr(pipe, "unet"):
        for name, module in BIASED.items():
            biases[module] = torch.randn(pipe.unet.get_submodule(module).bias.shape, generator=draw)
            tensors[f"{name}.diff_b"] = biases[module]
        return biases
    blocks = "transformer_blocks.0.attn"
    width = len(pipe.transformer.get_submodule(f"{blocks}.to_q").bias)
    tensors[f"{QKV}.diff_b"] = torch.randn(3 * width, generator=draw)
    biases |= dict(zip((f"{blocks}.{each}" for each in AXES), tensors[f"{QKV}.diff_b"].chunk(3), strict=True))
    tensors[f"{MODULATION}.diff_b"] = torch.randn(2 * width, generator=draw)
    biases["norm_out.linear"] = torch.cat(tensors[f"{MODULATION}.diff_b"].chunk(2)[::-1])  # scale before shift
    tensors[f"{MODULATION}.lora_down.weight"] = torch.zeros(1, width)
    tensors[f"{MODULATION}.lora_up.weight"] = torch.zeros(2 * width, 1)
    tensors[f"{MODULATION}.alpha"] = torch.tensor(1.0)
    return biases


def list_weights(pipe):
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    return {name: each.detach().clone() for name, each in denoiser.named_parameters()}


def run(*words, code=0):
    assert run_tool([str(word) for word in words]) == code


def merge_as_base_weights(name, path, multiplier=1.0):
    tiny = TINY[name]()
    config = AdapterConfig(base_weights=(str(path),), base_weights_multiplier=(multiplier,))
    merge_base_weights(tiny.pipe, read_initial_weights(config, FAMILIES.get(name)(), detect_model(tiny.source)))
    return list_weights(tiny.pipe)


def merge_with_tool(name, path, folder, multiplier=1.0):
    pipe = TINY[name]().pipe
    pipe.save_pretrained(folder / "base")
    run("lora", "merge", path, "--model", folder / "base", "--weights", multiplier, "--output", folder / "merged")
    (file,) = (folder / "merged" / ("unet" if hasattr(pipe, "unet") else "transformer")).glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("name", [pytest.param("sd1", marks=pytest.mark.slow), "flux"])
def test_changes_of_biases_are_merged_beside_those_of_weights(name, tmp_path):
    tensors, pipe = build_lora(name), TINY[name]().pipe
    save_file(tensors, tmp_path / "plain.safetensors")
    biases = add_biases(tensors, pipe)
    save_file(tensors, tmp_path / "biased.safetensors")

    expected = merge_as_base_weights(name, tmp_path / "plain.safetensors", 0.5)
    for module, change in biases.items():
        expected[f"{module}.bias"] += 0.5 * change
    assert any(not torch.equal(each, expected[key]) for key, each in list_weights(pipe).items())
    for found in (
        merge_as_base_weights(name, tmp_path / "biased.safetensors", 0.5),
        merge_with_tool(name, tmp_path / "biased.safetensors", tmp_path, 0.5),
    ):
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5, msg=lambda text, at=key: f"{at}: {text}")


@pytest.mark.parametrize("name", [pytest.param("sd1", marks=pytest.mark.slow), "flux"])
def test_changes_of_biases_are_converted_and_back_without_loss(name, tmp_path, capsys):
    source, there, back = (tmp_path / f"{each}.safetensors" for each in ("in", "there", "back"))
    tensors = build_lora(name)
    add_biases(tensors, TINY[name]().pipe)
    version = {"sd1": "sd_v1", "flux": "flux1"}[name]
    save_file(tensors, source, {"ss_base_model_version": version})

    run("convert", source, there, "--to", "comfy")
    run("convert", there, back, "--to", "kohya")

    found = load_file(back)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensor.to(found[key])) for key, tensor in tensors.items())
    run("convert", source, tmp_path / "no.safetensors", "--to", "diffusers", code=2)
    assert "diffusers does not load changes of biases (diff_b); use comfy or kohya" in capsys.readouterr().err


@pytest.mark.slow
def test_changes_of_biases_are_summed_scaled_and_kept_by_the_lora_tools(tmp_path, capsys):
    one, two, out = (tmp_path / f"{each}.safetensors" for each in ("one", "two", "out"))
    pipe, files = TINY["sd1"]().pipe, []
    for path, seed in ((one, 0), (two, 1)):
        files.append(build_lora("sd1", seed))
        add_biases(files[-1], pipe, seed)
        save_file(files[-1], path)
    first, second = files
    del second[f"{PREFIX}attentions_0_norm.diff_b"]
    save_file(second, two)
    keys = [f"{name}.diff_b" for name in BIASED]

    run("lora", "merge", one, two, "--weights", "1", "-0.5", "--output", out)
    merged = load(out.read_bytes())  # Windows replaces no file that is mapped, as load_file leaves it
    for key in keys:
        torch.testing.assert_close(merged[key], first[key] - 0.5 * second.get(key, torch.zeros(1)))
    assert merged[f"{PREFIX}resnets_0_conv1.lora_down.weight"].shape[0] > 2
    run("lora", "resize", one, "--rank", "1", "--output", out, "--overwrite")
    assert all(torch.equal(load_file(out)[key], first[key]) for key in keys)
    run("lora", "scale", one, "--blocks", "MID=0.5", "--output", out, "--overwrite")
    assert all(torch.equal(load_file(out)[key], 0.5 * first[key]) for key in keys)
    capsys.readouterr()
    run("lora", "inspect", one)
    text = capsys.readouterr().out
    assert "2 lora with a bias (diff_b)" in text and "1 full" in text


def test_inspect_describes_a_file_of_which_some_tensors_are_not_read(tmp_path, capsys):
    source, tensors = tmp_path / "in.safetensors", build_lora("sd1")
    tensors[f"{PREFIX}attentions_0_norm.set_weight"] = torch.ones(3)
    tensors[f"{PREFIX}attentions_0_proj_in.reshape_weight"] = torch.tensor([3, 3])
    save_file(tensors, source)

    run("lora", "inspect", source)

    text = capsys.readouterr().out
    assert "LoRA for sd1" in text and "set_weight" in text and "reshape_weight" in text
    for words in (("convert", source, tmp_path / "out.safetensors", "--to", "kohya"), ("lora", "metadata", source)):
        more = ("--set", "title=x", "--output", tmp_path / "out.safetensors") if words[0] == "lora" else ()
        run(*words, *more, code=2)
        assert "replace those of the model (ComfyUI's set_weight), which is not supported" in capsys.readouterr().err


def build_input_dora(name):
    """A LoRA of the denoiser whose layers have a dora_scale for each input, and the weights that it stands for."""
    pipe = TINY[name]().pipe
    tensors = {key: each for key, each in build_lora(name).items() if key.startswith("lora_unet")}
    contents = identify_lora(tensors, {"ss_base_model_version": {"sd1": "sd_v1", "flux": "flux1"}[name]}).contents
    weights, expected, draw = list_weights(pipe), {}, torch.Generator().manual_seed(5)
    for module, update in contents.updates.items():
        key = f"{module.partition('.')[2]}.weight"
        delta = update.tensors["up"].flatten(1) @ update.tensors["down"].flatten(1) * update.scale
        changed = weights[key] + delta.reshape(weights[key].shape)
        scale = torch.rand(changed.shape[1], generator=draw) + 0.5
        norms = changed.transpose(0, 1).flatten(1).norm(dim=1)
        shape = (1, -1, *[1] * (changed.dim() - 2))
        expected[key] = changed * (scale / norms).reshape(shape)
        tensors[f"lora_unet_{module.partition('.')[2].replace('.', '_')}.dora_scale"] = scale.reshape(shape)
    return tensors, expected


@pytest.mark.slow
def test_a_dora_scale_per_input_is_merged_converted_and_resized(tmp_path, capsys):
    source, comfy, back, small = (tmp_path / f"{each}.safetensors" for each in ("in", "comfy", "back", "small"))
    tensors, expected = build_input_dora("sd1")
    save_file(tensors, source, {"ss_base_model_version": "sd_v1"})
    assert any(each.dim() == 4 and each.shape[2] == 3 for each in expected.values()), "convolutions, too"

    for found in (merge_as_base_weights("sd1", source), merge_with_tool("sd1", source, tmp_path)):
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5, msg=lambda text, at=key: f"{at}: {text}")
    run("convert", source, comfy, "--to", "comfy")
    run("convert", comfy, back, "--to", "kohya")
    found = load_file(back)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensor.to(found[key])) for key, tensor in tensors.items())
    run("lora", "resize", source, "--rank", "1", "--output", small)
    found = load_file(small)
    scales = {key: tensor for key, tensor in tensors.items() if key.endswith(".dora_scale")}
    assert scales and all(torch.equal(found[key], tensor) for key, tensor in scales.items())
    capsys.readouterr()
    run("lora", "inspect", source)
    assert "dora with a dora_scale per input" in capsys.readouterr().out


def test_what_a_dora_scale_per_input_cannot_do_is_refused_with_the_reason(tmp_path, capsys):
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors, _ = build_input_dora("sd1")
    save_file(tensors, source, {"ss_base_model_version": "sd_v1"})
    tiny, family = TINY["sd1"](), FAMILIES.get("sd1")()

    run("convert", source, out, "--to", "diffusers", code=2)
    assert "diffusers and peft have no DoRA with a dora_scale per input" in capsys.readouterr().err
    run("lora", "merge", source, source, "--output", out, code=2)
    assert "depends on the weights of the base model" in capsys.readouterr().err
    config = AdapterConfig(network_weights=str(source), network_train_unet_only=True, network_args=("use_dora=True",))
    with pytest.raises(ConfigError, match=r"dora with a dora_scale per input, which can be merged \(--base_weights\)"):
        read_initial_weights(config, family, detect_model(tiny.source))


def test_a_dora_scale_per_input_of_a_fused_layer_is_that_of_all_its_rows(tmp_path, capsys):
    """The norms over query, key and value together cannot be computed from one of them."""
    source, weights = tmp_path / "in.safetensors", list_weights(TINY["flux"]().pipe)
    block, draw = "transformer_blocks.0.attn", torch.Generator().manual_seed(1)
    base = torch.cat([weights[f"{block}.{each}.weight"] for each in AXES])
    up, down = torch.randn(len(base), 2, generator=draw), 0.1 * torch.randn(2, base.shape[1], generator=draw)
    changed, scale = base + up @ down, torch.rand(1, base.shape[1], generator=draw) + 0.5
    lora = {"lora_up.weight": up, "lora_down.weight": down, "dora_scale": scale, "alpha": torch.tensor(2.0)}
    save_file({f"{QKV}.{end}": each for end, each in lora.items()}, source, {"ss_base_model_version": "flux1"})

    found = merge_as_base_weights("flux", source)

    merged = torch.cat([found[f"{block}.{each}.weight"] for each in AXES])
    torch.testing.assert_close(merged, changed * scale / changed.norm(dim=0), rtol=0, atol=1e-5)
    TINY["flux"]().pipe.save_pretrained(tmp_path / "base")
    out = tmp_path / "merged"
    run("lora", "merge", source, "--model", tmp_path / "base", "--output", out, code=2)
    assert "--base_weights of a run can merge it" in capsys.readouterr().err
    run("lora", "resize", source, "--rank", "1", "--output", tmp_path / "small.safetensors", code=2)
    assert "in.safetensors" in capsys.readouterr().err
