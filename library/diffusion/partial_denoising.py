"""Denoise a part of the way from pure noise, by pure functions: what predicts is up to the caller.

The steps are deterministic: those of DDIM (Song et al. 2020, arXiv 2010.02502) with ``trailing`` timesteps for models
that predict noise or v, Euler's for flow matching.  So after k of n steps the latents have the noise level of timestep
``T - 1 - k T / n``, at which ``train_leco.py`` of sd-scripts compares predictions; it takes DDPM's random steps.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from .process import DiscreteProcess, FlowMatchingProcess, NoiseProcess, apply_shift

Predict = Callable[[Tensor, Tensor], Tensor]
"""Predicts for noisy latents at timesteps (B,), with guidance or without."""


def list_timesteps(process: NoiseProcess, num_steps: int, num_tokens: int) -> list[float]:
    """List the timesteps of a whole denoising, and as the last one that at which it ends."""
    fractions = [1 - number / num_steps for number in range(num_steps + 1)]
    if isinstance(process, FlowMatchingProcess):
        factor = process.shift.compute_factor(num_tokens)
        sigmas = apply_shift(torch.tensor(fractions, dtype=torch.float64), factor)
        return [float(sigma) * process.num_timesteps for sigma in sigmas]
    return [max(0.0, float(round(fraction * process.num_timesteps) - 1)) for fraction in fractions]


def step_down(
    process: NoiseProcess, latents: Tensor, prediction: Tensor, timestep: Tensor, following: Tensor
) -> Tensor:
    """Take the latents from one timestep (B,) to the following one, by the prediction of the model."""
    if isinstance(process, FlowMatchingProcess):
        change = (process.sigma(following) - process.sigma(timestep)).view(-1, *[1] * (latents.ndim - 1))
        return latents + change.to(latents) * prediction
    if not isinstance(process, DiscreteProcess):
        raise TypeError(f"{type(process).__name__} has no steps of DDIM")
    clean = process.predict_clean_latents(latents, prediction, timestep)
    signal, spread = process.compute_coefficients(timestep, latents)
    noise = (latents - signal * clean) / spread
    signal, spread = process.compute_coefficients(following, latents)
    return signal * clean + spread * noise


def denoise(process: NoiseProcess, noise: Tensor, timesteps: list[float], predict: Predict) -> tuple[Tensor, Tensor]:
    """Denoise from the first to the last of the timesteps; return the latents and the last timestep (B,)."""
    latents, batch = noise, noise.shape[0]
    for now, following in itertools.pairwise(timesteps):
        both = (torch.full((batch,), value, dtype=torch.float32) for value in (now, following))
        t, after = (each.to(noise.device, non_blocking=True) for each in both)
        latents = step_down(process, latents, predict(latents, t).float(), t, after)
    return latents, torch.full((batch,), timesteps[-1], dtype=torch.float32).to(noise.device, non_blocking=True)
