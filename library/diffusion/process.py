"""Noise processes: how latents are noised at time ``t``, and what a model is to predict.

``t`` is a float tensor on diffusers' scale of 0..1000, one value a sample; 0 is the picture.
The letters follow Ho et al. 2020 (arXiv 2006.11239): ``x_t = sqrt(a) x_0 + sqrt(1 - a) e`` with ``a`` the
cumulative product of ``1 - beta`` up to ``t``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Size, Tensor

from ..errors import ConfigError

NUM_TRAIN_TIMESTEPS = 1000
"""Length of the noise schedule that every supported model is trained with."""


class NoiseProcess(Protocol):
    """What training needs to know of a model's noise process."""

    @property
    def prediction_type(self) -> str:
        """What the model predicts: ``epsilon``, ``v`` or ``flow``."""
        ...

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(noisy, target)``; the target is what a family's ``predict`` is compared with."""
        ...

    def predict_clean_latents(self, noisy_latents: Tensor, prediction: Tensor, timesteps: Tensor) -> Tensor:
        """The latents that ``predicted`` says are below the noise; undoes ``add_noise`` for a perfect model."""
        ...

    def snr(self, timesteps: Tensor) -> Tensor:
        """Signal to noise ratio of each sample: the square of how the two are mixed."""
        ...


@dataclass(frozen=True, eq=False)
class DiscreteProcess:
    """A process with a table of 1000 noise levels; ``t`` is a whole number from 0 to 999."""

    alphas_cumprod: Tensor

    def compute_coefficients(self, timesteps: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """``sqrt(a)`` and ``sqrt(1 - a)`` for each sample, shaped to be multiplied with ``like``."""
        a = self._gather_alphas_cumprod(timesteps)
        return _expand_like(a.sqrt(), like), _expand_like((1 - a).sqrt(), like)

    def snr(self, timesteps: Tensor) -> Tensor:
        a = self._gather_alphas_cumprod(timesteps)
        return a / (1 - a)

    def _gather_alphas_cumprod(self, timesteps: Tensor) -> Tensor:
        # The table goes to t and not t to the table: the other way round waits for the device.
        return self.alphas_cumprod.to(timesteps.device, non_blocking=True)[timesteps.long()]


@dataclass(frozen=True, eq=False)
class EpsilonProcess(DiscreteProcess):
    """The model predicts the noise."""

    prediction_type: str = "epsilon"

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        signal, spread = self.compute_coefficients(timesteps, latents)
        return signal * latents + spread * noise, noise

    def predict_clean_latents(self, noisy_latents: Tensor, prediction: Tensor, timesteps: Tensor) -> Tensor:
        signal, spread = self.compute_coefficients(timesteps, noisy_latents)
        return (noisy_latents - spread * prediction) / signal


@dataclass(frozen=True, eq=False)
class VPredictionProcess(DiscreteProcess):
    """The model predicts ``v = sqrt(a) e - sqrt(1 - a) x_0`` (Salimans and Ho 2022, arXiv 2202.00512)."""

    prediction_type: str = "v"

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        signal, spread = self.compute_coefficients(timesteps, latents)
        return signal * latents + spread * noise, signal * noise - spread * latents

    def predict_clean_latents(self, noisy_latents: Tensor, prediction: Tensor, timesteps: Tensor) -> Tensor:
        signal, spread = self.compute_coefficients(timesteps, noisy_latents)
        return signal * noisy_latents - spread * prediction


@dataclass(frozen=True)
class FixedShift:
    """One factor for pictures of every size."""

    factor: float = 1.0

    def compute_factor(self, num_tokens: int) -> float:
        """The factor for a picture that the model sees as ``tokens`` patches."""
        return self.factor


NO_SHIFT = FixedShift()


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


@dataclass(frozen=True)
class FlowMatchingProcess:
    """A straight line ``x_s = (1 - s) x_0 + s e`` with ``s = t / 1000``; the model predicts its direction ``e - x_0``.

    (Liu et al. 2022, arXiv 2209.03003.)  Families turn ``t`` and the prediction into their model's own convention.
    """

    shift: TimestepShift = NO_SHIFT
    """How the model's own pipeline moves times towards noise."""
    patch_size: int = 2
    """A square of this many latents on each side is one token of the model."""
    prediction_type: str = "flow"

    @classmethod
    def from_scheduler(cls, scheduler_config: Mapping[str, Any], patch_size: int = 2) -> "FlowMatchingProcess":
        """The process of a pipeline whose flow scheduler has these settings."""
        return cls(build_timestep_shift(scheduler_config), patch_size)

    def sigma(self, timesteps: Tensor) -> Tensor:
        """The share of noise ``s``, in float32 at least."""
        return timesteps.float() / NUM_TRAIN_TIMESTEPS

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        s = self.sigma(timesteps)
        return _expand_like(1 - s, latents) * latents + _expand_like(s, latents) * noise, noise - latents

    def predict_clean_latents(self, noisy_latents: Tensor, prediction: Tensor, timesteps: Tensor) -> Tensor:
        return noisy_latents - _expand_like(self.sigma(timesteps), noisy_latents) * prediction

    def snr(self, timesteps: Tensor) -> Tensor:
        s = self.sigma(timesteps)
        return ((1 - s) / s) ** 2

    def count_tokens(self, latents_shape: Size) -> int:
        """Into how many patches the model cuts latents of this shape (B, C, ..., H, W)."""
        return math.prod(latents_shape[2:]) // self.patch_size**2


def build_discrete_process(alphas_cumprod: Tensor, prediction_type: str) -> EpsilonProcess | VPredictionProcess:
    """The process with this noise table, for a model that predicts this; names are those of diffusers' schedulers."""
    if len(alphas_cumprod) != NUM_TRAIN_TIMESTEPS:
        raise ConfigError(
            [
                f"the model's scheduler says num_train_timesteps {len(alphas_cumprod)}; only {NUM_TRAIN_TIMESTEPS} is "
                "supported"
            ]
        )
    kinds: dict[str, type[EpsilonProcess | VPredictionProcess]] = {
        "epsilon": EpsilonProcess,
        "v_prediction": VPredictionProcess,
    }
    if prediction_type not in kinds:
        raise ConfigError(
            [
                f"the model's scheduler says prediction_type {prediction_type!r}; "
                "only epsilon and v_prediction can be trained"
            ]
        )
    return kinds[prediction_type](alphas_cumprod)


def _expand_like(values: Tensor, like: Tensor) -> Tensor:
    """One value a sample, shaped to be multiplied with ``like``."""
    return values.view(-1, *[1] * (like.ndim - 1)).to(like)


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
