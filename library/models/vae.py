"""Pictures to latents and back, by the VAEs of Stable Diffusion and FLUX, always in float32."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..data.batch import Moments


def disable_autocast(vae: Any) -> AbstractContextManager[Any]:
    """A context in which autocast, if it is on, leaves the VAE alone."""
    kind = vae.device.type
    if not torch.amp.is_autocast_available(kind):  # the meta device
        return nullcontext()
    return torch.autocast(kind, enabled=False)


@torch.no_grad()
def encode_vae_moments(vae: Any, pixels: Tensor) -> Moments:
    """Mean and standard deviation of the latents of pixels in -1..1, shifted and scaled for the denoiser."""
    with disable_autocast(vae):
        spread = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
    scale = float(vae.config.scaling_factor)
    return Moments.from_mean_and_std((spread.mean - _get_shift_factor(vae)) * scale, spread.std * scale)


@torch.no_grad()
def decode_vae_latents(vae: Any, latents: Tensor) -> Tensor:
    """Latents to pixels in -1..1; undoes ``moments`` as far as the VAE can."""
    latents = latents.to(vae.device, vae.dtype) / vae.config.scaling_factor + _get_shift_factor(vae)
    with disable_autocast(vae):
        pixels: Tensor = vae.decode(latents, return_dict=False)[0]
    return pixels


def _get_shift_factor(vae: Any) -> float:
    return vae.config.shift_factor or 0.0


def get_latent_statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread of each channel of the VAE's latents (B, C, 1, H, W)."""
    shape = (1, -1, 1, 1, 1)
    mean, std = (
        torch.tensor(numbers).view(shape).to(like) for numbers in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std
