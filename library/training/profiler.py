"""``--profile_steps``: time of each phase of a step, FLOPs, MFU, and a torch.profiler trace.

The first steps run without the profiler and give the time per step. The last few are profiled: each phase synchronizes
the device, so that its time includes the device's work.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import profile, schedule
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from ..config.types import StepRange
from ..distributed.devices import HOST, MIXED_PRECISION_DTYPES, synchronize
from ..distributed.step_phases import PHASE, SYNCHRONIZE, record_phase
from ..models.weights import build_empty_model
from ..parallel.pipeline import IS_REPEATED_FORWARD
from .state import Callback, TrainingRun

logger = logging.getLogger(__name__)
MAX_PROFILED_STEPS = 3
"""Traces of more steps are too large for viewers."""

PHASES = ("data", "encode", "forward", "backward", "communication", "optimizer", "other")
META = torch.device("meta")


class _StepBoundary:
    """A callback that runs before or after all others."""

    is_deferrable = False

    def __init__(
        self,
        id: str,
        should_run: Callable[[TrainingRun], bool],
        function: Callable[[TrainingRun], None],
        on_train_begin: Callable[[TrainingRun], None] | None = None,
    ) -> None:
        self.id, self._should_run, self._function, self._on_train_begin = id, should_run, function, on_train_begin

    def should_run(self, run: TrainingRun) -> bool:
        return self._should_run(run)

    def on_train_begin(self, run: TrainingRun) -> None:
        if self._on_train_begin is not None:
            self._on_train_begin(run)

    def __call__(self, run: TrainingRun) -> None:
        self._function(run)


class StepProfiler:
    """Times and profiles steps on the main rank, without the time of other callbacks between steps."""

    def __init__(self, steps: StepRange, trace: Path):
        self.steps, self.trace = steps, trace
        self.num_profiled = min(MAX_PROFILED_STEPS, steps.last - steps.first - 1)
        self.num_timed = steps.last - steps.first - self.num_profiled  # one step in between is the profiler's warmup
        self.boundaries = (steps.first - 1, *range(steps.first - 1 + self.num_timed, steps.last + 1))
        self.num_reached = 0
        self.calls, self.seconds = DenoiserCalls(), 0.0
        self._profile: profile | None = None
        self._step = ExitStack()

    def wrap(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Add a callback before all others, which ends the measured step, and one after them, which begins the next."""

        def is_due(run: TrainingRun) -> bool:  # equal on all ranks: they synchronize metrics before callbacks
            is_inside = self.boundaries[0] < run.state.step < self.steps.last
            return run.state.step in self.boundaries or (
                is_inside and any(callback.should_run(run) for callback in callbacks)
            )

        end = _StepBoundary("profiler_step_end", is_due, lambda run: self._step.close(), self.warn_if_incomplete)
        begin = _StepBoundary("profiler_step_begin", is_due, self._begin_step)
        return [end, *callbacks, begin]

    def warn_if_incomplete(self, run: TrainingRun) -> None:
        first, last = run.state.step + 1, run.plan.steps
        if run.state.step >= self.boundaries[0] or self.steps.last > last:
            logger.warning(
                "--profile_steps %s: incomplete, because this run trains steps %d to %d", self.steps, first, last
            )

    def _begin_step(self, run: TrainingRun) -> None:
        if not run.strategy.comm.is_main:
            return
        if self.num_reached < len(self.boundaries) and run.state.step == self.boundaries[self.num_reached]:
            self.num_reached += 1
            self._switch(run)
        if self._profile is not None:
            self._step.enter_context(_synchronized_step(run.strategy.device))
        elif self.num_reached == 1:
            self._step.enter_context(self._timed_steps(run))

    def _switch(self, run: TrainingRun) -> None:
        """Start, advance or stop the profiler at this boundary."""
        if self.num_reached == 2:
            plan = schedule(wait=0, warmup=1, active=self.num_profiled, repeat=1)
            self._profile = profile(schedule=plan, on_trace_ready=partial(self._report, run), acc_events=True)
            self._profile.start()
        elif self._profile is not None:
            self._profile.step()
            if self.num_reached == len(self.boundaries):
                self._profile.stop()
                self._profile = None

    @contextmanager
    def _timed_steps(self, run: TrainingRun) -> Iterator[None]:
        with self.calls.record(get_denoiser(run)):
            synchronize(run.strategy.device)
            start = time.perf_counter()
            yield
            synchronize(run.strategy.device)
        self.seconds += time.perf_counter() - start

    def _report(self, run: TrainingRun, profile: Any) -> None:
        events = profile.events()
        phases = {name: seconds / self.num_profiled for name, seconds in sum_phase_seconds(events).items()}
        collectives = sum(event.time_range.elapsed_us() for event in events if _is_collective(event)) / 1e6
        step, flops = self.seconds / self.num_timed, self.calls.count_flops(get_denoiser(run)) / self.num_timed
        flops /= run.strategy.model_parallel_size
        dtype = MIXED_PRECISION_DTYPES[run.strategy.mixed_precision]
        peak = measure_peak_flops(run.strategy.device, dtype) if flops else None
        metrics = {f"profile/{name}_seconds": phases.get(name, 0.0) for name in PHASES}
        metrics |= {"profile/step_seconds": step, "profile/collectives_seconds": collectives / self.num_profiled}
        metrics |= {"profile/step_teraflop": flops / 1e12} if flops else {}
        metrics |= {"profile/mfu": flops / step / peak} if peak else {}
        run.metric_logger.log_values(run, metrics)
        profiled = f"steps {self.steps.last - self.num_profiled + 1} to {self.steps.last}"
        logger.info("%s, profiled, with a device synchronization after each phase:", profiled)
        total = sum(phases.values())
        for name, seconds in {**dict.fromkeys(PHASES, 0.0), **phases, "total": total}.items():
            logger.info("  %-14s%10.4g ms %6.1f %%", name, 1e3 * seconds, 100 * seconds / total)
        collectives_ms, step_ms = 1e3 * collectives / self.num_profiled, 1e3 * step
        logger.info("  collectives, including those that overlap with computation: %.4g ms", collectives_ms)
        logger.info("steps %d to %d, unprofiled: %.4g ms per step", self.steps.first, self.boundaries[1], step_ms)
        if flops:
            logger.info("denoiser: %.4g TFLOP per step, %.4g TFLOP/s", flops / 1e12, flops / step / 1e12)
        if peak:
            mfu, peak_teraflops = 100 * flops / step / peak, peak / 1e12
            logger.info("MFU: %.1f %% of %.4g TFLOP/s, measured on a large matrix multiplication", mfu, peak_teraflops)
        try:
            profile.export_chrome_trace(str(self.trace))
            logger.info("trace of %s: %s", profiled, self.trace)
        except (OSError, RuntimeError) as error:  # training continues without the trace
            logger.warning("%s: cannot be written: %s", self.trace, error)


