"""Pictures to latents and back, by the VAEs of Stable Diffusion and FLUX, always in float32."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def full_precision(vae: Any) -> torch.autocast:
    """A context in which autocast, if it is on, leaves the VAE alone."""
    return torch.autocast(vae.device.type, enabled=False)


@torch.no_grad()
def moments(vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latents of pixels in -1..1, shifted and scaled for the denoiser."""
    with full_precision(vae):
        spread = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
    scale = float(vae.config.scaling_factor)
    return (spread.mean - _shift(vae)) * scale, spread.std * scale


def encode(vae: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Pixels in -1..1 to latents, drawn with a generator for each sample."""
    return drawn(*moments(vae, pixels), generators)


def drawn(mean: Tensor, spread: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One sample of each of the distributions."""
    noise = [torch.randn(mean.shape[1:], generator=each, device=each.device) for each in generators]
    return mean + spread * torch.stack(noise).to(mean)


@torch.no_grad()
def decode(vae: Any, latents: Tensor) -> Tensor:
    """Latents to pixels in -1..1; undoes ``encode`` as far as the VAE can."""
    latents = latents.to(vae.device, vae.dtype) / vae.config.scaling_factor + _shift(vae)
    with full_precision(vae):
        pixels: Tensor = vae.decode(latents, return_dict=False)[0]
    return pixels


def _shift(vae: Any) -> float:
    return vae.config.shift_factor or 0.0
