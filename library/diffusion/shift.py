"""Where the times of a flow model lie: shifted towards noise, by one factor or by one that grows with the picture.

A picture of more pixels needs more noise to lose the same share of what it shows, so models for large pictures are
made with times that are moved: ``s`` becomes ``f s / (1 + (f - 1) s)`` (Esser et al. 2024, arXiv 2403.03206).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class FixedShift:
    """One factor for pictures of every size."""

    factor: float = 1.0

    def compute_factor(self, num_tokens: int) -> float:
        """The factor for a picture that the model sees as ``tokens`` patches."""
        return self.factor


@dataclass(frozen=True)
class DynamicShift:
    """A factor ``exp(m)`` (or, linearly, ``m``) with ``m`` on the straight line through two points (tokens, m)."""

    base_point: tuple[int, float]
    max_point: tuple[int, float]
    is_exponential: bool = True

    def compute_factor(self, num_tokens: int) -> float:
        """The factor for a picture that the model sees as ``tokens`` patches."""
        (start, least), (end, most) = self.base_point, self.max_point
        m = least + (most - least) * (num_tokens - start) / (end - start)
        return math.exp(m) if self.is_exponential else m


TimestepShift = FixedShift | DynamicShift

NO_SHIFT = FixedShift()

FLUX_DEV_SHIFT = DynamicShift((256, 0.5), (4096, 1.15))
"""The line that FLUX.1 dev draws pictures by."""


def build_timestep_shift(scheduler_config: Mapping[str, Any]) -> TimestepShift:
    """How the pipeline moves its times, from the settings of diffusers' ``FlowMatchEulerDiscreteScheduler``."""
    if not scheduler_config.get("use_dynamic_shifting", False):
        return FixedShift(float(scheduler_config.get("shift", 1.0)))
    return DynamicShift(
        (int(scheduler_config.get("base_image_seq_len", 256)), float(scheduler_config.get("base_shift", 0.5))),
        (int(scheduler_config.get("max_image_seq_len", 4096)), float(scheduler_config.get("max_shift", 1.15))),
        scheduler_config.get("time_shift_type", "exponential") == "exponential",
    )


def apply_shift(sigmas: Tensor, factor: float) -> Tensor:
    """Times in 0..1, moved towards 1, which is noise, by a factor above 1."""
    return factor * sigmas / (1 + (factor - 1) * sigmas)
