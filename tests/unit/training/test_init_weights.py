"""Runs that start from LoRA files: ``base_weights`` merged into the model, ``network_weights`` loaded into the adapter."""

from dataclasses import replace

import pytest
import torch
from adapter_states import build_random_state
from adapter_tensors import merge
from problem_lines import format_lines
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_pipelines import TINY, get_tiny_sd1_folder
from training_runs import train, write_images

from library.adapters import injection
from library.adapters.file_comparison import compare_file_with_model
from library.adapters.kohya_diffusers_comfyui_keys import convert_from_file_format, convert_to_file_format
from library.adapters.merge import merge_adapter as merge_one
from library.adapters.module_adapter import group_by_module
from library.config import parse_config
from library.config.schema import AdapterConfig, RunConfig
from library.errors import ConfigError
from library.models.collect_component_keys import collect_component_keys
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.training.network_weights import load_network_weights, merge_base_weights, read_initial_weights
from library.training.trainable_modules import build_trainable_modules


def build_case(name, **adapter):
    tiny, family = TINY[name](), FAMILIES.get(name)()
    adapter = {"network_train_unet_only": not adapter.get("network_train_text_encoder_only", False), **adapter}
    return tiny, family, RunConfig(adapter=AdapterConfig(**adapter)), detect_model(tiny.source)


