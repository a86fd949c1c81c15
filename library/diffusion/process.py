"""Noise processes: how latents are noised at a timestep, and what the model predicts (epsilon, v or flow).

Timesteps are a float tensor on diffusers' scale of 0..1000, for Kolors 0..1100, one value per sample; 0 is the clean
image of flow matching, and the lowest noise level of DDPM schedules.
The letters follow Ho et al. 2020 (arXiv 2006.11239): ``x_t = sqrt(a) x_0 + sqrt(1 - a) e`` with ``a`` the
cumulative product of ``1 - beta`` up to ``t``.
``--zero_terminal_snr`` and ``--v_parameterization`` change the schedule in models/scheduler_overrides.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Size, Tensor

from ..errors import UserError
from .noise_level_distributions import NUM_TRAIN_TIMESTEPS
from .timestep_shift import NO_SHIFT, TimestepShift, build_timestep_shift


class NoiseProcess(Protocol):
    """Forward process and prediction target of a model."""

    @property
    def prediction_type(self) -> str:
        """``epsilon``, ``v`` or ``flow``."""
        ...

    @property
    def num_timesteps(self) -> int:
        """The timestep of pure noise, or the first after it where timesteps are whole numbers."""
        ...

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noisy latents and the target that ``Family.predict`` is compared with."""
        ...

    def predict_clean_latents(self, noisy_latents: Tensor, prediction: Tensor, timesteps: Tensor) -> Tensor:
        """The x_0 estimate of a prediction; inverts ``add_noise`` for a perfect model."""
        ...

    def snr(self, timesteps: Tensor) -> Tensor:
        """Signal-to-noise ratio of each sample, ``(signal / noise)^2``."""
        ...


@dataclass(frozen=True, eq=False)
class DiscreteProcess:
    """A DDPM process; timesteps are whole numbers from 0 to its number of noise levels less one."""

    alphas_cumprod: Tensor
    weighting_alphas_cumprod: Tensor | None = None
    """The noise schedule whose SNR the loss weightings take, where it is another one."""
    _tables: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_timesteps(self) -> int:
        return len(self.alphas_cumprod)

    def compute_coefficients(self, timesteps: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """``sqrt(a)`` and ``sqrt(1 - a)`` for each sample, shaped to be multiplied with ``like``."""
        a = self._gather_alphas_cumprod(timesteps)
        return expand_like(a.sqrt(), like), expand_like((1 - a).sqrt(), like)

    def snr(self, timesteps: Tensor) -> Tensor:
        a = self._gather_alphas_cumprod(timesteps)
        return a / (1 - a)

    def compute_weighting_snr(self, timesteps: Tensor) -> Tensor:
        """Compute the signal-to-noise ratio of each sample for loss weightings such as min-SNR."""
        if self.weighting_alphas_cumprod is None:
            return self.snr(timesteps)
        a = self._gather("weighting_alphas_cumprod", timesteps)
        return a / (1 - a)

    def _gather_alphas_cumprod(self, timesteps: Tensor) -> Tensor:
        return self._gather("alphas_cumprod", timesteps)

    def _gather(self, name: str, timesteps: Tensor) -> Tensor:
        """Look timesteps up in a table, which is copied to their device once: a CUDA graph cannot copy it."""
        key = name, timesteps.device
        if key not in self._tables:
            self._tables[key] = getattr(self, name).to(timesteps.device, non_blocking=True)
        return self._tables[key][timesteps.long()]


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
class FlowMatchingProcess:
    """Rectified flow ``x_s = (1 - s) x_0 + s e`` with ``s = t / 1000``; the model predicts the velocity ``e - x_0``.

    (Liu et al. 2022, arXiv 2209.03003.)  Families convert timesteps and predictions to their model's convention.
    """

    shift: TimestepShift = NO_SHIFT
    """Shift of the noise levels: of the model's own scheduler, or in training of the family's training defaults."""
    patch_size: int = 2
    """Side of the patch of latents that is one token."""
    prediction_type: str = "flow"
    velocity_sign: int = 1
    """-1 where the model itself predicts ``x_0 - e``, which its family turns round."""
    noise_scale: float = 1.0
    """The standard deviation of the noise ``e``."""
    min_sigma: float = 0.0
    """Below this noise level the velocity is ``(x_s - x_0) / min_sigma``, where the model itself predicts ``x_0``."""

    @property
    def num_timesteps(self) -> int:
        return NUM_TRAIN_TIMESTEPS

    @classmethod
    def from_scheduler(cls, scheduler_config: Mapping[str, Any], patch_size: int = 2) -> "FlowMatchingProcess":
        """The process of a pipeline whose ``FlowMatchEulerDiscreteScheduler`` has this config."""
        return cls(build_timestep_shift(scheduler_config), patch_size)

    def sigma(self, timesteps: Tensor) -> Tensor:
        """Noise level 0..1, in float32 at least."""
        return timesteps.float() / NUM_TRAIN_TIMESTEPS

    def get_velocity_divisor(self, timesteps: Tensor) -> Tensor:
        """Return what the difference of noisy and clean latents is divided by: the noise level, or its lower bound."""
        s = self.sigma(timesteps)
        return s.clamp(min=self.min_sigma) if self.min_sigma else s

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        s, noise = self.sigma(timesteps), self.scale_noise(noise)
        target = noise - latents
        if self.min_sigma:
            target = expand_like(s / self.get_velocity_divisor(timesteps), latents) * target
        return expand_like(1 - s, latents) * latents + expand_like(s, latents) * noise, target

    def scale_noise(self, noise: Tensor) -> Tensor:
        """Scale drawn noise of deviation 1 to that of the model."""
        return noise if self.noise_scale == 1 else self.noise_scale * noise

    def predict_clean_latents(self, noisy_latents: Tensor, prediction: Tensor, timesteps: Tensor) -> Tensor:
        return noisy_latents - expand_like(self.get_velocity_divisor(timesteps), noisy_latents) * prediction

    def snr(self, timesteps: Tensor) -> Tensor:
        s = self.sigma(timesteps)
        return ((1 - s) / (s * self.noise_scale)) ** 2

    def count_tokens(self, latents_shape: Size) -> int:
        """Number of patches of latents of this shape (B, C, ..., H, W)."""
        return math.prod(latents_shape[2:]) // self.patch_size**2


def build_discrete_process(alphas_cumprod: Tensor, prediction_type: str) -> EpsilonProcess | VPredictionProcess:
    """Build the process of a noise schedule; ``prediction_type`` is named as in diffusers' schedulers."""
    if prediction_type == "epsilon":
        return EpsilonProcess(alphas_cumprod)
    if prediction_type == "v_prediction":
        return VPredictionProcess(alphas_cumprod)
    raise UserError(
        f"the scheduler has prediction_type {prediction_type!r}; only epsilon and v_prediction are supported"
    )


def expand_like(values: Tensor, like: Tensor) -> Tensor:
    """One value per sample, broadcastable to ``like``."""
    return values.view(-1, *[1] * (like.ndim - 1)).to(like)


def apply_shift(sigmas: Tensor, factor: float) -> Tensor:
    """Shift sigmas (0..1) towards noise for a factor above 1."""
    return factor * sigmas / (1 + (factor - 1) * sigmas)
