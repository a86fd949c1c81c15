"""Noise processes: how latents are noised at time ``t``, and what a model is to predict.

``t`` is a float tensor on diffusers' scale of 0..1000, one value a sample.
The letters follow Ho et al. 2020 (arXiv 2006.11239): ``x_t = sqrt(a) x_0 + sqrt(1 - a) e`` with ``a`` the
cumulative product of ``1 - beta`` up to ``t``.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ConfigError

STEPS = 1000
"""Length of the noise schedule that every supported model is trained with."""


class Process(Protocol):
    """What training needs to know of a model's noise process."""

    @property
    def prediction(self) -> str:
        """What the model predicts: ``epsilon`` or ``v``."""
        ...

    def sample_timesteps(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw ``count`` times on the generator's device."""
        ...

    def add_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(noisy, target)``; the target is what a family's ``predict`` is compared with."""
        ...


@dataclass(frozen=True, eq=False)
class Discrete:
    """A process with a table of 1000 noise levels; ``t`` is a whole number from 0 to 999."""

    alphas_cumprod: Tensor

    def sample_timesteps(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, STEPS, (count,), generator=generator, device=generator.device).float()

    def coefficients(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """``sqrt(a)`` and ``sqrt(1 - a)`` for each sample, shaped to be multiplied with ``like``."""
        # The table goes to t and not t to the table: the other way round waits for the device.
        a = self.alphas_cumprod.to(t.device)[t.long()].view(-1, *[1] * (like.ndim - 1))
        return a.sqrt().to(like), (1 - a).sqrt().to(like)


@dataclass(frozen=True, eq=False)
class Epsilon(Discrete):
    """The model predicts the noise."""

    prediction: str = "epsilon"

    def add_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        signal, spread = self.coefficients(t, latents)
        return signal * latents + spread * noise, noise


@dataclass(frozen=True, eq=False)
class Velocity(Discrete):
    """The model predicts ``v = sqrt(a) e - sqrt(1 - a) x_0`` (Salimans and Ho 2022, arXiv 2202.00512)."""

    prediction: str = "v"

    def add_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        signal, spread = self.coefficients(t, latents)
        return signal * latents + spread * noise, signal * noise - spread * latents


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
