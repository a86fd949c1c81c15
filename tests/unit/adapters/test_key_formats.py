"""Conversion to the files of sd-scripts, diffusers and ComfyUI and back loses no bit and no alpha."""

import json
from pathlib import Path

import pytest
import torch
from adapter_states import build_random_state, list_tensor_shapes
from adapter_tensors import build_component_keys
from diffusers import UNet2DConditionModel
from family_cases import list_cases
from problem_lines import format_lines
from safetensors.torch import load_file, save_file
from tiny_denoiser import build_tiny_denoiser

from library.adapters.component_key_names import ComponentKeys
from library.adapters.file_reader import read_safetensors
from library.adapters.kohya_diffusers_comfyui_keys import convert_from_file_format, convert_to_file_format
from library.adapters.module_adapter import group_by_module
from library.adapters.targets_rank_alpha import match_target_modules
from library.cli import run_tool
from library.config.validate_adapter import validate_save_format
from library.errors import UserError
from library.models.detect import detect_model
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.loading import load_components_on_meta
from library.models.weights import build_empty_model
from library.tools.lora.identification import identify_lora

DATA = Path(__file__).resolve().parents[2] / "data"
EVERY = list_cases(FAMILY_FACTS)
FORMATS = ("kohya", "diffusers", "comfy")


def has_same_tensors(one, other):
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_every_family_is_converted_to_every_format_and_back_to_the_bit(name, file_format, dtype):
    # In 16 bits any alpha can be multiplied in and taken out again, in 32 bits powers of two.
    state, alphas, parts = build_random_state(name, dtype=dtype, scale=0.5 if dtype == torch.float32 else None)
    tensors, metadata = convert_to_file_format(state, alphas, parts, file_format)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    restored = convert_from_file_format(tensors, metadata, parts)
    assert has_same_tensors(restored.state_dict, state) and restored.alphas == alphas
    style = parts[0].key_style
    is_kohya = parts[0].name == "unet" or (style.is_kohya_in_comfyui and style.comfyui_style is None)
    assert restored.file_format == ("kohya" if file_format == "comfy" and is_kohya else file_format)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("kind, forms", [("dora", FORMATS), ("loha", ("comfy",)), ("lokr", ("comfy",))])
@pytest.mark.slow
def test_other_adapter_types_are_converted_to_the_formats_that_support_them_and_back(name, kind, forms):
    state, alphas, parts = build_random_state(name, kind, scale=0.25)
    for file_format in forms:
        restored = convert_from_file_format(*convert_to_file_format(state, alphas, parts, file_format), parts)
        assert has_same_tensors(restored.state_dict, state) and restored.alphas == alphas


def test_an_adapter_type_is_not_written_in_a_format_without_support():
    state, alphas, parts = build_random_state("flux", "lokr")
    with pytest.raises(UserError, match=r"transformer\.double_blocks.* lokr .*use comfy"):
        convert_to_file_format(state, alphas, parts, "kohya")
    state, alphas, parts = build_random_state("sd1", "loha")
    with pytest.raises(UserError, match="diffusers does not load loha; use comfy"):
        convert_to_file_format(state, alphas, parts, "diffusers")
    assert "rotates a layer's input" in format_lines(validate_save_format(["oft"], "kohya"))[0] and not format_lines(
        validate_save_format(["boft"], "diffusers")
    )


