"""The training objective: timestep sampling, noising, loss function and loss weighting of a model, combined.

The weights of samples (regularization images, padding) are applied in training/task.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Size, Tensor

from ..config.schema_objective import LossConfig, NoiseConfig
from ..randomness import Purpose
from .loss_weighting import compute_loss_weights
from .losses import LossContext, compute_elementwise_loss
from .model_prediction import select_compared_tensors
from .noise import GeneratorFactory, apply_input_perturbation, apply_noise_options, copy_async
from .noise_level_distributions import NoiseDistribution
from .process import FlowMatchingProcess, NoiseProcess
from .timestep_sampling import build_distribution, compute_timesteps, sample_quantiles_and_noise


@dataclass(frozen=True)
class NoisyBatch:
    """Noised latents and their target."""

    latents: Tensor  # noised: the input of the denoiser
    target: Tensor  # what the denoiser should predict
    timesteps: Tensor  # (B,), 0..1000
    sound_target: Tensor | None = None  # what it should predict of the noised sound, where there is any


@dataclass(frozen=True)
class Objective:
    """Pure functions of a batch; random numbers come from the generators passed in."""

    process: NoiseProcess
    noise_config: NoiseConfig
    loss_config: LossConfig

    def add_noise(
        self,
        latents: Tensor,
        make_generators: GeneratorFactory,
        timestep_buckets: Sequence[int] = (),
        quantiles: tuple[float, float] = (0.0, 1.0),
    ) -> NoisyBatch:
        """Noise the latents at random timesteps, a function of each sample's generators and timestep bucket only.

        Random numbers are drawn on the CPU, so they are the same for every device.  ``quantiles``: the part of the
        distribution from which timesteps are drawn.
        """
        u, noise = sample_quantiles_and_noise(make_generators(Purpose.NOISE), latents.shape[1:])
        if timestep_buckets:
            u = (torch.tensor(timestep_buckets) + u) / (self.noise_config.num_timestep_buckets or 1)
        if quantiles != (0.0, 1.0):
            u = quantiles[0] + (quantiles[1] - quantiles[0]) * u
        timesteps = self.compute_timesteps(u, latents.shape).to(latents.device, non_blocking=True)
        noise = apply_noise_options(copy_async(noise, latents), latents, self.noise_config, make_generators)
        batch = self.add_noise_at(latents, noise, timesteps)
        if not self.noise_config.ip_noise_gamma:
            return batch
        perturbed = apply_input_perturbation(noise, self.noise_config, make_generators)
        return NoisyBatch(self.add_noise_at(latents, perturbed, timesteps).latents, batch.target, timesteps)

    def add_noise_at(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> NoisyBatch:
        """Noise the latents with this noise at these timesteps, as validation does."""
        noisy, target = self.process.add_noise(latents, noise, timesteps)
        return NoisyBatch(noisy, target, timesteps)

    def compute_timesteps(self, u: Tensor, latents_shape: Size) -> Tensor:
        """The timesteps at the quantiles ``u`` (float64, between 0 and 1) for latents of this shape."""
        return compute_timesteps(u, self.noise_config, self.process, latents_shape, self.distribution)

    def count_tokens(self, latents_shape: Size) -> int:
        """Count the tokens of latents, by which shifts may depend on the size."""
        return self.process.count_tokens(latents_shape) if isinstance(self.process, FlowMatchingProcess) else 0

    @cached_property
    def distribution(self) -> NoiseDistribution | None:
        """The distribution of the noise levels of a flow-matching model, with its tables; None for other models."""
        process = self.process
        return build_distribution(self.noise_config, process) if isinstance(process, FlowMatchingProcess) else None

    def compute_elementwise_loss(self, prediction: Tensor, noisy_batch: NoisyBatch) -> Tensor:
        """The unreduced loss, before masks and weights."""
        target, process = noisy_batch.target, self.process
        if isinstance(process, FlowMatchingProcess):
            prediction, target = select_compared_tensors(
                prediction,
                target,
                noisy_batch.latents,
                process.sigma(noisy_batch.timesteps),
                name=self.noise_config.model_prediction_type,
                velocity_sign=process.velocity_sign,
            )
        return compute_elementwise_loss(
            prediction, target, LossContext(self.loss_config, noisy_batch.timesteps, process)
        )

    def compute_loss_weights(self, timesteps: Tensor) -> Tensor:
        """The loss weight of samples at these timesteps."""
        return compute_loss_weights(self.process, timesteps, self.noise_config, self.loss_config)
