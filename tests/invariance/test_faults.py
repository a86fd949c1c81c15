"""Bad days: no memory, no room on the disk, a bug, a killed process: a defined end, told once, nothing lost."""

import contextlib
import io
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from launched_runs import start_run, wait_for_exit, wait_until_training
from rank_processes import run_on_ranks
from resumed_runs import read_metrics
from safetensors.torch import load_file
from tiny_pipelines import get_tiny_sd1_folder
from training_runs import max_relative_difference, train, write_images

from library.distributed.step_phases import OutOfMemory, record_phase
from library.distributed.watchdog import ProcessIdentity

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "--max_train_steps",
    "13",
    "--network_dim",
    "2",
    "--learning_rate",
    "0.5",
    "--optimizer_type",
    "SGD",
    "--gradient_accumulation_steps",
    "2",
    "--seed",
    "5",
    "--mixed_precision",
    "no",
)
STEP = 11
"""At which things go wrong: one step after a reading."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("faults"), {(96, 64): 8})


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory) -> dict[int, Path]:
    """Runs that nobody disturbed, by ranks."""
    folders = {ranks: tmp_path_factory.mktemp("whole") for ranks in (1, 2)}
    for ranks, folder in folders.items():
        run_on_ranks(ranks, train, *flags(dataset, folder, ranks))
    return folders


def flags(dataset: Path, folder: Path, ranks: int = 1, *more: str) -> tuple[str, ...]:
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


def told(*words: str) -> tuple[int, str]:
    """Exit code and messages of one process, as its user sees them."""
    from library.cli import main

    with contextlib.redirect_stderr(io.StringIO()) as text:
        code = main(
            ["--pretrained_model_name_or_path", get_tiny_sd1_folder(), *words, "--max_data_loader_n_workers", "0"]
        )
    return code, text.getvalue()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


# ---- out of memory


def without_memory(phase: str, who: int, fits: int, *words: str) -> tuple[int, str]:
    """In ``STEP``, one rank has no memory for more than ``fits`` pictures; 0: only with activations computed twice."""
    from accelerate import Accelerator

    from library.optim import optimizers
    from library.training.task import DiffusionTask

    call, encode, backward, now = DiffusionTask.__call__, DiffusionTask.encode, Accelerator.backward, []

    def fail(name: str) -> None:
        if name != phase or not now:
            return
        step, size, number, computes_twice = now
        if rank() == who and step == STEP and number == 2 and size > fits and not (fits == 0 and computes_twice):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")

    def at_call(self, pixels, step):
        number = now[2] % 2 + 1 if now and now[0] == step else 1
        now[:] = [step, len(pixels), number, self.pipe.unet.is_gradient_checkpointing]
        losses = call(self, pixels, step)
        fail("forward")
        return losses

    def at_encode(self, pixels, step):
        fail("encode")
        return encode(self, pixels, step)

    def at_backward(self, loss, **more):
        backward(self, loss, **more)
        fail("backward")

    def at_optimizer(*arguments):
        made = make(*arguments)
        honest = made.step
        made.step = lambda *_, **__: fail("optimizer") or honest()
        return made

    make = optimizers.build_optimizer
    DiffusionTask.__call__, DiffusionTask.encode, Accelerator.backward = at_call, at_encode, at_backward
    optimizers.build_optimizer = at_optimizer
    return told(*words)


@pytest.mark.parametrize(("ranks", "phase", "fits"), [(1, "backward", 1), (1, "forward", 0), (2, "backward", 1)])
def test_a_step_that_finds_no_memory_is_cut_and_trains_the_same(dataset, whole, tmp_path, ranks, phase, fits):
    ends = run_on_ranks(
        ranks, without_memory, phase, ranks - 1, fits, *flags(dataset, tmp_path, ranks, "--on_oom", "recover")
    )
    assert [code for code, _ in ends] == [0] * ranks, ends
    text = ends[0][1]
    assert f"step {STEP + 1}: out of memory" in text and "splitting micro-batches into 2 parts" in text
    assert ("enabling gradient_checkpointing" in text) == (fits == 0)
    found, wanted = (load_file(folder / "lora.safetensors") for folder in (tmp_path, whole[ranks]))
    assert max_relative_difference(wanted, found) < 1e-6
    for one, other in zip(read_metrics(whole[ranks]), read_metrics(tmp_path), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize(("ranks", "phase"), [(1, "encode"), (1, "optimizer"), (2, "backward")])
def test_without_the_ladder_it_is_told_where_it_was_and_what_to_try(dataset, whole, tmp_path, ranks, phase):
    ends = run_on_ranks(ranks, without_memory, phase, ranks - 1, 0, *flags(dataset, tmp_path, ranks))
    text = ends[-1][1]
    assert ends[-1][0] == 2 and "CUDA out of memory. Tried to allocate 2.00 GiB." in text
    where = {
        "encode": "while encoding images and captions",
        "backward": "in the backward pass",
        "optimizer": "in the optimizer step",
    }[phase]
    assert f"out of memory in step {STEP + 1} {where}" in text
    if phase != "optimizer":
        assert re.search(rf"with {4 // ranks} images of 80x48: images/\d\d\.png, ", text)
    assert "Try next: --cache_latents, which frees the VAE" in text and "Traceback" not in text
    assert ("--on_oom recover" in text) == (phase != "optimizer")
    if ranks == 2:
        assert ends[0][0] == 1 and "ended" not in ends[0][1] and "stopped" not in ends[0][1]
    goes_on_exactly(dataset, whole, tmp_path, ranks)


def goes_on_exactly(dataset: Path, whole: dict[int, Path], folder: Path, ranks: int) -> None:
    """The state that was kept leads to what an undisturbed run has."""
    assert (folder / f"lora-step{STEP - 1:08d}-state").is_dir() or list(folder.glob("lora-step*-state"))
    run_on_ranks(ranks, train, *flags(dataset, folder, ranks, "--auto_resume"))
    found, wanted = (load_file(path / "lora.safetensors") for path in (folder, whole[ranks]))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_at_the_foot_of_the_ladder_the_run_ends(dataset, tmp_path):
    ((code, text),) = run_on_ranks(
        1, without_memory, "forward", 0, -1, *flags(dataset, tmp_path, 1, "--on_oom", "recover")
    )
    assert code == 2 and "enabling gradient_checkpointing" in text, text
    assert f"out of memory in step {STEP + 1} in the forward pass, with 1 image of 80x48" in text
    assert list(tmp_path.glob("lora-step*-state"))


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "Failed to CUDA calloc async\nCuda failure 2 'out of memory'",
    ],
)
def test_libraries_of_a_device_that_find_no_memory_are_understood(said):
    with pytest.raises(OutOfMemory), record_phase("forward"):
        raise RuntimeError(said)


def test_an_error_that_says_nothing_is_no_lack_of_memory():
    with pytest.raises(RuntimeError, match="3"), record_phase("forward"):
        raise RuntimeError(3)


def test_the_machines_own_memory_is_known_by_what_torch_says_of_it():
    with pytest.raises(OutOfMemory, match="DefaultCPUAllocator"), record_phase("backward"), record_phase("forward"):
        torch.empty(2**50)


# ---- errors that nobody foresaw


def with_a_bug(who: int, *words: str) -> tuple[int, str]:
    from library.training.task import DiffusionTask

    call = DiffusionTask.__call__

    def broken(self, pixels, step):
        if rank() == who and step == STEP:
            raise ValueError("the parrot is no more\nand has ceased to be")
        return call(self, pixels, step)

    DiffusionTask.__call__ = broken
    return told(*words)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bug_is_told_once_with_cause_place_and_what_to_do(dataset, whole, tmp_path, ranks):
    who = ranks - 1
    ends = run_on_ranks(ranks, with_a_bug, who, *flags(dataset, tmp_path, ranks))
    assert [code for code, _ in ends] == [1] * ranks
    told_by, quiet = ends[who][1], "".join(text for number, (_, text) in enumerate(ends) if number != who)
    last = told_by[told_by.index("train_lora: ended") :].splitlines()
    assert last[0] == ("train_lora: ended by an error." if ranks == 1 else "train_lora: ended on rank 1 by an error.")
    assert last[1] == "  ValueError: the parrot is no more"
    assert last[2].startswith(f"  in step {STEP + 1} of 13, with images of 80x48: images/")
    assert last[3].startswith("  the checkpoint after step ") and "to resume, add --auto_resume" in last[3]
    report = tmp_path / f"lora.error-rank{who}.txt"
    assert last[4] == f"  the traceback is in {report}. If the error recurs, report it together with that file"
    assert "has ceased to be" in report.read_text("utf-8") and "Traceback" in report.read_text("utf-8")
    assert "Traceback" not in told_by + quiet and "ended" not in quiet
    goes_on_exactly(dataset, whole, tmp_path, ranks)


def with_an_early_bug(folder: str, *words: str) -> tuple[int, str]:
    import library.config

    os.chdir(folder)
    library.config.parse_config = lambda argv: {}["nothing"]
    return told(*words)


def test_a_bug_before_anything_is_known_is_told_as_well(tmp_path):
    ((code, text),) = run_on_ranks(1, with_an_early_bug, str(tmp_path))
    assert code == 1 and text.splitlines()[:2] == ["train_lora: ended by an error.", "  KeyError: 'nothing'"]
    assert "Traceback" not in text and "parse_config" in (tmp_path / "train_lora.error.txt").read_text("utf-8")


def ends_while_it_still_speaks() -> int:
    from library.distributed.signals import StopSignals

    with StopSignals() as signals:
        signals.ignore_sigterm()
    os.kill(os.getpid(), signal.SIGTERM)
    return os.getpid()


def test_the_launchers_signal_does_not_cut_off_the_last_words():
    assert run_on_ranks(1, ends_while_it_still_speaks)[0] != os.getpid()


def test_a_process_that_is_killed_is_named_and_the_others_end(dataset, tmp_path):
    settings = ["--pretrained_model_name_or_path", get_tiny_sd1_folder(), *flags(dataset, tmp_path, 2)]
    run = start_run(2, settings, tmp_path, "--max_train_steps", "100000", "--max_data_loader_n_workers", "0")
    wait_until_training(run, tmp_path)
    victim = next(child for child in psutil.Process(run.pid).children() if child.environ().get("RANK") == "1")
    victim.send_signal(signal.SIGKILL)
    code, text = wait_for_exit(run)
    assert code == 1
    assert re.search(rf"rank 1 \(process {victim.pid} on .*\) died without an error message: killed", text), text
    assert text.count("train_lora: ended") == 1 and "to resume, add --auto_resume" in text
    assert len(list(tmp_path.glob("lora-step*-state"))) == 1


# ---- disks and clocks


def on_a_small_disk(limit: int, *words: str) -> tuple[int, str]:
    """No file may become larger than ``limit``, which fails as a full disk does."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return told(*words)


