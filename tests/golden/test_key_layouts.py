"""Keys of sd-scripts for models whose fused modules diffusers has split: golden lists, and lossless conversion."""

import json
from pathlib import Path

import original_checkpoints
import pytest
import torch
from adapter_tensors import build_component_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from published_configs import build_component_on_meta
from tiny_denoiser import build_tiny_denoiser
from torch import nn

from library.adapters import component_key_names, injection, original_module_names
from library.adapters.component_key_names import ComponentKeys
from library.adapters.fused_qkv import fuse_adapters, split_adapter
from library.adapters.kohya_diffusers_comfyui_keys import convert_from_file_format, convert_to_file_format
from library.adapters.module_adapter import ModuleAdapter
from library.adapters.original_module_names import OriginalModule
from library.adapters.targets_rank_alpha import match_target_modules
from library.config.schema import AdapterConfig
from library.errors import UserError
from library.models.families import FAMILIES

DATA = Path(__file__).resolve().parents[1] / "data"
NAMES = {
    name: component_key_names.build_key_map((), FAMILIES.get(name).facts.lora.key_style) for name in ("flux", "sd3")
}
GOLDEN = {"flux": "kohya_keys_flux.json", "sd3": "kohya_keys_sd3_medium.json"}


@pytest.fixture(scope="module", params=GOLDEN)
def real(request):
    """The denoiser of a published model on the meta device, with a LoRA of the golden list's rank."""
    name = request.param
    family = FAMILIES.get(name)
    model = build_component_on_meta(name, family.facts.denoiser_name)
    injection.inject_into_model(
        model,
        AdapterConfig(network_dim=16, network_alpha=8),
        family.facts.lora.targets,
        1,
        family.facts.lora.key_style,
        family.get_unused_layers(family, model),
    )
    golden = json.loads((DATA / GOLDEN[name]).read_text())
    return (
        model,
        family,
        {key: shape for key, shape in golden.items() if key.startswith(f"{family.facts.lora.prefix}_")},
    )


@pytest.mark.slow
def test_keys_and_shapes_of_the_published_model_are_those_of_sd_scripts(real):
    model, family, golden = real
    adapter_state = {
        key: torch.zeros(tensor.shape, dtype=torch.int8)
        for key, tensor in injection.get_adapter_state_dict(model).items()
    }
    ours = convert_to_kohya(adapter_state, 8.0, build_component_keys(model, family))
    assert {key: list(tensor.shape) for key, tensor in ours.items()} == golden
    assert {float(tensor) for key, tensor in ours.items() if key.endswith(".alpha")} == {8.0}


@pytest.mark.slow
def test_the_trainable_parameters_are_as_many_as_in_sd_scripts(real):
    model, family, golden = real
    idle = sum(16 * model.get_submodule(name).out_features for name in family.get_unused_layers(family, model))
    reference = sum(torch.Size(shape).numel() for key, shape in golden.items() if not key.endswith(".alpha"))
    assert sum(each.numel() for each in model.parameters() if each.requires_grad) == reference - idle


def add_prefix(values, part):
    return {f"{part.name}.{key}": value for key, value in values.items()}


def list_modules(state):
    return dict.fromkeys(key.rsplit(".", 2)[0] for key in state)


def convert_to_kohya(state, alpha, part):
    return convert_to_file_format(
        add_prefix(state, part), add_prefix(dict.fromkeys(list_modules(state), alpha), part), [part], "kohya"
    )[0]


def build_component(modules, style, name="transformer"):
    return ComponentKeys(name, tuple(modules), "lora_unet", style)


def build_state(shapes, layout, rank=3, shared=True, seed=0):
    """Random LoRA weights for modules of these shapes (outputs, inputs)."""
    draw = torch.Generator().manual_seed(seed)
    down = {}
    for group in NAMES[layout].group_modules(shapes):
        for module in group.modules:
            if module is not None:
                same = down.setdefault(group.name, torch.randn(rank, shapes[module][1], generator=draw))
                down[module] = same if shared else torch.randn(rank, shapes[module][1], generator=draw)
    state = {}
    for module, (outputs, _) in shapes.items():
        state[f"{module}.lora_A.weight"] = down[module]
        state[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw)
    return state


