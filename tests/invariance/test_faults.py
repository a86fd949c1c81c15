"""Out of memory, a full disk, an unexpected error, a killed process: reported once, with a checkpoint to resume from."""

import contextlib
import io
import os
import re
import signal
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from launched_runs import start_run, wait_for_exit, wait_until_training
from rank_processes import run_on_ranks
from resumed_runs import read_metrics
from safetensors.torch import load_file
from tiny_pipelines import get_tiny_sd1_folder
from training_runs import max_relative_difference, train, write_images

from library.config import parse_config
from library.distributed.step_phases import OutOfMemory, record_phase
from library.distributed.watchdog import ProcessIdentity
from library.training.failure_handling import FailureHandler

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tuple(
    (
        "--max_train_steps 13 --network_dim 2 --learning_rate 0.5 --optimizer_type SGD --gradient_accumulation_steps 2 "
        "--seed 5 --mixed_precision no"
    ).split()
)
STEP = 11
"""The step that fails: one step after the losses were read."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("faults"), {(96, 64): 8})


@pytest.fixture(scope="module")
def uninterrupted_runs(dataset, tmp_path_factory) -> dict[int, Path]:
    """The folders of uninterrupted runs, by number of ranks."""
    folders = {ranks: tmp_path_factory.mktemp("whole") for ranks in (1, 2)}
    for ranks, folder in folders.items():
        run_on_ranks(ranks, train, *build_flags(dataset, folder, ranks))
    return folders


def build_flags(dataset: Path, folder: Path, ranks: int = 1, *more: str) -> tuple[str, ...]:
    return (
        "--dataset_config",
        str(dataset),
        "--output_dir",
        str(folder),
        "--train_batch_size",
        str(4 // ranks),
        *SETTINGS,
        *more,
    )


def run_main(*flags: str) -> tuple[int, str]:
    """Run the command line in this process; return its exit code and stderr."""
    from library.cli import main

    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = main(
            [
                "--network_train_unet_only",
                "--pretrained_model_name_or_path",
                get_tiny_sd1_folder(),
                *flags,
                "--max_data_loader_n_workers",
                "0",
            ]
        )
    return code, stderr.getvalue()


def get_rank() -> int:
    return int(os.environ.get("RANK", "0"))


# ---- out of memory


def run_out_of_memory(phase: str, failing_rank: int, max_images: int, *flags: str) -> tuple[int, str]:
    """In ``STEP``, one rank is out of memory for more than ``fits`` images; 0: without gradient checkpointing."""
    from accelerate import Accelerator

    from library.optim import optimizers
    from library.training.task import DiffusionTask

    call, encode, backward, current_batch = DiffusionTask.__call__, DiffusionTask.encode, Accelerator.backward, []

    def fail_in_phase(name: str) -> None:
        if name != phase or not current_batch:
            return
        step, size, number, is_checkpointed = current_batch
        if (
            get_rank() == failing_rank
            and step == STEP
            and number == 2
            and size > max_images
            and not (max_images == 0 and is_checkpointed)
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")

    def call_and_fail(self, pixels, step):
        number = current_batch[2] % 2 + 1 if current_batch and current_batch[0] == step else 1
        current_batch[:] = [step, len(pixels), number, self.pipe.unet.is_gradient_checkpointing]
        losses = call(self, pixels, step)
        fail_in_phase("forward")
        return losses

    def encode_and_fail(self, pixels, step):
        fail_in_phase("encode")
        return encode(self, pixels, step)

    def backward_and_fail(self, loss, **more):
        backward(self, loss, **more)
        fail_in_phase("backward")

    def build_failing_optimizer(*arguments, **named):
        optimizer = build_optimizer(*arguments, **named)
        step = optimizer.step
        optimizer.step = lambda *_, **__: fail_in_phase("optimizer") or step()
        return optimizer

    build_optimizer = optimizers.build_optimizer
    DiffusionTask.__call__, DiffusionTask.encode, Accelerator.backward = (
        call_and_fail,
        encode_and_fail,
        backward_and_fail,
    )
    optimizers.build_optimizer = build_failing_optimizer
    return run_main(*flags)


@pytest.mark.parametrize(("ranks", "phase", "max_images"), [(1, "backward", 1), (1, "forward", 0), (2, "backward", 1)])
def test_oom_recovery_trains_the_same_lora(dataset, uninterrupted_runs, tmp_path, ranks, phase, max_images):
    results = run_on_ranks(
        ranks,
        run_out_of_memory,
        phase,
        ranks - 1,
        max_images,
        *build_flags(dataset, tmp_path, ranks, "--on_oom", "recover"),
    )
    assert [code for code, _ in results] == [0] * ranks, results
    stderr = results[0][1]
    assert f"step {STEP + 1}: out of memory" in stderr and "splitting micro-batches into 2 parts" in stderr
    assert ("enabling gradient_checkpointing" in stderr) == (max_images == 0)
    actual, expected = (load_file(folder / "lora.safetensors") for folder in (tmp_path, uninterrupted_runs[ranks]))
    assert max_relative_difference(expected, actual) < 1e-6
    for expected_metrics, actual_metrics in zip(
        read_metrics(uninterrupted_runs[ranks]), read_metrics(tmp_path), strict=True
    ):
        assert expected_metrics == pytest.approx(actual_metrics, rel=1e-5)


@pytest.mark.parametrize(("ranks", "phase"), [(1, "encode"), (1, "optimizer"), (2, "backward")])
def test_oom_without_recovery_reports_phase_images_and_suggestions(dataset, uninterrupted_runs, tmp_path, ranks, phase):
    results = run_on_ranks(ranks, run_out_of_memory, phase, ranks - 1, 0, *build_flags(dataset, tmp_path, ranks))
    stderr = results[-1][1]
    assert results[-1][0] == 2 and "CUDA out of memory. Tried to allocate 2.00 GiB." in stderr
    where = {
        "encode": "while encoding images and captions",
        "backward": "in the backward pass",
        "optimizer": "in the optimizer step",
    }[phase]
    assert f"out of memory in step {STEP + 1} {where}" in stderr
    if phase != "optimizer":
        assert re.search(rf"with {4 // ranks} images of 80x48: images/\d\d\.png, ", stderr)
    assert "Try next: --cache_latents, which frees the VAE" in stderr and "Traceback" not in stderr
    assert ("--on_oom recover" in stderr) == (phase != "optimizer")
    if ranks == 2:
        assert results[0][0] == 1 and "ended" not in results[0][1] and "stopped" not in results[0][1]
    assert_resume_gives_equal_weights(dataset, uninterrupted_runs, tmp_path, ranks)


def save_after_oom(*flags: str) -> tuple[int, list[int]]:
    """Run out of memory; return the activations and gradients that are alive when the checkpoint is saved."""
    from library.training.checkpoint import SaveCheckpoint
    from library.training.task import DiffusionTask

    call, save, step_tensors, alive = DiffusionTask.__call__, SaveCheckpoint.save_on_this_rank, [], []

    def call_and_fail(self, pixels, step):
        losses = call(self, pixels, step)
        if step == STEP:
            step_tensors.append(weakref.ref(losses))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return losses

    def save_and_count(self, run, *arguments):
        alive.append(sum(each() is not None for each in step_tensors))
        alive.append(sum(parameter.grad is not None for parameter in run.parameters))
        return save(self, run, *arguments)

    DiffusionTask.__call__, SaveCheckpoint.save_on_this_rank = call_and_fail, save_and_count
    code, _ = run_main(*flags)
    return code, alive


@pytest.mark.parametrize("options", [(), ("--deepspeed", "--zero_stage", "2")])
def test_tensors_of_the_failed_step_are_freed_before_the_emergency_checkpoint(dataset, tmp_path, options):
    """It copies the optimizer state on a device that has no memory left."""
    ((code, alive),) = run_on_ranks(
        1, save_after_oom, *build_flags(dataset, tmp_path), "--optimizer_type", "AdamW", *options
    )
    assert (code, alive) == (2, [0, 0])
    assert list(tmp_path.glob("lora-step*-state"))


def run_out_of_memory_in_a_stage(*flags: str) -> tuple[int, str]:
    """Run out of memory in the second stage of a pipeline."""
    from library.training.task import DiffusionTask

    call = DiffusionTask.__call__

    def call_and_fail(self, pixels, step):
        losses = call(self, pixels, step)
        if step == STEP and get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return losses

    DiffusionTask.__call__ = call_and_fail
    return run_main(*flags)


def test_out_of_memory_in_a_pipeline_is_told_as_such(dataset, tmp_path):
    """torch raises it again as ``[Stage 1] failed to run forward``."""
    model = ("--pretrained_model_name_or_path", "random:flux:tiny", "--pp_size", "2")
    results = run_on_ranks(2, run_out_of_memory_in_a_stage, *build_flags(dataset, tmp_path), *model)
    assert 2 in [code for code, _ in results], results
    assert any("out of memory in step 12" in stderr and "Try next" in stderr for _, stderr in results), results


def test_an_out_of_memory_message_survives_a_device_that_fails_again():
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    first, second = RuntimeError("CUDA error: out of memory"), RuntimeError("a second")
    first.__cause__, second.__cause__ = second, first
    run = SimpleNamespace(
        step_batches=None,
        parameters=[],
        state=SimpleNamespace(step=STEP),
        strategy=SimpleNamespace(empty_device_cache=fail),
    )
    handler = FailureHandler.__new__(FailureHandler)
    handler._is_handled, handler.config = False, parse_config([]).config
    handler.peers = SimpleNamespace(elect_reporter=lambda: True)

    message = str(handler.build_final_error(first, run, object()))

    assert message.startswith(f"out of memory in step {STEP + 1} (CUDA error: out of memory)")
    assert f"the checkpoint after step {STEP} cannot be saved: RuntimeError: CUDA error: an illegal" in message


def assert_resume_gives_equal_weights(
    dataset: Path, uninterrupted_runs: dict[int, Path], folder: Path, ranks: int
) -> None:
    """Resume from the saved checkpoint; the weights equal those of the uninterrupted run."""
    assert (folder / f"lora-step{STEP - 1:08d}-state").is_dir() or list(folder.glob("lora-step*-state"))
    run_on_ranks(ranks, train, *build_flags(dataset, folder, ranks, "--auto_resume"))
    actual, expected = (load_file(path / "lora.safetensors") for path in (folder, uninterrupted_runs[ranks]))
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_the_run_ends_when_oom_recovery_has_no_option_left(dataset, tmp_path):
    ((code, stderr),) = run_on_ranks(
        1, run_out_of_memory, "forward", 0, -1, *build_flags(dataset, tmp_path, 1, "--on_oom", "recover")
    )
    assert code == 2 and "enabling gradient_checkpointing" in stderr, stderr
    assert f"out of memory in step {STEP + 1} in the forward pass, with 1 image of 80x48" in stderr
    assert list(tmp_path.glob("lora-step*-state"))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "Failed to CUDA calloc async\nCuda failure 2 'out of memory'",
    ],
)
def test_oom_errors_of_device_libraries_are_recognized(message):
    with pytest.raises(OutOfMemory), record_phase("forward"):
        raise RuntimeError(message)


def test_an_error_without_a_message_is_not_an_oom_error():
    with pytest.raises(RuntimeError, match="3"), record_phase("forward"):
        raise RuntimeError(3)


def test_oom_of_host_memory_is_recognized():
    with pytest.raises(OutOfMemory, match="DefaultCPUAllocator"), record_phase("backward"), record_phase("forward"):
        torch.empty(2**50)


# ---- unexpected errors


def run_with_error(failing_rank: int, *flags: str) -> tuple[int, str]:
    from library.training.task import DiffusionTask

    call = DiffusionTask.__call__

    def call_and_fail(self, pixels, step):
        if get_rank() == failing_rank and step == STEP:
            raise ValueError("first line\nsecond line")
        return call(self, pixels, step)

    DiffusionTask.__call__ = call_and_fail
    return run_main(*flags)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_unexpected_error_is_reported_once_with_step_images_and_traceback_file(
    dataset, uninterrupted_runs, tmp_path, ranks
):
    failing_rank = ranks - 1
    results = run_on_ranks(ranks, run_with_error, failing_rank, *build_flags(dataset, tmp_path, ranks))
    assert [code for code, _ in results] == [1] * ranks
    stderr, other_stderr = (
        results[failing_rank][1],
        "".join(text for number, (_, text) in enumerate(results) if number != failing_rank),
    )
    message = stderr[stderr.index("train_lora: ended") :].splitlines()
    assert message[0] == (
        "train_lora: ended by an error." if ranks == 1 else "train_lora: ended on rank 1 by an error."
    )
    assert message[1] == "  ValueError: first line"
    assert message[2].startswith(f"  in step {STEP + 1} of 13, with images of 80x48: images/")
    assert message[3].startswith("  the checkpoint after step ") and "to resume, add --auto_resume" in message[3]
    report = tmp_path / f"lora.error-rank{failing_rank}.txt"
    assert message[4] == f"  the traceback is in {report}. If the error recurs, report it together with that file"
    assert "second line" in report.read_text("utf-8") and "Traceback" in report.read_text("utf-8")
    assert "Traceback" not in stderr + other_stderr and "ended" not in other_stderr
    assert_resume_gives_equal_weights(dataset, uninterrupted_runs, tmp_path, ranks)


def run_with_error_in_parsing(folder: str, *flags: str) -> tuple[int, str]:
    import library.training.preflight

    os.chdir(folder)
    library.training.preflight.parse_config = lambda argv: {}["nothing"]
    return run_main(*flags)


def test_an_error_before_the_configuration_is_parsed_is_reported(tmp_path):
    ((code, stderr),) = run_on_ranks(1, run_with_error_in_parsing, str(tmp_path))
    assert code == 1 and stderr.splitlines()[:2] == ["train_lora: ended by an error.", "  KeyError: 'nothing'"]
    assert "Traceback" not in stderr and "parse_config" in (tmp_path / "train_lora.error.txt").read_text("utf-8")


def ignore_sigterm_and_return_pid() -> int:
    from library.distributed.signals import StopSignals

    with StopSignals() as signals:
        signals.ignore_sigterm()
    os.kill(os.getpid(), signal.SIGTERM)
    return os.getpid()


def test_sigterm_is_ignored_while_an_error_is_reported():
    assert run_on_ranks(1, ignore_sigterm_and_return_pid)[0] != os.getpid()


def test_a_killed_rank_is_reported_by_the_others_which_exit(dataset, tmp_path):
    settings = ["--pretrained_model_name_or_path", get_tiny_sd1_folder(), *build_flags(dataset, tmp_path, 2)]
    run = start_run(2, settings, tmp_path, "--max_train_steps", "100000", "--max_data_loader_n_workers", "0")
    wait_until_training(run, tmp_path)
    victim = next(child for child in psutil.Process(run.pid).children() if child.environ().get("RANK") == "1")
    victim.send_signal(signal.SIGKILL)
    code, output = wait_for_exit(run)
    assert code == 1
    assert re.search(rf"rank 1 \(process {victim.pid} on .*\) died without an error message: killed", output), output
    assert output.count("train_lora: ended") == 1 and "to resume, add --auto_resume" in output
    assert len(list(tmp_path.glob("lora-step*-state"))) == 1


# ---- full disks and changed clocks


def run_with_file_size_limit(limit: int, *flags: str) -> tuple[int, str]:
    """Run with a limit of the file size, which fails as a full disk does."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return run_main(*flags)


