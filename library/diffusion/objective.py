"""What a model is asked, and how its answer is judged: noise process, times, noise, loss and weights in one."""

from dataclasses import dataclass

from torch import Size, Tensor

from ..config.schema_objective import LossConfig, NoiseConfig
from .losses import compute_elementwise_loss
from .noise import GeneratorFactory, apply_input_perturbation, apply_noise_options, sent
from .process import NoiseProcess
from .timesteps import compute_timesteps, sample_quantiles_and_noise
from .weighting import compute_loss_weights


@dataclass(frozen=True)
class NoisyBatch:
    """A batch at the times it is trained at."""

    latents: Tensor  # with noise: what the model sees
    target: Tensor  # what it is to say
    timesteps: Tensor  # (B,), 0..1000


@dataclass(frozen=True)
class Objective:
    """Pure functions of a batch; the random numbers are handed in."""

    process: NoiseProcess
    noise_config: NoiseConfig
    loss_config: LossConfig

    def add_noise(self, latents: Tensor, make_generators: GeneratorFactory) -> NoisyBatch:
        """The batch at times and with noise that are a function of each sample's generators and of nothing else.

        They are drawn on the CPU, whose generators give the same numbers beside every kind of device.
        """
        u, noise = sample_quantiles_and_noise(make_generators("noise"), latents.shape[1:])
        t = self.compute_timesteps(u, latents.shape).to(latents.device, non_blocking=True)
        noise = apply_noise_options(sent(noise, latents), latents, self.noise_config, make_generators)
        made = self.add_noise_at(latents, noise, t)
        if not self.noise_config.ip_noise_gamma:
            return made
        return NoisyBatch(
            self.add_noise_at(latents, apply_input_perturbation(noise, self.noise_config, make_generators), t).latents,
            made.target,
            t,
        )

    def add_noise_at(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> NoisyBatch:
        """The batch at given times with given noise, as validation wants it."""
        noisy, target = self.process.add_noise(latents, noise, timesteps)
        return NoisyBatch(noisy, target, timesteps)

    def compute_timesteps(self, u: Tensor, latents_shape: Size) -> Tensor:
        """The ``u``-quantiles, in float64 and between 0 and 1, of the times that latents of this shape train at."""
        return compute_timesteps(u, self.noise_config, self.process, latents_shape)

    def compute_elementwise_loss(self, prediction: Tensor, noisy_batch: NoisyBatch) -> Tensor:
        """The loss of each number, before masks; the mean over a sample is its loss."""
        return compute_elementwise_loss(
            prediction, noisy_batch.target, noisy_batch.timesteps, self.process, self.loss_config
        )

    def compute_loss_weights(self, timesteps: Tensor) -> Tensor:
        """How much the loss of a sample at time ``t`` counts."""
        return compute_loss_weights(self.process, timesteps, self.noise_config, self.loss_config)
