"""What a model is asked, and how its answer is judged: noise process, times, noise, loss and weights in one."""

from dataclasses import dataclass

from torch import Size, Tensor

from ..config.schema import LossConfig, NoiseConfig
from .losses import elementwise
from .noise import Draws, coloured, perturbed, sent
from .process import Process
from .timesteps import draw, times
from .weighting import weights


@dataclass(frozen=True)
class Noised:
    """A batch at the times it is trained at."""

    latents: Tensor  # with noise: what the model sees
    target: Tensor  # what it is to say
    t: Tensor  # (B,), 0..1000


@dataclass(frozen=True)
class Objective:
    """Pure functions of a batch; the random numbers are handed in."""

    process: Process
    noise: NoiseConfig
    loss: LossConfig

    def noised(self, latents: Tensor, draws: Draws) -> Noised:
        """The batch at times and with noise that are a function of each sample's generators and of nothing else.

        They are drawn on the CPU, whose generators give the same numbers beside every kind of device.
        """
        u, noise = draw(draws("noise"), latents.shape[1:])
        t = self.times(u, latents.shape).to(latents.device, non_blocking=True)
        noise = coloured(sent(noise, latents), latents, self.noise, draws)
        made = self.at(latents, noise, t)
        if not self.noise.ip_noise_gamma:
            return made
        return Noised(self.at(latents, perturbed(noise, self.noise, draws), t).latents, made.target, t)

    def at(self, latents: Tensor, noise: Tensor, t: Tensor) -> Noised:
        """The batch at given times with given noise, as validation wants it."""
        noisy, target = self.process.add_noise(latents, noise, t)
        return Noised(noisy, target, t)

    def times(self, u: Tensor, latents: Size) -> Tensor:
        """The ``u``-quantiles, in float64 and between 0 and 1, of the times that latents of this shape train at."""
        return times(u, self.noise, self.process, latents)

    def elementwise(self, predicted: Tensor, noised: Noised) -> Tensor:
        """The loss of each number, before masks; the mean over a sample is its loss."""
        return elementwise(predicted, noised.target, noised.t, self.process, self.loss)

    def weights(self, t: Tensor) -> Tensor:
        """How much the loss of a sample at time ``t`` counts."""
        return weights(self.process, t, self.noise, self.loss)
