"""Full training (``--train full``): equal in one process and with DDP, resumed exactly, and read by diffusers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from problem_lines import format_lines
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from tiny_pipelines import get_tiny_sd1_folder
from training_runs import even_dataset, train

from library.config import parse_config
from library.errors import CrashError
from library.models.component_files import write_weights
from library.training.checkpoint_dir import remove_leftover_files
from library.training.output_lock import has_final_output
from library.training.preflight import validate_output_files

__all__ = ["even_dataset"]  # a fixture

SETTINGS = (
    "--train full --max_train_steps 6 --learning_rate 0.03 --optimizer_type SGD --max_grad_norm 0 --seed 3"
    " --train_text_encoder"
).split()


def train_full(dataset: Path, folder: Path, ranks: int, *flags: str) -> Path:
    """Train in full on ``ranks`` ranks with four images in each step; return the folder of the model."""
    split = {1: ("2", "2"), 2: ("1", "2")}[ranks]
    batch = ("--train_batch_size", split[0], "--gradient_accumulation_steps", split[1])
    run_on_ranks(ranks, train, *SETTINGS, *batch, "--dataset_config", str(dataset), "--output_dir", str(folder), *flags)
    return folder / "lora"


def read_weights(model: Path) -> dict[str, torch.Tensor]:
    """Read the weights of all components of a model."""
    found = {}
    for path in sorted(model.rglob("*.safetensors")):
        found |= {f"{path.parent.name}.{name}": tensor for name, tensor in load_file(path).items()}
    return found


def compute_update(model: Path, base: Path) -> dict[str, torch.Tensor]:
    """Compute by how much the weights differ from those of the base model."""
    before = read_weights(base)
    return {name: value - before[name] for name, value in read_weights(model).items()}


def predict(folder: Path) -> torch.Tensor:
    pipe = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    tokens = pipe.tokenizer("a b", padding="max_length", truncation=True, max_length=77, return_tensors="pt").input_ids
    with torch.no_grad():
        states = pipe.text_encoder(tokens)[0]
        noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
        return pipe.unet(noise, torch.tensor(500), states).sample


@pytest.mark.slow
def test_full_training_gives_the_same_model_with_ddp_and_is_opened_by_diffusers(even_dataset, tmp_path):
    base = Path(get_tiny_sd1_folder())
    one = train_full(even_dataset, tmp_path / "one", 1)
    two = train_full(even_dataset, tmp_path / "two", 2)

    updates, others = compute_update(one, base), compute_update(two, base)
    changed = {name.partition(".")[0] for name, update in updates.items() if update.any()}
    assert changed == {"unet", "text_encoder"}, "the VAE stays as it is"
    difference = max(float((updates[name] - others[name]).abs().max()) for name in updates)
    assert difference < 1e-5 * max(float(weight.abs().max()) for weight in read_weights(one).values())
    assert difference < 1e-4 * max(float(update.abs().max()) for update in updates.values())
    assert not torch.equal(predict(one), predict(base))
    assert torch.allclose(predict(one), predict(two), atol=1e-5)


@pytest.mark.slow
def test_weights_that_get_no_gradient_stay_as_they_are_with_ddp_as_well(even_dataset, tmp_path):
    """The last norm of SDXL's first text encoder is computed, and its result is not used."""
    flags = "--pretrained_model_name_or_path random:sdxl:tiny --optimizer_type AdamW --learning_rate 1e-3".split()
    models = [read_weights(train_full(even_dataset, tmp_path / str(ranks), ranks, *flags)) for ranks in (1, 2)]

    assert models[0].keys() == models[1].keys()
    idle = [name for name in models[0] if name.startswith("text_encoder.") and "final_layer_norm" in name]
    assert len(idle) == 2 and all(torch.equal(models[0][name], models[1][name]) for name in idle)
    assert all(bool((models[0][name] == float(name.endswith("weight"))).all()) for name in idle)
    assert max(float((models[0][name] - models[1][name]).abs().max()) for name in models[0]) < 1e-2


