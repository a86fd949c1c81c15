"""Full training of a model in one file is saved as one file: equal to the folder of diffusers, the rest as it was."""

from pathlib import Path

import original_checkpoints
import pytest
import torch
from model_layouts import save_tensors, save_tokenizers
from problem_lines import format_lines, format_unused
from rank_processes import run_on_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_pipelines import TINY, get_tiny_sd1_folder
from training_runs import even_dataset, train

from library.config import parse_config
from library.config.schema import ModelConfig
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES

__all__ = ["even_dataset"]  # a fixture
SETTINGS = (
    "--train full --max_train_steps 2 --learning_rate 0.03 --optimizer_type SGD --max_grad_norm 0 --seed 3".split()
)


def build_base(name: str, folder: Path) -> tuple[str, ...]:
    """Write a tiny model as one file; return the options that name it."""
    pipe = TINY[name]().pipe
    path = save_tensors(original_checkpoints.build_checkpoint(name, pipe), folder / "base.safetensors")
    tokenizers = save_tokenizers(name, pipe, folder / "tokenizers")
    return "--pretrained_model_name_or_path", path, "--tokenizer_cache_dir", tokenizers


def load_weights(name: str, model: Path, options: tuple[str, ...]) -> dict[str, torch.Tensor]:
    config = ModelConfig(str(model), tokenizer_cache_dir=options[3])
    family = FAMILIES.get(name)(config)
    pipe = family.load(detect_model(config), torch.float32)
    modules = {part: getattr(pipe, part) for part in family.facts.components}
    return {
        f"{part}.{key}": tensor
        for part, module in modules.items()
        if isinstance(module, torch.nn.Module)
        for key, tensor in module.state_dict().items()
    }


def train_full(dataset: Path, folder: Path, ranks: int, *flags: str) -> Path:
    split = {1: ("2", "2"), 2: ("1", "2")}[ranks]
    batch = ("--train_batch_size", split[0], "--gradient_accumulation_steps", split[1])
    run_on_ranks(ranks, train, *SETTINGS, *batch, "--dataset_config", str(dataset), "--output_dir", str(folder), *flags)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"), [("sd1", "--train_text_encoder"), ("sdxl", "--train_text_encoder"), ("sd3", ""), ("z_image", "")]
)
def test_the_file_is_the_folder_of_diffusers_and_what_is_not_trained_is_unchanged(name, more, even_dataset, tmp_path):
    options = build_base(name, tmp_path)
    one = train_full(even_dataset, tmp_path / "one", 1, *options, *more.split())
    other = train_full(even_dataset, tmp_path / "other", 1, *options, *more.split(), "--save_model_as", "diffusers")

    assert (other / "lora" / "model_index.json").exists() and not (one / "lora").exists()
    file, folder = load_weights(name, one / "lora.safetensors", options), load_weights(name, other / "lora", options)
    assert file.keys() == folder.keys()
    assert [key for key in file if not torch.equal(file[key], folder[key])] == []

    before, after = load_file(options[1]), load_file(one / "lora.safetensors")
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key].to(before[key].dtype))}
    prefixes = {
        "sd1": ("model.diffusion_model.", "cond_stage_model."),
        "sdxl": ("model.diffusion_model.", "conditioner."),
    }
    assert changed and all(key.startswith(prefixes.get(name, ("model.diffusion_model.",))) for key in changed)
    assert all(any(key.startswith(prefix) for key in changed) for prefix in prefixes.get(name, ()))
    with safe_open(one / "lora.safetensors", "pt") as opened:
        assert opened.metadata()["ss_output_name"] == "lora" and opened.metadata()["modelspec.architecture"]


@pytest.mark.slow
def test_the_file_of_sharded_training_is_that_of_one_process_and_has_the_precision_that_is_asked_for(
    even_dataset, tmp_path
):
    options = (*build_base("sd1", tmp_path), "--save_precision", "fp16", "--ema_decay", "0.5")
    one = train_full(even_dataset, tmp_path / "one", 1, *options)
    two = train_full(even_dataset, tmp_path / "two", 2, *options, "--fsdp")
    for name in ("lora", "lora-ema"):
        files = [load_file(folder / f"{name}.safetensors") for folder in (one, two)]
        assert files[0].keys() == files[1].keys()
        assert {tensor.dtype for tensor in files[0].values() if tensor.is_floating_point()} == {torch.float16}
        assert max(float((files[0][key].float() - files[1][key].float()).abs().max()) for key in files[0]) < 2e-3
    assert not list(two.glob(".*.part"))


@pytest.mark.slow
def test_a_lora_is_merged_into_the_saved_file_and_encoders_of_other_files_are_left_alone(even_dataset, tmp_path):
    """SD3 with its text encoders in files of their own, into which ``base_weights`` could be merged as well."""
    pipe = TINY["sd3"]().pipe
    tensors = original_checkpoints.build_checkpoint("sd3", pipe)
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith("text_encoders.")}
    assert len(kept) < len(tensors)
    options = ["--pretrained_model_name_or_path", save_tensors(kept, tmp_path / "base.safetensors")]
    options += ["--tokenizer_cache_dir", save_tokenizers("sd3", pipe, tmp_path / "tokenizers")]
    for option, name in (("clip_l", "text_encoder"), ("clip_g", "text_encoder_2"), ("t5xxl", "text_encoder_3")):
        encoder = original_checkpoints.convert_text_encoder(getattr(pipe, name))
        options += [f"--{option}", save_tensors(encoder, tmp_path / f"{option}.safetensors")]
    lora = "--max_train_steps 2 --learning_rate 0.1 --network_dim 2 --network_train_unet_only".split()
    run_on_ranks(1, train, *options, *lora, "--dataset_config", str(even_dataset), "--output_dir", str(tmp_path / "l"))
    base_weights = ("--base_weights", str(tmp_path / "l" / "lora.safetensors"), "--learning_rate", "1e-12")
    saved = load_file(train_full(even_dataset, tmp_path / "full", 1, *options, *base_weights) / "lora.safetensors")
    assert saved.keys() == kept.keys()
    assert max(float((saved[key] - kept[key]).abs().max()) for key in kept) > 1e-4, "the LoRA is merged"


@pytest.mark.slow
def test_a_folder_cannot_become_one_file_which_is_said_before_the_model_is_loaded(even_dataset, tmp_path):
    flags = ("--pretrained_model_name_or_path", get_tiny_sd1_folder(), "--save_model_as", "safetensors")
    with pytest.raises(ConfigError, match=r"save_model_as.*the base model is no single file"):
        train(*SETTINGS, "--dataset_config", str(even_dataset), "--output_dir", str(tmp_path), *flags)


def test_names_of_formats_are_those_of_sd_scripts():
    base = ["--dataset_config", "pyproject.toml", "--save_model_as"]
    full = parse_config([*base, "diffusers_safetensors", "--train", "full"])
    assert full.problems == [] and full.config.save.save_model_as == "diffusers"
    lora = parse_config([*base, "safetensors"])
    assert lora.problems == [] and lora.unused == ()
    assert "LoRA files are safetensors" in str(format_unused(parse_config([*base, "diffusers"]).unused))
    assert any("save_model_as" in line for line in format_lines(parse_config([*base, "ckpt"]).problems))
