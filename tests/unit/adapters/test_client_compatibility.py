"""The default file of every family and adapter type in diffusers, by output, and what runs say about the other ones."""

import pytest
import torch
from adapter_states import list_tensor_shapes
from client_cases import EVERY, build_trained_case, list_kinds, load_in_diffusers, measure_errors, write_file
from diffusers import FluxPipeline

from library.adapters.client_compatibility import choose_file_format, format_client_losses, list_client_losses
from library.adapters.component_key_names import ComponentKeys
from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.adapters.module_adapter import group_by_module
from library.errors import UserError
from library.models.families import FAMILIES
from library.training.save_adapter import build_adapter_file

QUICK_KINDS = ("LoRA",)
QUICK_FAMILIES = ("sdxl", "flux")
EVERY_KIND_FAMILIES = tuple(
    (
        "sd1 sdxl sd3 flux flux2_klein z_image qwen_image lumina2 krea2 sana anima hunyuan_image qwen_image21 ovis_image "
        "aura_flow pixart_sigma ideogram4 minimax_h3 cosmos2_text2image"
    ).split()
)
"""Every key style; each other family shares one of these."""

DEFAULT = [
    pytest.param(name, kind, marks=() if kind in QUICK_KINDS and name in QUICK_FAMILIES else pytest.mark.slow)
    for name in EVERY
    for kind in list_kinds(name)
    if kind == "LoRA" or name in EVERY_KIND_FAMILIES
]


NOTHING = ("loads nothing", "does not load", "converts this layout")
"""Of what runs say where diffusers loads nothing of a file, or refuses it."""


def check_client_losses(case, file, path):
    """Compare what is said of diffusers with its outputs; return the components that it gets wrong."""
    text = file.client_losses.get("diffusers", "")
    reasons = text.split(" and ")
    assert len(set(reasons)) == len(reasons), text
    try:
        outputs = load_in_diffusers(case, path)
    except Exception:  # refused
        outputs = case.base
    errors = measure_errors(case, outputs)
    wrong = {part for part, error in errors.items() if not error < 1e-4}
    assert bool(text) == bool(wrong), (wrong, text)
    is_nothing = all(torch.equal(outputs[part], case.base[part]) for part in errors)
    assert any(phrase in text for phrase in NOTHING) == is_nothing, (errors, text)
    return wrong


@pytest.mark.parametrize("name, kind", DEFAULT)
def test_the_default_file_is_right_in_diffusers_or_the_run_says_what_is_lost(name, kind, tmp_path):
    case = build_trained_case(name, kind)
    file = write_file(case, tmp_path / "lora.safetensors")
    wrong = check_client_losses(case, file, tmp_path / "lora.safetensors")
    if kind in ("LoRA", "LoRA, convolutions", "LoRA, block_alphas", "LoRA, outer layers"):
        # No layout of these is for both: ComfyUI has their original names only.
        families = ("lumina2", "ideogram4", "hunyuan_image", "hunyuan_video15", "hunyuan_video15_i2v", "hunyuan_video")
        families += ("mochi", "wan_vace", "hunyuan_video_i2v", "hunyuan_video_33ch_i2v")
        families += ("cosmos2_text2image", "cosmos2_video2world")
        lost = dict.fromkeys(families, "loads nothing of this layout")
        peft_alone = "does not load LoRA of this transformer, which peft does"
        lost |= dict.fromkeys(("pixart_sigma", "prx", "prx_pixel"), peft_alone)
        lost |= dict.fromkeys(("joyimage_edit", "joyimage_edit_plus"), "does not load LoRA of this transformer")
        assert file.client_losses == ({"diffusers": lost[name]} if name in lost else {})
    if kind == "LoRA, T5":
        assert len(wrong) == 1, "all but T5 works"


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["kohya", "diffusers", "comfy"])
@pytest.mark.parametrize(
    "name, kind",
    [(name, kind) for name in EVERY for kind in list_kinds(name) if kind == "LoRA" or name in EVERY_KIND_FAMILIES],
)
def test_every_layout_is_right_in_diffusers_or_the_run_says_what_is_lost(name, kind, file_format, tmp_path):
    case = build_trained_case(name, kind)
    try:
        file = write_file(case, tmp_path / "lora.safetensors", file_format)
    except UserError:
        return
    check_client_losses(case, file, tmp_path / "lora.safetensors")


