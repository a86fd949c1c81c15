"""Complete runs: the same LoRA for any number of ranks and micro-batches, a file that diffusers loads, and previews."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from rank_processes import run_on_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from training_runs import even_dataset, max_relative_difference, train, train_adapter, write_images, write_prompts

__all__ = ["even_dataset"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def uneven_dataset(tmp_path_factory):
    """The dataset file of three buckets that do not divide evenly into steps."""
    return write_images(tmp_path_factory.mktemp("uneven"), {(96, 64): 5, (64, 96): 3, (64, 64): 2})


@pytest.fixture(scope="module")
def reference(even_dataset, tmp_path_factory):
    return train_adapter(tmp_path_factory.mktemp("reference"), 1, 4, 1, "--optimizer_type", "SGD", dataset=even_dataset)


@pytest.mark.parametrize(("ranks", "batch", "accumulation"), [(1, 1, 4), (1, 2, 2), (2, 2, 1), (2, 1, 2), (4, 1, 1)])
def test_every_split_of_four_images_per_step_trains_the_same_lora(
    ranks, batch, accumulation, even_dataset, reference, tmp_path
):
    # SGD, because Adam divides by the gradient's size and would hide a wrong scale.
    adapter = train_adapter(tmp_path, ranks, batch, accumulation, "--optimizer_type", "SGD", dataset=even_dataset)

    assert max_relative_difference(reference, adapter) < 1e-4
    assert max(float(tensor.abs().max()) for key, tensor in adapter.items() if "lora_up" in key) > 1e-4


def test_noise_and_loss_options_train_equally_on_two_ranks(even_dataset, tmp_path):
    flags = (
        "--optimizer_type SGD --noise_offset 0.1 --noise_offset_random_strength --adaptive_noise_scale 0.1 "
        "--multires_noise_iterations 3 --ip_noise_gamma 0.2 --ip_noise_gamma_random_strength --loss_type huber "
        "--v_parameterization --zero_terminal_snr --min_snr_gamma 5 --min_timestep 100"
    ).split()
    one_rank = train_adapter(tmp_path, 1, 4, 1, *flags, dataset=even_dataset)

    assert max_relative_difference(one_rank, train_adapter(tmp_path, 2, 1, 2, *flags, dataset=even_dataset)) < 1e-4


def test_incomplete_batches_train_equally_on_any_number_of_ranks(uneven_dataset, tmp_path):
    one_rank = train_adapter(tmp_path, 1, 4, 1, "--optimizer_type", "SGD", dataset=uneven_dataset)
    two_ranks = train_adapter(tmp_path, 2, 2, 1, "--optimizer_type", "SGD", dataset=uneven_dataset)
    four_ranks = train_adapter(tmp_path, 4, 1, 1, "--optimizer_type", "SGD", dataset=uneven_dataset)

    assert max_relative_difference(one_rank, two_ranks) < 1e-4
    assert max_relative_difference(one_rank, four_ranks) < 1e-4


def test_runs_with_the_same_seed_are_bitwise_equal(even_dataset, tmp_path):
    first = train_adapter(tmp_path / "a", 1, 2, 1, dataset=even_dataset)
    second = train_adapter(tmp_path / "b", 1, 2, 1, dataset=even_dataset)
    other_seed = train_adapter(tmp_path / "c", 1, 2, 1, "--seed", "43", dataset=even_dataset)

    assert max_relative_difference(first, second) == 0.0
    assert max_relative_difference(first, other_seed) > 1e-3


def test_gradient_checkpointing_changes_only_rounding(even_dataset, reference, tmp_path):
    adapter = train_adapter(
        tmp_path, 1, 4, 1, "--optimizer_type", "SGD", "--gradient_checkpointing", dataset=even_dataset
    )

    assert max_relative_difference(reference, adapter) < 1e-4


def test_bf16_mixed_precision_saves_float32_adapters_close_to_float32_training(even_dataset, reference, tmp_path):
    adapter = train_adapter(
        tmp_path, 1, 4, 1, "--optimizer_type", "SGD", "--mixed_precision", "bf16", dataset=even_dataset
    )

    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert 1e-6 < max_relative_difference(reference, adapter) < 0.3


def test_mixed_precision_fp16_on_a_cpu_is_refused(even_dataset, tmp_path):
    with pytest.raises(AssertionError, match="fp16"):
        train_adapter(tmp_path, 1, 1, 1, "--mixed_precision", "fp16", dataset=even_dataset)


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """The demo run with accelerate launch, but shorter: its folder and log."""
    folder = tmp_path_factory.mktemp("demo")
    command = [
        sys.executable,
        *(
            "-m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
        ).split(),
        str(ROOT / "train_lora.py"),
        "--dataset_config",
        str(ROOT / "dataset_configs/demo.toml"),
        "--config_file",
        str(ROOT / "dataset_configs/demo_run.toml"),
        *"--max_train_steps 12 --save_every_n_steps 5".split(),
        "--output_dir",
        str(folder / "out"),
        "--logging_dir",
        str(folder / "logs"),
        "--sample_prompts",
        write_prompts(folder),
        "--sample_every_n_steps",
        "12",
    ]
    result = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONWARNINGS": "default"}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return folder, result.stderr


def test_the_log_names_model_steps_and_output_files(demo_run):
    folder, log = demo_run

    assert "Traceback" not in log
    assert "using the built-in demo model" in log
    assert "training 12/12" in log
    assert f"LoRA file: {folder / 'out' / 'demo.safetensors'}" in log
    assert f"previews: {folder / 'out' / 'sample'}" in log
    sheet = folder / "out" / "demo.before_after.png"
    assert f"previews side by side, before and after: {sheet}" in log and sheet.is_file()


def test_file_names_are_those_of_sd_scripts(demo_run):
    folder, _ = demo_run

    assert sorted(path.name for path in (folder / "out").glob("*.safetensors")) == [
        "demo-step00000005.safetensors",
        "demo-step00000010.safetensors",
        "demo.safetensors",
    ]
    previews = sorted((folder / "out" / "sample").glob("demo_000012_*.png"))
    assert len(previews) == 2
    assert [Image.open(path).size for path in previews] == [(64, 96), (96, 64)]


def test_diffusers_loads_the_file_and_it_changes_the_image(demo_run):
    from diffusers import StableDiffusionPipeline

    from library.demo import BUILT_IN_MODEL_DIR

    folder, _ = demo_run
    pipe = StableDiffusionPipeline.from_pretrained(BUILT_IN_MODEL_DIR)
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a red circle", "num_inference_steps": 2, "width": 64, "height": 64, "output_type": "pt"}
    before = pipe(**call, generator=torch.Generator().manual_seed(0)).images
    pipe.load_lora_weights(str(folder / "out" / "demo.safetensors"))
    after = pipe(**call, generator=torch.Generator().manual_seed(0)).images

    active = [name for name, _ in pipe.unet.named_parameters() if "lora_B" in name]
    assert len(active) * 3 == len(load_file(folder / "out" / "demo.safetensors"))
    assert float((torch.as_tensor(before) - torch.as_tensor(after)).abs().max()) > 1e-4


def test_the_metadata_describes_the_run_without_paths(demo_run):
    folder, _ = demo_run
    with safe_open(folder / "out" / "demo-step00000005.safetensors", "pt") as file:
        metadata = file.metadata()

    assert metadata["ss_steps"] == "5" and metadata["ss_max_train_steps"] == "12"
    assert metadata["ss_base_model_version"] == "sd_v1"
    assert not [key for key, value in metadata.items() if str(folder) in value or str(ROOT) in value]


def test_the_tracker_logs_every_step(demo_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = demo_run
    (run,) = (folder / "logs").iterdir()
    events = EventAccumulator(str(next(run.rglob("events.*")).parent))
    events.Reload()

    assert [event.step for event in events.Scalars("loss/current")] == list(range(1, 13))


def test_the_plan_tool_prints_the_plan_of_a_run():
    command = [
        sys.executable,
        *"-m library plan --dataset_config dataset_configs/demo.toml --max_train_epochs 3".split(),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert result.returncode == 0, result.stderr
    assert "16" in result.stdout


@pytest.mark.quick
def test_dry_run_writes_nothing_and_does_not_import_diffusers(tmp_path):
    script = (
        "import sys; from library.cli import main; code = main(sys.argv[1:]); "
        "print(code, 'diffusers' in sys.modules, 'accelerate' in sys.modules)"
    )
    command = [
        sys.executable,
        "-c",
        script,
        "--dataset_config",
        str(ROOT / "dataset_configs/demo.toml"),
        "--dry_run",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert result.stdout.splitlines()[-1] == "0 False False", result.stdout + result.stderr
    assert not (tmp_path / "out").exists()


def test_an_unwritable_output_folder_is_reported_before_training(tmp_path, even_dataset):
    (tmp_path / "out").write_text("a file is in the way")

    with pytest.raises(
        AssertionError, match=r"--output_dir: cannot write to .*\n--compile_cache_dir: cannot write to "
    ):
        run_on_ranks(
            1,
            train,
            "--dataset_config",
            str(even_dataset),
            "--output_dir",
            str(tmp_path / "out"),
            "--torch_compile",
            "--compile_cache_dir",
            str(tmp_path / "out" / "compiled"),
        )


@pytest.mark.parametrize(
    "flags",
    [pytest.param(("--no-dynamo_use_regional_compilation",), marks=pytest.mark.slow), ()],
    ids=["whole model", "regional"],
)
def test_torch_compile_trains_the_same_lora_with_the_same_keys(flags, even_dataset, reference, tmp_path):
    adapter = train_adapter(
        tmp_path,
        1,
        4,
        1,
        *"--optimizer_type SGD --torch_compile --dynamo_backend aot_eager".split(),
        *flags,
        dataset=even_dataset,
    )

    assert max_relative_difference(reference, adapter) < 1e-4


def train_with_failing_preview(*flags: str) -> str:
    from library.models.families.sd1_sd2 import StableDiffusion1

    def raise_error(*_, **__):
        raise RuntimeError("preview failed")

    StableDiffusion1.generate_frames = raise_error
    return train(*flags)


def test_a_failing_preview_does_not_end_the_run(even_dataset, tmp_path):
    (file,) = run_on_ranks(
        1,
        train_with_failing_preview,
        "--dataset_config",
        str(even_dataset),
        "--output_dir",
        str(tmp_path),
        "--max_train_steps",
        "2",
        "--sample_prompts",
        write_prompts(tmp_path),
        "--sample_every_n_steps",
        "1",
    )

    assert Path(file).is_file()


def train_with_failing_save(*flags: str) -> str:
    from library.adapters import file_writer

    def write(*_, **__):
        raise OSError("no space left on device")

    file_writer.write_adapter_file = write
    return train(*flags)


def test_a_failed_save_ends_the_run_on_every_rank(even_dataset, tmp_path):
    with pytest.raises(AssertionError, match="no space left on device"):
        run_on_ranks(
            2,
            train_with_failing_save,
            "--dataset_config",
            str(even_dataset),
            "--output_dir",
            str(tmp_path),
            "--max_train_steps",
            "2",
            seconds=60,
        )


def test_an_uncreatable_logging_dir_stops_every_rank_with_one_line(even_dataset, tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(AssertionError, match=r"ConfigError: --logging_dir .*file: cannot create the directory"):
        run_on_ranks(
            2,
            train,
            "--dataset_config",
            str(even_dataset),
            "--output_dir",
            str(tmp_path),
            "--logging_dir",
            str(tmp_path / "file"),
            seconds=60,
        )


def test_an_unknown_tracker_argument_is_a_user_error(even_dataset, tmp_path):
    (tmp_path / "tracker.toml").write_text("[tensorboard]\nmax_queu = 3\n")

    with pytest.raises(AssertionError, match=r"UserError: --log_with: the tracker could not start: .*max_queu"):
        run_on_ranks(
            1,
            train,
            "--dataset_config",
            str(even_dataset),
            "--output_dir",
            str(tmp_path),
            "--logging_dir",
            str(tmp_path / "logs"),
            "--log_tracker_config",
            str(tmp_path / "tracker.toml"),
        )


def test_max_train_epochs_sets_the_length_and_the_file_names(even_dataset, tmp_path):
    run_on_ranks(
        1,
        train,
        "--dataset_config",
        str(even_dataset),
        "--output_dir",
        str(tmp_path),
        *"--max_train_epochs 3 --train_batch_size 4 --save_every_n_epochs 2".split(),
        "--sample_prompts",
        write_prompts(tmp_path),
        *"--sample_every_n_epochs 3 --sample_at_first --sample_every_n_steps 1".split(),
    )

    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "lora-000002.safetensors",
        "lora.safetensors",
    ]
    previews = sorted(path.name.rsplit("_", 2)[0] for path in (tmp_path / "sample").glob("*.png"))
    assert previews == ["lora_000000_00", "lora_000000_01", "lora_e000003_00", "lora_e000003_01"]


def test_a_lora_file_has_the_permissions_of_other_new_files(even_dataset, tmp_path):
    train_adapter(tmp_path, 1, 4, 1, dataset=even_dataset)
    (tmp_path / "other").touch()

    assert (tmp_path / "r1b4a1.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_trackers_get_no_paths_comments_or_prefixes(even_dataset, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "train_lora.py"),
        "--dataset_config",
        str(even_dataset),
        "--output_dir",
        str(tmp_path / "secret_folder"),
        "--log_with",
        "wandb",
        "--logging_dir",
        str(tmp_path / "logs"),
        *(
            "--log_config --training_comment secret_comment --caption_prefix /home/alice/secret_prefix "
            "--wandb_run_name a_run_of_mine --log_tracker_name a_project_of_mine --max_train_steps 2 "
            "--max_data_loader_n_workers 0"
        ).split(),
    ]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"WANDB_MODE": "offline"}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr

    # Some releases of accelerate start an offline run a second time, for its settings.
    logged = b"".join(record.read_bytes() for record in (tmp_path / "logs").rglob("*.wandb"))
    assert b"a_run_of_mine" in logged and b"a_project_of_mine" in logged and b"learning_rate" in logged
    for private in (b"secret_folder", b"secret_comment", b"secret_prefix", b"--training_comment", b"dataset.toml"):
        assert private not in logged, private
