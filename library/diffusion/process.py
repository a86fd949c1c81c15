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
from .shift import UNSHIFTED, Shift, shift_of

STEPS = 1000
"""Length of the noise schedule that every supported model is trained with."""


class Process(Protocol):
    """What training needs to know of a model's noise process."""

    @property
    def prediction(self) -> str:
        """What the model predicts: ``epsilon``, ``v`` or ``flow``."""
        ...

    def add_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(noisy, target)``; the target is what a family's ``predict`` is compared with."""
        ...

    def clean(self, noisy: Tensor, predicted: Tensor, t: Tensor) -> Tensor:
        """The latents that ``predicted`` says are below the noise; undoes ``add_noise`` for a perfect model."""
        ...

    def snr(self, t: Tensor) -> Tensor:
        """Signal to noise ratio of each sample: the square of how the two are mixed."""
        ...


@dataclass(frozen=True, eq=False)
class Discrete:
    """A process with a table of 1000 noise levels; ``t`` is a whole number from 0 to 999."""

    alphas_cumprod: Tensor

    def coefficients(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """``sqrt(a)`` and ``sqrt(1 - a)`` for each sample, shaped to be multiplied with ``like``."""
        a = self._a(t)
        return _beside(a.sqrt(), like), _beside((1 - a).sqrt(), like)

    def snr(self, t: Tensor) -> Tensor:
        a = self._a(t)
        return a / (1 - a)

    def _a(self, t: Tensor) -> Tensor:
        # The table goes to t and not t to the table: the other way round waits for the device.
        return self.alphas_cumprod.to(t.device, non_blocking=True)[t.long()]


@dataclass(frozen=True, eq=False)
class Epsilon(Discrete):
    """The model predicts the noise."""

    prediction: str = "epsilon"

    def add_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        signal, spread = self.coefficients(t, latents)
        return signal * latents + spread * noise, noise

    def clean(self, noisy: Tensor, predicted: Tensor, t: Tensor) -> Tensor:
        signal, spread = self.coefficients(t, noisy)
        return (noisy - spread * predicted) / signal


@dataclass(frozen=True, eq=False)
class Velocity(Discrete):
    """The model predicts ``v = sqrt(a) e - sqrt(1 - a) x_0`` (Salimans and Ho 2022, arXiv 2202.00512)."""

    prediction: str = "v"

    def add_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        signal, spread = self.coefficients(t, latents)
        return signal * latents + spread * noise, signal * noise - spread * latents

    def clean(self, noisy: Tensor, predicted: Tensor, t: Tensor) -> Tensor:
        signal, spread = self.coefficients(t, noisy)
        return signal * noisy - spread * predicted


@dataclass(frozen=True)
class FlowMatching:
    """A straight line ``x_s = (1 - s) x_0 + s e`` with ``s = t / 1000``; the model predicts its direction ``e - x_0``.

    (Liu et al. 2022, arXiv 2209.03003.)  Families turn ``t`` and the prediction into their model's own convention.
    """

    shift: Shift = UNSHIFTED
    """How the model's own pipeline moves times towards noise."""
    patch: int = 2
    """A square of this many latents on each side is one token of the model."""
    prediction: str = "flow"

    @classmethod
    def from_scheduler(cls, scheduler: Mapping[str, Any], patch: int = 2) -> "FlowMatching":
        """The process of a pipeline whose flow scheduler has these settings."""
        return cls(shift_of(scheduler), patch)

    def sigma(self, t: Tensor) -> Tensor:
        """The share of noise ``s``, in float32 at least."""
        return t.float() / STEPS

    def add_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        s = self.sigma(t)
        return _beside(1 - s, latents) * latents + _beside(s, latents) * noise, noise - latents

    def clean(self, noisy: Tensor, predicted: Tensor, t: Tensor) -> Tensor:
        return noisy - _beside(self.sigma(t), noisy) * predicted

    def snr(self, t: Tensor) -> Tensor:
        s = self.sigma(t)
        return ((1 - s) / s) ** 2

    def tokens(self, latents: Size) -> int:
        """Into how many patches the model cuts latents of this shape (B, C, ..., H, W)."""
        return math.prod(latents[2:]) // self.patch**2


def from_table(alphas_cumprod: Tensor, prediction_type: str) -> Epsilon | Velocity:
    """The process with this noise table, for a model that predicts this; names are those of diffusers' schedulers."""
    if len(alphas_cumprod) != STEPS:
        raise ConfigError([f"the model's scheduler says num_train_timesteps {len(alphas_cumprod)}; only {STEPS} is "
                           "supported"])  # fmt: skip
    kinds: dict[str, type[Epsilon | Velocity]] = {"epsilon": Epsilon, "v_prediction": Velocity}
    if prediction_type not in kinds:
        raise ConfigError([f"the model's scheduler says prediction_type {prediction_type!r}; "
                           "only epsilon and v_prediction can be trained"])  # fmt: skip
    return kinds[prediction_type](alphas_cumprod)


def _beside(values: Tensor, like: Tensor) -> Tensor:
    """One value a sample, shaped to be multiplied with ``like``."""
    return values.view(-1, *[1] * (like.ndim - 1)).to(like)
