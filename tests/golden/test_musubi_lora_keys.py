"""LoRA files of musubi-tuner's commands have the layers that it trains, under the names that it and ComfyUI look up.

The names are facts of musubi-tuner's model classes: the linear layers that its network modules train by default, a
block's number as {}, and those that ``include_patterns`` can add. Its loader replaces the dots of a module's name by
underscores after ``lora_unet_``.
"""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from adapter_states import list_tensor_shapes
from data_paths import DATA
from published_configs import build_component_on_meta

from library.adapters.injection import select_target_layers
from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.adapters.module_adapter import parse_tensor_key
from library.errors import ConfigError
from library.models.collect_component_keys import build_component_keys
from library.models.families import FAMILIES
from library.training.preflight import load_settings
from library.training.trainable_modules import select_target_components

COMFYUI = json.loads((Path(__file__).resolve().parents[1] / "data" / "comfyui_keys.json").read_text("utf-8"))


def join_names(start: str, parts: str) -> list[str]:
    return [f"{start}{part}" for part in parts.split()]


DOUBLE = "img_attn.qkv img_attn.proj img_mlp.0 img_mlp.2 txt_attn.qkv txt_attn.proj txt_mlp.0 txt_mlp.2"
JOINT = "to_q to_k to_v add_q_proj add_k_proj add_v_proj to_out.0 to_add_out"
ATTENTION, MLP = "wq wk wv gate wo", "gate up down"
FLUX_LAYERS = [*join_names("double_blocks.{}.", DOUBLE), *join_names("single_blocks.{}.", "linear1 linear2")]
LAYERS = {
    "flux2_dev": FLUX_LAYERS,
    "flux2_klein": FLUX_LAYERS,
    "flux_kontext": FLUX_LAYERS,
    "z_image": [
        *join_names("layers.{}.attention.", "to_q to_k to_v to_out.0"),
        *join_names("layers.{}.feed_forward.", "w1 w2 w3"),
    ],
    "krea2": [
        *join_names("", "first tmlp.0 tmlp.2 tproj.1 txtmlp.1 txtmlp.3 last.linear"),
        *join_names("blocks.{}.attn.", ATTENTION),
        *join_names("blocks.{}.mlp.", MLP),
        *(
            name
            for blocks in ("layerwise_blocks", "refiner_blocks")
            for name in [
                *join_names(f"txtfusion.{blocks}.{{}}.attn.", ATTENTION),
                *join_names(f"txtfusion.{blocks}.{{}}.mlp.", MLP),
            ]
        ),
    ],
    "qwen_image": [
        *join_names("transformer_blocks.{}.attn.", JOINT),
        *join_names("transformer_blocks.{}.", "img_mlp.net.0.proj img_mlp.net.2 txt_mlp.net.0.proj txt_mlp.net.2"),
        *join_names("transformer_blocks.{}.", "img_mod.1 txt_mod.1"),
    ],
    "wan": [
        *join_names("blocks.{}.self_attn.", "q k v o"),
        *join_names("blocks.{}.cross_attn.", "q k v o"),
        *join_names("blocks.{}.ffn.", "0 2"),
    ],
}
LAYERS |= dict.fromkeys(("qwen_image_edit", "qwen_image_edit_plus", "qwen_image_layered"), LAYERS["qwen_image"])
LEFT_OUT = {"krea2": {"txtfusion.projector"}}
"""Layers that musubi-tuner trains and that get no adapter here."""
MODULES = {
    "flux2_dev": "flux_2",
    "flux2_klein": "flux_2",
    "flux_kontext": "flux",
    "z_image": "zimage",
    "krea2": "krea2",
    "wan": "wan",
}


@cache
def build_denoiser(family):
    return build_component_on_meta(f"{family}_tiny", FAMILIES.get(family).facts.denoiser_name)


def select_layers(family, *network_args):
    """The layers of a command of musubi-tuner that get an adapter."""
    module = f"networks.lora_{MODULES.get(family, 'qwen_image')}"
    words = ["--dit", f"random:{family}:tiny", "--network_module", module]
    loaded = load_settings([*DATA, *words, *(["--network_args", *network_args] if network_args else [])])
    config, cls = loaded.require_valid(), FAMILIES.get(family)
    pipe = type("Pipe", (), {cls.facts.denoiser_name: build_denoiser(family)})()
    parts = select_target_components(config.adapter, config.optim, cls(config.model), pipe)
    layers, ranks = select_target_layers(parts, config.adapter, cls.facts.options.network)
    return [layer for layer in layers if layer.name in ranks]