@pytest.mark.slow
def test_a_killed_full_training_resumes_to_the_bit(even_dataset, tmp_path):
    flags = "--optimizer_type AdamW --learning_rate 1e-3 --ema_decay 0.9 --save_every_n_steps 3 --save_state --lr_scheduler cosine".split()
    whole = train_full(even_dataset, tmp_path / "whole", 1, *flags)
    shutil.copytree(whole.parent, tmp_path / "killed", ignore=shutil.ignore_patterns("lora", "lora-ema", "lora-state"))

    resumed = train_full(even_dataset, tmp_path / "killed", 1, *flags, "--auto_resume")

    for name in ("lora", "lora-ema"):
        expected, actual = read_weights(whole.parent / name), read_weights(resumed.parent / name)
        assert expected.keys() == actual.keys()
        assert [key for key in expected if not torch.equal(expected[key], actual[key])] == []
    assert not torch.equal(
        read_weights(resumed)["unet.conv_in.weight"], read_weights(resumed.parent / "lora-ema")["unet.conv_in.weight"]
    )


def train_with_failing_step(step: int, *flags: str) -> None:
    """Train until a step fails, which leaves a checkpoint of the steps before; then resume."""
    from library.training.task import DiffusionTask

    call = DiffusionTask.__call__

    def fail(self: DiffusionTask, batch: object, current: int) -> torch.Tensor:
        if current == step:
            raise RuntimeError("the device is lost")
        return call(self, batch, current)

    DiffusionTask.__call__ = fail
    with pytest.raises(CrashError, match=f"the checkpoint after step {step} is in "):
        train(*flags)
    DiffusionTask.__call__ = call
    train(*flags, "--auto_resume")


@pytest.mark.slow
def test_the_steps_before_a_crash_are_saved_and_resumed_to_the_bit(even_dataset, tmp_path):
    flags = (
        *"--optimizer_type AdamW --learning_rate 1e-3 --train_batch_size 4 --dataset_config".split(),
        str(even_dataset),
    )
    for name, work in (("whole", (train,)), ("crashed", (train_with_failing_step, 3))):
        run_on_ranks(1, *work, *SETTINGS, *flags, "--output_dir", str(tmp_path / name))
    whole, crashed = (read_weights(tmp_path / name / "lora") for name in ("whole", "crashed"))
    assert whole.keys() == crashed.keys() and all(torch.equal(whole[key], crashed[key]) for key in whole)


def test_a_folder_is_put_back_if_the_run_was_killed_before_its_successor_had_the_name(tmp_path):
    (tmp_path / ".lora.7.old").mkdir()
    (tmp_path / ".lora.7.old" / "model_index.json").write_text("{}")
    (tmp_path / ".lora.7.part").mkdir()
    assert not has_final_output(tmp_path, "lora")
    remove_leftover_files(tmp_path, "lora")
    assert [path.name for path in tmp_path.iterdir()] == ["lora"] and has_final_output(tmp_path, "lora")
    (tmp_path / ".lora.8.old").mkdir()
    remove_leftover_files(tmp_path, "lora")
    assert [path.name for path in tmp_path.iterdir()] == ["lora"]


@pytest.mark.slow
def test_only_weights_that_match_a_pattern_are_trained_and_old_folders_are_removed(even_dataset, tmp_path):
    flags = "--train_modules attn2 --no-train_text_encoder --save_every_n_steps 2 --save_last_n_steps 1".split()
    model = train_full(even_dataset, tmp_path, 1, *flags)

    update = compute_update(model, Path(get_tiny_sd1_folder()))
    changed = [name for name, value in update.items() if value.any()]
    assert changed and all(name.startswith("unet.") and "attn2" in name for name in changed)
    assert not (tmp_path / "lora-step00000002").exists() and (tmp_path / "lora-step00000004").is_dir()
    metadata = json.loads((tmp_path / "lora" / "model_index.json").read_text())
    assert metadata["_class_name"] == "StableDiffusionPipeline"
    parsed = parse_config([*SETTINGS, "--dataset_config", str(even_dataset), "--output_dir", str(tmp_path)]).config
    problems = validate_output_files(parsed.save, parsed.state, parsed.train, has_ema=False)
    assert [problem.fix for problem in problems] == ["add --overwrite, or --output_name lora-2"]


