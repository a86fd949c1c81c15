"""Noise levels that a family is trained with: what is used unless options say otherwise, and what other trainers use.

A pipeline's own shift is made for sampling in few steps.  Drawing its steps with a density that already prefers the
middle would count that bias twice, so training has facts of its own.  No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..config.schema_objective import NoiseConfig, TimestepSampling
from ..diffusion.noise_level_distributions import NoiseDistribution
from ..diffusion.timestep_shift import TimestepShift, build_timestep_shift
from .model_configs import ConfigReader, read_scheduler_config

PROGRAMS = ("musubi-tuner", "sd-scripts", "ai-toolkit", "OneTrainer", "diffusion-pipe")
"""The other trainers whose noise levels are compared."""


def read_scheduler_shift(read: ConfigReader) -> TimestepShift:
    """Read the shift of a ``FlowMatchEulerDiscreteScheduler``."""
    return build_timestep_shift(read_scheduler_config(read))


@dataclass(frozen=True)
class NoiseLevels:
    """The noise levels with which a program trains a family: by its own defaults, or as its documents recommend."""

    timestep_sampling: TimestepSampling = "shift"
    """The option's value that has these noise levels here."""
    shift: float | None = None
    """The shift of ``shift`` and ``sigma``; None: that of the model's pipeline."""
    origin: str = ""
    """Where they come from, where that is not the program's default."""
    shares: tuple[float, float] | None = None
    """The shares of samples below 0.5 and 0.25, for a density that ``timestep_sampling`` does not have."""

    def build_distribution(self, pipeline_shift: TimestepShift) -> NoiseDistribution:
        """Build the distribution for a model whose pipeline has this shift."""
        return NoiseDistribution(
            self.timestep_sampling, NoiseConfig(discrete_flow_shift=self.shift), default_shift=pipeline_shift
        )

    def compute_share_below(self, sigma: float, pipeline_shift: TimestepShift, num_tokens: int) -> float:
        """Compute the share of samples below noise level 0.5 or 0.25."""
        if self.shares is not None:
            return self.shares[(0.5, 0.25).index(sigma)]
        return self.build_distribution(pipeline_shift).compute_share_below(sigma, num_tokens)


UNIFORM = NoiseLevels("uniform")
LOGIT_NORMAL = NoiseLevels("sigmoid")

WEIGHTED = NoiseLevels("uniform", origin="loss weighted")
"""ai-toolkit's ``weighted``: uniform timesteps, whose loss is weighted by a table."""

PARABOLA = NoiseLevels(origin="density 2 - 7.7 (sigma - 0.5)^2", shares=(0.5, 0.1614))
"""OneTrainer's ``INVERTED_PARABOLA`` with a weight of 7.7, by the integral of that polynomial."""


@dataclass(frozen=True)
class TrainingNoiseFacts:
    """The noise levels of training, where the family matches flows."""

    timestep_sampling: TimestepSampling = "shift"
    """The default of ``timestep_sampling``."""
    shift: TimestepShift | None = None
    """The default shift of ``shift`` and ``sigma``; None: that of the model's pipeline."""
    reason: str = "as the model is sampled"
    """Why, for the table of noise levels."""
    read_pipeline_shift: Callable[[ConfigReader], TimestepShift] = read_scheduler_shift
    """Read the shift of the model's pipeline from its JSON files."""
    multiples_per_token: float = 1
    """The side of the square for which shifts by image size count one token, in least multiples of image sides: 2
    where they count patches of 2 x 2 latents, as sd-scripts does, and the model has none."""
    max_timestep: int | None = None
    """The default of ``max_timestep``, of a model that knows low noise levels only; of any kind of model."""
    other_trainers: Mapping[str, NoiseLevels] = field(default_factory=dict)
    """The noise levels of other trainers, by program, of those that train the family."""

    def read_shift(self, read: ConfigReader) -> TimestepShift:
        """Read the default shift of ``shift`` and ``sigma``."""
        return self.shift or self.read_pipeline_shift(read)

    def describe_used_defaults(self, noise_config: NoiseConfig) -> str | None:
        """Describe which of these defaults a run with these options uses; None where they are the pipeline's."""
        sampling = noise_config.get_timestep_sampling(self.timestep_sampling)
        uses_sampling = not noise_config.timestep_sampling and not noise_config.weighting_scheme
        uses_shift = sampling in ("shift", "sigma") and not noise_config.discrete_flow_shift
        parts: list[str] = [sampling] if uses_sampling and sampling != AS_SAMPLED.timestep_sampling else []
        if uses_shift and self.shift is not None:
            parts.append(f"shift {self.shift.describe()}")
        return ", ".join(parts) or None

    def build_distribution(self, noise_config: NoiseConfig, read: ConfigReader) -> NoiseDistribution:
        """Build the distribution of a run with these options."""
        sampling = noise_config.get_timestep_sampling(self.timestep_sampling)
        return NoiseDistribution(sampling, noise_config, self.read_shift(read))

    def count_tokens(self, width: int, height: int, size_multiple: int) -> int:
        """Count the tokens of an image as shifts by image size do; ``size_multiple`` is that of the model's sides."""
        side = int(self.multiples_per_token * size_multiple)
        return (width // side) * (height // side)


AS_SAMPLED = TrainingNoiseFacts()
"""The facts of a family that is trained with the shift of its pipeline."""