@pytest.mark.parametrize(
    "kind, text",
    [
        ("LoRA, T5", "diffusers loads no LoRA of T5"),
        ("LoHa", "diffusers does not load LoHa"),
        ("OFT", "diffusers does not load OFT; ComfyUI does not load OFT; peft does"),
        ("DoRA", "ComfyUI normalizes DoRA by the base weights, so images differ a little"),
    ],
)
def test_a_run_says_in_one_line_what_is_lost(kind, text):
    case = build_trained_case("flux", kind)
    file = build_adapter_file(case.state, case.adapter, case.family, case.pipe, "auto")
    assert format_client_losses(file.client_losses) == text


def build_flux_state(width):
    """A LoRA of one double and one single block, and of T5 if asked for."""
    blocks = {
        "transformer_blocks.0": (
            *((f"attn.{part}", width, width) for part in ("to_q", "to_k", "to_v", "to_out.0")),
            *((f"attn.{part}", width, width) for part in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
            *((f"{ff}.net.0.proj", 4 * width, width) for ff in ("ff", "ff_context")),
            *((f"{ff}.net.2", width, 4 * width) for ff in ("ff", "ff_context")),
            *((f"{norm}.linear", 6 * width, width) for norm in ("norm1", "norm1_context")),
        ),
        "single_transformer_blocks.0": (
            *((f"attn.{part}", width, width) for part in ("to_q", "to_k", "to_v")),
            *(("proj_mlp", 4 * width, width), ("proj_out", width, 5 * width), ("norm.linear", 3 * width, width)),
        ),
    }
    state, draw = {}, torch.Generator().manual_seed(0)
    for block, layers in blocks.items():
        for layer, outputs, inputs in layers:
            for end, shape in list_tensor_shapes("lora", (outputs, inputs), 2).items():
                state[f"transformer.{block}.{layer}.{end}"] = torch.randn(shape, generator=draw)
    for block, first, others in (
        ("transformer_blocks.0", "attn.to_q", ("attn.to_k", "attn.to_v")),
        ("transformer_blocks.0", "attn.add_q_proj", ("attn.add_k_proj", "attn.add_v_proj")),
        ("single_transformer_blocks.0", "attn.to_q", ("attn.to_k", "attn.to_v", "proj_mlp")),
    ):
        for other in others:  # as they are trained
            state[f"transformer.{block}.{other}.lora_A.weight"] = state[f"transformer.{block}.{first}.lora_A.weight"]
    modules = {key.rpartition(".lora_")[0]: 1.5 for key in state}
    names = [module.removeprefix("transformer.") for module in modules]
    return (
        state,
        modules,
        [ComponentKeys("transformer", tuple(names), "lora_unet", FAMILIES.get("flux").facts.lora.key_style)],
    )


def test_flux_of_the_published_width_gets_sd_scripts_keys_which_diffusers_converts_to_the_same_layers():
    state, alphas, parts = build_flux_state(3072)
    adapters = group_by_module(state, alphas)
    assert choose_file_format(adapters, parts, "kohya") == "kohya"
    assert list_client_losses(adapters, parts, "kohya") == {}
    converted = FluxPipeline.lora_state_dict(convert_to_file_format(state, alphas, parts, "kohya")[0])
    assert {key.partition(".lora_")[0] for key in converted} == set(alphas)
    for module, adapter in adapters.items():
        inputs = torch.randn(adapter.tensors["down"].shape[1], generator=torch.Generator().manual_seed(1)).double()
        expected = adapter.scale * adapter.tensors["up"].double() @ (adapter.tensors["down"].double() @ inputs)
        down, up = (converted[f"{module}.lora_{end}.weight"].double() for end in "AB")
        found = up @ (down @ inputs)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max(), module


def test_flux_files_that_diffusers_cannot_convert_get_diffusers_keys():
    state, alphas, parts = build_flux_state(64)
    assert choose_file_format(group_by_module(state, alphas), parts, "kohya") == "diffusers"
    assert "width of 3072" in list_client_losses(group_by_module(state, alphas), parts, "kohya")["diffusers"]
    state, alphas, parts = build_flux_state(3072)
    outer = "transformer.x_embedder"
    state |= {f"{outer}.lora_A.weight": torch.ones(2, 64), f"{outer}.lora_B.weight": torch.ones(3072, 2)}
    assert choose_file_format(group_by_module(state, {**alphas, outer: 1.5}), parts, "kohya") == "diffusers"


def test_a_format_that_cannot_hold_an_adapter_is_named_with_the_option_that_set_it():
    case = build_trained_case("flux", "LoHa")

    with pytest.raises(UserError, match=r"save_format kohya: transformer.* cannot be fused; use comfy"):
        build_adapter_file(case.state, case.adapter, case.family, case.pipe, "kohya")