def save_adapter_file(path, name, file_format, kind="lora", prefixes=None, zero_modules=(), **options):
    """Save random adapter weights; ``zero_modules`` get an update of zero, as in files of other programs."""
    state, alphas, components = build_random_state(name, kind, **options)
    state = {
        key: tensor * (not (key.endswith("lora_B.weight") and any(f".{module}." in key for module in zero_modules)))
        for key, tensor in state.items()
    }
    if prefixes is not None:
        state = {key: tensor for key, tensor in state.items() if key.startswith(prefixes)}
        alphas = {key: alpha for key, alpha in alphas.items() if key.startswith(prefixes)}
    save_file(convert_to_file_format(state, alphas, components, file_format)[0], path)
    return state, alphas


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, file_format", [("sd1", "kohya"), ("sdxl", "diffusers"), ("sd3", "comfy"), ("flux", "kohya")]
)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@torch.no_grad()
def test_base_weights_are_merged_with_their_multiplier(name, file_format, kind, tmp_path):
    first_path, second_path = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    state, alphas = save_adapter_file(first_path, name, file_format, kind)
    second_state, second_alphas = save_adapter_file(second_path, name, "comfy", seed=7)
    tiny, family, config, model = build_case(
        name, base_weights=(str(first_path), str(second_path)), base_weights_multiplier=(1.0, -0.5)
    )
    merge_base_weights(tiny.pipe, read_initial_weights(config.adapter, family, model))
    expected = TINY[name]().pipe
    merge(expected, state, alphas)
    merge(expected, second_state, {module: -0.5 * alpha for module, alpha in second_alphas.items()})
    for component in collect_component_keys(family, expected):
        expected_state = getattr(expected, component.name).state_dict()
        for key, tensor in getattr(tiny.pipe, component.name).state_dict().items():
            torch.testing.assert_close(
                tensor, expected_state[key], rtol=1e-4, atol=1e-4, msg=lambda text, at=key: f"{at}: {text}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("name, file_format", [("sd1", "kohya"), ("sdxl", "comfy"), ("qwen_image", "diffusers")])
@torch.no_grad()
def test_network_weights_load_with_any_alpha(name, file_format, tmp_path):
    path = tmp_path / "lora.safetensors"
    denoiser, family = f"{FAMILIES.get(name).facts.denoiser_name}.", FAMILIES.get(name)()
    unused_layers = family.get_unused_layers(getattr(TINY[name]().pipe, family.facts.denoiser_name))
    state, alphas = save_adapter_file(path, name, file_format, prefixes=denoiser, zero_modules=unused_layers)
    for module in unused_layers:
        del alphas[f"{denoiser}{module}"], state[f"{denoiser}{module}.lora_A.weight"]
        del state[f"{denoiser}{module}.lora_B.weight"]
    tiny, family, config, model = build_case(name, network_weights=str(path), dim_from_weights=True)
    initial_weights = read_initial_weights(config.adapter, family, model)
    model_with_adapter, adapter = build_trainable_modules(config, family, tiny.pipe, initial_weights.rank_alphas)
    load_network_weights(model_with_adapter, adapter, initial_weights)
    assert (
        adapter.rank_alphas.keys() == alphas.keys() and len({size.rank for size in adapter.rank_alphas.values()}) == 2
    )
    updates = group_by_module(state, alphas)
    for module, update in updates.items():
        layer = model_with_adapter.get_submodule(module)
        down, up = layer.lora_A["default"].weight.flatten(1), layer.lora_B["default"].weight.flatten(1)
        expected = update.scale * update.tensors["up"].flatten(1) @ update.tensors["down"].flatten(1)
        torch.testing.assert_close(layer.scaling["default"] * up @ down, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr"])
@torch.no_grad()
def test_a_different_alpha_does_not_change_the_loaded_update(kind, tmp_path):
    path = tmp_path / "lora.safetensors"
    tiny, family, config, model = build_case(
        "sd1", network_weights=str(path), network_dim=3, network_alpha=2.0, network_module=f"networks.{kind}"
    )
    trained, adapter = build_trainable_modules(config, family, tiny.pipe)
    source = {name: torch.randn(tensor.shape) for name, tensor in injection.get_adapter_state_dict(trained).items()}
    alphas = {name: 1.0 if size.rank == 1 else 0.7 for name, size in adapter.rank_alphas.items()}
    save_file(convert_to_file_format(source, alphas, collect_component_keys(family, tiny.pipe), "comfy")[0], path)
    load_network_weights(trained, adapter, read_initial_weights(config.adapter, family, model))
    for module, update in group_by_module(source, alphas).items():
        layer = trained.get_submodule(module)
        expected = torch.zeros_like(layer.get_base_layer().weight)
        merge_one(expected, update, 1.0)
        torch.testing.assert_close(layer.get_delta_weight("default"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_file_that_does_not_fit_is_reported_with_a_fix(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_adapter_file(path, "sd1", "kohya", prefixes="unet.")
    tiny, family, config, model = build_case(
        "sd1", network_weights=str(path), network_dim=4, network_args=("conv_dim=4",)
    )
    initial_weights = read_initial_weights(config.adapter, family, model)
    with pytest.raises(ConfigError) as error:
        load_network_weights(
            *build_trainable_modules(config, family, tiny.pipe, initial_weights.rank_alphas), initial_weights
        )
    assert "has rank 3 in the file and 4 in this run; add dim_from_weights" in str(error.value)
    assert "... and" in str(error.value)
    save_adapter_file(path, "sd1", "kohya")
    unet_only = replace(config.adapter, network_train_unet_only=True)
    with pytest.raises(ConfigError, match=r"has layers of text_encoder, .*; remove network_train_unet_only"):
        read_initial_weights(unet_only, family, model)
    tiny, family, config, model = build_case("sd1", network_weights=str(path), network_args=("use_dora=True",))
    with pytest.raises(ConfigError, match="has type lora, but this run trains dora"):
        read_initial_weights(config.adapter, family, model)
    save_adapter_file(path, "sdxl", "kohya")
    with pytest.raises(ConfigError, match=r"network_weights: .*: \d+ of \d+ keys do not belong to this"):
        read_initial_weights(config.adapter, family, model)


def test_oft_base_weights_are_reported_before_the_model_is_loaded(tmp_path):
    path, tiny, family = tmp_path / "oft.safetensors", TINY["sd1"](), FAMILIES.get("sd1")()
    source, adapter = build_trainable_modules(
        RunConfig(adapter=AdapterConfig(network_module="networks.oft", network_train_unet_only=True)), family, tiny.pipe
    )
    save_file(
        convert_to_file_format(
            injection.get_adapter_state_dict(source),
            adapter.alphas,
            collect_component_keys(family, tiny.pipe),
            "diffusers",
        )[0],
        path,
    )
    _, family, config, model = build_case("sd1", base_weights=(str(path),))
    with pytest.raises(ConfigError, match=r"--base_weights: .*oft.safetensors: has type oft, which cannot be merged"):
        read_initial_weights(config.adapter, family, model)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("is_dim_from_weights", [False, True])
def test_separate_lora_a_of_query_key_and_value_are_trained_apart(is_dim_from_weights, tmp_path):
    """As in files of diffusers and ai-toolkit; modules of one layer share lora_A otherwise."""
    path, end = tmp_path / "lora.safetensors", "lora_A.weight"
    settings = {"network_weights": str(path), "dim_from_weights": is_dim_from_weights}
    state, alphas = save_adapter_file(path, "flux", "diffusers", prefixes="transformer.")
    if not is_dim_from_weights:
        settings["network_dim"] = 2
        state = {key: each for key, each in state.items() if "_blocks.1." in key}  # of rank 2
        alphas = {key: each for key, each in alphas.items() if "_blocks.1." in key}
        components = collect_component_keys(FAMILIES.get("flux"), TINY["flux"]().pipe)
        save_file(convert_to_file_format(state, alphas, components, "diffusers")[0], path)
    tiny, family, config, model = build_case("flux", **settings)
    initial = read_initial_weights(config.adapter, family, model)
    trained, adapter = build_trainable_modules(
        config, family, tiny.pipe, initial.rank_alphas, initial.independent_modules
    )
    load_network_weights(trained, adapter, initial)

    loaded = injection.get_adapter_state_dict(trained)
    first, second = (f"transformer.transformer_blocks.1.attn.{name}.{end}" for name in ("to_q", "to_k"))
    assert torch.equal(loaded[first], state[first]) and torch.equal(loaded[second], state[second])
    if not is_dim_from_weights:  # the file lacks this block
        assert torch.equal(loaded[first.replace(".1.", ".0.")], loaded[second.replace(".1.", ".0.")])


@pytest.mark.slow
@torch.no_grad()
def test_a_file_may_lack_some_modules_that_share_lora_a(tmp_path):
    """As in files of sd-scripts whose query modules have a zero update."""
    path, tiny, family = tmp_path / "lora.safetensors", TINY["flux"](), FAMILIES.get("flux")()
    source, adapter = build_trainable_modules(
        RunConfig(adapter=AdapterConfig(network_dim=3, network_train_unet_only=True)), family, tiny.pipe
    )
    for name, parameter in injection.iter_adapter_parameters(source):
        parameter.normal_() if "lora_B" in name and not name.endswith("to_q.lora_B.weight") else None
    parts = collect_component_keys(family, tiny.pipe)
    save_file(convert_to_file_format(injection.get_adapter_state_dict(source), adapter.alphas, parts, "kohya")[0], path)
    content = convert_from_file_format(load_file(path), {}, parts)
    assert len(content.alphas) < len(adapter.alphas)
    assert not list(compare_file_with_model(source, content, adapter.alphas))

    other, family, config, model = build_case("flux", network_weights=str(path), network_dim=3)
    trained, sizes = build_trainable_modules(replace(config, train=replace(config.train, seed=5)), family, other.pipe)
    load_network_weights(trained, sizes, read_initial_weights(config.adapter, family, model))
    for (name, one), (_, two) in zip(
        injection.iter_adapter_parameters(source), injection.iter_adapter_parameters(trained), strict=True
    ):
        assert torch.equal(one, two) or not any(module in name for module in content.alphas), name


def test_conflicting_options_are_reported(tmp_path):
    flags = [
        "--dim_from_weights",
        *("--network_weights", str(tmp_path / "no.safetensors"), "--base_weights", str(tmp_path / "no.safetensors")),
        *"--base_weights_multiplier 1 2 --network_dim 4 --network_args conv_dim=4".split(),
    ]
    problems = " ".join(format_lines(parse_config(flags).problems))
    for text in (
        "no such file",
        "2 multipliers for 1 base_weights",
        "conv_dim: dim_from_weights",
    ):
        assert text in problems, text


@pytest.mark.slow
def test_a_run_starts_from_network_weights_and_deletes_old_files(tmp_path):
    """The last two epochs stay; a run with learning rate 0 saves the weights it started from, in another format."""
    data = write_images(tmp_path / "data", {(64, 64): 4})
    flags = ["--dataset_config", str(data), "--train_batch_size", "2", "--output_dir", str(tmp_path)]
    (tmp_path / "a-000000.safetensors").write_text("not written by this run")
    first = train(
        *flags,
        *(
            "--output_name a --max_train_epochs 4 --save_every_n_epochs 1 --save_last_n_epochs 2 "
            "--save_every_n_steps 2 --save_last_n_steps 2 --network_dim 3 --learning_rate 1e-2 --metadata_author me"
        ).split(),
    )
    assert sorted(path.name for path in tmp_path.glob("a*.safetensors")) == [
        "a-000000.safetensors",
        "a-000002.safetensors",
        "a-000003.safetensors",
        "a-step00000004.safetensors",
        "a-step00000006.safetensors",
        "a.safetensors",
    ]
    second = train(
        *flags,
        *"--output_name b --max_train_steps 1".split(),
        "--network_weights",
        first,
        *"--dim_from_weights --learning_rate 1e-38 --save_format diffusers".split(),
    )
    parts = collect_component_keys(
        FAMILIES.get("sd1"), FAMILIES.get("sd1")().load(get_tiny_sd1_folder(), torch.float32)
    )
    metadata_by_file = []
    for path in (first, second):
        with safe_open(path, "pt") as file:
            metadata_by_file.append(file.metadata())
    first_content, second_content = (
        convert_from_file_format(load_file(path), metadata, parts)
        for path, metadata in zip((first, second), metadata_by_file, strict=True)
    )
    assert (first_content.file_format, second_content.file_format) == (
        "kohya",
        "diffusers",
    ) and first_content.alphas == second_content.alphas
    for key, tensor in first_content.state_dict.items():
        torch.testing.assert_close(second_content.state_dict[key], tensor)
    assert metadata_by_file[0]["modelspec.author"] == "me" and metadata_by_file[0]["ss_num_epochs"] == "4"
    assert '"images": {' in metadata_by_file[0]["ss_tag_frequency"] and metadata_by_file[1]["ss_network_dim"] == "3"
    assert str(tmp_path) not in str(metadata_by_file)