def test_weights_are_written_in_shards_with_an_index_and_cast(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer.{number}": torch.randn(8, 16, generator=generator) for number in range(5)}
    tensors["steps"] = torch.arange(3)

    paths = write_weights(tmp_path, "model", tensors, torch.bfloat16, {"format": "pt"}, max_shard_bytes=600)

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(paths) == 3 and {path.name for path in paths} == set(index["weight_map"].values())
    read = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert read.keys() == tensors.keys() == index["weight_map"].keys()
    assert all(
        torch.equal(read[name], tensor.to(torch.bfloat16)) for name, tensor in tensors.items() if name != "steps"
    )
    assert torch.equal(read["steps"], tensors["steps"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--quantize_base fp8", "quantize_base"),
        ("--blocks_to_swap 2", "blocks_to_swap"),
        ("--blocks_to_swap 2 --fused_backward_pass --torch_compile", "blocks_to_swap"),
        ("--pp_size 2 --tp_size 2", "pp_size"),
        ("--pp_size 2 --mixed_precision fp16", "mixed_precision"),
        ("--device_map balanced", "device_map"),
        ("--fsdp --fsdp_offload_params --mixed_precision fp16", "mixed_precision"),
        ("--network_weights pyproject.toml", "network_weights"),
        ("--training_adapter pyproject.toml", "training_adapter"),
        ("--mixed_precision fp8", "mixed_precision"),
        ("--train_text_encoder --stop_text_encoder_training 5", "stop_text_encoder_training"),
        ("--train_modules (", "train_modules"),
        (
            f"--train_text_encoder --learning_rate_te 1e-6 --learning_rate 0 --block_lr {','.join(['1e-5'] * 23)}",
            "learning_rate",
        ),
        ("--blank_prompt_preservation_multiplier 1", "blank_prompt_preservation_multiplier"),
    ],
)
def test_what_full_training_does_not_support_is_refused_before_anything_is_loaded(flags, named):
    parsed = parse_config(["--dataset_config", "pyproject.toml", "--train", "full", *flags.split()])
    lines = [line for line in format_lines(parsed.problems) if line.startswith((f"--{named}: ", f"--{named} "))]
    assert len(lines) == 1, format_lines(parsed.problems)
    assert parse_config(["--dataset_config", "pyproject.toml", "--train", "full"]).problems == []


def test_options_of_full_fine_tuning_in_run_files_of_sd_scripts_are_refused_or_named(tmp_path):
    """Beside a LoRA they are ignored, as in sd-scripts; with ``train full`` they would change the result."""
    path = tmp_path / "run.toml"
    path.write_text(
        "train = 'full'\nno_token_padding = true\nmem_eff_save = true\nsave_model_as = 'diffusers'\n", "utf-8"
    )
    parsed = parse_config(["--dataset_config", "pyproject.toml", "--config_file", str(path)])
    assert format_lines(parsed.problems) == [f"{path}:2: no_token_padding: not supported with train full; remove it"]
    assert any("mem_eff_save" in str(place) for place, _ in parsed.unused)


def test_learning_rates_of_single_text_encoders_mean_what_they_mean_in_sd_scripts():
    base = ["--dataset_config", "pyproject.toml", "--train", "full", "--learning_rate", "1e-5"]
    both = parse_config([*base, "--train_text_encoder", "--learning_rate_te1", "3e-6"]).config
    assert both.optim.text_encoder_lr == (3e-6, 1e-5) and both.adapter.trains_text_encoders
    twice = parse_config([*base, "--train_text_encoder", "--learning_rate_te1", "3e-6", "--text_encoder_lr", "1e-6"])
    assert any("--learning_rate_te1: contradicts text_encoder_lr" in line for line in format_lines(twice.problems))
    alone = parse_config([*base, "--learning_rate_te1", "3e-6"]).config
    assert alone.optim.text_encoder_lr == () and not alone.adapter.trains_text_encoders