@contextmanager
def _synchronized_step(device: torch.device) -> Iterator[None]:
    """Make phases synchronize the device; time outside of the phases is recorded as "other"."""
    token = SYNCHRONIZE.set(partial(synchronize, device))
    try:
        with record_phase("other"):
            yield
    finally:
        SYNCHRONIZE.reset(token)


def sum_phase_seconds(events: Iterable[Any]) -> dict[str, float]:
    """Sum the time of each phase in a profile, excluding nested phases."""
    seconds: defaultdict[str, float] = defaultdict(float)
    spans = [event for event in events if event.name.startswith(PHASE) and event.device_type == DeviceType.CPU]
    parents: list[tuple[str, float]] = []
    for span in sorted(spans, key=lambda span: (span.time_range.start, -span.time_range.end)):
        while parents and parents[-1][1] <= span.time_range.start:
            parents.pop()
        duration, name = span.time_range.elapsed_us() / 1e6, span.name.removeprefix(PHASE)
        if parents:
            seconds[parents[-1][0]] -= duration
        seconds[name] += duration
        parents.append((name, span.time_range.end))
    return dict(seconds)


def _is_collective(event: Any) -> bool:
    return str(event.name).startswith(("gloo:", "ncclDev"))


def get_denoiser(run: TrainingRun) -> nn.Module:
    """Return the pipeline's denoiser, which every strategy calls inside its wrappers."""
    model: nn.Module = getattr(run.task.pipe, run.task.family.facts.denoiser_name)
    return model


class DenoiserCalls:
    """Counts denoiser calls by input shapes, and their FLOPs on a copy on the meta device.

    So the FLOPs do not depend on strategy, torch.compile and activation checkpointing; adapters are not counted.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self.inputs: dict[tuple[Any, ...], Any] = {}

    @contextmanager
    def record(self, denoiser: nn.Module) -> Iterator[None]:
        """Record the calls inside the context."""
        hook = denoiser.register_forward_pre_hook(self._record, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _record(self, denoiser: nn.Module, *inputs: Any) -> None:
        if not IS_REPEATED_FORWARD.get():
            shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in tree_leaves(inputs))
            self.counts[shapes] += 1
            if shapes not in self.inputs:
                self.inputs[shapes] = tree_map(_to_meta, inputs)

    def count_flops(self, denoiser: nn.Module) -> int:
        """Count the forward pass and the backward pass to the inputs; frozen weights need no gradient."""
        if not self.counts:
            return 0
        own: Any = denoiser
        # FSDP2 replaces the class by a subclass.
        cls = next(base for base in type(denoiser).__mro__ if base.__module__.startswith("diffusers."))
        model, total = build_empty_model(cls, own.config).requires_grad_(False).to(META), 0
        for shapes, (args, kwargs) in self.inputs.items():
            with FlopCounterMode(display=False) as counter, torch.enable_grad():
                outputs = model(*args, **kwargs)[0]
                torch.autograd.backward([output.sum() for output in tree_leaves(outputs)])
            total += self.counts[shapes] * int(counter.get_total_flops())
        return total


def _to_meta(item: Any) -> Any:
    if not isinstance(item, Tensor):
        return item
    if not item.is_floating_point():
        return torch.empty_like(item, device=META)
    has_gradient = item.ndim > 2  # latents and text embeddings; timesteps do not need one
    return torch.empty_like(item, device=META, dtype=torch.float32, requires_grad=has_gradient)


def measure_peak_flops(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float | None:
    """Measure the FLOP/s of a large matrix multiplication; None on a CPU, or without memory for it.

    torch 2.11's table of peak FLOP/s has few devices, some with the value for sparse matrices.
    """
    if device.type == HOST.type:
        return None
    try:
        matrix = torch.randn(size, size, device=device, dtype=dtype)
        timer = Timer("matrix @ matrix", globals={"matrix": matrix})
        return 2 * size**3 / timer.blocked_autorange().median
    except torch.OutOfMemoryError:
        return None
