"""Layers in the formats of LyCORIS have the effect that LyCORIS itself computes.

tests/data/lycoris_layers.safetensors has for each kind the base layer, the layer's tensors in a file, an input, and the
output of lycoris-lora 4.1.3's own forward pass with random weights, as ``KIND|base|weight``, ``KIND|file|lora_up.weight``,
``KIND|in`` and ``KIND|out``.  lycoris-lora is not needed to run the test.
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from library.adapters.component_key_names import ComponentKeys
from library.adapters.kohya_diffusers_comfyui_keys import convert_from_file_format, convert_to_file_format
from library.adapters.merge import merge_adapter, merge_bias_adapter
from library.errors import UserError
from library.models.families.flux import FLUX_KEYS

DATA = Path(__file__).resolve().parents[2] / "data" / "lycoris_layers.safetensors"
COMPONENT = ComponentKeys("unet", ("layer",), "lora_unet")


def list_kinds():
    with safe_open(DATA, "pt") as file:
        return sorted({key.partition("|")[0] for key in file.keys()})


def read_kind(kind):
    """The parts of one kind: base tensors, file tensors, input and output."""
    with safe_open(DATA, "pt") as file:
        parts = {"base": {}, "file": {}}
        for key in file.keys():
            name, part, *rest = key.split("|")
            if name == kind and rest:
                parts[part][rest[0]] = file.get_tensor(key)
            elif name == kind:
                parts[part] = file.get_tensor(key)
    return parts


def build_layer(kind, base):
    weight = base["weight"]
    if "norm" in kind:
        layer = nn.GroupNorm(4, len(weight)) if kind == "group norm" else nn.LayerNorm(len(weight))
    elif weight.dim() == 4:
        layer = nn.Conv2d(weight.shape[1], len(weight), weight.shape[2], padding=weight.shape[2] // 2)
    else:
        layer = nn.Linear(weight.shape[1], len(weight))
    layer.load_state_dict(base)
    return layer


def read_layer(tensors):
    content = convert_from_file_format(tensors, {}, [COMPONENT])
    return content.updates["unet.layer"], content


@torch.no_grad()
@pytest.mark.parametrize("kind", list_kinds())
@pytest.mark.parametrize("is_converted", [False, True])
def test_a_merged_layer_has_the_output_that_lycoris_computes(kind, is_converted):
    parts = read_kind(kind)
    layer = build_layer(kind, parts["base"])
    assert (layer(parts["in"]) - parts["out"]).abs().max() > 1e-2, "the layer does something"
    adapter, content = read_layer({f"lora_unet_layer.{key}": tensor for key, tensor in parts["file"].items()})
    if is_converted:
        tensors, metadata = convert_to_file_format(content.state_dict, content.alphas, [COMPONENT], "kohya")
        adapter = convert_from_file_format(tensors, metadata, [COMPONENT]).updates["unet.layer"]

    merge_adapter(layer.weight, adapter, 1.0)
    merge_bias_adapter(layer.bias, adapter, 1.0)

    torch.testing.assert_close(layer(parts["in"]), parts["out"], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["tucker locon", "glora", "diag-oft", "layer norm"])
def test_half_a_multiplier_is_half_the_difference_of_the_weights(kind):
    parts = read_kind(kind)
    adapter, _ = read_layer({f"lora_unet_layer.{key}": tensor for key, tensor in parts["file"].items()})
    full, half = (parts["base"]["weight"].clone() for _ in range(2))

    merge_adapter(full, adapter, 1.0)
    merge_adapter(half, adapter, 0.5)

    torch.testing.assert_close(half, (full + parts["base"]["weight"]) / 2)


@torch.no_grad()
def test_an_oft_of_sd_scripts_is_that_of_lycoris():
    """networks.oft writes the same tensors under another prefix."""
    parts = read_kind("diag-oft")
    adapter, _ = read_layer({f"oft_unet_layer.{key}": tensor for key, tensor in parts["file"].items()})
    layer = build_layer("diag-oft", parts["base"])

    merge_adapter(layer.weight, adapter, 1.0)

    torch.testing.assert_close(layer(parts["in"]), parts["out"], rtol=1e-5, atol=1e-5)


FUSED_SHAPES = {
    "loha": {"hada_w1_a": (24, 2), "hada_w1_b": (2, 8), "hada_w2_a": (24, 2), "hada_w2_b": (2, 8)},
    "lokr": {"lokr_w1": (6, 2), "lokr_w2_a": (4, 2), "lokr_w2_b": (2, 4)},
    "glora": {"a1.weight": (8, 2), "a2.weight": (2, 8), "b1.weight": (24, 2), "b2.weight": (2, 8)},
    "full": {"diff": (24, 8)},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", FUSED_SHAPES)
def test_a_fused_layer_is_split_into_query_key_and_value_and_fused_again(kind):
    modules = tuple(f"transformer_blocks.0.attn.to_{part}" for part in "qkv")
    component = ComponentKeys("transformer", modules, "lora_unet", FLUX_KEYS)
    draw = torch.Generator().manual_seed(3)
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {f"{name}.{key}": torch.randn(shape, generator=draw) for key, shape in FUSED_SHAPES[kind].items()}
    tensors |= {} if kind == "full" else {f"{name}.alpha": torch.tensor(2.0)}
    plain = ComponentKeys("unet", ("layer",), "lora_unet")
    whole = convert_from_file_format(
        {key.replace(name, "lora_unet_layer"): tensor for key, tensor in tensors.items()}, {}, [plain]
    ).updates["unet.layer"]
    base = torch.randn(24, 8, generator=draw)
    expected, parts = base.clone(), [rows.clone() for rows in base.chunk(3)]
    merge_adapter(expected, whole, 1.0)

    content = convert_from_file_format(tensors, {}, [component])
    for rows, module in zip(parts, modules, strict=True):
        merge_adapter(rows, content.updates[f"transformer.{module}"], 1.0)

    torch.testing.assert_close(torch.cat(parts), expected)
    back, _ = convert_to_file_format(content.state_dict, content.alphas, [component], "kohya")
    assert back.keys() == tensors.keys()


@pytest.mark.parametrize("kind", ["glora", "diag-oft", "layer norm", "full"])
def test_diffusers_files_cannot_hold_types_of_lycoris(kind):
    parts = read_kind(kind)
    _, content = read_layer({f"lora_unet_layer.{key}": tensor for key, tensor in parts["file"].items()})

    with pytest.raises(UserError, match="diffusers does not load LyCORIS' type"):
        convert_to_file_format(content.state_dict, content.alphas, [COMPONENT], "diffusers")


@pytest.mark.parametrize(
    "key, kind",
    [
        ("lora_unet_layer.on_input", r"\(IA\)3"),
        ("unet.layer.lora_B.bias", r"LoRA with a bias \(peft's lora_bias\)"),
        ("unet.layer.vera_lambda_d", "VeRA"),
        ("model.diffusion_model.layer.weight", "a whole model"),
    ],
)
def test_a_kind_that_is_not_read_is_named(key, kind):
    lora = {"lora_unet_layer.lora_down.weight": torch.ones(1, 8), "lora_unet_layer.lora_up.weight": torch.ones(12, 1)}

    with pytest.raises(UserError, match=f"contains {kind}, which is not supported: {key}"):
        convert_from_file_format({**lora, key: torch.ones(1)}, {}, [COMPONENT])
