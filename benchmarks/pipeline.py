"""Benchmark the bubble fraction of a pipeline: the share of a step in which stages are idle, against the formula.

Each pipeline is one of real training, in a process for each stage.  Where there are fewer processors than stages,
``--simulate_ms`` adds a sleep to the compute time of each stage.
"""

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from library.distributed.devices import synchronize
from library.errors import ConfigError
from library.problems import Problem

from .processes import run_workers
from .report import Measurement, add_count_option
from .synthetic_run import load_training_options, write_dataset

if TYPE_CHECKING:
    from library.training.state import TrainingRun

MODEL = ("--pretrained_model_name_or_path", "random:flux:tiny")
MAX_DIFFERENCE = 5.0
"""In percentage points."""
BACKWARD = 2
"""Simulated backward time, as a multiple of forward."""


def add_arguments(parser: ArgumentParser) -> None:
    add_count_option(parser, "--micro_batches", [4, 8, 16], "numbers of micro-batches in a step")
    parser.add_argument("--simulate_ms", type=int, default=0, help="sleep in each forward, twice as long in backward")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> Iterator[Measurement]:
    """Measure each number of micro-batches."""
    training_options = [*MODEL, *training_options]
    config, explicit = load_training_options(training_options)
    stages = config.parallel.pp_size
    if stages == 1:
        raise ConfigError([Problem("pp_size", "a pipeline needs at least 2 stages")])
    if "gradient_accumulation_steps" in explicit:
        raise ConfigError([Problem("gradient_accumulation_steps", "set by the benchmark", "use --micro_batches")])
    arguments = {"repetitions": options.repetitions, "simulated_seconds": options.simulate_ms / 1000}
    for count in options.micro_batches:
        accumulation = ["--gradient_accumulation_steps", str(count)]
        argv = write_dataset([*training_options, *accumulation], directory / str(count), options.repetitions + 1)
        bubbles = run_workers("benchmarks.pipeline:measure_bubbles", arguments, argv, stages)[0]
        expected = compute_bubble(stages, count, config.parallel.pp_schedule)
        title, note = f"{count} micro-batches: bubble fraction", f"formula: {100 * expected:.1f} %"
        yield Measurement(title, [100 * bubble for bubble in bubbles], "%", note=note)
        difference = 100 * abs(statistics.median(bubbles) - expected)
        yield Measurement(f"{title}, difference from the formula", [difference], "%", at_most=MAX_DIFFERENCE)


def compute_bubble(stages: int, micro_batches: int, schedule: str) -> float:
    """Compute the share of a step in which a stage is idle, if all stages take the same time."""
    chunks = 2 if schedule == "interleaved" else 1
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def measure_bubbles(run: "TrainingRun", repetitions: int, simulated_seconds: float) -> list[float]:
    """Measure the bubble fraction of ``repetitions`` steps, after one of warmup; called on each stage."""
    from torch.distributed.pipelining import PipelineStage

    busy: list[tuple[float, float]] = []

    def time_chunks(compute: Callable[..., Any], simulated: float) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            time.sleep(simulated)
            result = compute(*args, **kwargs)
            synchronize(run.strategy.device)
            busy.append((start, time.perf_counter()))
            return result

        return timed

    forward = time_chunks(PipelineStage.forward_one_chunk, simulated_seconds)
    backward = time_chunks(PipelineStage.backward_one_chunk, BACKWARD * simulated_seconds)
    bubbles = []
    with (
        patch.object(PipelineStage, "forward_one_chunk", forward),
        patch.object(PipelineStage, "backward_one_chunk", backward),
    ):
        for step in range(repetitions + 1):
            busy.clear()
            steps: Any = run.loader.iter_steps(step)
            work = next(steps)
            steps.close()
            run.strategy.comm.barrier()  # all stages start together
            run.strategy.compute_gradients(run.task, work.micro_batches, work.num_global_samples, step)
            run.optimizer.zero_grad()
            bubbles.append(compute_idle_fraction(run.strategy.comm.all_gather_object(list(busy))))
    return bubbles[1:]


def compute_idle_fraction(stages: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Compute the mean idle share of stages, each with its busy intervals, from the first start to the last end."""
    intervals = [interval for stage in stages for interval in stage]
    makespan = max(end for _, end in intervals) - min(start for start, _ in intervals)
    return 1 - statistics.mean(sum(end - start for start, end in stage) for stage in stages) / makespan
