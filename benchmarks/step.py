"""Benchmark a training step against a bare PyTorch loop on the same model, batch and precision, taking turns.

The bare loop is forward, MSE loss, backward and AdamW on the same adapter, with inputs that are prepared beforehand.
Ours is the training loop itself, with everything that it does in a step: reading ahead, noise, loss weights, gradient
clipping, the check for NaN, metrics.  Both start from the same weights and noise, and their losses are compared.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from library.distributed.device_memory import get_peak_memory
from library.distributed.devices import synchronize

from .report import Measurement, add_count_option, compute_ratios
from .synthetic_run import build_run, reset_peak_memory, write_dataset

if TYPE_CHECKING:
    from library.training.state import TrainingRun

MAX_OVERHEAD, MAX_OVERHEAD_TINY = 1.03, 1.15
"""Ratio of step times; the overhead is a few milliseconds, which is much of the step of a tiny model."""
MAX_DIFFERENCE, MAX_DIFFERENCE_MIXED = 1e-4, 2e-2
"""Relative difference of loss and gradient norm, in float32 and in mixed precision."""
Batch = tuple[Callable[[], torch.Tensor], torch.Tensor]


def add_arguments(parser: ArgumentParser) -> None:
    add_count_option(parser, "--bench_steps", 10, "steps in a turn")


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> list[Measurement]:
    """Measure ``repetitions`` turns of both loops, after one turn of warmup."""
    from library.report.metric_series import read_metrics
    from library.training.loop import train

    argv = write_dataset(training_options, directory, options.bench_steps * (options.repetitions + 1))
    with build_run(argv, directory) as job:
        comparison = LoopComparison(job, options.bench_steps)
        job.callbacks = [comparison]
        train(job)
        precision, images = job.strategy.mixed_precision, job.state.samples / job.state.step
        model = str(job.config.model.pretrained_model_name_or_path)
    ours, bare = comparison.seconds["ours"], comparison.seconds["bare"]
    limit = MAX_OVERHEAD_TINY if model.endswith(":tiny") else MAX_OVERHEAD
    measurements = [
        Measurement("our step", ours, "s"),
        Measurement("bare step", bare, "s"),
        Measurement("our step / bare step", compute_ratios(ours, bare), "x", at_most=limit),
        Measurement("our throughput", [images / seconds for seconds in ours], "images/s"),
    ]
    steps = {line["step"]: line for line in read_metrics(directory / "metrics.jsonl")}
    for metric in ("loss/current", "gradient_norm"):
        pairs = [(steps[step][metric], expected[metric]) for step, expected in comparison.expected.items()]
        differences = [abs(value / expected - 1) for value, expected in pairs]
        tolerance = MAX_DIFFERENCE if precision == "no" else MAX_DIFFERENCE_MIXED
        measurements.append(Measurement(f"relative difference of {metric}", differences, at_most=tolerance))
    return measurements + [Measurement(f"peak memory, {name}", peaks, "GB") for name, peaks in comparison.peaks.items()]


class BareLoop:
    """Train the model of a run on the batch of its next step, as a short script would."""

    def __init__(self, run: "TrainingRun"):
        self.parameters = run.parameters
        self.optimizer = torch.optim.AdamW(self.parameters, lr=run.config.optim.learning_rate, fused=True)
        self.autocast = run.strategy.accelerator.autocast
        self.batches = list(prepare_batches(run))

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> torch.Tensor:
        """Compute the gradients of all micro-batches; return the loss."""
        losses = []
        for predict, target in self.batches:
            with self.autocast():
                predicted = predict()
            loss = torch.nn.functional.mse_loss(predicted.float(), target) / len(self.batches)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def compute_metrics(self) -> dict[str, float]:
        """Compute loss and gradient norm of the step, under the names of the run's own metrics."""
        loss = self.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in self.parameters if each.grad is not None])
        self.optimizer.zero_grad()
        return {"loss/current": float(loss), "gradient_norm": float(norm)}


def prepare_batches(run: "TrainingRun") -> Iterator[Batch]:
    """Prepare the forward pass and the target of each micro-batch of the next step."""
    task, step = run.task, run.state.step
    denoiser: Any = run.strategy.unwrap_model(run.model).denoiser
    steps: Any = run.loader.iter_steps(step)
    work = next(steps)
    steps.close()
    for pixels in work.micro_batches:
        with torch.no_grad():
            batch = task.encode(pixels, step)
            noised = task.objective.add_noise(
                batch.latents, partial(task.build_generators, step=step, global_positions=batch.global_positions)
            )
        yield (
            partial(task.family.predict, task.pipe, denoiser, noised.latents, noised.timesteps, batch),
            noised.target.float(),
        )


class LoopComparison:
    """Callback that gives the bare loop as many steps, from the same weights, after every ``steps`` of ours."""

    id = "loop_comparison"
    is_deferrable = False

    def __init__(self, run: "TrainingRun", steps: int):
        self.steps, self.device = steps, run.strategy.device
        self.seconds: dict[str, list[float]] = {"ours": [], "bare": []}
        self.peaks: dict[str, list[float]] = {"ours": [], "bare": []}
        self.expected: dict[int, dict[str, float]] = {}
        """By step: the metrics that the bare loop computed for it."""
        self.start = self._start_clock()

    def should_run(self, run: "TrainingRun") -> bool:
        return run.state.step % self.steps == 0

    def on_train_begin(self, run: "TrainingRun") -> None: ...

    def __call__(self, run: "TrainingRun") -> None:
        is_warmup = run.state.step == self.steps
        self._stop_clock("ours", is_warmup)
        weights = [parameter.detach().clone() for parameter in run.parameters]
        bare = BareLoop(run)
        if run.state.step < run.plan.steps:
            self.expected[run.state.step + 1] = bare.compute_metrics()
        self.start = self._start_clock()
        for _ in range(self.steps):
            bare.step()
        self._stop_clock("bare", is_warmup)
        with torch.no_grad():
            for parameter, weight in zip(run.parameters, weights, strict=True):
                parameter.copy_(weight)
        del bare, weights
        self.start = self._start_clock()

    def _start_clock(self) -> float:
        synchronize(self.device)
        reset_peak_memory(self.device)
        return time.perf_counter()

    def _stop_clock(self, name: str, is_warmup: bool) -> None:
        synchronize(self.device)
        if not is_warmup:
            self.seconds[name].append((time.perf_counter() - self.start) / self.steps)
            self.peaks[name].append(get_peak_memory(self.device) / 1e9)
