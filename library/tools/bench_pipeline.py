"""How long the stages of a pipeline wait for each other, beside the share that the schedule makes them wait.

Each pipeline is one of real training, in a program for each stage.  What a stage does itself is timed, and the rest of
the time between the first micro-batch and the last is waiting.  Where there are fewer processors than stages, or other
stages than on the devices that are meant, they can sleep for so long in the place of computing.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..config import RunConfig
from ..config.options import opt
from ..errors import ConfigError, UserError
from .bench_figure import Figure, reported
from .bench_group import together
from .bench_run import MODELS, made_up_run, scratch, settings, with_pictures

if TYPE_CHECKING:
    from ..training.job import Run

BACKWARD = 2
"""So many times as long as forward, when stages sleep."""
MOST_APART = 0.05


@dataclass(frozen=True)
class PipelineOptions:
    """Which pipelines, and how often."""

    micro_batches: tuple[int, ...] = opt((4, 8, 16), "numbers of micro-batches in a step", minimum=1)
    pretend_ms: int = opt(0, "a stage sleeps so long for a forward, and twice as long for a backward", minimum=0)
    repetitions: int = opt(5, "steps of each, after one that only warms up", minimum=1)
    json: bool = opt(False, "every single value as JSON")


@dataclass(frozen=True)
class Arguments(RunConfig):
    bench: PipelineOptions = field(default_factory=PipelineOptions)


def run(argv: Sequence[str]) -> str:
    """Start a program for each stage, or be one of them."""
    config, given = settings(["--pretrained_model_name_or_path", MODELS["pipeline"], *argv], Arguments)
    options, stages = config.bench, config.parallel.pp_size
    if stages == 1:
        raise ConfigError(["--pp_size: one stage has none to wait for; say 2 or more"])
    if "WORLD_SIZE" in os.environ:
        return _as_stage(config, given)
    if "gradient_accumulation_steps" in given:
        raise ConfigError(["--gradient_accumulation_steps: --micro_batches says how many; take it out"])
    each = 2 if config.parallel.pp_schedule == "interleaved" else 1
    figures = []
    for count in options.micro_batches:
        due = (stages - 1) / (each * count + stages - 1)
        found = tuple(_measured(argv, stages, count))
        away = abs(statistics.median(found) - due)
        figures += [Figure(f"{count} micro-batches: stages wait", tuple(100 * share for share in found), "%",
                           remark=f"formula {100 * due:.1f} %"),
                    Figure("  apart from the formula", (away,), "", MOST_APART)]  # fmt: skip
    return reported("pipeline", argv, figures, as_values=options.json)


def _measured(argv: Sequence[str], stages: int, count: int) -> list[float]:
    """The share of each step in which stages wait, the mean over them."""
    words = ["-m", "library", "bench", "pipeline", *argv, "--gradient_accumulation_steps", str(count)]
    ended = together(stages, words)
    found = [line for line in ended[0].said.splitlines() if line.startswith("[")]
    if failed := [process for process in ended if process.code]:
        raise UserError(f"{' '.join(words[1:])} failed:\n{failed[0].errors[-2000:]}")
    shares: list[float] = json.loads(found[0])
    return shares


def _as_stage(config: RunConfig, given: frozenset[str]) -> str:
    """A list of shares, told by the first of the stages."""
    bench: PipelineOptions = config.bench  # type: ignore[attr-defined]
    pretend = bench.pretend_ms / 1000
    with scratch() as folder, made_up_run(with_pictures(config, folder, bench.repetitions + 1), given, folder) as job:
        if pretend:
            _sleep_in_blocks(job.strategy, pretend)
        shares = [_share_of_waiting(job, number) for number in range(bench.repetitions + 1)][1:]
        return json.dumps(shares) if job.strategy.is_main else ""


def _share_of_waiting(job: "Run", number: int) -> float:
    """Of the time from the first micro-batch of a step to the end of the last on any stage, the mean over stages.

    The exchange of gradients, which comes after, does not count; a stage that is done early waits in it.
    """
    import torch

    from ..distributed.devices import wait_for
    from ..distributed.memory import phase
    from ..training.profiler import sum_phase_seconds

    steps = job.loader.steps(number)
    work = next(steps)
    steps.close()  # type: ignore[attr-defined]
    job.strategy.gather(None)  # all begin at once
    with torch.profiler.profile() as profile, phase("other"):
        job.strategy.gradients(job.task, work.batches, work.samples, number)
        wait_for(job.strategy.device)
    job.optimizer.zero_grad()
    phases = sum_phase_seconds(profile.events() or ())
    worked = sum(seconds for name, seconds in phases.items() if name not in ("other", "communication"))
    stages = job.strategy.gather((worked, worked + phases["other"]))
    return 1 - statistics.mean(busy for busy, _ in stages) / max(until for _, until in stages)


def _sleep_in_blocks(pipeline: Any, seconds: float) -> None:
    """Each stage for so long, whatever number of blocks it has."""
    for first, end in zip(pipeline.cuts, pipeline.cuts[1:], strict=False):
        for block in pipeline.passage.chain.blocks[first:end]:
            block.register_forward_hook(_sleeper(seconds / (end - first)))


def _sleeper(seconds: float) -> Callable[..., Any]:
    import torch

    class Slept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            time.sleep(seconds)
            return tuple(tensor.view_as(tensor) for tensor in tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            time.sleep(BACKWARD * seconds)
            return gradients

    def hook(block: Any, given: Any, made: Any) -> Any:
        sleep: Any = Slept.apply
        return sleep(*made) if isinstance(made, tuple) else sleep(made)[0]

    return hook
