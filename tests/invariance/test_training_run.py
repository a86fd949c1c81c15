"""A whole run: the same LoRA however the work is spread, in a file that diffusers loads, and pictures beside it."""

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
def uneven(tmp_path_factory):
    """Three buckets with remainders."""
    return write_images(tmp_path_factory.mktemp("uneven"), {(96, 64): 5, (64, 96): 3, (64, 64): 2})


@pytest.fixture(scope="module")
def reference(even_dataset, tmp_path_factory):
    return train_adapter(tmp_path_factory.mktemp("reference"), 1, 4, 1, "--optimizer_type", "SGD", dataset=even_dataset)


@pytest.mark.parametrize(("ranks", "batch", "accumulation"), [(1, 1, 4), (1, 2, 2), (2, 2, 1), (2, 1, 2), (4, 1, 1)])
def test_four_pictures_a_step_train_alike_however_they_are_split(
    ranks, batch, accumulation, even_dataset, reference, tmp_path
):
    # Plain gradient descent: Adam divides by the gradient's size and would hide a wrong scale.
    found = train_adapter(tmp_path, ranks, batch, accumulation, "--optimizer_type", "SGD", dataset=even_dataset)

    assert max_relative_difference(reference, found) < 1e-4
    assert max(float(tensor.abs().max()) for key, tensor in found.items() if "lora_up" in key) > 1e-4


def test_noise_and_losses_of_every_kind_train_alike_on_two_ranks(even_dataset, tmp_path):
    flags = [
        "--optimizer_type",
        "SGD",
        "--noise_offset",
        "0.1",
        "--noise_offset_random_strength",
        "--adaptive_noise_scale",
        "0.1",
        "--multires_noise_iterations",
        "3",
        "--ip_noise_gamma",
        "0.2",
        "--ip_noise_gamma_random_strength",
        "--loss_type",
        "huber",
        "--v_parameterization",
        "--zero_terminal_snr",
        "--min_snr_gamma",
        "5",
        "--min_timestep",
        "100",
    ]
    one = train_adapter(tmp_path, 1, 4, 1, *flags, dataset=even_dataset)

    assert max_relative_difference(one, train_adapter(tmp_path, 2, 1, 2, *flags, dataset=even_dataset)) < 1e-4


def test_short_batches_weigh_by_their_pictures_on_any_number_of_ranks(uneven, tmp_path):
    one = train_adapter(tmp_path, 1, 4, 1, "--optimizer_type", "SGD", dataset=uneven)
    two = train_adapter(tmp_path, 2, 2, 1, "--optimizer_type", "SGD", dataset=uneven)
    four = train_adapter(tmp_path, 4, 1, 1, "--optimizer_type", "SGD", dataset=uneven)

    assert max_relative_difference(one, two) < 1e-4
    assert max_relative_difference(one, four) < 1e-4


def test_the_same_settings_give_the_same_file_to_the_bit_and_another_seed_another(even_dataset, tmp_path):
    first = train_adapter(tmp_path / "a", 1, 2, 1, dataset=even_dataset)
    again = train_adapter(tmp_path / "b", 1, 2, 1, dataset=even_dataset)
    other = train_adapter(tmp_path / "c", 1, 2, 1, "--seed", "43", dataset=even_dataset)

    assert max_relative_difference(first, again) == 0.0
    assert max_relative_difference(first, other) > 1e-3


def test_gradient_checkpointing_changes_nothing_but_rounding(even_dataset, reference, tmp_path):
    found = train_adapter(
        tmp_path, 1, 4, 1, "--optimizer_type", "SGD", "--gradient_checkpointing", dataset=even_dataset
    )

    assert max_relative_difference(reference, found) < 1e-4


def test_bf16_trains_the_same_adapters_in_float32(even_dataset, reference, tmp_path):
    found = train_adapter(
        tmp_path, 1, 4, 1, "--optimizer_type", "SGD", "--mixed_precision", "bf16", dataset=even_dataset
    )

    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert 1e-6 < max_relative_difference(reference, found) < 0.3


