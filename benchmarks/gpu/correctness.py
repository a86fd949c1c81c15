"""Whether training on the device is right: losses against the CPU, exact resume, no waiting for the device."""

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from library.distributed.devices import synchronize
from library.errors import UserError

from ..processes import run_workers
from ..report import Measurement
from ..synthetic_run import write_dataset
from .sections import NOTE_LENGTH, SectionContext, yield_unmeasured
from .training_commands import DEMO, TrainingCommand, compare_weights, run_commands

if TYPE_CHECKING:
    from library.training.state import TrainingRun

ON_CPU = "float32 on the CPU"
MAX_LOSS_DIFFERENCE = 1e-4
MODELS = ("random:sd1:tiny", "random:sdxl:tiny", "random:flux:tiny", "random:qwen_image:tiny")
STEPS = 8
FIRST_WATCHED = 12
SYNCHRONIZATION = "called a synchronizing"
"""In torch's warning of each; switching the debug mode on warns, too."""
SETTINGS = "--learning_rate 2e-3 --gradient_accumulation_steps 2 --seed 11 --flip_aug".split()
GOLDEN = [*SETTINGS, "--lr_scheduler", "cosine"]


def measure_device(context: SectionContext) -> Iterator[Measurement]:
    """Measure what the device can do at best."""
    size = context.choose(8192, 256)
    yield Measurement(
        "bf16 matmul", [measure_matmul_speed(context.device, size) / 1e12], "TFLOP/s", note=f"size {size}"
    )
    yield Measurement(
        "float32 matmul", [measure_matmul_speed(context.device, size // 2, torch.float32) / 1e12], "TFLOP/s"
    )
    count = context.choose(2**30, 2**24)
    source = torch.ones(count, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    seconds = measure_device_seconds(lambda: target.copy_(source), context.device)
    yield Measurement("copy on the device", [2 * count / seconds / 1e9], "GB/s", note="read and written")
    host = torch.ones(count, dtype=torch.uint8, pin_memory=context.device_type == "cuda")
    seconds = measure_device_seconds(lambda: target.copy_(host, non_blocking=True), context.device)
    yield Measurement("copy from pinned host memory", [count / seconds / 1e9], "GB/s")


def measure_matmul_speed(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Measure FLOP/s of a square matmul of random numbers."""
    first, second = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / measure_device_seconds(lambda: first @ second, device)


def measure_device_seconds(function: Callable[[], object], device: torch.device, count: int = 10) -> float:
    """Measure the time of a call among several, after some for warmup."""
    for _ in range(3):
        function()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / count


def compare_losses(context: SectionContext) -> Iterator[Measurement]:
    """Train on the CPU in float32, and on the device in each precision."""
    steps = str(context.choose(20, 2))
    jobs: dict[str, Sequence[str]] = {"demo": [*DEMO, *GOLDEN, "--max_train_steps", steps, "--network_dim", "8"]}
    for model in () if context.is_tiny else MODELS:
        folder = context.directory / model.replace(":", "_")
        folder.mkdir()
        options = ["--pretrained_model_name_or_path", model, "--resolution", "64", "--learning_rate", "2e-3"]
        jobs[model] = write_dataset(options, folder, STEPS)
    variants = list_precisions(context)
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2)) as pool:
        futures = {
            (job, name): pool.submit(_record_losses_in_worker, [*argv, "--mixed_precision", precision], environment)
            for job, argv in jobs.items()
            for name, (environment, precision) in variants.items()
        }
        for job in jobs:
            expected = futures[job, ON_CPU].result()
            if isinstance(expected, str):
                yield Measurement(f"{job}: losses on the CPU", [], note=expected)
                continue
            for name in [name for name in variants if name != ON_CPU]:
                title = f"{job}: relative difference of losses, {name}"
                limit = MAX_LOSS_DIFFERENCE if name == "fp32" else None
                actual = futures[job, name].result()
                if isinstance(actual, str):
                    yield Measurement(title, [], at_most=limit, note=actual)
                    continue
                pairs = zip(actual, expected, strict=True)
                yield Measurement(title, [max(abs(one / other - 1) for one, other in pairs)], at_most=limit)


def list_precisions(context: SectionContext) -> dict[str, tuple[Mapping[str, str], str]]:
    """List environment and ``--mixed_precision`` by name; float32 convolutions are in TF32 unless it is ruled out."""
    threads = {"OMP_NUM_THREADS": str(context.choose(2, 1))}  # many of them run at once
    on_device = {**context.environment, **threads}
    precisions: dict[str, tuple[Mapping[str, str], str]] = {
        ON_CPU: ({"ACCELERATE_USE_CPU": "true", **threads}, "no"),
        "fp32": ({**on_device, "NVIDIA_TF32_OVERRIDE": "0"}, "no"),
    }
    if context.device_type == "cuda":
        precisions["tf32"] = (on_device, "no")
    return precisions | {name: (on_device, name) for name in ("bf16", "fp16")}


def _record_losses_in_worker(argv: Sequence[str], environment: Mapping[str, str]) -> list[float] | str:
    losses = _run_in_worker("record_losses", argv, environment)
    return losses if isinstance(losses, str) else [float(loss) for loss in losses]


def _run_in_worker(function: str, argv: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Return what a function of this module returns for a run, or as a string why it failed."""
    try:
        (result,) = run_workers(f"benchmarks.gpu.correctness:{function}", {}, argv, 1, environment)
    except UserError as error:
        return f"failed: {str(error).strip().splitlines()[-1]}"[:NOTE_LENGTH]
    return result


def record_losses(run: "TrainingRun") -> list[float]:
    """Train, and return the loss of each step; of one that was repeated after a rollback, the last."""
    from library.training.loop import train

    losses: dict[int, torch.Tensor] = {}
    strategy: Any = run.strategy
    compute_gradients = strategy.compute_gradients

    def compute_and_record(task: Any, batches: Any, count: int, step: int) -> torch.Tensor:
        loss: torch.Tensor = compute_gradients(task, batches, count, step)
        losses[step] = loss.detach().clone()
        return loss

    strategy.compute_gradients = compute_and_record
    train(run)
    return [float(losses[step]) for step in sorted(losses)]


def compare_resumed_runs(context: SectionContext) -> Iterator[Measurement]:
    """Compare files of uninterrupted and of resumed runs, and of two equal runs."""
    precision = "no" if context.device_type == "cpu" else "bf16"
    # With a constant learning rate, which does not depend on the number of steps.
    options = [*DEMO, *SETTINGS, "--mixed_precision", precision, "--network_dim", "8", "--max_train_steps"]
    runs: dict[str, TrainingCommand] = {}
    modes = ("deterministic",) if context.is_tiny else ("deterministic", "default")
    for mode in modes:
        flags = ["--deterministic"] if mode == "deterministic" else []
        for name, steps in (("first", "12"), ("second", "12"), ("resumed", "6")):
            states = ["--save_state_on_train_end"] if name == "resumed" else []
            folder = context.directory / mode / name
            runs[f"{mode} {name}"] = TrainingCommand(folder, [*options, steps, *flags, *states], context.environment)
    run_commands(list(runs.values()))
    if failures := {name: run.failure for name, run in runs.items() if run.failure}:
        yield from (Measurement(name, [], note=failure) for name, failure in failures.items())
        return
    for mode in modes:
        run = runs[f"{mode} resumed"]
        run.options = [option if option != "6" else "12" for option in run.options] + ["--resume", "latest"]
    run_commands([runs[f"{mode} resumed"] for mode in modes])
    for mode in modes:
        expected = runs[f"{mode} first"].load()
        for name in ("second", "resumed"):
            run = runs[f"{mode} {name}"]
            title = f"{mode}, {'resumed' if name == 'resumed' else 'the same again'}: tensors that differ"
            if run.failure:
                yield Measurement(title, [], note=run.failure)
                continue
            count, difference = compare_weights(run.load(), expected)
            note = f"of {len(expected)}; largest difference {difference:.1e} of the largest value"
            yield Measurement(title, [count], at_most=0 if mode == "deterministic" else None, note=note)


def count_synchronizations(context: SectionContext) -> Iterator[Measurement]:
    """Count how often the host waits for the device in steps between two reads of the metrics."""
    models = MODELS[:1] if context.is_tiny else MODELS
    titles = [f"{model}: waits in {STEPS} steps" for model in models]
    if context.device_type != "cuda":
        yield from yield_unmeasured(titles)
        return
    jobs = []
    for model in models:
        folder = context.directory / model.replace(":", "_")
        folder.mkdir()
        options = ["--pretrained_model_name_or_path", model, "--resolution", "64", "--mixed_precision", "bf16"]
        jobs.append(write_dataset(options, folder, FIRST_WATCHED + STEPS + 2))
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = pool.map(lambda argv: _run_in_worker("find_synchronizations", argv, {}), jobs)
        for title, places in zip(titles, found, strict=True):
            if isinstance(places, str):
                yield Measurement(title, [], at_most=0, note=places)
                continue
            note = "; ".join(f"{count} x {place}" for place, count in places.items())[:400]
            yield Measurement(title, [sum(places.values())], at_most=0, note=note)


def find_synchronizations(run: "TrainingRun") -> dict[str, int]:
    """Train, and return the places at which torch saw a synchronization in some of the steps, with their numbers."""
    from library.training.loop import train

    run.callbacks = [_SynchronizationWatcher()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(run)
    found = [each for each in caught if SYNCHRONIZATION in str(each.message)]
    return dict(Counter(f"{each.filename.rpartition('site-packages/')[2]}:{each.lineno}" for each in found))


class _SynchronizationWatcher:
    """A callback that is never due, and switches torch's debug mode on and off where it is asked.

    The metrics are read after the first step and after every ten more: not in the steps that are watched.
    """

    id = "synchronization_watcher"
    is_deferrable = False

    def should_run(self, run: "TrainingRun") -> bool:
        is_watched = FIRST_WATCHED <= run.state.step < FIRST_WATCHED + STEPS
        torch.cuda.set_sync_debug_mode("warn" if is_watched else "default")
        return False

    def on_train_begin(self, run: "TrainingRun") -> None: ...

    def __call__(self, run: "TrainingRun") -> None: ...
