"""A step of training beside a bare loop of PyTorch: the same model, batch and precision, in turn on the same machine.

The bare loop is forward, mean squared error, backward, and AdamW on the adapter; batch, noise and times are made for it
beforehand.  Ours is the loop of training itself, with all that it does in a step and at a reading every ten steps:
reading ahead, noise, weights, clipping, looking for what is no number, figures in a file.  Both see the same weights
and the same noise, and that they compute the same loss and the same gradient is measured, too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import RunConfig
from ..config.options import opt
from .bench_figure import Figure, reported
from .bench_run import made_up_run, scratch, settings, with_pictures

if TYPE_CHECKING:
    from ..training.job import Run

TARGET = 1.03
"""Of a model of its published size; where a step takes milliseconds, as with tiny ones, it is another."""
TINY_TARGET = 1.15
MOST_APART = {"no": 1e-4, "bf16": 2e-2, "fp16": 2e-2, "fp8": 2e-2}
"""How far loss and gradient may be from each other, as a share of them, by precision."""


@dataclass(frozen=True)
class StepOptions:
    """How often is measured."""

    bench_steps: int = opt(10, "steps in a row of each loop", minimum=1)
    repetitions: int = opt(5, "how often the loops take turns, after a first turn that only warms up", minimum=1)
    json: bool = opt(False, "every single value as JSON")


@dataclass(frozen=True)
class Arguments(RunConfig):
    bench: StepOptions = field(default_factory=StepOptions)


def run(argv: Sequence[str]) -> str:
    """Measure and report."""
    config, given = settings(argv, Arguments)
    options = config.bench
    steps = options.bench_steps * (options.repetitions + 1)
    with scratch() as folder, made_up_run(with_pictures(config, folder, steps), given, folder) as job:
        turns = Turns(options.bench_steps)
        job.actions = [turns]
        from ..training.loop import train

        turns.begin(job)
        train(job)
        figures = [*turns.figures(job), *turns.memory(job)]
        device = turns.device(job)
    return reported("step", argv, figures, as_values=options.json, device=device)


class Turns:
    """Comes after every ``each`` of our steps, and lets the bare loop do as many with the same weights."""

    can_wait = False

    def __init__(self, each: int):
        self.each = each
        self.ours: list[tuple[float, float]] = []  # seconds of a step, by the clock and of the processors
        self.bare: list[tuple[float, float]] = []
        self.apart: list[tuple[float, float]] = []  # loss and gradient of a step by the bare loop and by ours
        self.peaks: list[tuple[int, int]] = []

    def is_due(self, run: "Run") -> bool:
        return run.state.step % self.each == 0

    def begin(self, run: "Run") -> None:
        """The clock starts with what happens before the first step."""
        from ..distributed.devices import forget_peak, wait_for

        self._teller, run.teller = run.teller, self
        wait_for(run.strategy.device)
        forget_peak(run.strategy.device)
        self._expected: tuple[float, float] | None = None
        self._mark = _now()

    def stepped(self, run: "Run") -> None:
        self._teller.stepped(run)

    def told(self, run: "Run", figures: Sequence[Any]) -> None:
        """The first of the steps since the last turn is the one that the bare loop has done already."""
        self._teller.told(run, figures)
        if self._expected is not None:
            loss, norm = self._expected
            first = figures[0]
            self.apart.append((_share(loss, float(first.loss)), _share(norm, float(first.gradient_norm))))
            self._expected = None

    def noted(self, run: "Run", values: Any) -> None: ...

    def pictured(self, run: "Run", pictures: Any) -> None: ...

    def __call__(self, run: "Run") -> None:
        from ..distributed.devices import forget_peak, peak_memory, wait_for

        device = run.strategy.device
        wait_for(device)
        ours, peak = _since(self._mark, self.each), peak_memory(device)
        bare = Bare(run)
        forget_peak(device)
        wait_for(device)
        mark = _now()
        for _ in range(self.each):
            bare.step()
        wait_for(device)
        if run.state.step > self.each:  # the first turn warms up
            self.ours.append(ours)
            self.bare.append(_since(mark, self.each))
            self.peaks.append((peak, peak_memory(device)))
        bare.undo()
        if run.state.step < run.plan.steps:
            self._expected = bare.first
        del bare
        forget_peak(device)
        wait_for(device)
        self._mark = _now()

    def figures(self, run: "Run") -> list[Figure]:
        """Seconds of both, and their ratio turn by turn."""
        found = []
        is_tiny = str(run.config.model.pretrained_model_name_or_path).endswith(":tiny")
        target = TINY_TARGET if is_tiny else TARGET
        for number, clock in enumerate(("", ", processor time")):
            ours, bare = (tuple(turn[number] for turn in turns) for turns in (self.ours, self.bare))
            ratios = tuple(one / other for one, other in zip(ours, bare, strict=True))
            found += [Figure(f"our step{clock}", ours, "s"), Figure(f"bare step{clock}", bare, "s"),
                      Figure(f"ours / bare{clock}", ratios, "", target)]  # fmt: skip
        found += _of_peak(run, self.ours, self.bare)
        most = MOST_APART[run.strategy.precision]
        losses, norms = zip(*self.apart, strict=True)
        return [*found, Figure("loss, ours and bare apart", losses, "of it", most),
                Figure("gradient, ours and bare apart", norms, "of it", most)]  # fmt: skip

    def memory(self, run: "Run") -> list[Figure]:
        """Peaks of both, with the model in them."""
        ours, bare = zip(*self.peaks, strict=True)
        return [Figure("our peak memory", tuple(peak / 1e9 for peak in ours), "GB"),
                Figure("bare peak memory", tuple(peak / 1e9 for peak in bare), "GB")]  # fmt: skip

    def device(self, run: "Run") -> str:
        from ..distributed.devices import device_title

        return device_title(run.strategy.device)


def _of_peak(run: "Run", ours: Sequence[tuple[float, float]], bare: Sequence[tuple[float, float]]) -> list[Figure]:
    """What the denoiser computes in a step, and how much that is of what the device can."""
    from ..training.precision import DTYPES
    from ..training.profiler import DenoiserCalls, get_denoiser, measure_peak_flops

    denoiser = get_denoiser(run)
    calls = DenoiserCalls()
    with calls.record(denoiser):
        Bare(run).undo()
    flops = calls.count_flops(denoiser)
    found = [Figure("the denoiser computes", (flops / 1e12,), "TFLOP a step")]
    if (peak := measure_peak_flops(run.strategy.device, DTYPES[run.strategy.precision])) is not None:
        for name, turns in (("our", ours), ("bare", bare)):
            shares = tuple(100 * flops / clock / peak for clock, _ in turns)
            found.append(Figure(f"{name} share of the device's peak (MFU)", shares, "%"))
    return found


class Bare:
    """The loop that anybody would write, on the model of the run, at its weights, with the batch of its next step."""

    def __init__(self, run: "Run"):
        import torch

        self.torch = torch
        self.parameters = run.parameters
        self.kept = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=run.config.optim.learning_rate, fused=True)
        self.autocast = run.strategy.accelerator.autocast
        self.forwards = list(_forwards(run))
        self.first: tuple[float, float] | None = None
        losses = [self._backward(forward, target) for forward, target in self.forwards]
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.first = float(sum(losses)), float(norm)
        self.optimizer.zero_grad()

    def step(self) -> None:
        for forward, target in self.forwards:
            self._backward(forward, target)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self, forward: Callable[[], Any], target: Any) -> Any:
        with self.autocast():
            predicted = forward()
        loss = self.torch.nn.functional.mse_loss(predicted.float(), target) / len(self.forwards)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def undo(self) -> None:
        """The run goes on as if nothing had happened."""
        with self.torch.no_grad():
            for parameter, value in zip(self.parameters, self.kept, strict=True):
                parameter.copy_(value)


def _forwards(run: "Run") -> Any:
    """Of each micro-batch of the coming step: what calls the model, and what it is to say."""
    import torch

    task, step = run.task, run.state.step
    denoiser: Any = run.strategy.unwrapped(run.adapter).denoiser
    steps = run.loader.steps(step)
    work = next(steps)
    steps.close()  # type: ignore[attr-defined]
    for pixels in work.batches:
        with torch.no_grad():
            batch = task.encode(pixels, step)
            noised = task.objective.noised(batch.latents, partial(task.generators, step=step, places=batch.places))
        predict = partial(task.family.predict, task.pipe, denoiser, noised.latents, noised.t, batch)
        yield predict, noised.target.float()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(mark: tuple[float, float], steps: int) -> tuple[float, float]:
    clock, worked = _now()
    return (clock - mark[0]) / steps, (worked - mark[1]) / steps


def _share(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-30)