def test_a_network_of_another_kind_than_the_launcher_asked_for_is_never_taken(even_dataset, tmp_path):
    with pytest.raises(AssertionError, match="fp16"):
        train_adapter(tmp_path, 1, 1, 1, "--mixed_precision", "fp16", dataset=even_dataset)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The main job as users start it, only shorter."""
    folder = tmp_path_factory.mktemp("demo")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        str(ROOT / "train_lora.py"),
        "--dataset_config",
        str(ROOT / "dataset_configs/demo.toml"),
        "--config_file",
        str(ROOT / "dataset_configs/demo_run.toml"),
        "--max_train_steps",
        "12",
        "--save_every_n_steps",
        "5",
        "--output_dir",
        str(folder / "out"),
        "--logging_dir",
        str(folder / "logs"),
        "--sample_prompts",
        write_prompts(folder),
        "--sample_every_n_steps",
        "12",
    ]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONWARNINGS": "default"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


def test_the_run_says_what_it_does_and_where_the_files_are(demo):
    folder, said = demo

    assert "Traceback" not in said
    assert "using the built-in demo model" in said
    assert "training 12/12" in said
    assert f"LoRA file: {folder / 'out' / 'demo.safetensors'}" in said
    assert f"previews: {folder / 'out' / 'sample'}" in said
    sheet = folder / "out" / "demo.before_after.png"
    assert f"previews side by side, before and after: {sheet}" in said and sheet.is_file()


def test_the_files_have_the_names_of_sd_scripts(demo):
    folder, _ = demo

    assert sorted(path.name for path in (folder / "out").glob("*.safetensors")) == [
        "demo-step00000005.safetensors",
        "demo-step00000010.safetensors",
        "demo.safetensors",
    ]
    pictures_drawn = sorted((folder / "out" / "sample").glob("demo_000012_*.png"))
    assert len(pictures_drawn) == 2
    assert [Image.open(path).size for path in pictures_drawn] == [(64, 96), (96, 64)]


def test_diffusers_loads_the_file_and_it_changes_the_picture(demo):
    from diffusers import StableDiffusionPipeline

    from library.demo import BUILT_IN_MODEL_DIR

    folder, _ = demo
    pipe = StableDiffusionPipeline.from_pretrained(BUILT_IN_MODEL_DIR)
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a red circle", "num_inference_steps": 2, "width": 64, "height": 64, "output_type": "pt"}
    before = pipe(**call, generator=torch.Generator().manual_seed(0)).images
    pipe.load_lora_weights(str(folder / "out" / "demo.safetensors"))
    after = pipe(**call, generator=torch.Generator().manual_seed(0)).images

    active = [name for name, _ in pipe.unet.named_parameters() if "lora_B" in name]
    assert len(active) * 3 == len(load_file(folder / "out" / "demo.safetensors"))
    assert float((torch.as_tensor(before) - torch.as_tensor(after)).abs().max()) > 1e-4


def test_the_metadata_tells_the_run_and_no_paths(demo):
    folder, _ = demo
    with safe_open(folder / "out" / "demo-step00000005.safetensors", "pt") as file:
        metadata = file.metadata()

    assert metadata["ss_steps"] == "5" and metadata["ss_max_train_steps"] == "12"
    assert metadata["ss_base_model_version"] == "sd_v1"
    assert not [key for key, value in metadata.items() if str(folder) in value or str(ROOT) in value]


def test_the_tracker_has_every_step(demo):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = demo
    (run,) = (folder / "logs").iterdir()
    events = EventAccumulator(str(next(run.rglob("events.*")).parent))
    events.Reload()

    assert [event.step for event in events.Scalars("loss/current")] == list(range(1, 13))


def test_the_plan_tool_says_what_the_run_does():
    command = [
        sys.executable,
        "-m",
        "library",
        "plan",
        "--dataset_config",
        "dataset_configs/demo.toml",
        "--max_train_epochs",
        "3",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    assert "16" in done.stdout


@pytest.mark.quick
def test_dry_run_writes_nothing_and_imports_no_model(tmp_path):
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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert done.stdout.splitlines()[-1] == "0 False False", done.stdout + done.stderr
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_written_is_known_before_training(tmp_path, even_dataset):
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
    ids=["whole", "by blocks"],
)
def test_a_compiled_model_trains_the_same_and_is_saved_under_the_same_names(flags, even_dataset, reference, tmp_path):
    found = train_adapter(
        tmp_path,
        1,
        4,
        1,
        "--optimizer_type",
        "SGD",
        "--torch_compile",
        "--dynamo_backend",
        "aot_eager",
        *flags,
        dataset=even_dataset,
    )

    assert max_relative_difference(reference, found) < 1e-4


def failing_preview(*flags: str) -> str:
    from library.models.families.sd1_sd2 import StableDiffusion1

    def draw(*_, **__):
        raise RuntimeError("out of memory, let us say")

    StableDiffusion1.generate_image = draw
    return train(*flags)


def test_a_preview_that_fails_does_not_end_the_run(even_dataset, tmp_path):
    (file,) = run_on_ranks(
        1,
        failing_preview,
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


def failing_write(*flags: str) -> str:
    from library.adapters import lora_file

    def write(*_, **__):
        raise OSError("no space left on device")

    lora_file.write_adapter_file = write
    return train(*flags)


def test_a_file_that_cannot_be_written_ends_the_run_on_every_rank(even_dataset, tmp_path):
    with pytest.raises(AssertionError, match="no space left on device"):
        run_on_ranks(
            2,
            failing_write,
            "--dataset_config",
            str(even_dataset),
            "--output_dir",
            str(tmp_path),
            "--max_train_steps",
            "2",
            seconds=60,
        )


def test_a_log_folder_that_cannot_be_made_stops_every_rank_with_one_line(even_dataset, tmp_path):
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


def test_an_argument_that_a_tracker_does_not_take_is_a_mistake_of_the_user(even_dataset, tmp_path):
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


def test_a_warm_up_longer_than_the_epochs_of_a_run_is_refused(even_dataset, tmp_path):
    with pytest.raises(AssertionError, match="5000 warmup steps, but the run has 12 steps"):
        run_on_ranks(
            1,
            train,
            "--dataset_config",
            str(even_dataset),
            "--output_dir",
            str(tmp_path),
            "--max_train_epochs",
            "1",
            "--lr_scheduler",
            "constant_with_warmup",
            "--lr_warmup_steps",
            "5000",
        )


def test_epochs_decide_length_and_names_of_files_and_pictures(even_dataset, tmp_path):
    run_on_ranks(
        1,
        train,
        "--dataset_config",
        str(even_dataset),
        "--output_dir",
        str(tmp_path),
        "--max_train_epochs",
        "3",
        "--train_batch_size",
        "4",
        "--save_every_n_epochs",
        "2",
        "--sample_prompts",
        write_prompts(tmp_path),
        "--sample_every_n_epochs",
        "3",
        "--sample_at_first",
        "--sample_every_n_steps",
        "1",
    )

    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "lora-000002.safetensors",
        "lora.safetensors",
    ]
    drawn = sorted(path.name.rsplit("_", 2)[0] for path in (tmp_path / "sample").glob("*.png"))
    assert drawn == ["lora_000000_00", "lora_000000_01", "lora_e000003_00", "lora_e000003_01"]


def test_a_lora_file_may_be_read_by_whom_other_files_may_be_read_by(even_dataset, tmp_path):
    train_adapter(tmp_path, 1, 4, 1, dataset=even_dataset)
    (tmp_path / "other").touch()

    assert (tmp_path / "r1b4a1.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_nothing_private_goes_to_trackers(even_dataset, tmp_path):
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
        "--log_config",
        "--training_comment",
        "secret_comment",
        "--caption_prefix",
        "/home/alice/secret_prefix",
        "--wandb_run_name",
        "a_run_of_mine",
        "--log_tracker_name",
        "a_project_of_mine",
        "--max_train_steps",
        "2",
        "--max_data_loader_n_workers",
        "0",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"WANDB_MODE": "offline"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr

    # Some releases of accelerate start an offline run a second time, for its settings.
    sent = b"".join(record.read_bytes() for record in (tmp_path / "logs").rglob("*.wandb"))
    assert b"a_run_of_mine" in sent and b"a_project_of_mine" in sent and b"learning_rate" in sent
    for private in (b"secret_folder", b"secret_comment", b"secret_prefix", b"--training_comment", b"dataset.toml"):
        assert private not in sent, private