def test_a_disk_that_is_too_small_for_the_lora_ends_the_run_and_old_files_stay(dataset, tmp_path):
    words = flags(dataset, tmp_path, 1, "--save_every_n_steps", "6", "--save_state")
    run_on_ranks(1, train, *words, "--max_train_steps", "6")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    size = (tmp_path / "lora.safetensors").stat().st_size
    ((code, text),) = run_on_ranks(1, on_a_small_disk, size // 2, *words, "--auto_resume")
    assert code == 2 and "lora-step00000012.safetensors: cannot be written: " in text and "File too large" in text
    assert re.search(r"the checkpoint after step \d+ cannot be saved: .*File too large", text), text
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    assert not list(tmp_path.glob(".lora*")) and "Traceback" not in text


def test_a_disk_that_is_too_small_for_a_state_is_told_and_training_goes_on(dataset, tmp_path):
    words = flags(
        dataset,
        tmp_path,
        1,
        "--optimizer_type",
        "AdamW",
        "--learning_rate",
        "1e-3",
        "--save_every_n_steps",
        "6",
        "--save_state",
    )
    run_on_ranks(1, train, *words, "--max_train_steps", "6", "--output_name", "size")
    size = (tmp_path / "size.safetensors").stat().st_size
    ((code, text),) = run_on_ranks(1, on_a_small_disk, size * 3 // 2, *words)
    assert (tmp_path / "lora.safetensors").is_file() and (tmp_path / "lora-step00000012.safetensors").is_file()
    assert text.count("the checkpoint cannot be saved: ") >= 2 and "training continues" in text
    assert code == 2 and not list(tmp_path.glob("lora*-state")), text


def with_a_clock_that_runs_back(*words: str) -> tuple[int, str]:
    now = [time.time()]

    def back() -> float:
        now[0] -= 3600
        return now[0]

    time.time = back
    return told(*words)


def test_nothing_depends_on_the_clock(dataset, whole, tmp_path):
    ((code, text),) = run_on_ranks(
        1, with_a_clock_that_runs_back, *flags(dataset, tmp_path, 1, "--save_every_n_steps", "6", "--save_state")
    )
    assert code == 0, text
    found, wanted = (load_file(path / "lora.safetensors") for path in (tmp_path, whole[1]))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    for name in ("lora-state", "lora.safetensors"):
        path = tmp_path / name
        assert path.exists()


def test_a_process_is_known_again_when_the_clock_was_set(monkeypatch):
    """psutil reckons from the time when the system began, which moves with the clock."""
    me, boot = ProcessIdentity.get_current(), psutil._psplatform.boot_time
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot() + 3600)
    assert me.is_alive() and me.is_on_this_machine and ProcessIdentity.from_json(me.to_json()) == me
    assert not ProcessIdentity(me.host, me.system, me.pid, me.began - 60).is_alive()
