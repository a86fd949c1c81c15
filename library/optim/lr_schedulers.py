"""Learning rate schedulers as pure functions of the optimizer step, independent of ranks, accumulation and resume.

A schedule is not given to ``accelerator.prepare``, with which it would step once per process.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config.schema_optim import OptimConfig
from ..config.types import split_keyword_args
from ..errors import UserError
from ..problems import Problem
from .arguments import find_unknown_args, import_class, parse_keyword_args

LRSchedule = Callable[[int], float]
"""A function of the optimizer step, counted from 0, that returns the factor on the peak learning rate."""


@dataclass(frozen=True)
class ScheduleContext:
    """The options and lengths that a schedule depends on; lengths are in optimizer steps."""

    config: OptimConfig
    total_steps: int
    warmup_steps: int
    decay_steps: int

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The values of ``SCHEDULER_ARGS``."""

    @property
    def min_lr_ratio(self) -> float:
        return self.config.lr_scheduler_min_lr_ratio or 0.0


ProgressFactor = Callable[[float, ScheduleContext], float]
"""A function that returns the factor on the peak from the progress after the warmup, which is between 0 and 1."""


def _constant(progress: float, context: ScheduleContext) -> float:
    return 1.0


def _linear(progress: float, context: ScheduleContext) -> float:
    return 1.0 - progress


def _compute_cosine_wave(progress: float, cycles: float) -> float:
    """A half cycle falls from 1 to 0; more of them rise again without a jump."""
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress)))


def _cosine(progress: float, context: ScheduleContext) -> float:
    return _compute_cosine_wave(progress, context.arguments["num_cycles"])


def _cosine_with_restarts(progress: float, context: ScheduleContext) -> float:
    if progress >= 1.0:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * (context.config.lr_scheduler_num_cycles * progress % 1.0)))


def _cosine_with_min_lr(progress: float, context: ScheduleContext) -> float:
    wave = _compute_cosine_wave(progress, context.config.lr_scheduler_num_cycles / 2)
    return wave * (1.0 - context.min_lr_ratio) + context.min_lr_ratio


def _polynomial(progress: float, context: ScheduleContext) -> float:
    """Decays to ``lr_end``, an absolute learning rate."""
    peak = context.config.learning_rate
    floor = min(context.arguments["lr_end"] / peak, 1.0) if peak else 0.0
    return float((1.0 - floor) * (1.0 - progress) ** context.config.lr_scheduler_power + floor)


def _rex(progress: float, context: ScheduleContext) -> float:
    """Reflected exponential: stays high for long and falls fast at the end, the more so the smaller ``rex_alpha``."""
    alpha, beta = context.arguments["rex_alpha"], context.arguments["rex_beta"]
    curve = (1.0 - progress) / (alpha + beta - beta * progress)
    return float(context.min_lr_ratio + (1.0 - context.min_lr_ratio) * curve)


PROGRESS_SCHEDULES: Mapping[str, ProgressFactor] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "adafactor": _constant,  # the optimizer computes the rate
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "polynomial": _polynomial,
    "rex": _rex,
}
"""The schedules that depend on the progress only, by ``lr_scheduler``."""


def _build_inverse_sqrt(context: ScheduleContext) -> LRSchedule:
    """Build the schedule ``sqrt(timescale / (step - warmup + timescale))``."""
    timescale = context.config.lr_scheduler_timescale or context.warmup_steps or 10_000
    return lambda step: math.sqrt(timescale / (step - context.warmup_steps + timescale))


def _build_warmup_stable_decay(context: ScheduleContext) -> LRSchedule:
    """Build a constant schedule with a decay over the last ``lr_decay_steps``, by default that of a cosine."""
    start, lowest, kind = context.total_steps - context.decay_steps, context.min_lr_ratio, context.arguments

    def factor(step: int) -> float:
        if step < start:
            return 1.0
        progress = min((step - start) / max(1, context.decay_steps), 1.0)
        if kind["decay_type"] == "cosine":
            return _cosine_with_min_lr(progress, context)
        rest = 1.0 - (progress if kind["decay_type"] == "linear" else math.sqrt(progress))
        return rest * (1.0 - lowest) + lowest

    return factor


WARMUP_CURVES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 * (1.0 - math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(1.0 - progress),
}
"""The shapes of warmup and decay of ``warmup_stable_decay``."""

SCHEDULER_ARGS: Mapping[str, Mapping[str, float | str]] = {
    "cosine": {"num_cycles": 0.5},
    "polynomial": {"lr_end": 1e-7},
    "warmup_stable_decay": {"warmup_type": "linear", "decay_type": "cosine"},
    "rex": {"rex_alpha": 0.5, "rex_beta": 0.5},
}
"""The ``lr_scheduler_args`` of schedules besides ``piecewise_constant``, with their defaults: those of transformers,
and for ``rex`` those of its authors."""


