"""At which times a model is trained: densities over 0..1, as functions of one uniform number ``u`` for each sample.

Each is the quantile function of its density (``u = 0.5`` gives the median), so what a sample draws does not depend on
its batch, and a validation can ask for fixed quantiles.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Size, Tensor

from ..config.schema import NoiseConfig
from .process import STEPS, FlowMatching, Process
from .shift import FLUX, shifted

LEAST = 1e-6
"""No share of noise is smaller: at 0 the ratio of signal to noise has no end."""


def uniform(u: Tensor, noise: NoiseConfig) -> Tensor:
    """Every time equally often."""
    return u


def sigmoid(u: Tensor, noise: NoiseConfig) -> Tensor:
    """The sigmoid of a normal number times ``sigmoid_scale``: the middle more often than the ends."""
    return torch.sigmoid(noise.sigmoid_scale * torch.special.ndtri(u))


def logit_normal(u: Tensor, noise: NoiseConfig) -> Tensor:
    """The sigmoid of a normal number with mean ``logit_mean``, above 0 for more noise, and spread ``logit_std``."""
    return torch.sigmoid(noise.logit_mean + noise.logit_std * torch.special.ndtri(u))


def mode(u: Tensor, noise: NoiseConfig) -> Tensor:
    """Esser et al. 2024 (arXiv 2403.03206, equation 20), turned to grow with ``u``; the density is symmetric."""
    return u + noise.mode_scale * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)


DENSITIES: Mapping[str, Callable[[Tensor, NoiseConfig], Tensor]] = {"logit_normal": logit_normal, "mode": mode}
"""Names of ``weighting_scheme`` that choose times; under the other names ``sigma`` draws them uniformly."""


def sigma(u: Tensor, noise: NoiseConfig, process: FlowMatching, tokens: int) -> Tensor:
    """One of the 1000 levels of diffusers' flow scheduler, by the density that ``weighting_scheme`` names."""
    density = DENSITIES.get(noise.weighting_scheme or "none", uniform)
    level = (STEPS * density(u, noise)).floor().clamp(0, STEPS - 1) + 1
    return shifted(level / STEPS, _factor(noise, process, tokens))


def shift(u: Tensor, noise: NoiseConfig, process: FlowMatching, tokens: int) -> Tensor:
    """``sigmoid``, moved by ``discrete_flow_shift`` or, without it, as the model's own pipeline moves its times."""
    return shifted(sigmoid(u, noise), _factor(noise, process, tokens))


def flux_shift(u: Tensor, noise: NoiseConfig, process: FlowMatching, tokens: int) -> Tensor:
    """``sigmoid``, moved by the size of the picture as FLUX.1 dev does, whatever the model says."""
    return shifted(sigmoid(u, noise), FLUX.at(tokens))


SAMPLINGS: Mapping[str, Callable[[Tensor, NoiseConfig, FlowMatching, int], Tensor]] = {
    "uniform": lambda u, noise, process, tokens: uniform(u, noise),
    "sigmoid": lambda u, noise, process, tokens: sigmoid(u, noise),
    "sigma": sigma,
    "shift": shift,
    "flux_shift": flux_shift,
}
"""What ``timestep_sampling`` can name: the share of noise of a flow model from ``u`` and the model's own shift."""


def times(u: Tensor, noise: NoiseConfig, process: Process, latents: Size) -> Tensor:
    """``t`` on 0..1000 for each ``u``, for latents of this shape, within ``min_timestep`` and ``max_timestep``."""
    low, high = noise.min_timestep or 0, STEPS if noise.max_timestep is None else noise.max_timestep
    if not isinstance(process, FlowMatching):
        return (low + (high - low) * u).floor().float()
    s = SAMPLINGS[noise.flow_sampling](u, noise, process, process.tokens(latents))
    return (low + (high - low) * s).clamp(min=STEPS * LEAST).float()


def draw(generators: Sequence[torch.Generator], shape: Size) -> tuple[Tensor, Tensor]:
    """``u`` and normal noise of this shape for each generator.

    The noise does not depend on how times are chosen: ``u`` takes whole thousandths before it and the rest after it.
    """
    coarse, noise, fine = [], [], []
    for generator in generators:
        coarse.append(torch.randint(0, STEPS, (), generator=generator))
        noise.append(torch.randn(shape, generator=generator))
        fine.append(torch.rand((), generator=generator))
    return fraction(torch.stack(coarse), torch.stack(fine)), torch.stack(noise)


def fraction(thousandths: Tensor, rest: Tensor) -> Tensor:
    """``u`` of so many whole thousandths and a part of the next; never 0 or 1, where normal numbers have no quantile.

    ``rest`` is a number of ``torch.rand`` in float32, which knows steps of 2^-24.
    """
    return (thousandths + rest.double() + 2.0**-25) / STEPS


def _factor(noise: NoiseConfig, process: FlowMatching, tokens: int) -> float:
    return noise.discrete_flow_shift or process.shift.at(tokens)