def update(state, module, scale, a="lora_A", b="lora_B"):
    return scale * state[f"{module}.{b}.weight"] @ state[f"{module}.{a}.weight"]


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("shared", [True, False])
def test_names_are_converted_to_the_original_ones_and_back_without_loss(name, shared):
    model, family = build_tiny_denoiser(name)
    shapes = {
        module: model.get_submodule(module).weight.shape
        for module in match_target_modules(model, family.facts.lora.targets)
    }
    state = build_state(shapes, name, shared=shared)
    part = build_component_keys(model, family)
    state = add_prefix(state, part)
    alphas = add_prefix(dict.fromkeys(shapes, 5.0), part)
    file, _ = convert_to_file_format(state, alphas, [part], "kohya")
    restored = convert_from_file_format(file, {}, [part])
    assert restored.state_dict.keys() == state.keys() and all(
        torch.equal(restored.state_dict[key], state[key]) for key in state
    )
    assert restored.alphas == alphas
    second, _ = convert_to_file_format(restored.state_dict, restored.alphas, [part], "kohya")
    assert second.keys() == file.keys() and all(torch.equal(second[key], file[key]) for key in file)


@pytest.mark.parametrize("shared", [True, False])
def test_diffusers_converts_a_flux_file_to_the_same_updates(shared):
    """Its converter supports the published sizes only, so one block of each type has them."""
    from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers

    size, family = 3072, FAMILIES.get("flux")
    shapes = {}
    for part in (*original_module_names.IMAGE_STREAM, *original_module_names.TEXT_STREAM):
        outputs = {"norm1": 6, "norm1_context": 6, "ff": 4, "ff_context": 4}.get(part.split(".")[0], 1)
        is_outer = part.endswith("net.2")
        shapes[f"transformer_blocks.0.{part}"] = (size if is_outer else size * outputs, size * 4 if is_outer else size)
    for part, (outputs, inputs) in {
        "attn.to_q": (1, 1),
        "attn.to_k": (1, 1),
        "attn.to_v": (1, 1),
        "proj_mlp": (4, 1),
        "proj_out": (1, 5),
        "norm.linear": (3, 1),
    }.items():
        shapes[f"single_transformer_blocks.0.{part}"] = (size * outputs, size * inputs)
    state = {key: each.double() for key, each in build_state(shapes, "flux", rank=2, shared=shared).items()}
    part = build_component(shapes, family.facts.lora.key_style)
    reference = _convert_kohya_flux_lora_to_diffusers(convert_to_kohya(state, 3.0, part))
    ours, _ = convert_to_file_format(
        add_prefix(state, part), add_prefix(dict.fromkeys(shapes, 3.0), part), [part], "diffusers"
    )
    assert reference.keys() == ours.keys()
    probe = {inputs: torch.randn(inputs, 1).double() for inputs in (size, 4 * size, 5 * size)}
    for module, (_, inputs) in shapes.items():
        moved = [
            f[f"transformer.{module}.lora_B.weight"] @ (f[f"transformer.{module}.lora_A.weight"] @ probe[inputs])
            for f in (reference, ours)
        ]
        torch.testing.assert_close(*moved, msg=lambda text, module=module: f"{module}: {text}")


@pytest.mark.parametrize("shared", [True, False])
def test_an_sd3_file_changes_the_original_weights_as_the_lora_changes_those_of_diffusers(shared):
    """Compared with diffusers' conversion of checkpoints, including the order of parts, shift and scale."""
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers as convert

    model, family = build_tiny_denoiser("sd3")
    modules = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    shapes = {module: model.get_submodule(module).weight.shape for module in modules}
    state = build_state(shapes, "sd3", shared=shared)
    file = convert_to_kohya(state, 4.0, build_component_keys(model, family))
    before = original_checkpoints.convert_sd3_transformer(model)
    after = dict(before)
    for group in NAMES["sd3"].group_modules(modules):
        start = component_key_names.build_kohya_name(group.name, family.facts.lora.prefix)
        scale = file[f"{start}.alpha"] / len(file[f"{start}.lora_down.weight"])
        after[f"{group.name}.weight"] = before[f"{group.name}.weight"] + update(
            file, start, scale, "lora_down", "lora_up"
        )
    converted = convert(after)
    for module in modules:
        expected = model.get_submodule(module).weight + update(state, module, 4 / 3)
        torch.testing.assert_close(converted[f"{module}.weight"], expected, msg=lambda t, m=module: f"{m}: {t}")


