"""The learning rate as a pure function of the optimizer step, so that ranks, accumulation and resume cannot move it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..config.schema import OptimConfig
from ..errors import ConfigError
from .arguments import find_unknown_args, import_class, parse_keyword_args

LRSchedule = Callable[[int], float]
"""From an optimizer step, from 0, to a share of the peak learning rate."""


@dataclass(frozen=True)
class ScheduleContext:
    """The run as a schedule sees it, lengths in optimizer steps."""

    config: OptimConfig
    total_steps: int
    warmup_steps: int
    decay_steps: int

    @property
    def min_lr_ratio(self) -> float:
        return self.config.lr_scheduler_min_lr_ratio or 0.0


ProgressFactor = Callable[[float, ScheduleContext], float]
"""From progress after the warm-up, 0 to 1, to a share of the peak."""


def _constant(progress: float, context: ScheduleContext) -> float:
    return 1.0


def _linear(progress: float, context: ScheduleContext) -> float:
    return 1.0 - progress


def _cosine(progress: float, context: ScheduleContext) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _cosine_with_restarts(progress: float, context: ScheduleContext) -> float:
    if progress >= 1.0:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * (context.config.lr_scheduler_num_cycles * progress % 1.0)))


def _cosine_with_min_lr(progress: float, context: ScheduleContext) -> float:
    return _cosine(progress, context) * (1.0 - context.min_lr_ratio) + context.min_lr_ratio


def _polynomial(progress: float, context: ScheduleContext) -> float:
    """Ends at the floor that transformers gives this schedule, 1e-7 in absolute terms."""
    peak = context.config.learning_rate
    floor = min(1e-7 / peak, 1.0) if peak else 0.0
    return float((1.0 - floor) * (1.0 - progress) ** context.config.lr_scheduler_power + floor)


def _rex(progress: float, context: ScheduleContext) -> float:
    """Stays high for long and falls fast at the end (reflected exponential)."""
    return (1.0 - progress) / (1.0 - progress / 2)


PROGRESS_SCHEDULES: Mapping[str, ProgressFactor] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "adafactor": _constant,  # the rate is the optimizer's own
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "polynomial": _polynomial,
    "rex": _rex,
}
"""Schedules that know only how far the run has come."""


def _build_inverse_sqrt(context: ScheduleContext) -> LRSchedule:
    """Falls with the root of the steps, counted as if they had begun ``timescale`` before the warm-up's end."""
    timescale = context.config.lr_scheduler_timescale or context.warmup_steps or 10_000
    return lambda step: math.sqrt(timescale / (step - context.warmup_steps + timescale))


def _build_warmup_stable_decay(context: ScheduleContext) -> LRSchedule:
    """At the peak until the decay, which ends with the run."""
    start = context.total_steps - context.decay_steps

    def factor(step: int) -> float:
        if step < start:
            return 1.0
        return _cosine_with_min_lr(min((step - start) / max(1, context.decay_steps), 1.0), context)

    return factor


def _build_piecewise_constant(context: ScheduleContext) -> LRSchedule:
    """``step_rules=1:10,0.1:20,0.01``: the peak until step 10, a tenth until 20, a hundredth from there on."""
    words = dict(word.partition("=")[::2] for word in context.config.lr_scheduler_args)
    rules = words.pop("step_rules", "").strip().strip("'\"").split(",")
    try:
        if words:
            raise ValueError
        limits = [(int(rule.split(":")[1]), float(rule.split(":")[0])) for rule in rules[:-1]]
        last = float(rules[-1])
        if [limit for limit, _ in limits] != sorted({limit for limit, _ in limits}):
            raise ValueError
    except (ValueError, IndexError):
        raise ConfigError(
            [
                "--lr_scheduler_args: piecewise_constant takes step_rules=1:10,0.1:20,0.01 (the peak until"
                " step 10, a tenth until 20, then a hundredth) and nothing else"
            ]
        ) from None
    return lambda step: next((factor for limit, factor in limits if step < limit), last)


STEP_SCHEDULES: Mapping[str, Callable[[ScheduleContext], LRSchedule]] = {
    "inverse_sqrt": _build_inverse_sqrt,
    "warmup_stable_decay": _build_warmup_stable_decay,
    "piecewise_constant": _build_piecewise_constant,
}
"""Schedules that count steps."""


def build_lr_schedule(config: OptimConfig, total_steps: int) -> LRSchedule:
    """The course of the learning rate over a run of ``steps``; mistakes in its settings are a ``ConfigError``."""
    if config.lr_scheduler_type:
        return _build_from_scheduler_class(config, total_steps)
    course = ScheduleContext(
        config, total_steps, config.lr_warmup_steps.to_steps(total_steps), config.lr_decay_steps.to_steps(total_steps)
    )
    if config.lr_scheduler in STEP_SCHEDULES:
        after = STEP_SCHEDULES[config.lr_scheduler](course)
    else:
        factor, rest = PROGRESS_SCHEDULES[config.lr_scheduler], max(1, total_steps - course.warmup_steps)

        def after(step: int) -> float:
            return factor(min((step - course.warmup_steps) / rest, 1.0), course)

    lowest = course.min_lr_ratio if config.lr_scheduler == "warmup_stable_decay" else 0.0

    def factor_of(step: int) -> float:
        if step < course.warmup_steps:
            return lowest + (1.0 - lowest) * step / course.warmup_steps
        return after(step)

    return factor_of


def _build_from_scheduler_class(config: OptimConfig, total_steps: int) -> LRSchedule:
    """A scheduler of torch or of the user's own, walked through once beforehand, which makes it a function, too."""
    name = config.lr_scheduler_type
    kind = import_class(name if "." in name else f"torch.optim.lr_scheduler.{name}", "lr_scheduler_type", name)
    arguments = parse_keyword_args(config.lr_scheduler_args, "lr_scheduler_args")
    peak = config.learning_rate or 1.0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    if unknown := find_unknown_args(kind, list(arguments)):
        raise ConfigError([f"--lr_scheduler_args: {name} does not take {', '.join(unknown)}"])
    try:
        scheduler = kind(optimizer, **arguments)
        rates = []
        for _ in range(total_steps):
            rates.append(optimizer.param_groups[0]["lr"] / peak)
            optimizer.step()
            scheduler.step()
    except Exception as error:  # a class of the user's own raises what it likes
        raise ConfigError([f"--lr_scheduler_type: {name}: {error}"]) from None
    return lambda step: float(rates[min(step, len(rates) - 1)])


def validate_lr_schedule(config: OptimConfig) -> None:
    """Build the schedule for nothing, so that a mistake in its settings shows before a model is loaded."""
    build_lr_schedule(config, 2)