def test_a_disk_full_for_the_lora_file_ends_the_run_and_keeps_older_files(dataset, tmp_path):
    run_flags = build_flags(dataset, tmp_path, 1, "--save_every_n_steps", "6", "--save_state")
    run_on_ranks(1, train, *run_flags, "--max_train_steps", "6")
    files_before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    size = (tmp_path / "lora.safetensors").stat().st_size
    ((code, stderr),) = run_on_ranks(1, run_with_file_size_limit, size // 2, *run_flags, "--auto_resume")
    assert code == 2 and "lora-step00000012.safetensors: cannot be written: " in stderr and "File too large" in stderr
    assert re.search(r"the checkpoint after step \d+ cannot be saved: .*File too large", stderr), stderr
    assert files_before == {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    assert not list(tmp_path.glob(".lora*")) and "Traceback" not in stderr


def test_a_disk_full_for_a_checkpoint_is_reported_and_training_continues(dataset, tmp_path):
    run_flags = build_flags(
        dataset, tmp_path, 1, *"--optimizer_type AdamW --learning_rate 1e-3 --save_every_n_steps 6 --save_state".split()
    )
    run_on_ranks(1, train, *run_flags, "--max_train_steps", "6", "--output_name", "size")
    size = (tmp_path / "size.safetensors").stat().st_size
    ((code, stderr),) = run_on_ranks(1, run_with_file_size_limit, size * 3 // 2, *run_flags)
    assert (tmp_path / "lora.safetensors").is_file() and (tmp_path / "lora-step00000012.safetensors").is_file()
    assert stderr.count("the checkpoint cannot be saved: ") >= 2 and "training continues" in stderr
    assert code == 2 and not list(tmp_path.glob("lora*-state")), stderr


def run_with_backward_clock(*flags: str) -> tuple[int, str]:
    now = [time.time()]

    def go_back() -> float:
        now[0] -= 3600
        return now[0]

    time.time = go_back
    return run_main(*flags)


def test_training_does_not_depend_on_the_system_clock(dataset, uninterrupted_runs, tmp_path):
    ((code, stderr),) = run_on_ranks(
        1, run_with_backward_clock, *build_flags(dataset, tmp_path, 1, "--save_every_n_steps", "6", "--save_state")
    )
    assert code == 0, stderr
    actual, expected = (load_file(path / "lora.safetensors") for path in (tmp_path, uninterrupted_runs[1]))
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    for name in ("lora-state", "lora.safetensors"):
        path = tmp_path / name
        assert path.exists()


def test_a_process_identity_survives_a_change_of_the_system_clock(monkeypatch):
    """psutil computes process start times from the boot time, which changes with the clock."""
    identity, boot_time = ProcessIdentity.get_current(), psutil._psplatform.boot_time
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_time() + 3600)
    assert (
        identity.is_alive()
        and identity.is_on_this_machine
        and ProcessIdentity.from_json(identity.to_json()) == identity
    )
    assert not ProcessIdentity(identity.host, identity.system, identity.pid, identity.began - 60).is_alive()
