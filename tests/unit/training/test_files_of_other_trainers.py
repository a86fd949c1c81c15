"""LoRA files that diffusers, peft, XLabs and sd-scripts wrote are merged, trained on and converted at full strength."""

import json
from pathlib import Path

import pytest
import torch
from adapter_states import build_random_state
from family_runs import train as run_family
from peft import LoKrConfig, LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tiny_pipelines import TINY
from training_runs import write_images

from library.adapters import injection
from library.adapters.file_reader import read_adapter_file
from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.adapters.targets_rank_alpha import match_target_modules
from library.cli import run_tool
from library.config.schema import AdapterConfig, RunConfig
from library.errors import ConfigError
from library.models.collect_component_keys import collect_component_keys
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.training.network_weights import (
    keep_idle_layers,
    load_network_weights,
    merge_base_weights,
    read_initial_weights,
)
from library.training.trainable_modules import build_trainable_modules

DATA = Path(__file__).resolve().parents[2] / "data"
EVERY = ("sd1", "sd2", "sdxl", "sd3", "flux", "z_image", "qwen_image")


def save_with_diffusers(name, folder, **settings):
    """Save a random LoRA with diffusers' own ``save_lora_weights``; return the file and the outputs with it."""
    tiny, family = TINY[name](), FAMILIES.get(name)()
    denoiser = getattr(tiny.pipe, family.facts.denoiser_name)
    idle = set(family.get_unused_layers(denoiser))
    targets = [each for each in match_target_modules(denoiser, family.facts.lora.targets) if each not in idle]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings)
    denoiser.add_adapter(config)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in denoiser.named_parameters():
            if "lora_B" in key:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    kind = family.facts.denoiser_name
    type(tiny.pipe).save_lora_weights(
        folder,
        **{
            f"{kind}_lora_layers": get_peft_model_state_dict(denoiser),
            f"{kind}_lora_adapter_metadata": denoiser.peft_config["default"].to_dict(),
        },
    )
    return folder / "pytorch_lora_weights.safetensors", predict(family, tiny)


@torch.no_grad()
def predict(family, tiny):
    timesteps = torch.tensor([300.0, 700.0])
    return family.predict(
        tiny.pipe, getattr(tiny.pipe, family.facts.denoiser_name), tiny.batch.latents, timesteps, tiny.batch
    )


def read(name, **options):
    tiny, family = TINY[name](), FAMILIES.get(name)()
    config = RunConfig(adapter=AdapterConfig(**options))
    return tiny, family, config, read_initial_weights(config.adapter, family, detect_model(tiny.source))


def train_on(name, path, **options):
    """The pipeline with the file loaded as the adapter that a run trains."""
    tiny, family, config, initial = read(name, network_weights=str(path), dim_from_weights=True, **options)
    trained, adapter = build_trainable_modules(
        config, family, tiny.pipe, initial.rank_alphas, initial.independent_modules
    )
    load_network_weights(trained, adapter, initial)
    return tiny, family, trained.eval(), keep_idle_layers(adapter, initial, collect_component_keys(family, tiny.pipe))


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "flux")) for name in EVERY])
def test_a_file_of_diffusers_with_alpha_8_and_rank_4_has_its_full_strength(name, tmp_path):
    path, expected = save_with_diffusers(name, tmp_path)
    tiny, family, _, initial = read(name, base_weights=(str(path),))
    assert (predict(family, tiny) - expected).abs().max() > 1e-2 * expected.abs().max(), "the LoRA does something"

    merge_base_weights(tiny.pipe, initial)
    assert_close(predict(family, tiny), expected)

    tiny, family, _, _ = train_on(name, path)
    assert_close(predict(family, tiny), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_converted_file_of_diffusers_has_its_full_strength_in_diffusers(name, tmp_path):
    path, expected = save_with_diffusers(name, tmp_path)
    for form in ("diffusers", "kohya", "comfy"):
        # Tiny models of several families have equal sizes, and diffusers does not write which it is.
        words = ["convert", str(path), str(tmp_path / f"{form}.safetensors"), "--to", form, "--family", name]
        assert run_tool(words) == 0
        _tensors, metadata = read_adapter_file(tmp_path / f"{form}.safetensors")
        assert "lora_adapter_metadata" not in metadata
        tiny, family, _, initial = read(name, base_weights=(str(tmp_path / f"{form}.safetensors"),))
        merge_base_weights(tiny.pipe, initial)
        assert_close(predict(family, tiny), expected)
    tiny = TINY[name]()
    tiny.pipe.load_lora_weights(str(tmp_path), weight_name="diffusers.safetensors")
    assert_close(predict(FAMILIES.get(name)(), tiny), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"alpha_pattern": {"attn1.to_q": 2}, "rank_pattern": {"attn2.to_k": 3}},
    ],
)
def test_rank_stabilization_and_patterns_of_peft_are_applied(settings, tmp_path):
    path, expected = save_with_diffusers("sd1", tmp_path, **settings)
    tiny, family, _, initial = read("sd1", base_weights=(str(path),))
    merge_base_weights(tiny.pipe, initial)
    assert_close(predict(family, tiny), expected)


