"""Timestep shifts: the factor by which noise levels are moved towards noise, fixed or by resolution; no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FixedShift:
    """A shift that does not depend on the resolution."""

    factor: float = 1.0

    def describe(self) -> str:
        return f"{self.factor:g}"

    def compute_factor(self, num_tokens: int) -> float:
        return self.factor


NO_SHIFT = FixedShift()


@dataclass(frozen=True)
class DynamicShift:
    """Resolution-dependent shift ``exp(mu)`` (or ``mu``), with ``mu`` linear in the number of tokens."""

    base_point: tuple[int, float]
    max_point: tuple[int, float]
    is_exponential: bool = True

    def describe(self) -> str:
        points = (f"{mu:g} at {tokens} tokens" for tokens, mu in (self.base_point, self.max_point))
        return f"{'exp of ' if self.is_exponential else ''}{' to '.join(points)}"

    def compute_factor(self, num_tokens: int) -> float:
        """The shift for an image of this many tokens (patches)."""
        (start, base_shift), (end, max_shift) = self.base_point, self.max_point
        mu = base_shift + (max_shift - base_shift) * (num_tokens - start) / (end - start)
        return math.exp(mu) if self.is_exponential else mu


@dataclass(frozen=True)
class SquareRootShift:
    """Shift that grows with the side of the image, as in the pipelines of CogView4 and Ideogram 4."""

    base_tokens: int
    offset: float
    slope: float

    def describe(self) -> str:
        return f"{self.offset:g} + {self.slope:g} sqrt(tokens / {self.base_tokens})"

    def compute_factor(self, num_tokens: int) -> float:
        return math.sqrt(num_tokens / self.base_tokens) * self.slope + self.offset


TimestepShift = FixedShift | DynamicShift | SquareRootShift

FLUX_DEV_SHIFT = DynamicShift((256, 0.5), (4096, 1.15))
"""The shift of FLUX.1 dev's scheduler, which many later models declare as well."""

QWEN_SHIFT = DynamicShift((256, 0.5), (8192, 0.9))
"""The shift of Qwen-Image's scheduler."""

KREA2_SHIFT = DynamicShift((256, 0.5), (6400, 1.15))
"""The shift of Krea 2's scheduler; its last point is a square image of 1280 pixels."""

IDEOGRAM4_SHIFT = SquareRootShift(1024, 0.0, 1.0)
"""The shift of Ideogram 4's pipeline: the side of the image, in units of 512 pixels."""


def build_timestep_shift(scheduler_config: Mapping[str, Any]) -> TimestepShift:
    """Read the timestep shift from the config of a ``FlowMatchEulerDiscreteScheduler``."""
    if not scheduler_config.get("use_dynamic_shifting", False):
        return FixedShift(float(scheduler_config.get("flow_shift", scheduler_config.get("shift", 1.0))))
    return DynamicShift(
        (int(scheduler_config.get("base_image_seq_len", 256)), float(scheduler_config.get("base_shift", 0.5))),
        (int(scheduler_config.get("max_image_seq_len", 4096)), float(scheduler_config.get("max_shift", 1.15))),
        scheduler_config.get("time_shift_type", "exponential") == "exponential",
    )
