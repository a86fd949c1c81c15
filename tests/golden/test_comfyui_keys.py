"""The layers of every family's LoRA files are named as ComfyUI knows them, or the run says what ComfyUI does not load.

``tests/data/comfyui_keys.json`` holds the names that ComfyUI 0.30.0 knows for its class of each transformer, a block's
number as {}; ``tests/interop/model_table.py --patterns`` writes it.  Editing models have the names of those that they come
from.
"""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from adapter_states import list_tensor_shapes
from published_configs import build_component_on_meta

from library.adapters.client_compatibility import choose_file_format, list_client_losses
from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.adapters.module_adapter import group_by_module, parse_tensor_key
from library.adapters.targets_rank_alpha import match_target_modules
from library.models.collect_component_keys import build_component_keys
from library.models.families import FAMILIES, FAMILY_FACTS

KNOWN = json.loads((Path(__file__).resolve().parents[1] / "data" / "comfyui_keys.json").read_text())
KNOWN["cosmos2_text2image"] = KNOWN["anima"]  # its class is that of Cosmos Predict2 with more for the texts
VIDEO_MODELS = {"wan"}
"""The models of videos whose names are in the table."""
NOT_IN_COMFYUI = {
    "bria",
    "bria_fibo",
    "bria_fibo_edit",
    "bria_fibo2",
    "sana",
    "cogview4",
    "glm_image",
    "flux3",
    "qwen_image21",
    "prx",
    "prx_pixel",
    "nucleus_image",
}


@cache
def build_state(name, kind):
    """An adapter of the tiny denoiser, and the key names of the denoiser."""
    family = FAMILIES.get(name)
    model = build_component_on_meta(f"{name}_tiny", family.facts.denoiser_name)
    part = build_component_keys(family, family.facts.denoiser_name, model)
    state = {}
    for module in match_target_modules(model, family.facts.lora.targets):
        for end, shape in list_tensor_shapes(kind, model.get_submodule(module).weight.shape, 2).items():
            state[f"{part.name}.{module}.{end}"] = torch.ones(shape)
    return state, dict.fromkeys((parse_tensor_key(key)[0] for key in state), 2.0), [part]


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr"])
@pytest.mark.parametrize("name", KNOWN)
def test_comfyui_knows_every_layer_of_a_file_or_the_run_says_what_it_does_not_load(name, kind):
    state, alphas, parts = build_state(name, kind)
    adapters = group_by_module(state, alphas)
    default = choose_file_format(adapters, parts, FAMILIES.get(name).facts.lora.format)
    layouts = ("kohya", "diffusers", "comfy") if kind in ("lora", "dora") else (default,)
    unread = {}
    for file_format in layouts:
        tensors, _ = convert_to_file_format(state, alphas, parts, file_format)
        names = {re.sub(r"(?<=[._])\d+(?=[._])", "{}", parse_tensor_key(key)[0]) for key in tensors}
        unread[file_format] = sorted(names - set(KNOWN[name]))
        losses = list_client_losses(adapters, parts, file_format).get("ComfyUI", "")
        assert bool(unread[file_format]) == ("loads" in losses), (file_format, unread[file_format][:3], losses)
    if kind in ("lora", "dora"):
        assert not unread[default] and not unread["comfy"], "ComfyUI reads the default file and its own layout"


def test_every_transformer_but_these_is_in_comfyui():
    transformers = {name for name, facts in FAMILY_FACTS.items() if facts.denoiser_name != "unet"}
    images = {name for name in transformers if FAMILY_FACTS[name].pipeline.kind == "image"}
    assert set(KNOWN) == images - NOT_IN_COMFYUI | VIDEO_MODELS