def list_originals(layers):
    return {re.sub(r"(?<=\.)\d+(?=\.)", "{}", layer.original_name, count=1) for layer in layers}


def normalize(names):
    """The number of a block alone is {}, not that of a layer in it."""
    return {re.sub(r"(?<=\.)\{\}(?=\.)", "{}", name, count=1) for name in names}


@pytest.mark.parametrize("family", LAYERS)
def test_a_command_trains_the_layers_of_musubi_tuner(family):
    found = list_originals(select_layers(family))
    assert found == normalize(LAYERS[family])


@pytest.mark.parametrize("family", LAYERS)
def test_every_key_of_the_file_is_a_module_of_musubi_tuner_and_of_comfyui(family):
    cls, layers = FAMILIES.get(family), select_layers(family)
    denoiser = cls.facts.denoiser_name
    part = build_component_keys(cls, denoiser, build_denoiser(family))
    state = {
        f"{layer.name}.{end}": torch.ones(shape)
        for layer in layers
        for end, shape in list_tensor_shapes(
            "lora", build_denoiser(family).get_submodule(layer.module).weight.shape, 2
        ).items()
    }
    tensors, _ = convert_to_file_format(state, dict.fromkeys((layer.name for layer in layers), 2.0), [part], "kohya")
    names = {parse_tensor_key(key)[0] for key in tensors}
    expected = {"lora_unet_" + name.replace(".", "_") for name in LAYERS[family]}
    patterns = re.compile("|".join(re.escape(name).replace(r"\{\}", r"\d+") for name in expected))
    assert names and all(patterns.fullmatch(name) for name in names), "musubi-tuner"
    known = set(COMFYUI[{"flux_kontext": "flux"}.get(family, "qwen_image" if "qwen" in family else family)])
    unread = {re.sub(r"(?<=_)\d+(?=_)", "{}", name) for name in names} - known
    if family == "z_image":  # musubi-tuner has a script for this, and the run says so
        assert unread == {f"lora_unet_layers_{{}}_attention_{each}" for each in ("to_q", "to_k", "to_v", "to_out_0")}
    else:
        assert not unread, "ComfyUI"


@pytest.mark.parametrize(
    ("family", "argument", "kept"),
    [
        (
            "krea2",
            "exclude_patterns=['.*\\.mlp\\..*','first','last\\.linear','tmlp\\..*','txtmlp\\..*','tproj\\.1','txtfusion\\..*']",
            set(join_names("blocks.{}.attn.", ATTENTION)),
        ),
        ("flux2_dev", "exclude_patterns=[r'.*single_blocks.*']", set(join_names("double_blocks.{}.", DOUBLE))),
        ("qwen_image", r"exclude_patterns=['.*_mod\.1']", normalize(LAYERS["qwen_image"][:-2])),
        ("z_image", "exclude_patterns=[r'layers\\.\\d+\\.feed_forward.*']", set(LAYERS["z_image"][:4])),
    ],
)
def test_patterns_match_the_names_of_the_original_model(family, argument, kept):
    assert list_originals(select_layers(family, argument)) == kept


def test_included_layers_of_the_blocks_are_trained_although_they_are_excluded_by_default():
    argument = "include_patterns=['noise_refiner\\.0\\.attention\\.to_q', 'layers.*adaLN_modulation.*']"
    added = list_originals(select_layers("z_image", argument)) - set(LAYERS["z_image"])
    assert added == {"noise_refiner.{}.attention.to_q", "layers.{}.adaLN_modulation.0"}


@pytest.mark.parametrize(
    ("family", "pattern"),
    [("flux2_dev", "transformer_blocks.*"), ("flux2_dev", "lora_unet_double.*"), ("krea2", ".*to_q")],
)
def test_other_names_of_the_layers_do_not_match(family, pattern):
    with pytest.raises(ConfigError, match=r"matches no full module name, for example (double_blocks|first|tmlp)"):
        select_layers(family, f"exclude_patterns=['{pattern}']")


def test_ranks_and_rates_are_chosen_by_the_same_names():
    (ranks,) = {layer.module for layer in select_layers("krea2", "network_reg_dims=^first$=8")} ^ {
        layer.module for layer in select_layers("krea2", "network_reg_dims=^first$=0")
    }
    assert ranks == "img_in"