def _parse_scheduler_args(config: OptimConfig) -> dict[str, Any]:
    """The arguments of the schedule, with its defaults; a mistake raises ``UserError``."""
    name, known = config.lr_scheduler, SCHEDULER_ARGS.get(config.lr_scheduler, {})
    arguments = dict[str, Any](known)
    for key, text in split_keyword_args(config.lr_scheduler_args) if known else ():
        if key not in known:
            raise UserError(Problem("lr_scheduler_args", f"{name} takes {' and '.join(known)}, not {key}"))
        word = (text or "").strip("'\"")
        if isinstance(known[key], str):
            if word not in WARMUP_CURVES:
                raise UserError(Problem("lr_scheduler_args", f"{key} is {', '.join(WARMUP_CURVES)}; got {word}"))
            arguments[key] = word
            continue
        try:
            arguments[key] = float(word)
        except ValueError:
            arguments[key] = -1.0
        limit = "above 0" if key == "rex_alpha" else "of at least 0"
        if not 0 <= arguments[key] < math.inf or (key == "rex_alpha" and not arguments[key]):
            raise UserError(Problem("lr_scheduler_args", f"{key} is a number {limit}; got {word}"))
    return arguments


def _build_piecewise_constant(context: ScheduleContext) -> LRSchedule:
    """Build the schedule of ``step_rules=1:10,0.1:20,0.01``: factor 1 until step 10, 0.1 until step 20, then 0.01."""
    arguments = dict(split_keyword_args(context.config.lr_scheduler_args))
    rules = (arguments.pop("step_rules", "") or "").strip("'\"").split(",")
    try:
        if arguments:
            raise ValueError
        limits = [(int(rule.split(":")[1]), float(rule.split(":")[0])) for rule in rules[:-1]]
        last = float(rules[-1])
        if [limit for limit, _ in limits] != sorted({limit for limit, _ in limits}):
            raise ValueError
    except (ValueError, IndexError):
        raise UserError(
            Problem(
                "lr_scheduler_args",
                "piecewise_constant takes step_rules=1:10,0.1:20,0.01 (factor 1 until step 10, 0.1 until"
                " step 20, then 0.01) and nothing else",
            )
        ) from None
    return lambda step: next((factor for limit, factor in limits if step < limit), last)


STEP_SCHEDULES: Mapping[str, Callable[[ScheduleContext], LRSchedule]] = {
    "inverse_sqrt": _build_inverse_sqrt,
    "warmup_stable_decay": _build_warmup_stable_decay,
    "piecewise_constant": _build_piecewise_constant,
}
"""The schedules that depend on the step, by ``lr_scheduler``."""


def build_lr_schedule(config: OptimConfig, total_steps: int) -> LRSchedule:
    """Build the learning rate schedule of a run of ``total_steps``; a mistake in the settings raises ``UserError``."""
    if config.lr_scheduler_type:
        return _build_from_scheduler_class(config, total_steps)
    warmup_steps, decay_steps = (
        steps.to_steps(total_steps) for steps in (config.lr_warmup_steps, config.lr_decay_steps)
    )
    context = ScheduleContext(config, total_steps, warmup_steps, decay_steps, _parse_scheduler_args(config))
    if config.lr_scheduler in STEP_SCHEDULES:
        after_warmup = STEP_SCHEDULES[config.lr_scheduler](context)
    else:
        progress_factor, remaining = PROGRESS_SCHEDULES[config.lr_scheduler], max(1, total_steps - warmup_steps)

        def after_warmup(step: int) -> float:
            return progress_factor(min((step - warmup_steps) / remaining, 1.0), context)

    start = context.min_lr_ratio if config.lr_scheduler in ("warmup_stable_decay", "rex") else 0.0
    curve = WARMUP_CURVES[context.arguments.get("warmup_type", "linear")]

    def factor(step: int) -> float:
        if step < warmup_steps:
            return start + (1.0 - start) * curve(step / warmup_steps)
        return after_warmup(step)

    return factor


def _build_from_scheduler_class(config: OptimConfig, total_steps: int) -> LRSchedule:
    """Tabulate a torch scheduler, or one by its import path, over the whole run."""
    name = config.lr_scheduler_type
    import_path = name if "." in name else f"torch.optim.lr_scheduler.{name}"
    scheduler_class = import_class(import_path, "lr_scheduler_type", name)
    arguments = parse_keyword_args(config.lr_scheduler_args, "lr_scheduler_args")
    peak = config.learning_rate or 1.0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    if unknown := find_unknown_args(scheduler_class, list(arguments)):
        raise UserError(Problem("lr_scheduler_args", f"{name} does not take {', '.join(unknown)}"))
    try:
        scheduler = scheduler_class(optimizer, **arguments)
        rates = []
        for _ in range(total_steps):
            rates.append(optimizer.param_groups[0]["lr"] / peak)
            optimizer.step()
            scheduler.step()
    except Exception as error:  # a user's class may raise anything
        raise UserError(Problem("lr_scheduler_type", f"{name}: {error}")) from None
    return lambda step: float(rates[min(step, len(rates) - 1)])
