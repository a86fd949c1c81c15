"""Benchmark ``--torch_compile``: graphs, compile time with a cold and a warm cache, time to the first step, step time.

Each training is a process of its own: without compiling, compiled for each image size, and compiled once for all.
"""

import math
import statistics
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from library.report.metric_series import read_metrics

from .processes import TRAIN, measure_first_step
from .report import Measurement, add_count_option, compute_ratios
from .synthetic_run import load_training_options, read_intervals, write_dataset

MODES = ("eager", "static", "dynamic")
DYNAMIC = {"static": "false", "dynamic": "true"}
COLD, WARM = "cold cache", "warm cache"
MAX_WARM_RATIO = 1 / 3
Samples = dict[tuple[str, str], dict[str, list[float]]]
"""By mode and cache, then by quantity."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(repetitions=1)
    add_count_option(parser, "--sizes", [1, 8, 24], "numbers of image sizes")
    add_count_option(parser, "--bench_steps", 31, "steps of each training")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="what to compare (all)")
    parser.add_argument("--backend", default="inductor", help="as --dynamo_backend, but not in eager mode")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> Iterator[Measurement]:
    """Measure and report each number of image sizes by itself."""
    training_options = ["--resolution", "96", "--train_batch_size", "2", *training_options]
    for count in options.sizes:
        yield from measure_sizes(count, options, training_options, directory / f"{count}_sizes")


def measure_sizes(
    count: int, options: Namespace, training_options: Sequence[str], directory: Path
) -> Iterator[Measurement]:
    """Train on ``count`` image sizes in each mode; compiled modes with an empty cache and with what that leaves.

    Each is reported after its last training, so that none is lost where a later one is cut off.
    """
    config, _ = load_training_options(training_options)
    assert config.data.resolution is not None
    sizes = choose_sizes(config.data.resolution.width, count)
    argv = write_dataset(training_options, directory, options.bench_steps, sizes=sizes)
    samples: Samples = defaultdict(lambda: defaultdict(list))
    for repetition in range(options.repetitions):
        for mode in [mode for mode in MODES if mode in options.modes]:
            compiling = ["--torch_compile", "--dynamo_backend", options.backend]
            compiling += ["--compile_dynamic", DYNAMIC.get(mode, "auto")]
            compiling += ["--compile_cache_dir", str(directory / f"cache_{mode}_{repetition}")]
            for cache in (COLD,) if mode == "eager" else (COLD, WARM):
                output = directory / f"{mode}_{cache}_{repetition}"
                flags = [] if mode == "eager" else compiling
                for name, values in measure_training([*argv, *flags], output).items():
                    samples[mode, cache][name] += values
                if repetition == options.repetitions - 1:
                    yield from report_sizes(f"{count} sizes", mode, cache, samples)


def measure_training(argv: Sequence[str], output: Path) -> dict[str, list[float]]:
    """Train in a new process; return seconds to the first step and of each step, and the run's metrics of compiling."""
    first_step = measure_first_step([*TRAIN, *argv, "--output_dir", str(output)], stop=False)
    lines = read_metrics(output / "lora.metrics.jsonl")
    compiling = {name: [line[name]] for line in lines for name in line if name.startswith("compile/")}
    steps = [seconds / steps for steps, seconds in read_intervals(output)[1:]]  # the first interval is warmup
    return {"first step": [first_step], "step": steps, **compiling}


def report_sizes(title: str, mode: str, cache: str, samples: Samples) -> Iterator[Measurement]:
    """Report a mode and cache; compare compile times to those with a cold cache, step times to eager mode."""
    values = samples[mode, cache]
    name = f"{title}, {mode}" if mode == "eager" else f"{title}, {mode}, {cache}"
    yield Measurement(f"{name}: to the first step", values["first step"], "s")
    if mode != "eager":
        graphs = f"{values['compile/graphs'][0]:.0f} graphs"
        yield Measurement(f"{name}: compile time", values["compile/seconds"], "s", note=graphs)
    if cache == WARM:
        ratios = compute_ratios(values["compile/seconds"], samples[mode, COLD]["compile/seconds"])
        yield Measurement(f"{name}: compile time / cold cache", ratios, "x", at_most=MAX_WARM_RATIO)
        return
    yield Measurement(f"{name}: step time", values["step"], "s")
    if mode != "eager" and ("eager", COLD) in samples:
        speedup = statistics.median(samples["eager", COLD]["step"]) / statistics.median(values["step"])
        yield Measurement(f"{name}: speedup over eager", [speedup], "x")


def choose_sizes(resolution: int, count: int) -> list[tuple[int, int]]:
    """Choose the image sizes whose areas are nearest to that of the square, which is the first."""
    step = 64 if resolution >= 512 else 16
    sides = range(step, 3 * resolution, step)
    sizes = [(width, height) for width in sides for height in sides if max(width, height) <= 3 * min(width, height)]

    def compute_distance(size: tuple[int, int]) -> tuple[float, int]:
        return abs(math.log(size[0] * size[1] / resolution**2)), abs(size[0] - size[1])

    return sorted(sizes, key=compute_distance)[:count]
