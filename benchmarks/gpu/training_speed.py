"""Speed on the device: step, MFU and torch.compile of each model, attention backends, optimizers, other trainers."""

import statistics
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

from library.distributed.device_memory import get_peak_memory
from library.distributed.devices import synchronize

from .. import compile as compile_benchmark
from .. import peers
from ..report import Measurement, compute_ratios
from ..step import BareLoop, LoopComparison
from ..synthetic_run import build_run, release_memory, write_dataset
from ..variants import StepTimer
from .correctness import measure_matmul_speed
from .sections import NOT_MEASURED, SectionContext, format_failure

if TYPE_CHECKING:
    from library.training.state import TrainingRun

CACHED = ("--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk")
"""So that the encoders run once for all runs of a section."""
MIN_MFU, MIN_SPEEDUP, MAX_OVERHEAD, MAX_DATA_WAIT = 0.45, 1.25, 1.03, 0.01
"""At least: FLUX.1 compiled, compiled over eager.  At most: our step over a bare loop's, waits of a step for data."""
LONGEST = 3
VARIANTS: Mapping[str, Sequence[str]] = {
    "sdpa": (),
    "efficient": ("--attn_mode", "efficient"),
    "cudnn": ("--attn_mode", "cudnn"),
    "AdamW, not fused": ("--optimizer_args", "fused=False"),
    "AdamW8bit": ("--optimizer_type", "AdamW8bit"),
    "deterministic": ("--deterministic",),
}


@dataclass(frozen=True)
class EagerSteps:
    """What is measured of the model as it is; without the run, so that its memory is free for the next."""

    ours: Sequence[float]
    bare: Sequence[float]
    """Seconds of a step."""
    peaks: Sequence[float]
    images: float
    flops: float
    waits: float
    """Mean seconds in which a step waited for data."""
    longest: str


def measure_model(context: SectionContext) -> Iterator[Measurement]:
    """Measure a step, ours and the bare loop's, and the same compiled; with the longest kernels of each."""
    turn, turns = context.choose(5, 2), context.choose(2, 1)
    argv = write_dataset([*context.training_options, *CACHED], context.directory, turn * (turns + 1))
    peak = measure_matmul_speed(context.device, context.choose(8192, 256))
    eager = measure_eager_steps(context, argv, turn)
    seconds = statistics.median(eager.ours)
    overhead, wait, speedup = (None, None, None) if context.is_tiny else (MAX_OVERHEAD, MAX_DATA_WAIT, MIN_SPEEDUP)
    # With checkpointing the counted operations have the repeated ones among them.
    is_checkpointed = "--gradient_checkpointing" in argv
    utilization = "HFU (with recomputation)" if is_checkpointed else "MFU"
    yield Measurement("step", eager.ours, "s")
    yield Measurement("throughput", [eager.images / each for each in eager.ours], "images/s")
    yield Measurement("step / bare loop", compute_ratios(eager.ours, eager.bare), "x", at_most=overhead)
    yield Measurement("share of a step that waits for data", [eager.waits / seconds], at_most=wait)
    yield Measurement("FLOPs of a step", [eager.flops / 1e12], "TFLOP", note="matmul, convolution and attention")
    yield Measurement(utilization, [eager.flops / each / peak for each in eager.ours], note=eager.longest)
    yield Measurement("peak memory", eager.peaks, "GB")
    release_memory(context.device)
    try:
        compiled, first_turn, longest = measure_compiled_steps(context, argv, turn)
    except NOT_MEASURED as error:
        yield Measurement("compiled: step", [], at_least=speedup, note=format_failure(error))
        return
    is_flux = context.training_options[1] == "random:flux"
    limit = MIN_MFU if is_flux and not is_checkpointed else None
    yield Measurement("compiled: step", compiled, "s")
    yield Measurement("compiled: speedup over eager", [seconds / each for each in compiled], "x", at_least=speedup)
    values = [eager.flops / each / peak for each in compiled]
    yield Measurement(f"compiled: {utilization}", values, at_least=limit, note=longest)
    yield Measurement("compiled: seconds of compiling, cold", [first_turn - turn * min(compiled)], "s")


def measure_eager_steps(context: SectionContext, argv: Sequence[str], turn: int) -> EagerSteps:
    """Measure turns of ours and of the bare loop, after one for warmup."""
    from library.report.metric_series import read_metrics
    from library.training.loop import train

    with build_run(argv, context.directory) as run:
        with FlopCounterMode(display=False) as counter:
            BareLoop(run).compute_metrics()
        comparison = LoopComparison(run, turn)
        run.callbacks = [comparison]
        train(run)
        images = run.state.samples / run.state.step
        longest = "" if context.is_tiny else find_longest_kernels(run)
    lines = read_metrics(context.directory / "metrics.jsonl")
    waits = [line["data_wait_seconds"] for line in lines if line["step"] > turn and "data_wait_seconds" in line]
    return EagerSteps(
        ours=comparison.seconds["ours"],
        bare=comparison.seconds["bare"],
        peaks=comparison.peaks["ours"],
        images=images,
        flops=counter.get_total_flops(),
        waits=statistics.fmean(waits),
        longest=longest,
    )


