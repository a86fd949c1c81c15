"""Runs with ``--control``: one result with every strategy, from caches, and after a resume; previews; rejections."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_runs import train_and_count_graphs
from problem_lines import format_lines, format_unused
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library.config import parse_config
from library.dataset.validate import validate_dataset_config
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.models.sampling import use_eval_mode
from library.models.validate_options import validate_model_options
from library.parallel.compile import MAX_GRAPHS_PER_SIZE
from library.training import run as run_module
from library.training.loop import train as train_loop
from library.training.preflight import RunFacts, check_run_settings
from library.training.validation_loss import compute_losses_at_quantile

MODEL = ("--pretrained_model_name_or_path", "random:flux:tiny", "--control")
OMINI, CHANNELS = (*MODEL, "omini"), (*MODEL, "channels")
SGD = ("--optimizer_type", "SGD", "--learning_rate", "0.1", "--network_alpha", "4", "--network_dim", "4")

ACCUMULATE = ("--gradient_accumulation_steps", "2")


@pytest.fixture
def write_data(tmp_path):
    """Write a dataset of two buckets, with a condition image made from each picture."""

    path = write_images(tmp_path, {(96, 64): 8, (64, 96): 4})
    text = path.read_text()

    def write(kind="canny"):
        path.write_text(f"{text}\ncontrol_from_image = '{kind}'\n")
        return path

    return write


def run(data, folder, name, *flags, ranks=1, model=OMINI):
    words = (*model, *SGD, "--dataset_config", str(data), "--output_dir", str(folder), "--output_name", name)
    words += ("--max_train_steps", "4", "--seed", "3", *flags)
    if ranks == 1:
        train(*words)
    else:
        run_on_ranks(ranks, train, *words)
    return load_file(folder / f"{name}.safetensors")


def test_strategies_caches_and_checkpointing_train_the_adapter_of_one_process(write_data, tmp_path):
    data = write_data()
    one = run(data, tmp_path, "one", "--train_batch_size", "4")
    assert len(one) == 2 * 22 and all(name.startswith("transformer.") for name in one)
    more = ("--gradient_checkpointing", "--blocks_to_swap", "1")
    assert max_relative_difference(one, run(data, tmp_path, "less", "--train_batch_size", "4", *more)) < 1e-5
    for name, flags in {"ddp": (), "fsdp": ("--fsdp", "--gradient_checkpointing")}.items():
        two = run(data, tmp_path, name, "--train_batch_size", "2", *flags, ranks=2)
        assert max_relative_difference(one, two) < 1e-5


def test_blocks_that_switch_lora_off_and_on_are_compiled_like_others(write_data, tmp_path):
    data = ("--dataset_config", str(write_data()), *OMINI, *SGD, "--max_train_steps", "3")
    results = []
    for name, flags in {"eager": (), "compiled": ("--torch_compile", "--dynamo_backend", "eager")}.items():
        words = (*data, "--output_dir", str(tmp_path), "--output_name", name, *flags)
        results.append(run_on_ranks(1, train_and_count_graphs, *words)[0])
    assert max_relative_difference(*(load_file(result.lora) for result in results)) < 1e-5
    assert results[1].recompile_count == 0 and 0 < max(results[1].graph_counts.values()) <= 2 * MAX_GRAPHS_PER_SIZE


def test_a_condition_in_channels_is_trained_by_tensor_and_pipeline_parallelism(write_data, tmp_path):
    data = write_data()
    one = run(data, tmp_path, "one", "--train_batch_size", "4", model=CHANNELS)
    for name, flags in {"tp": ("4", "--tp_size", "2"), "pp": ("2", "--pp_size", "2", *ACCUMULATE)}.items():
        two = run(data, tmp_path, name, "--train_batch_size", *flags, ranks=2, model=CHANNELS)
        assert max_relative_difference(one, two) < 1e-5


def test_cached_condition_images_train_the_same_adapter_and_those_of_another_kind_another_one(write_data, tmp_path):
    runs = {}
    for kind in ("canny", "colorization"):
        data = write_data(kind)
        runs[kind] = run(data, tmp_path, kind)
        # The gradients of keys nearly cancel, which magnifies the rounding of other batches in the VAE.
        assert max_relative_difference(runs[kind], run(data, tmp_path, "disk", "--cache_latents_to_disk")) < 1e-3
    assert max_relative_difference(*runs.values()) > 1e-2


def test_a_resumed_run_draws_the_holes_of_the_run_that_went_through(write_data, tmp_path):
    data = write_data("inpainting")
    through = run(data, tmp_path, "through", "--flip_aug")
    flags = ("--flip_aug", "--save_state", "--save_every_n_steps", "2")
    run(data, tmp_path, "half", *flags)
    state = tmp_path / "half-step00000002-state"
    resumed = run(data, tmp_path, "resumed", "--flip_aug", "--resume", str(state))
    assert all(torch.equal(through[name], resumed[name]) for name in through)


def test_the_demo_learns_to_use_its_condition(tmp_path, monkeypatch):
    """``make demo-control`` with fewer steps: the loss is lower with its own condition than with that of another."""
    runs = []
    monkeypatch.setattr(run_module, "train", lambda run: (runs.append(run), train_loop(run)))
    settings = "--dataset_config dataset_configs/demo_control.toml --config_file dataset_configs/demo_control_run.toml"
    words = (*settings.split(), "--max_train_steps", "32", "--no-sample_at_first", "--output_dir", str(tmp_path))
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    run_module.run_training(parse_config([*words, "--quiet", "--max_data_loader_n_workers", "0"]).require_valid())
    task = runs[0].task
    (pixels,) = runs[0].step_batches.micro_batches
    with use_eval_mode(runs[0].model), torch.no_grad():
        own = task.encode(pixels, 0)
        other = replace(own, control_latents=tuple(each.roll(1, 0) for each in own.control_latents))
        for quantile, gain in {4: 1.02, 8: 1.2}.items():
            loss, with_other = (compute_losses_at_quantile(task, batch, quantile).mean() for batch in (own, other))
            assert gain * loss < with_other, quantile


@pytest.mark.quick
def test_what_control_does_not_support_is_refused(write_data, tmp_path):
    data = ("--dataset_config", str(write_data("inpainting")))

    def list_problems(*words, model=OMINI):
        parsed = parse_config([*data, *words, *model])
        config = parsed.config
        problems = [*format_lines(parsed.problems), *format_lines(validate_dataset_config(config.data, config.cache))]
        return "\n".join([*problems, *format_lines(validate_model_options(config, {}))])

    plain = OMINI[:2]
    assert list_problems() == ""
    assert "inpainting cannot be used with cache_latents" in list_problems("--cache_latents")
    assert "control_from_image: FLUX.1 takes no control images" in list_problems(model=plain)
    assert "FLUX.1 with --control, " in list_problems(model=plain)
    (unused,) = format_unused(parse_config([*data, "--control_scale", "0.5", *plain]).unused)
    assert unused[0] == "--control_scale" and "control" in unused[1]
    assert "apply_t5_attn_mask: does not apply to FLUX.1 with control omini" in list_problems("--apply_t5_attn_mask")
    others = list_problems(model=("--pretrained_model_name_or_path", "random:sd3:tiny", "--control", "omini"))
    assert "control: omini is not supported for Stable Diffusion 3, only for FLUX.1" in others
    write_data("depth")
    assert "control_from_image: no depth model is part of this program" in list_problems()
    write_data("cany")
    assert "got 'cany'; did you mean canny?" in list_problems()
    config = parse_config([*data, *OMINI, "--cp_size", "2"]).config
    detected = detect_model(config.model)
    with pytest.raises(ConfigError, match="tokens of its own kind"):
        check_run_settings(config, RunFacts(FAMILIES.get(detected.family)(), detected))
