"""Models of two experts, one for high noise and one for low: which of them a training step is for.

The expert of an optimizer step is drawn from the seed and the number of the step alone, so that all ranks and all
micro-batches of a step train the same one, whatever the number of processes; the noise levels of its samples are drawn
from the expert's own part of the distribution.  Together they have the distribution of the run.  No torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..randomness import Purpose, derive_rng
from .noise_level_distributions import NoiseDistribution

HIGH_NOISE: Literal["high_noise"] = "high_noise"
LOW_NOISE: Literal["low_noise"] = "low_noise"
TrainedExperts = Literal["both", "high_noise", "low_noise"]
TYPICAL_TOKENS = 1560
"""Tokens of a frame of 832 x 480 pixels, by which experts are drawn where the noise levels depend on the size."""


@dataclass(frozen=True)
class NoiseExperts:
    """The experts of a model, and which of them are trained."""

    boundary: float
    """The noise level, in 0..1, from which on the expert of high noise predicts."""
    trained: TrainedExperts = "both"

    def list_trained(self) -> tuple[str, ...]:
        """List the experts that are trained."""
        return (HIGH_NOISE, LOW_NOISE) if self.trained == "both" else (self.trained,)

    def draw(self, seed: int, step: int, distribution: NoiseDistribution) -> str:
        """Draw the expert that optimizer step ``step`` trains."""
        if self.trained != "both":
            return self.trained
        share = distribution.compute_share_below(self.boundary, TYPICAL_TOKENS)
        return LOW_NOISE if derive_rng(seed, Purpose.NOISE_EXPERT, step).random() < share else HIGH_NOISE

    def get_quantiles(self, expert: str, distribution: NoiseDistribution, num_tokens: int) -> tuple[float, float]:
        """The part of the quantiles of the distribution that the noise levels of an expert are."""
        share = distribution.compute_share_below(self.boundary, num_tokens)
        return (0.0, share) if expert == LOW_NOISE else (share, 1.0)

    def find_expert(self, quantile: float, distribution: NoiseDistribution, num_tokens: int) -> str:
        """Find the expert of a noise level by its quantile in the distribution."""
        return LOW_NOISE if quantile < self.get_quantiles(LOW_NOISE, distribution, num_tokens)[1] else HIGH_NOISE

    def count_steps(self, seed: int, steps: Sequence[int], distribution: NoiseDistribution) -> Mapping[str, int]:
        """Count the steps that train each expert."""
        if self.trained != "both":
            return {self.trained: len(steps)}
        drawn = Counter(self.draw(seed, step, distribution) for step in steps)
        return {expert: drawn[expert] for expert in self.list_trained()}

    def format_steps(self, seed: int, steps: range, distribution: NoiseDistribution) -> str:
        """Say how many steps train each expert."""
        counts = self.count_steps(seed, steps, distribution)
        parts = (f"{name} {count} of {len(steps)} steps ({count / len(steps):.0%})" for name, count in counts.items())
        return f"experts, from noise level {self.boundary:g} on high_noise: {', '.join(parts)}"
