"""Runs with ``--training_adapter``: training as on a base model with it merged, previews and LoRA files without it."""

import pytest
import torch
from adapter_states import build_random_state
from PIL import Image, ImageChops
from problem_lines import format_lines
from rank_processes import run_on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from training_runs import max_relative_difference, train, write_images

from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.config import parse_config
from library.config.schema import AdapterConfig, ModelConfig, TrainConfig
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.models.training_adapter import bypass_training_adapter
from library.parallel.frozen_base import quantize_and_offload_base
from library.training.network_weights import add_training_adapter, merge_base_weights, read_initial_weights

NAME = "z_image"
LORA = "--network_dim 4 --network_alpha 4 --optimizer_type SGD --learning_rate 0.5 --seed 3".split()


def save_training_adapter(path, kind="lora", seed=5, part="transformer.", scale=0.3):
    state, alphas, components = build_random_state(NAME, kind, seed=seed)
    state = {key: scale * tensor for key, tensor in state.items() if key.startswith(part)}
    alphas = {key: alpha for key, alpha in alphas.items() if key.startswith(part)}
    save_file(convert_to_file_format(state, alphas, components, "comfy")[0], path)
    return str(path)


def read(folder, **options):
    family = FAMILIES.get(NAME)()
    model = detect_model(ModelConfig(pretrained_model_name_or_path=str(folder)))
    return family, model, read_initial_weights(AdapterConfig(**options), family, model)


def run(folder, name, *flags, model, ranks=1):
    words = ["--pretrained_model_name_or_path", str(model), "--dataset_config", str(folder / "dataset.toml")]
    words += ["--output_dir", str(folder), "--output_name", name, "--max_train_steps", "4", *LORA, *flags]
    run_on_ranks(ranks, train, *words) if ranks > 1 else train(*words)
    return load_file(folder / f"{name}.safetensors")


@pytest.fixture
def files(tmp_path):
    """A model, the same with the training adapter merged, the adapter, and a dataset."""
    write_images(tmp_path, {(96, 64): 8, (64, 96): 4})
    base, merged, path = tmp_path / "base", tmp_path / "merged", save_training_adapter(tmp_path / "adapter.safetensors")
    FAMILIES.get(NAME)().load(f"random:{NAME}:tiny", torch.float32).save_pretrained(base)
    family, model, initial = read(base, base_weights=(path,))
    pipe = family.load(model, torch.float32)
    merge_base_weights(pipe, initial)
    pipe.save_pretrained(merged)
    return base, merged, path


def list_previews(folder, name):
    paths = sorted((folder / "sample").glob(f"{name}_0*.png"))
    assert paths
    return [Image.open(path).convert("RGB") for path in paths]


def is_equal(one, other):
    return all(ImageChops.difference(*pair).getbbox() is None for pair in zip(one, other, strict=True))


def test_training_is_that_on_a_merged_base_and_previews_and_files_are_without_the_adapter(files, tmp_path, caplog):
    base, merged, path = files
    flags = ("--sample_prompts", "a --w 64 --h 64 --s 2 --d 1 --l 3", "--sample_every_n_steps", "4", "--save_state")
    adapter = ("--training_adapter", path)
    trained = run(tmp_path, "own", *adapter, *flags, "--save_every_n_steps", "2", model=base)
    assert "is distilled to few steps" not in caplog.text
    assert max_relative_difference(trained, run(tmp_path, "merged", *flags, model=merged)) < 1e-5
    assert "Z-Image as loaded is distilled to few steps" in caplog.text
    with safe_open(tmp_path / "own.safetensors", "pt") as opened:
        assert opened.metadata()["ss_training_adapter"] == "adapter.safetensors"

    start = ("--network_weights", str(tmp_path / "own.safetensors"), "--max_train_steps", "1")
    plain = run(tmp_path, "plain", *start, *flags, "--sample_at_first", model=base)
    assert plain.keys() == trained.keys() and max_relative_difference(plain, trained) > 1e-3
    assert is_equal(list_previews(tmp_path, "own"), list_previews(tmp_path, "plain"))
    assert not is_equal(list_previews(tmp_path, "own"), list_previews(tmp_path, "merged"))

    resume = ("--resume", str(tmp_path / "own-step00000002-state"))
    again = run(tmp_path, "again", *adapter, *resume, model=base)
    assert all(torch.equal(trained[name], again[name]) for name in trained)
    other = ("--training_adapter", save_training_adapter(tmp_path / "other.safetensors", seed=6))
    for changed in (other, ()):
        with pytest.raises(ConfigError, match="--resume: the training adapter changed"):
            run(tmp_path, "refused", *changed, *resume, model=base)


def test_tensor_parallelism_shards_the_adapter_with_its_layers(files, tmp_path):
    base, _, path = files
    adapter = ("--training_adapter", path, "--train_batch_size")
    one = run(tmp_path, "one", *adapter, "4", model=base)
    two = run(tmp_path, "two", *adapter, "4", "--tp_size", "2", model=base, ranks=2)
    assert max_relative_difference(one, two) < 1e-5


@torch.no_grad()
def test_a_quantized_and_offloaded_base_is_unchanged_without_the_adapter(files):
    base, _, path = files
    weights = []
    for options in ({}, {"training_adapter": path}):
        family, model, initial = read(base, **options)
        pipe = family.load(model, torch.float32)
        add_training_adapter(pipe, family, initial)
        host = torch.device("cpu")
        quantize_and_offload_base(
            pipe.transformer.requires_grad_(False),
            (host, host),
            ModelConfig(quantize_base="int8"),
            TrainConfig(blocks_to_swap=1),
        )
        draw = torch.Generator().manual_seed(1)
        layers = [pipe.transformer.get_submodule(f"layers.{index}.attention.to_q") for index in range(2)]
        inputs = torch.randn(3, layers[0].in_features, generator=draw)
        with bypass_training_adapter(pipe.transformer):
            without = [layer(inputs) for layer in layers]
        weights.append((without, [layer(inputs) for layer in layers]))
    (plain, same), (without, added) = weights
    for each in range(2):
        assert torch.equal(plain[each], same[each]) and torch.equal(plain[each], without[each])
        assert (added[each] - plain[each]).abs().max() > 1e-2


@pytest.mark.quick
def test_a_file_that_cannot_be_a_training_adapter_is_refused(tmp_path):
    problems = format_lines(parse_config(["--training_adapter", str(tmp_path / "none.safetensors")]).problems)
    assert any("training_adapter" in line and "no such file" in line for line in problems)
    boft = ["--network_module", "lycoris.kohya", "--network_args", "algo=boft"]
    assert "base weights alone" in str(format_lines(parse_config([*boft, "--training_adapter", __file__]).problems))
    loha = save_training_adapter(tmp_path / "loha.safetensors", "loha")
    with pytest.raises(ConfigError, match=r"--training_adapter: .*loha.safetensors: has layers of type loha; a train"):
        read(f"random:{NAME}:tiny", training_adapter=loha)
    with pytest.raises(ConfigError, match=r"--training_adapter: .*adapter.safetensors: "):
        family = FAMILIES.get("flux")()
        path = save_training_adapter(tmp_path / "adapter.safetensors")
        model = detect_model(ModelConfig(pretrained_model_name_or_path="random:flux:tiny"))
        read_initial_weights(AdapterConfig(training_adapter=path), family, model)
