"""What is added to the normal noise of a sample; every sample has generators of its own.

Random numbers come from the CPU, whose generators give the same beside every device; only what depends on the latents
is computed where they are.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.schema_objective import NoiseConfig

GeneratorFactory = Callable[[str], list[torch.Generator]]
"""Purpose -> a generator for each sample, so that what is drawn for one thing never moves another."""


def apply_noise_options(
    noise: Tensor, latents: Tensor, config: NoiseConfig, make_generators: GeneratorFactory
) -> Tensor:
    """The noise that is mixed with the latents and, by its process, asked of the model."""
    if config.noise_offset:
        noise = apply_noise_offset(noise, latents, config, make_generators("noise offset"))
    if config.multires_noise_iterations:
        noise = apply_pyramid_noise(noise, config, make_generators("multires noise"))
    return noise


def apply_input_perturbation(noise: Tensor, config: NoiseConfig, make_generators: GeneratorFactory) -> Tensor:
    """Noise for the model's input that its target knows nothing of (Ning et al. 2023, arXiv 2301.11706)."""
    if not config.ip_noise_gamma:
        return noise
    generators = make_generators("input noise")
    strength = _sample_strengths(config.ip_noise_gamma, generators, config.ip_noise_gamma_random_strength)
    extra = torch.stack([torch.randn(noise.shape[1:], generator=each) for each in generators])
    return noise + (_expand_dims_like(strength, extra) * extra).to(noise, non_blocking=True)


def apply_noise_offset(
    noise: Tensor, latents: Tensor, config: NoiseConfig, generators: Sequence[torch.Generator]
) -> Tensor:
    """Each channel as a whole moved by a normal number, so that the model learns to make pictures darker or lighter.

    With ``adaptive_noise_scale`` by more where the channel's mean is far from 0.
    """
    strength = _sample_strengths(config.noise_offset, generators, config.noise_offset_random_strength)
    moves = torch.stack([torch.randn(noise.shape[1], generator=each) for each in generators])
    strength, moves = (each.to(noise, non_blocking=True) for each in (strength.view(-1, 1), moves))
    if config.adaptive_noise_scale:
        strength = (strength + config.adaptive_noise_scale * latents.flatten(2).mean(2).abs()).clamp(min=0)
    return noise + _expand_dims_like(strength * moves, noise)


def apply_pyramid_noise(noise: Tensor, config: NoiseConfig, generators: Sequence[torch.Generator]) -> Tensor:
    """Coarser and coarser noise added, fainter by ``multires_noise_discount`` each time; spread 1 for each sample."""
    rows, columns = noise.shape[-2:]
    layers = torch.stack([_sample_pyramid_noise(noise.shape[1], rows, columns, config, each) for each in generators])
    noise = noise + layers.to(noise, non_blocking=True)
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
    """``amount`` for each sample, or a random share of it."""
    if not is_random:
        return torch.full((len(generators),), amount)
    return amount * torch.stack([torch.rand((), generator=each) for each in generators])


def _expand_dims_like(values: Tensor, like: Tensor) -> Tensor:
    return values.view(*values.shape, *[1] * (like.ndim - values.ndim))


def sent(tensor: Tensor, like: Tensor) -> Tensor:
    """On its way to where ``like`` is, in its precision, and nobody waits for it.

    CUDA copies by itself from pinned memory only; from other memory the program may have to wait until the device has
    come so far, and the more so the larger the tensor is.
    """
    if like.is_cuda and not tensor.is_cuda and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(like, non_blocking=True)