def test_the_settings_of_another_file_are_an_error(tmp_path):
    path, _ = save_with_diffusers("sd1", tmp_path)
    tensors, metadata = read_adapter_file(path)
    values = json.loads(metadata["lora_adapter_metadata"]) | {"unet.r": 16}
    for text, message in ((json.dumps(values), "has rank 4, but its lora_adapter_metadata .* says 16"), ("[", "valid")):
        save_file(tensors, path, {"lora_adapter_metadata": text})
        with pytest.raises(ConfigError, match=message):
            read("sd1", base_weights=(str(path),))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["lora", "lokr", "full lokr"])
def test_a_file_of_peft_has_the_strength_that_adapter_config_says(kind, tmp_path):
    tiny, family = TINY["sd1"](), FAMILIES.get("sd1")()
    targets = list(match_target_modules(tiny.pipe.unet, ("attn1.to_q", "attn2.to_v")))
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    if kind != "lora":
        config = LoKrConfig(r=4 if kind == "lokr" else 32, alpha=8, decompose_factor=4, target_modules=targets)
    model = get_peft_model(tiny.pipe.unet, config)
    for key, parameter in model.named_parameters():
        if "lora_B" in key or "lokr_" in key:
            parameter.normal_(0, 0.1)
    model.save_pretrained(tmp_path)
    expected = predict(family, tiny)
    path = tmp_path / "adapter_model.safetensors"

    tiny, family, _, initial = read("sd1", base_weights=(str(path),))
    merge_base_weights(tiny.pipe, initial)

    assert_close(predict(family, tiny), expected)


@torch.no_grad()
def test_a_file_of_xlabs_is_read_as_diffusers_reads_it(tmp_path):
    tiny, family = TINY["flux"](), FAMILIES.get("flux")()
    path, draw = tmp_path / "xlabs.safetensors", torch.Generator().manual_seed(2)
    size = tiny.pipe.transformer.transformer_blocks[0].attn.to_q.weight.shape[0]
    inputs = tiny.pipe.transformer.single_transformer_blocks[0].proj_out.weight.shape[1]
    shapes = {
        **{f"double_blocks.0.processor.qkv_lora{number}": (size, 3 * size) for number in (1, 2)},
        **{f"double_blocks.0.processor.proj_lora{number}": (size, size) for number in (1, 2)},
        "single_blocks.0.processor.qkv_lora": (size, 3 * size),
        "single_blocks.0.processor.proj_lora": (inputs, size),
    }
    tensors = {}
    for key, (columns, rows) in shapes.items():
        tensors[f"{key}.down.weight"] = 0.2 * torch.randn(2, columns, generator=draw)
        tensors[f"{key}.up.weight"] = 0.2 * torch.randn(rows, 2, generator=draw)
    save_file(tensors, path)
    tiny.pipe.load_lora_weights(str(tmp_path), weight_name=path.name)
    expected = predict(family, tiny)

    tiny, family, _, initial = read("flux", base_weights=(str(path),))
    assert (predict(family, tiny) - expected).abs().max() > 1e-2
    merge_base_weights(tiny.pipe, initial)
    assert_close(predict(family, tiny), expected)
    tiny, family, _, _ = train_on("flux", path)
    assert_close(predict(family, tiny), expected)


