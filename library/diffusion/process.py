"""Noise processes: how latents are noised at time ``t``, and what a model is to predict.

``t`` is a float tensor on diffusers' scale of 0..1000, one value a sample.
The letters follow Ho et al. 2020 (arXiv 2006.11239): ``x_t = sqrt(a) x_0 + sqrt(1 - a) e`` with ``a`` the
cumulative product of ``1 - beta`` up to ``t``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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


def from_scheduler(config: Mapping[str, Any]) -> Epsilon | Velocity:
    """The process that a diffusers scheduler's configuration describes."""
    table = alphas_cumprod(config)
    prediction = config.get("prediction_type", "epsilon")
    if prediction == "epsilon":
        return Epsilon(table)
    if prediction == "v_prediction":
        return Velocity(table)
    raise ConfigError([f"the model's scheduler says prediction_type {prediction!r}; "
                       "only epsilon and v_prediction can be trained"])  # fmt: skip


def alphas_cumprod(config: Mapping[str, Any]) -> Tensor:
    """The noise table of a diffusers scheduler's configuration, computed as diffusers does, in float32."""
    steps = config.get("num_train_timesteps", STEPS)
    if steps != STEPS:
        raise ConfigError([f"the model's scheduler says num_train_timesteps {steps}; only {STEPS} is supported"])
    table = torch.cumprod(1 - _betas(config), dim=0)
    return _without_terminal_signal(table) if config.get("rescale_betas_zero_snr") else table


def _betas(config: Mapping[str, Any]) -> Tensor:
    if config.get("trained_betas") is not None:
        return torch.tensor(config["trained_betas"], dtype=torch.float32)
    start, end = config.get("beta_start", 0.0001), config.get("beta_end", 0.02)
    match config.get("beta_schedule", "linear"):
        case "linear":
            return torch.linspace(start, end, STEPS, dtype=torch.float32)
        case "scaled_linear":
            return torch.linspace(start**0.5, end**0.5, STEPS, dtype=torch.float32) ** 2
        case "squaredcos_cap_v2":
            return _cosine_betas()
        case other:
            raise ConfigError([f"the model's scheduler says beta_schedule {other!r}; "
                               "there are: linear, scaled_linear, squaredcos_cap_v2"])  # fmt: skip


def _cosine_betas() -> Tensor:
    """Nichol and Dhariwal 2021 (arXiv 2102.09672), equation 17, capped at 0.999."""

    def level(share: float) -> float:
        return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1 - level((i + 1) / STEPS) / level(i / STEPS), 0.999) for i in range(STEPS)]
    return torch.tensor(betas, dtype=torch.float32)


def _without_terminal_signal(table: Tensor) -> Tensor:
    """Shift and stretch ``sqrt(a)`` so that nothing is left of x_0 at the end (arXiv 2305.08891, algorithm 1)."""
    root = table.sqrt()
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
