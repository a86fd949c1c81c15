"""Keys of LoRA files: the golden list of sd-scripts, lossless conversion, and no names of wrappers."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel

from library.adapters import component_key_names, injection
from library.adapters.kohya_diffusers_comfyui_keys import convert_from_file_format, convert_to_file_format
from library.config.schema import AdapterConfig
from library.errors import UserError
from library.models.families import FAMILIES

GOLDEN = json.loads((Path(__file__).resolve().parents[1] / "data/kohya_keys_sd15.json").read_text())
FAMILY = FAMILIES.get("sd1")


@pytest.fixture(scope="module")
def real():
    """The UNet of Stable Diffusion 1.5 on the meta device, with a LoRA of the golden list's rank."""
    with torch.device("meta"):
        model = UNet2DConditionModel(cross_attention_dim=768)
    return model, injection.inject_into_model(
        model, AdapterConfig(network_dim=16, network_alpha=8), FAMILY.facts.lora.targets, seed=1
    )


def fill_weights(model):
    draw = torch.Generator().manual_seed(0)
    return {
        f"unet.{name}": torch.rand(tensor.shape, generator=draw)
        for name, tensor in injection.get_adapter_state_dict(model).items()
    }


def list_alphas(adapter):
    return {f"unet.{name}": adapter.alpha for name in adapter.modules}


def names(model):
    return component_key_names.ComponentKeys(
        "unet", component_key_names.list_module_names(model), FAMILY.facts.lora.prefix
    )


def test_keys_and_shapes_of_the_published_unet_are_those_of_sd_scripts(real):
    model, adapter = real
    ours, _ = convert_to_file_format(fill_weights(model), list_alphas(adapter), [names(model)], "kohya")
    golden = {name: shape for name, shape in GOLDEN.items() if name.startswith("lora_unet_")}
    assert {name: list(tensor.shape) for name, tensor in ours.items()} == golden
    assert len(golden) == 3 * 192
    assert {float(tensor) for name, tensor in ours.items() if name.endswith(".alpha")} == {8.0}


@pytest.mark.parametrize("file_format", ["kohya", "diffusers", "comfy"])
def test_keys_are_converted_to_the_file_and_back_without_loss(real, file_format):
    model, adapter = real
    state = fill_weights(model)
    restored = convert_from_file_format(
        *convert_to_file_format(state, list_alphas(adapter), [names(model)], file_format), [names(model)]
    )
    assert restored.state_dict.keys() == state.keys()
    assert all(torch.equal(restored.state_dict[name], state[name]) for name in state)
    assert restored.alphas == list_alphas(adapter)


def test_a_file_with_keys_of_another_model_is_rejected(real):
    model, _ = real
    stranger = {"lora_te_text_model_encoder_layers_0_mlp_fc1.alpha": torch.tensor(1.0)}
    with pytest.raises(UserError, match="1 of 1 keys do not belong to this model, for example lora_te_text"):
        convert_from_file_format(stranger, {}, [names(model)])


@pytest.mark.parametrize(
    "name",
    [
        "module.mid_block.attentions.0.to_q.lora_A.default.weight",
        "_orig_mod.mid_block.attentions.0.to_q.lora_A.default.weight",
        "module._orig_mod.mid_block.attentions.0.to_q.lora_A.weight",
        "_orig_mod.module.mid_block._orig_mod.attentions.0.to_q.lora_A.weight",
    ],
)
def test_the_names_of_wrappers_are_removed(name):
    assert component_key_names.clean_parameter_name(name) == "mid_block.attentions.0.to_q.lora_A.weight"


@pytest.mark.parametrize(
    "name",
    [
        "lora_unet__orig_mod_mid_block_to_q.alpha",
        "lora_unet_mid_block__orig_mod_to_q.alpha",
        "lora_unet_module_mid_block_to_q.alpha",
        "lora_unet_mid_block_to_q.lora_down.default.weight",
        "lora_unet_mid_block_to_q_base_layer.alpha",
        "module.lora_unet_mid_block_to_q.alpha",
    ],
)
def test_remaining_names_of_wrappers_are_found(name):
    assert component_key_names.find_wrapper_names([name]) == [name]


def test_a_state_dict_with_names_of_wrappers_is_rejected():
    with pytest.raises(ValueError, match="names of wrappers"):
        convert_to_file_format({"unet._orig_mod.to_q.lora_A.weight": torch.ones(1)}, {}, [], "kohya")


def test_the_golden_keys_contain_no_names_of_wrappers():
    assert component_key_names.find_wrapper_names(GOLDEN) == []
