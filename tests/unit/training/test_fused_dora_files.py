"""Files of a DoRA with layers of the original model, of which one part is idle in the last block."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_pipelines import TINY

from library.adapters import injection
from library.adapters.file_comparison import compare_file_with_model
from library.adapters.kohya_diffusers_comfyui_keys import convert_from_file_format
from library.config.schema import AdapterConfig, RunConfig
from library.errors import UserError
from library.models.collect_component_keys import collect_component_keys
from library.models.families import FAMILIES
from library.training.network_weights import keep_magnitudes, split_idle_layers
from library.training.save_adapter import build_adapter_file
from library.training.trainable_modules import build_trainable_modules

DORA = RunConfig(adapter=AdapterConfig(network_dim=2, network_args=("dora_wd=True",)))


def build_dora(name):
    """A tiny pipeline with a random DoRA; the adapter has what its files need."""
    tiny, family = TINY[name](), FAMILIES.get(name)()
    trained, adapter = build_trainable_modules(DORA, family, tiny.pipe)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in injection.iter_adapter_parameters(trained):
            if "lora_A" not in key:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return tiny, family, trained, keep_magnitudes(adapter, family, tiny.pipe)


@pytest.mark.parametrize(
    "name, form, file_name",
    [("mochi", "auto", "blocks_{}_attn_qkv_y"), ("sd3", "kohya", "joint_blocks_{}_context_block_attn_qkv")],
)
def test_the_idle_part_of_a_fused_dora_keeps_its_weights(name, form, file_name):
    """By hand: the magnitudes times the directions of all rows are each part's own weights."""
    tiny, family, trained, adapter = build_dora(name)
    denoiser = tiny.pipe.transformer
    (idle,) = family.get_unused_layers(denoiser)
    state = injection.get_adapter_state_dict(trained)

    file = build_adapter_file(state, adapter, family, tiny.pipe, form)

    found = file_name.format(len(denoiser.transformer_blocks) - 1)
    ends = ("lora_down.weight", "lora_up.weight", "dora_scale", "alpha")
    down, up, magnitude, alpha = (file.tensors[f"lora_unet_{found}.{end}"] for end in ends)
    parts = [denoiser.get_submodule(idle.replace("add_q", f"add_{each}")) for each in "qkv"]
    base = torch.cat([getattr(part, "base_layer", part).weight for part in parts])
    merged = base + alpha / len(down) * up @ down
    merged = magnitude.view(-1, 1) * merged / merged.norm(dim=1, keepdim=True)
    size = len(parts[0].weight)
    torch.testing.assert_close(merged[:size], parts[0].weight)
    for number in (1, 2):
        parts[number].merge()
        torch.testing.assert_close(merged[number * size :][:size], parts[number].weight)
        assert (parts[number].weight - base[number * size :][:size]).abs().max() > 1e-3
        parts[number].unmerge()


@pytest.mark.parametrize("name", ["mochi", "sd3"])
def test_a_fused_dora_is_read_back_as_it_was_trained(name, tmp_path):
    tiny, family, trained, adapter = build_dora(name)
    file = build_adapter_file(injection.get_adapter_state_dict(trained), adapter, family, tiny.pipe, "kohya")
    save_file(file.tensors, tmp_path / "dora.safetensors", dict(file.metadata))

    tensors = load_file(tmp_path / "dora.safetensors")
    content = convert_from_file_format(tensors, file.metadata, collect_component_keys(family, tiny.pipe))

    own, idle = split_idle_layers(content, adapter.kept.alphas)
    assert idle is not None and not list(compare_file_with_model(trained, own, adapter.alphas))


def test_files_with_the_names_of_diffusers_have_no_idle_layer():
    tiny, family, trained, adapter = build_dora("sd3")
    state = injection.get_adapter_state_dict(trained)

    file = build_adapter_file(state, adapter, family, tiny.pipe, "diffusers")

    (idle,) = family.get_unused_layers(tiny.pipe.transformer)
    assert adapter.kept.alphas and not any(idle in key for key in file.tensors)


def test_a_fused_dora_without_a_part_names_a_layout_that_can_hold_it():
    tiny, family, trained, adapter = build_dora("mochi")
    state = {key: each for key, each in injection.get_adapter_state_dict(trained).items() if ".to_k." not in key}

    with pytest.raises(UserError, match="train all parts of a fused module, or none; use diffusers"):
        build_adapter_file(state, adapter, family, tiny.pipe, "auto")

    assert build_adapter_file(state, adapter, family, tiny.pipe, "diffusers").tensors


def test_text_encoders_that_are_not_loaded_have_no_idle_layers():
    """Such as with cached text encoder outputs."""
    tiny, family = TINY["sdxl"](), FAMILIES.get("sdxl")()
    config = replace(DORA, adapter=replace(DORA.adapter, network_train_unet_only=True))
    _, adapter = build_trainable_modules(config, family, tiny.pipe)
    tiny.pipe.text_encoder = tiny.pipe.text_encoder_2 = None

    assert keep_magnitudes(adapter, family, tiny.pipe) == adapter