def measure_compiled_steps(context: SectionContext, argv: Sequence[str], turn: int) -> tuple[list[float], float, str]:
    """Return the seconds of a step in each turn, those of the whole first turn, and the longest kernels."""
    from library.training.loop import train

    folder = context.directory / "compiled"
    folder.mkdir()
    options = ["--torch_compile", "--compile_cache_dir", str(folder / "cache")]
    if context.is_tiny:
        options += ["--dynamo_backend", "aot_eager"]
    with build_run([*argv, *options], folder) as run:
        timer = StepTimer(turn)
        run.callbacks = [timer]
        started = time.perf_counter()
        train(run)
        longest = "" if context.is_tiny else find_longest_kernels(run)
    times = [started, *(mark[0] for mark in timer.marks)]
    seconds = [after - before for before, after in pairwise(times)]
    return [each / turn for each in seconds[1:]], seconds[0], longest


def find_longest_kernels(run: "TrainingRun") -> str:
    """Name the kernels that take most of the device's time in a step."""
    from torch.profiler import ProfilerActivity, profile

    steps: Any = run.loader.iter_steps(0)
    work = next(steps)
    steps.close()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run.strategy.compute_gradients(run.task, work.micro_batches, work.num_global_samples, 0)
        synchronize(run.strategy.device)
    return format_longest_kernels(profiler.key_averages())


def format_longest_kernels(averages: Iterable[Any]) -> str:
    """Name the kernels among a profile's events: operations and ranges have the times of their kernels as well."""
    events = [
        event
        for event in averages
        if event.self_device_time_total and event.device_type != DeviceType.CPU and not event.is_user_annotation
    ]
    total = sum(event.self_device_time_total for event in events) or 1
    events = sorted(events, key=lambda event: -event.self_device_time_total)[:LONGEST]
    shares = [f"{event.key[:60]} {100 * event.self_device_time_total / total:.0f} %" for event in events]
    return "longest: " + "; ".join(shares)


def compare_variants(context: SectionContext) -> Iterator[Measurement]:
    """Measure steps with each attention backend and optimizer, compared to the first."""
    turn = context.choose(4, 1)
    argv = write_dataset([*context.training_options, *CACHED], context.directory, 3 * turn)
    baseline = 0.0
    for name, options in VARIANTS.items():
        folder = context.directory / name.replace(" ", "_")
        folder.mkdir()
        release_memory(context.device)
        try:
            seconds, peak = measure_run([*argv, *options], folder, turn)
        except NOT_MEASURED as error:
            yield Measurement(f"{name}: step", [], note=format_failure(error))
            continue
        baseline = baseline or seconds
        yield Measurement(f"{name}: step", [seconds], "s", note=f"{seconds / baseline:.2f} x {next(iter(VARIANTS))}")
        yield Measurement(f"{name}: peak memory", [peak], "GB")


def measure_run(argv: Sequence[str], folder: Path, turn: int) -> tuple[float, float]:
    """Train three turns; return seconds of a step and peak GB in the last two."""
    from library.training.loop import train

    with build_run(argv, folder) as run:
        timer = StepTimer(turn)
        run.callbacks = [timer]
        train(run)
        device = run.strategy.device
        del run
    first, *_, last = timer.marks
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    peak = max((mark[3] for mark in timer.marks[1:]), default=get_peak_memory(device))
    return (last[0] - first[0]) / (turn * (len(timer.marks) - 1)), peak / 1e9


def compile_sizes(context: SectionContext) -> Iterator[Measurement]:
    """Compile for many image sizes with dynamic shapes, with a cold and a warm cache."""
    options = Namespace(
        repetitions=1,
        sizes=[context.choose(12, 2)],
        bench_steps=context.choose(21, 3),
        modes=["dynamic"],
        backend="aot_eager" if context.is_tiny else "inductor",
    )
    training_options = [*context.training_options, *CACHED, "--train_batch_size", "1"]
    for measurement in compile_benchmark.run(options, training_options, context.directory):
        # The backend of tiny models caches nothing.
        yield replace(measurement, at_most=None) if context.is_tiny else measurement


def compare_peers(context: SectionContext) -> Iterator[Measurement]:
    """Train beside sd-scripts or diffusers' script, if its folder is given; ours compiled on a device."""
    model = context.training_options[1].removesuffix(":tiny")
    name, folder = ("sd_scripts", context.sd_scripts) if model == "random:sd1" else ("diffusers", context.diffusers)
    if not folder:
        yield Measurement(f"{model} beside {name}", [], note=f"not run: give --{name} and --{name}_python")
        return
    options = Namespace(
        sd_scripts=Path(context.sd_scripts) if context.sd_scripts else None,
        sd_scripts_python=context.sd_scripts_python,
        diffusers=Path(context.diffusers) if context.diffusers else None,
        diffusers_python=context.diffusers_python,
        bench_steps=context.choose(20, 4),
        repetitions=1,
    )
    if context.is_tiny:  # sd-scripts knows no tiny sizes
        settings = list(SMALL_PEER if model == "random:sd1" else context.training_options)
    else:
        settings = [*context.training_options, "--torch_compile"]
    for measurement in peers.run(options, settings, context.directory):
        yield replace(measurement, at_most=None) if context.is_tiny else measurement


SMALL_PEER = ("--pretrained_model_name_or_path", "random:sd1", "--resolution", "64")