@pytest.mark.parametrize("rank, alpha", [(3, 1.0), (6, 5.0), (4, 16.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_folded_alpha_that_is_no_power_of_two_is_unfolded_to_the_bit(rank, alpha, dtype):
    part = ComponentKeys("transformer", ("a", "a.b"), "lora_unet")
    draw = torch.Generator().manual_seed(1)
    state = {
        "transformer.a.b.lora_A.weight": torch.randn(rank, 50, generator=draw).to(dtype),
        "transformer.a.b.lora_B.weight": torch.randn(400, rank, generator=draw).to(dtype),
    }
    alphas = {"transformer.a.b": alpha}
    tensors, metadata = convert_to_file_format(state, alphas, [part], "diffusers", torch.float16)
    up, down = tensors["transformer.a.b.lora_B.weight"], tensors["transformer.a.b.lora_A.weight"]
    expected_outputs = (
        alpha / rank * state["transformer.a.b.lora_B.weight"].double() @ state["transformer.a.b.lora_A.weight"].double()
    )
    torch.testing.assert_close(up.double() @ down.double(), expected_outputs, rtol=1e-6, atol=1e-6)
    restored = convert_from_file_format(tensors, metadata, [part])
    assert (
        has_same_tensors(restored.state_dict, state)
        and restored.alphas == alphas
        and restored.alpha_dtype == torch.float16
    )
    assert convert_from_file_format(tensors, {}, [part]).alphas == {"transformer.a.b": rank}, (
        "without the metadata it still works"
    )


def test_keys_of_older_diffusers_of_peft_and_of_other_trainers_are_read():
    state, _, parts = build_random_state("sd1")
    module = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    down, up = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"]
    short = module.removeprefix("unet.")
    for first, second in (
        (f"{module[:-5]}.processor.to_q_lora.down.weight", f"{module[:-5]}.processor.to_q_lora.up.weight"),
        (f"base_model.model.{short}.lora_A.weight", f"base_model.model.{short}.lora_B.weight"),
        (f"{module}.lora.down.weight", f"{module}.lora.up.weight"),
        (f"lycoris_{short.replace('.', '_')}.lora_down.weight", f"lycoris_{short.replace('.', '_')}.lora_up.weight"),
        (
            "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q.lora_down.weight",
            "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q.lora_up.weight",
        ),
        (
            "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.lora_A.weight",
            "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.lora_B.weight",
        ),
    ):
        restored = convert_from_file_format({first: down, second: up}, {}, parts)
        assert has_same_tensors(
            restored.state_dict, {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        ), first
        assert restored.alphas == {module: len(down)}
    text = "text_encoder.encoder.layers.0.self_attn.q_proj"
    old = "text_encoder.text_model.encoder.layers.0.self_attn.to_q_lora"
    restored = convert_from_file_format({f"{old}.down.weight": down[:, :1], f"{old}.up.weight": up}, {}, parts)
    (actual,) = {name.rpartition(".lora_")[0] for name in restored.state_dict}
    assert actual.replace("text_model.", "") == text


def test_fused_attention_of_z_image_is_split():
    model, family = build_tiny_denoiser("z_image")
    part = build_component_keys(model, family)
    size = model.layers[0].attention.to_q.weight.shape[1]
    rows = [model.layers[0].attention.get_submodule(end).weight.shape[0] for end in ("to_q", "to_k", "to_v")]
    assert rows == [size] * 3
    down, up = torch.randn(4, size), torch.randn(3 * size, 4)
    actual = convert_from_file_format(
        {
            "diffusion_model.layers.0.attention.qkv.lora_A.weight": down,
            "diffusion_model.layers.0.attention.qkv.lora_B.weight": up,
        },
        {},
        [part],
    )
    parts = group_by_module(actual.state_dict, actual.alphas)
    moved = [parts[f"transformer.layers.0.attention.to_{end}"] for end in "qkv"]
    torch.testing.assert_close(torch.cat([each.tensors["up"] @ each.tensors["down"] for each in moved]), up @ down)


def golden_file(path, name, dtype=torch.float16):
    """A file as sd-scripts saves it: its keys and shapes, alphas in the dtype of the weights."""
    draw = torch.Generator().manual_seed(3)
    shapes = json.loads((DATA / f"kohya_keys_{name}.json").read_text())
    few = {key: shape for key, shape in shapes.items() if "s_0_" in key and "single" not in key}
    tensors = {
        key: (
            torch.tensor(8.0)
            if key.endswith("alpha")
            else 0.1 * torch.randn([min(side, 5000) for side in shape] if False else shape, generator=draw)
        ).to(dtype)
        for key, shape in few.items()
    }
    save_file(tensors, path, {"ss_network_dim": "16", "ss_output_name": "x", "modelspec.title": "my LoRA"})


FAMILY_OF = {"sd15": "sd1", "sdxl": "sdxl", "sd3_medium": "sd3", "flux": "flux"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, zero, file_format",
    [pytest.param("lora", "lora_down.weight", "diffusers", marks=pytest.mark.slow), ("lokr", "lokr_w2_b", "comfy")],
)
def test_the_tool_converts_files_with_a_layer_without_effect(kind, zero, file_format, tmp_path):
    """LyCORIS initializes other tensors with zeros than peft, and unused layers keep them."""
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    state, alphas, parts = build_random_state("sd1", kind)
    tensors = convert_to_file_format(state, alphas, parts, "kohya")[0]
    idle = next(key for key in tensors if key.endswith(zero))
    save_file({**tensors, idle: torch.zeros_like(tensors[idle])}, source)

    assert run_tool(["convert", str(source), str(target), "--to", file_format]) == 0
    assert len(load_file(target)) == len(tensors) - len(alphas) * (file_format == "diffusers")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_the_tool_converts_sd_scripts_files_to_diffusers_and_back_to_the_bit(name, tmp_path, capsys):
    source = tmp_path / "a.safetensors"
    golden_file(source, name)
    for file_format in ("diffusers", "comfy"):
        there, restored = tmp_path / f"{file_format}.safetensors", tmp_path / f"{file_format}-back.safetensors"
        assert run_tool(["convert", str(source), str(there), "--to", file_format]) == 0
        assert f"a.safetensors: {FAMILY_OF[name]}, " in capsys.readouterr().out
        assert run_tool(["convert", str(there), str(restored), "--to", "kohya"]) == 0
        assert has_same_tensors(load_file(restored), load_file(source))
        converted_metadata = read_safetensors(restored)[1]
        assert converted_metadata["modelspec.title"] == "my LoRA" and converted_metadata["ss_network_dim"] == "16"
        assert not [key for key in converted_metadata if key.startswith("lorikeet.")]
        hashes = [read_safetensors(path)[1]["sshs_model_hash"] for path in (there, restored)]
        assert (hashes[0] == hashes[1]) == (file_format == "comfy" and name == "sd15"), (
            "they are those of the new tensors"
        )


@pytest.mark.slow
def test_a_model_of_custom_size_is_identified_by_its_keys_and_by_the_metadata():
    unet = build_empty_model(
        UNet2DConditionModel,
        {
            "cross_attention_dim": 24,
            "block_out_channels": (32, 64),
            "norm_num_groups": 8,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
    )
    family = FAMILIES.get("sd1")
    state, alphas = {}, {}
    for module in match_target_modules(unet, family.facts.lora.targets):
        for end, size in list_tensor_shapes("lora", unet.get_submodule(module).weight.shape, 2).items():
            state[f"unet.{module}.{end}"] = torch.ones(size)
        alphas[f"unet.{module}"] = 1.0
    tensors, _ = convert_to_file_format(state, alphas, [build_component_keys(unet)], "kohya")
    actual = identify_lora(tensors, {"modelspec.architecture": "stable-diffusion-v2-512/lora"})
    assert (actual.family, actual.is_known_size) == ("sd2", False)
    assert has_same_tensors(actual.contents.state_dict, state)
    built_in = load_components_on_meta(detect_model(None), ("unet",)).unet
    state = {
        f"unet.{name}.lora_{end}.weight": torch.ones(2, 2)
        for name in match_target_modules(built_in, family.facts.lora.targets)
        for end in "AB"
    }
    alphas = {key.removesuffix(".lora_A.weight"): 1.0 for key in state if "lora_A" in key}
    for module in alphas:
        shape = built_in.get_submodule(module.removeprefix("unet.")).weight.shape
        state |= {f"{module}.{end}": torch.ones(size) for end, size in list_tensor_shapes("lora", shape, 2).items()}
    actual = identify_lora(convert_to_file_format(state, alphas, [build_component_keys(built_in)], "kohya")[0], {})
    assert (actual.family, actual.is_known_size) == ("sd1", True)


@pytest.mark.slow
def test_the_tool_rejects_files_that_are_no_lora_and_overwrites_nothing(tmp_path, capsys):
    model, adapter = tmp_path / "model.safetensors", tmp_path / "lora.safetensors"
    save_file({"first.weight": torch.ones(2)}, model)
    save_file(
        {"lora_unet_x.lora_down.weight": torch.ones(1, 2), "lora_unet_x.lora_up.weight": torch.ones(2, 1)}, adapter
    )
    (tmp_path / "text.safetensors").write_text("no")
    for name, message in (
        (
            "model.safetensors",
            "not a LoRA file: none of its 1 tensors has the name of a LoRA weight; the first is first.weight",
        ),
        ("lora.safetensors", "LoRA of an unknown model; one of its 2 keys is lora_unet_x"),
        ("text.safetensors", "cannot be read as safetensors"),
        ("none.safetensors", "no such file"),
    ):
        assert run_tool(["convert", str(tmp_path / name), str(tmp_path / "out.safetensors"), "--to", "kohya"]) == 2
        assert message in capsys.readouterr().err
    assert run_tool(["convert", str(model), str(adapter), "--to", "kohyo", "--fast"]) == 2
    stderr = capsys.readouterr().err
    assert (
        "unknown format 'kohyo'; did you mean kohya?" in stderr
        and "is not overwritten" in stderr
        and "--fast" in stderr
    )
    assert not (tmp_path / "out.safetensors").exists()


SD3_LAST = "transformer.transformer_blocks.1.norm1_context.linear"


@pytest.mark.parametrize("file_format", ["diffusers", "comfy"])
def test_sd3_files_have_each_module_once(file_format):
    """ComfyUI swaps shift and scale of the last block's text modulation itself, under any name of this module."""
    state, alphas, parts = build_random_state("sd3", scale=1)
    tensors, _ = convert_to_file_format(state, alphas, parts, file_format)
    assert torch.equal(tensors[f"{SD3_LAST}.lora_B.weight"], state[f"{SD3_LAST}.lora_B.weight"])
    assert not [key for key in tensors if key.startswith(("lora_transformer", "lora_unet"))]
    assert len([key for key in tensors if key.endswith("lora_B.weight")]) == len(alphas)


def test_sd3_files_of_version_0_1_with_a_repeated_module_are_read():
    state, alphas, parts = build_random_state("sd3", scale=1)
    tensors, metadata = convert_to_file_format(state, alphas, parts, "diffusers")
    swapped = torch.cat(tensors[f"{SD3_LAST}.lora_B.weight"].chunk(2)[::-1])
    name = SD3_LAST.replace(".", "_").replace("transformer_", "lora_transformer_", 1)
    repeated = {f"{name}.lora_down.weight": tensors[f"{SD3_LAST}.lora_A.weight"], f"{name}.lora_up.weight": swapped}
    assert has_same_tensors(convert_from_file_format({**tensors, **repeated}, metadata, parts).state_dict, state)


@pytest.mark.parametrize("file_format", ["diffusers", "comfy"])
def test_the_magnitudes_of_a_transformers_dora_are_there_for_diffusers_and_for_comfyui(file_format):
    state, alphas, parts = build_random_state("sd3", "dora", scale=1)
    tensors, _ = convert_to_file_format(state, alphas, parts, file_format)
    magnitude = state[f"{SD3_LAST}.lora_magnitude_vector.weight"]
    in_original_order = torch.cat(magnitude.chunk(2)[::-1])
    assert torch.equal(tensors[f"{SD3_LAST}.dora_scale"].flatten(), in_original_order)
    if file_format == "diffusers":
        assert torch.equal(tensors[f"{SD3_LAST}.lora_magnitude_vector"], magnitude)
        # transformers adds the adapter's name before the last part of a key.
        assert any(key.startswith("text_encoder.") and key.endswith("vector.weight") for key in tensors)


@pytest.mark.parametrize("name, prefix", [("sd3", "lora_te3"), ("flux", "lora_te3")])
@pytest.mark.parametrize("file_format", FORMATS)
def test_t5_has_the_names_that_comfyui_and_sd_scripts_read(name, prefix, file_format):
    state, alphas, parts = build_random_state(name, scale=1)
    tensors, _ = convert_to_file_format(state, alphas, parts, file_format)
    (t5,) = (part.name for part in parts if part.key_style.name == "t5")
    expected = {f"{prefix}{module.removeprefix(t5).replace('.', '_')}" for module in alphas if module.startswith(t5)}
    assert expected == {key.partition(".")[0] for key in tensors if key.startswith(prefix)}
    assert any(key.startswith(f"{prefix}_encoder_block_0_layer_0_SelfAttention_q.") for key in tensors)


@pytest.mark.parametrize("kind", ["loha", "lokr"])
@pytest.mark.parametrize("name", ["sd1", "flux"])
def test_loha_and_lokr_have_alpha_equal_to_their_rank(name, kind):
    """LyCORIS applies alpha / rank twice, and diffusers does not apply it."""
    state, alphas, parts = build_random_state(name, kind, scale=0.5)
    tensors, metadata = convert_to_file_format(state, alphas, parts, "comfy")
    assert {float(tensor) for key, tensor in tensors.items() if key.endswith(".alpha")} <= {2.0}
    without_metadata = convert_from_file_format(tensors, {}, parts)
    assert set(without_metadata.alphas.values()) == {2.0}
    back = convert_from_file_format(tensors, metadata, parts)
    assert has_same_tensors(back.state_dict, state) and back.alphas == alphas


def test_equal_alphas_keep_the_update_and_are_restored_from_the_metadata():
    state, alphas, parts = build_random_state("sd1", scale=1)
    alphas = {module: alpha * 2 ** (number % 3) for number, (module, alpha) in enumerate(alphas.items())}
    tensors, metadata = convert_to_file_format(state, alphas, parts, "kohya", equal_alphas=True)
    assert len({float(tensor) for key, tensor in tensors.items() if key.endswith(".alpha")}) == 1
    equal = convert_from_file_format(tensors, {}, parts)
    for module, update in group_by_module(state, alphas).items():
        other = group_by_module(equal.state_dict, equal.alphas)[module]
        torch.testing.assert_close(other.scale * other.tensors["up"], update.scale * update.tensors["up"])
    back = convert_from_file_format(tensors, metadata, parts)
    assert back.alphas == alphas and set(back.state_dict) == set(state)
    for key, tensor in state.items():
        torch.testing.assert_close(back.state_dict[key], tensor, rtol=1e-6, atol=0)
