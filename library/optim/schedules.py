"""The learning rate as a pure function of the optimizer step, so that ranks, accumulation and resume cannot move it."""

import math
from collections.abc import Callable

from ..config.schema import OptimConfig

Factor = Callable[[float, OptimConfig], float]
"""From progress after the warm-up, 0 to 1, to a share of the peak."""


def _constant(progress: float, config: OptimConfig) -> float:
    return 1.0


def _linear(progress: float, config: OptimConfig) -> float:
    return 1.0 - progress


def _cosine(progress: float, config: OptimConfig) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _cosine_with_restarts(progress: float, config: OptimConfig) -> float:
    if progress >= 1.0:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * (config.lr_scheduler_num_cycles * progress % 1.0)))


def _polynomial(progress: float, config: OptimConfig) -> float:
    """Ends at the floor that transformers gives this schedule, 1e-7 in absolute terms."""
    floor = min(1e-7 / config.learning_rate, 1.0) if config.learning_rate else 0.0
    return float((1.0 - floor) * (1.0 - progress) ** config.lr_scheduler_power + floor)


SCHEDULES: dict[str, Factor] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
}


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of optimizer step ``step`` (from 0) in a run of ``steps``."""
    warmup = config.lr_warmup_steps.steps(steps)
    if step < warmup:
        return config.learning_rate * step / warmup
    progress = min((step - warmup) / max(1, steps - warmup), 1.0)
    return config.learning_rate * SCHEDULES[config.lr_scheduler](progress, config)