@pytest.mark.parametrize("name", [pytest.param("sdxl", marks=pytest.mark.slow), "sd3", "qwen_image"])
def test_idle_layers_of_a_file_are_kept_unchanged(name, tmp_path, caplog):
    """Other trainers write them; here they have no gradient, so they are not trained."""
    caplog.set_level("INFO")
    path = tmp_path / "kohya.safetensors"
    state, alphas, parts = build_random_state(name, with_t5=False)
    form = "diffusers" if name == "qwen_image" else "kohya"
    state = share_lora_a(state, parts)
    original, metadata = convert_to_file_format(state, dict.fromkeys(alphas, 2.0), parts, form)
    save_file(original, path, metadata)

    _, _, trained, adapter = train_on(name, path, network_train_unet_only=name == "qwen_image")

    assert adapter.kept.alphas and "have no effect in this model" in caplog.text
    assert not any("base_layer" in key for key in adapter.kept.state_dict)
    saved = adapter.kept.add_to(injection.get_adapter_state_dict(trained), adapter.alphas)
    tensors, _ = convert_to_file_format(*saved, parts, form)
    assert tensors.keys() == original.keys()
    for key, tensor in original.items():
        torch.testing.assert_close(tensors[key].float(), tensor.float(), msg=lambda text, at=key: f"{at}: {text}")


def share_lora_a(state, parts):
    """As sd-scripts trains it: the parts of a fused layer have one lora_A."""
    state = dict(state)
    for part in parts:
        key_map = part.get_key_map()
        for group in key_map.group_modules(key_map.filter_known_modules(part.modules)) if key_map.layout else []:
            keys = [f"{part.name}.{module}.lora_A.weight" for module in group.modules]
            found = [key for key in keys if key in state]
            state |= {key: state[found[0]] for key in found}
    return state


@pytest.mark.parametrize(
    "name, key",
    [
        ("flux", "lora_te2_encoder_block_0_layer_0_SelfAttention_q"),
        ("flux", "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q"),
        ("sd1", "lora_te1_text_model_encoder_layers_0_mlp_fc1"),
        ("sdxl", "text_encoders.clip_g.transformer.text_model.encoder.layers.0.mlp.fc1"),
    ],
)
def test_names_of_text_encoders_in_files_of_onetrainer_are_read(name, key, tmp_path):
    path, model = tmp_path / "lora.safetensors", TINY[name]().pipe
    encoder = model.text_encoder if name == "sd1" else model.text_encoder_2
    module = next(
        each for each, _ in encoder.named_modules() if each and key.replace(".", "_").endswith(each.replace(".", "_"))
    )
    outputs, inputs = encoder.get_submodule(module).weight.shape
    save_file({f"{key}.lora_down.weight": torch.ones(1, inputs), f"{key}.lora_up.weight": torch.ones(outputs, 1)}, path)

    ((_, content, _),) = read(name, base_weights=(str(path),))[3].base_weights

    assert list(content.alphas) == [f"{'text_encoder' if name == 'sd1' else 'text_encoder_2'}.{module}"]


@pytest.mark.slow
@pytest.mark.parametrize("name, source", [("sdxl", "random:sdxl"), ("sd3_medium", "random:sd3")])
def test_the_layers_that_sd_scripts_writes_for_published_models_are_accepted(name, source, tmp_path):
    """With rank 1 and nonzero values in every layer."""
    shapes = json.loads((DATA / f"kohya_keys_{name}.json").read_text())
    tensors = {}
    for key, shape in shapes.items():
        axis = 0 if "lora_down" in key else 1
        small = [
            1 if each == axis and "lora_" in key.rpartition(".lora")[1] else side for each, side in enumerate(shape)
        ]
        tensors[key] = torch.ones(small, dtype=torch.bfloat16)
    path = tmp_path / "kohya.safetensors"
    save_file(tensors, path)
    family = FAMILIES.get(source.split(":")[1])()
    config = AdapterConfig(network_weights=str(path), dim_from_weights=True, network_train_unet_only=False)

    initial = read_initial_weights(config, family, detect_model(source))

    idle = {module.partition(".")[0] for module in initial.idle_layers.alphas}
    assert idle == ({"text_encoder"} if name == "sdxl" else {"transformer"})


