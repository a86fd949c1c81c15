"""Noise offset, multires (pyramid) noise and input perturbation; every sample has its own random generators.

Random numbers are drawn on the CPU, so they are the same for every device; what depends on the latents runs on theirs.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.schema_objective import NoiseConfig
from ..randomness import Purpose

GeneratorFactory = Callable[[str], list[torch.Generator]]
"""Makes one generator per sample for a purpose, so that drawing for one purpose never shifts another."""


def apply_noise_options(
    noise: Tensor, latents: Tensor, config: NoiseConfig, make_generators: GeneratorFactory
) -> Tensor:
    """Apply noise offset and multires noise; the result is mixed with the latents and part of the target."""
    if config.noise_offset:
        noise = apply_noise_offset(noise, latents, config, make_generators(Purpose.NOISE_OFFSET))
    if config.multires_noise_iterations:
        noise = apply_pyramid_noise(noise, config, make_generators(Purpose.MULTIRES_NOISE))
    return noise


def apply_input_perturbation(noise: Tensor, config: NoiseConfig, make_generators: GeneratorFactory) -> Tensor:
    """Perturb the noise of the model's input, but not of its target (Ning et al. 2023, arXiv 2301.11706)."""
    if not config.ip_noise_gamma:
        return noise
    generators = make_generators(Purpose.INPUT_NOISE)
    strength = _sample_strengths(config.ip_noise_gamma, generators, config.ip_noise_gamma_random_strength)
    extra = torch.stack([torch.randn(noise.shape[1:], generator=each) for each in generators])
    return noise + (_expand_dims_like(strength, extra) * extra).to(noise, non_blocking=True)


def apply_noise_offset(
    noise: Tensor, latents: Tensor, config: NoiseConfig, generators: Sequence[torch.Generator]
) -> Tensor:
    """Shift each channel by a Gaussian number, so that the model learns to change the overall brightness.

    ``adaptive_noise_scale`` adds to the strength in proportion to the absolute mean of the channel's latents.
    """
    strength = _sample_strengths(config.noise_offset, generators, config.noise_offset_random_strength)
    offsets = torch.stack([torch.randn(noise.shape[1], generator=each) for each in generators])
    strength, offsets = (each.to(noise, non_blocking=True) for each in (strength.view(-1, 1), offsets))
    if config.adaptive_noise_scale:
        strength = (strength + config.adaptive_noise_scale * latents.flatten(2).mean(2).abs()).clamp(min=0)
    return noise + _expand_dims_like(strength * offsets, noise)


def apply_pyramid_noise(noise: Tensor, config: NoiseConfig, generators: Sequence[torch.Generator]) -> Tensor:
    """Add noise of ever lower resolution, discounted by ``multires_noise_discount`` per level; normalize to std 1.

    Each channel, and each frame of a clip, has its own.
    """
    height, width = noise.shape[-2:]
    channels = math.prod(noise.shape[1:-2])
    layers = torch.stack([_sample_pyramid_noise(channels, height, width, config, each) for each in generators])
    noise = noise + layers.view_as(noise).to(noise, non_blocking=True)
    return noise / _expand_dims_like(noise.flatten(1).std(1), noise)


def _sample_pyramid_noise(
    channels: int, height: int, width: int, config: NoiseConfig, generator: torch.Generator
) -> Tensor:
    total = torch.zeros(channels, height, width)
    for level in range(config.multires_noise_iterations):
        smaller = (2 + 2 * float(torch.rand((), generator=generator))) ** level
        size = max(1, int(height / smaller)), max(1, int(width / smaller))
        layer = torch.randn(1, channels, *size, generator=generator)
        total += config.multires_noise_discount**level * F.interpolate(layer, (height, width), mode="bilinear")[0]
        if 1 in size:
            break
    return total


def _sample_strengths(amount: float, generators: Sequence[torch.Generator], is_random: bool) -> Tensor:
    """``amount`` for each sample, or a uniformly random fraction of it."""
    if not is_random:
        return torch.full((len(generators),), amount)
    return amount * torch.stack([torch.rand((), generator=each) for each in generators])


def _expand_dims_like(values: Tensor, like: Tensor) -> Tensor:
    return values.view(*values.shape, *[1] * (like.ndim - values.ndim))


def copy_async(tensor: Tensor, like: Tensor) -> Tensor:
    """Copy to the device and dtype of ``like`` without waiting for the device.

    CUDA copies asynchronously from pinned memory only; a copy from pageable memory may synchronize.
    """
    if like.is_cuda and not tensor.is_cuda and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(like, non_blocking=True)
