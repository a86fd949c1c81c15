"""The noise levels of a planned run: the share of its samples below half and a quarter of the noise; no torch."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ..config.schema_objective import NoiseConfig
from ..dataloader.batch_plan import get_planned_stages
from ..dataloader.run_plan import RunPlan
from ..models.detect import DetectedModel, get_config_reader
from ..models.own_families import get_family_facts

LEVELS = (0.5, 0.25)
"""The noise levels below which samples are counted: below them likeness and texture are learned."""


@dataclass(frozen=True)
class NoiseSummary:
    """The distribution of noise levels over all samples of a run."""

    sampling: str
    shifts: tuple[float, float]
    """The smallest and the largest shift of its image sizes."""
    shares: tuple[float, ...]
    """The share of samples below each of ``LEVELS``."""

    def format_text(self) -> str:
        low, high = (f"{shift:.3g}" for shift in self.shifts)
        shift = low if low == high else f"{low} to {high}"
        shares = ", ".join(
            f"{share:.1%} below sigma {level:g}" for level, share in zip(LEVELS, self.shares, strict=True)
        )
        return f"noise levels: timestep_sampling {self.sampling}, shift {shift}; share of samples: {shares}"

    def to_json(self) -> dict[str, Any]:
        shares = {f"below_{level:g}": share for level, share in zip(LEVELS, self.shares, strict=True)}
        return {"timestep_sampling": self.sampling, "shift": list(self.shifts), "shares": shares}


def summarize_noise_levels(noise_config: NoiseConfig, detected: DetectedModel, plan: RunPlan) -> NoiseSummary | None:
    """Summarize the noise levels of a run; None for models that do not match flows."""
    if detected.prediction_type != "flow":
        return None
    family = get_family_facts(detected.family)
    facts, rule = family.training_noise, detected.frame_rule
    distribution = facts.build_distribution(noise_config, get_config_reader(detected))
    samples = defaultdict[int, float](float)
    for stage in get_planned_stages(plan.batch_plan):
        steps = (plan.steps if stage.end_step is None else min(stage.end_step, plan.steps)) - stage.first_step
        for index, bucket in enumerate(stage.batch_plan.buckets):
            frames = 1 if rule is None else rule.count_latent_frames(bucket.num_frames)
            if rule is not None and family.has_sections:
                frames = rule.count_latent_frames(rule.least) - 1  # of one section
            tokens = frames * facts.count_tokens(*bucket.resolution, detected.size_multiple)
            epochs = steps / stage.batch_plan.steps_per_epoch
            samples[tokens] += epochs * stage.batch_plan.count_samples(index)
    shifts = [distribution.compute_factor(tokens) for tokens in samples]
    shares = tuple(distribution.compute_mean_share_below(level, samples) for level in LEVELS)
    return NoiseSummary(distribution.sampling, (min(shifts), max(shifts)), shares)
