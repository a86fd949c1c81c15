"""Encode images and clips to latents and back, with image VAEs, and video VAEs of which some get one frame only.

VAEs always run in float32.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from ..dataloader.batch import Moments
from ..diffusion.noise import copy_async


def disable_autocast(vae: Any) -> AbstractContextManager[Any]:
    """Keep the VAE in its dtype where autocast is enabled."""
    device_type = vae.device.type
    if not is_autocast_available(device_type):  # the meta device
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


@torch.no_grad()
def encode_vae_moments(vae: Any, pixels: Tensor, *, applies_shift: bool = True) -> Moments:
    """Encode pixels in -1..1; the shift and scale of the denoiser's latents are applied."""
    with disable_autocast(vae):
        output = vae.encode(pixels.to(vae.device, vae.dtype))
    scale = float(vae.config.scaling_factor)
    if hasattr(output, "latent"):  # a deterministic encoder
        return Moments.from_mean_and_std(output.latent * scale, torch.zeros_like(output.latent))
    latent_dist = output.latent_dist
    shift = _get_shift_factor(vae) if applies_shift else 0.0
    return Moments.from_mean_and_std((latent_dist.mean - shift) * scale, latent_dist.std * scale)


@torch.no_grad()
def decode_vae_latents(vae: Any, latents: Tensor, *, applies_shift: bool = True) -> Tensor:
    """Decode latents to pixels in -1..1."""
    shift = _get_shift_factor(vae) if applies_shift else 0.0
    latents = latents.to(vae.device, vae.dtype) / vae.config.scaling_factor + shift
    with disable_autocast(vae):
        pixels: Tensor = vae.decode(latents, return_dict=False)[0]
    return pixels


def _get_shift_factor(vae: Any) -> float:
    return vae.config.get("shift_factor") or 0.0


def get_latent_statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation per channel of a video VAE's latents (B, C, F, H, W).

    They are in the VAE's config, or buffers among its weights.
    """
    if "latents_mean" in dict(vae.named_buffers(recurse=False)):
        return vae.latents_mean.view(1, -1, 1, 1, 1), vae.latents_std.view(1, -1, 1, 1, 1)
    statistics = (vae.config.latents_mean, vae.config.latents_std)
    mean, std = (copy_async(torch.tensor(values).view(1, -1, 1, 1, 1), like) for values in statistics)
    return mean, std


def as_clips(pixels: Tensor) -> Tensor:
    """Return images (B, C, H, W) as clips of one frame, and clips as they are."""
    return pixels if pixels.ndim == 5 else pixels.unsqueeze(2)


@torch.no_grad()
def encode_clip_moments(vae: Any, pixels: Tensor) -> Moments:
    """Encode clips (B, 3, frames, height, width) with a video VAE; latents are normalized by channel."""
    with disable_autocast(vae):
        latent_dist = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
    mean, std = get_latent_statistics(vae, latent_dist.mean)
    return Moments.from_mean_and_std((latent_dist.mean - mean) / std, latent_dist.std / std)


@torch.no_grad()
def decode_clip_latents(vae: Any, latents: Tensor, timestep: Tensor | None = None) -> Tensor:
    """Decode latents (B, C, F, H, W) with a video VAE to pixels in -1..1; some get the noise level of the latents."""
    latents = latents.to(vae.device, vae.dtype)
    mean, std = get_latent_statistics(vae, latents)
    levels = () if timestep is None else (timestep.to(latents),)
    with disable_autocast(vae):
        pixels: Tensor = vae.decode(latents * std + mean, *levels, return_dict=False)[0]
    return pixels


def encode_frame_moments(vae: Any, pixels: Tensor) -> Moments:
    """Encode pixels with a video VAE as one frame, whose axis the latents do not have."""
    return Moments(encode_clip_moments(vae, pixels.unsqueeze(2)).mean_and_std.squeeze(3))


def decode_frame_latents(vae: Any, latents: Tensor) -> Tensor:
    """Decode the latents of one frame with a video VAE to pixels in -1..1."""
    return decode_clip_latents(vae, latents.unsqueeze(2)).squeeze(2)


def get_patch_statistics(vae: Any, epsilon: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of a patch of FLUX.2's VAE."""
    mean, variance = (values.view(1, -1, 1, 1) for values in (vae.bn.running_mean, vae.bn.running_var))
    return mean, (variance + epsilon).sqrt()


@torch.no_grad()
def encode_patch_moments(pipe: Any, pixels: Tensor, epsilon: float) -> Moments:
    """Encode pixels with FLUX.2's VAE to its mean only: models are trained on it, without noise of the VAE."""
    with disable_autocast(pipe.vae):
        latents = pipe.vae.encode(pixels.to(pipe.vae.device, pipe.vae.dtype)).latent_dist.mode()
        mean, std = get_patch_statistics(pipe.vae, epsilon)
        latents = (pipe._patchify_latents(latents) - mean) / std
    return Moments.from_mean_and_std(latents, torch.zeros_like(latents))


@torch.no_grad()
def decode_patch_latents(pipe: Any, latents: Tensor, epsilon: float) -> Tensor:
    """Decode normalized patches to pixels in -1..1."""
    mean, std = get_patch_statistics(pipe.vae, epsilon)
    patches = latents.to(pipe.vae.device, pipe.vae.dtype) * std + mean
    with disable_autocast(pipe.vae):
        pixels: Tensor = pipe.vae.decode(pipe._unpatchify_latents(patches), return_dict=False)[0]
    return pixels