@given(
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.booleans(),
    st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_fused_updates_have_the_effect_of_their_parts_and_are_split_again(
    ranks, shared, present, zero, decomposed, seed
):
    """Ranks may differ if alpha / rank is one value."""
    draw = torch.Generator().manual_seed(seed)
    original = OriginalModule("whole", ("q", "k", "v", "mlp"), output_ratios=(1, 1, 1, 4))
    inputs, common = 5, torch.randn(ranks[0], 5, generator=draw)
    parts = []
    for size, rank, is_there in zip(original.output_ratios, ranks, present, strict=True):
        down = common if shared else torch.randn(rank, inputs, generator=draw)
        tensors = {"down": down, "up": torch.randn(size * inputs, len(down), generator=draw) * (0 if zero else 1)}
        if decomposed and all(present):
            tensors["magnitude"] = torch.rand(size * inputs, generator=draw)
        parts.append(ModuleAdapter(tensors, 0.5 * len(down)) if is_there else None)
    fused = fuse_adapters(parts, original)
    single = [
        torch.zeros(size * inputs, inputs) if part is None else moved(part)
        for part, size in zip(parts, original.output_ratios, strict=True)
    ]
    torch.testing.assert_close(moved(fused), torch.cat(single))
    restored = split_adapter(fused, original)
    if zero:  # the ranks cannot be assigned to the parts
        return
    assert [each is None for each in restored] == [not each for each in present]
    for part, each in zip(parts, restored, strict=True):
        if part is not None:
            assert part.alpha == each.alpha and part.tensors.keys() == each.tensors.keys()
            assert all(torch.equal(part.tensors[name], each.tensors[name]) for name in part.tensors)


def moved(update):
    return update.scale * update.tensors["up"] @ update.tensors["down"]


def test_a_shared_lora_a_with_zero_updates_is_not_split():
    """Its rank could be that of four blocks, and all other entries are zero."""
    down = torch.randn(4, 5)
    parts = split_adapter(
        ModuleAdapter({"down": down, "up": torch.zeros(7 * 5, 4)}, 2.0),
        OriginalModule("whole", ("q", "k", "v", "mlp"), output_ratios=(1, 1, 1, 4)),
    )
    assert all(torch.equal(part.tensors["down"], down) and part.alpha == 2.0 for part in parts)


def test_a_file_of_another_model_and_an_incomplete_file_are_rejected():
    part = build_component_keys(*build_tiny_denoiser("flux"))
    with pytest.raises(UserError, match="1 of 1 keys do not belong to this model, for example lora_unet_joint"):
        convert_from_file_format({"lora_unet_joint_blocks_0_x_block_attn_qkv.alpha": torch.tensor(1.0)}, {}, [part])
    half = {"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": torch.ones(2, 32)}
    with pytest.raises(UserError, match="img_attn_qkv: lora_up is missing"):
        convert_from_file_format(half, {}, [part])
    with pytest.raises(ValueError, match="has no name in the files of sd-scripts"):
        NAMES["sd3"].group_modules(["a.b"])


def test_every_layer_that_sd_scripts_can_train_has_an_original_name():
    """Each linear layer of the two models is in the layout once, under its diffusers and its original name."""
    for name in GOLDEN:
        model, _ = build_tiny_denoiser(name)
        linear = [module for module, part in model.named_modules() if isinstance(part, nn.Linear)]
        actual = NAMES[name].group_modules(linear)
        assert sorted(module for group in actual for module in group.modules if module) == sorted(linear)
        assert len({component_key_names.build_kohya_name(group.name, "") for group in actual}) == len(actual)