def test_layers_outside_of_the_usual_targets_are_trained_with_dim_from_weights(tmp_path):
    """As LyCORIS' default preset adapts them."""
    tiny, _family = TINY["sd1"](), FAMILIES.get("sd1")()
    path, tensors = tmp_path / "lycoris.safetensors", {}
    for module in ("conv_in", "conv_out", "time_embedding.linear_1", "down_blocks.0.resnets.0.conv1"):
        shape = tiny.pipe.unet.get_submodule(module).weight.shape
        name = f"lycoris_{module.replace('.', '_')}"
        tensors[f"{name}.lora_down.weight"] = torch.randn(2, *shape[1:])
        tensors[f"{name}.lora_up.weight"] = torch.randn(shape[0], 2, *[1] * (len(shape) - 2))
    save_file(tensors, path)

    _, _, trained, adapter = train_on("sd1", path)

    assert set(adapter.modules) == {
        *("unet.conv_in", "unet.conv_out", "unet.time_embedding.linear_1", "unet.down_blocks.0.resnets.0.conv1")
    }
    assert all(layer.lora_B["default"].weight.requires_grad for layer in map(trained.get_submodule, adapter.modules))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_tucker_layers_are_trained_by_peft_as_they_are(kind, tmp_path):
    tiny, family = TINY["sd1"](), FAMILIES.get("sd1")()
    path, module = tmp_path / "tucker.safetensors", "down_blocks.0.resnets.0.conv1"
    outputs, inputs, *_ = tiny.pipe.unet.get_submodule(module).weight.shape
    core = (2, 2, 3, 3)
    shapes = {
        "loha": {
            **{f"hada_w{number}_a": (2, outputs) for number in (1, 2)},
            **{f"hada_w{number}_b": (2, inputs) for number in (1, 2)},
            **{f"hada_t{number}": core for number in (1, 2)},
        },
        "lokr": {"lokr_w1": (4, 4), "lokr_w2_a": (2, outputs // 4), "lokr_w2_b": (2, inputs // 4), "lokr_t2": core},
    }[kind]
    name = f"lora_unet_{module.replace('.', '_')}"
    tensors = {f"{name}.{key}": torch.randn(shape) for key, shape in shapes.items()}
    save_file({**tensors, f"{name}.alpha": torch.tensor(1.0)}, path)
    base, _, _, initial = read("sd1", base_weights=(str(path),))
    before = predict(family, base)
    merge_base_weights(base.pipe, initial)

    options = {"network_args": ("factor=4",)} if kind == "lokr" else {}
    tiny, _, _, _ = train_on("sd1", path, network_module=f"networks.{kind}", **options)

    expected = predict(family, base)
    assert (expected - before).abs().max() > 1e-3 * expected.abs().max()
    assert_close(predict(family, tiny), expected)


def test_what_can_only_be_merged_is_refused_for_training_with_its_kind(tmp_path):
    tiny = TINY["sd1"]()
    path, norm = tmp_path / "lycoris.safetensors", "lora_unet_conv_norm_out"
    count = len(tiny.pipe.unet.conv_norm_out.weight)
    save_file({f"{norm}.w_norm": torch.ones(count), f"{norm}.b_norm": torch.ones(count)}, path)
    with pytest.raises(
        ConfigError, match=r"has layers of type norm, which can be merged \(--base_weights\) but not tr"
    ):
        read("sd1", network_weights=str(path), dim_from_weights=True)

    tiny, _, _, initial = read("sd1", base_weights=(str(path),))
    before = {key: each.clone() for key, each in tiny.pipe.unet.conv_norm_out.state_dict().items()}
    merge_base_weights(tiny.pipe, initial)
    for key, tensor in tiny.pipe.unet.conv_norm_out.state_dict().items():
        assert torch.equal(tensor, before[key] + 1)


def test_layers_of_text_encoders_that_are_not_trained_are_reported(tmp_path):
    path = tmp_path / "kohya.safetensors"
    state, alphas, parts = build_random_state("sd1")
    save_file(convert_to_file_format(state, alphas, parts, "kohya")[0], path)
    with pytest.raises(ConfigError, match=r"has layers of text_encoder, .*remove network_train_unet_only"):
        read("sd1", network_weights=str(path), dim_from_weights=True, network_train_unet_only=True)


@pytest.mark.slow
def test_bundled_embeddings_are_kept(tmp_path, caplog, capsys):
    path, key = tmp_path / "onetrainer.safetensors", "bundle_emb.token.clip_l"
    state, alphas, parts = build_random_state("sd1")
    state = {name: each for name, each in state.items() if name.startswith("unet.")}
    alphas = {name: each for name, each in alphas.items() if name.startswith("unet.")}
    embedding = {key: torch.randn(2, 64)}
    save_file(convert_to_file_format(state, alphas, parts, "kohya")[0] | embedding, path)

    assert train_on("sd1", path)[3].kept.embeddings.keys() == {key}
    assert "1 bundled embeddings are not used and not trained" in caplog.text
    for form, is_kept in (("comfy", True), ("diffusers", False)):
        assert run_tool(["convert", str(path), str(tmp_path / f"{form}.safetensors"), "--to", form]) == 0
        assert (key in load_file(tmp_path / f"{form}.safetensors")) == is_kept
        assert (
            "1 bundled embeddings of OneTrainer are " + ("kept" if is_kept else "left out") in capsys.readouterr().out
        )


@pytest.mark.slow
@torch.no_grad()
def test_a_fused_layer_of_lycoris_that_cannot_be_split_is_merged(tmp_path):
    tiny, _family = TINY["flux"](), FAMILIES.get("flux")()
    attention = tiny.pipe.transformer.transformer_blocks[0].attn
    before = torch.cat([getattr(attention, name).weight for name in ("to_q", "to_k", "to_v")]).clone()
    size = before.shape[1]
    first, second = torch.randn(2, 2), torch.randn(3 * size // 2, size // 2)
    name, path = "lora_unet_double_blocks_0_img_attn_qkv", tmp_path / "lokr.safetensors"
    save_file({f"{name}.lokr_w1": first, f"{name}.lokr_w2": second, f"{name}.alpha": torch.tensor(1.0)}, path)

    with pytest.raises(ConfigError, match=f"{name}: .*it can be merged"):
        read("flux", network_weights=str(path), network_module="networks.lokr", dim_from_weights=True)
    save_file({f"{name}.lokr_w1": first, f"{name}.lokr_w2": second[:-2]}, tmp_path / "small.safetensors")
    with pytest.raises(ConfigError, match=f"1 of 1 layers have other sizes than this model: {name} has "):
        read("flux", base_weights=(str(tmp_path / "small.safetensors"),))
    tiny, _, _, initial = read("flux", base_weights=(str(path),))
    merge_base_weights(tiny.pipe, initial)

    attention = tiny.pipe.transformer.transformer_blocks[0].attn
    after = torch.cat([getattr(attention, name).weight for name in ("to_q", "to_k", "to_v")])
    torch.testing.assert_close(after - before, torch.kron(first, second), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("sdxl", marks=pytest.mark.slow), "sd3"])
def test_a_run_saves_the_idle_layers_of_its_network_weights(name, tmp_path):
    """With a learning rate near 0 all tensors of the file are those of network_weights."""
    path = tmp_path / "kohya.safetensors"
    state, alphas, parts = build_random_state(name, with_t5=False)
    state = share_lora_a({key: 0.1 * each for key, each in state.items()}, parts)
    original, metadata = convert_to_file_format(state, dict.fromkeys(alphas, 2.0), parts, "kohya")
    embeddings = {"bundle_emb.token.clip_l": torch.randn(2, 8)}
    save_file(original | embeddings, path, metadata)
    data = write_images(tmp_path / "data", {(64, 64): 2})

    run_family(
        *("--pretrained_model_name_or_path", f"random:{name}:tiny", "--dataset_config", str(data)),
        *("--network_weights", str(path), "--dim_from_weights", "--learning_rate", "1e-12", "--save_format", "kohya"),
        "--no-network_train_unet_only",
        *("--max_train_steps", "1", "--output_dir", str(tmp_path / "out"), "--output_name", "x"),
    )

    found = load_file(tmp_path / "out" / "x.safetensors")
    assert found.keys() == original.keys() | embeddings.keys()
    for key, tensor in (original | embeddings).items():
        torch.testing.assert_close(found[key].float(), tensor.float(), msg=lambda text, at=key: f"{at}: {text}")
