"""Every option of noise, times and loss, in typed frozen groups that are part of ``schema.py``."""

from dataclasses import dataclass
from typing import Literal

from .options import define_option


@dataclass(frozen=True)
class NoiseConfig:
    """What the model is asked: which noise, at which times, and for what."""

    v_parameterization: bool | None = define_option(
        None, "diffusion models: the model predicts v, and not the noise; without it, its scheduler file says"
    )
    zero_terminal_snr: bool = define_option(
        False, "models that predict v: no trace of the picture is left at the last time"
    )
    min_timestep: int | None = define_option(None, "no time below this, of 1000; without it, 0", minimum=0, maximum=999)
    max_timestep: int | None = define_option(
        None, "no time from this on, of 1000; without it, 1000", minimum=1, maximum=1000
    )
    timestep_sampling: Literal["uniform", "sigmoid", "shift", "flux_shift", "sigma"] | None = define_option(
        None, "flow models: how times are chosen; without it, sigma when there is a weighting_scheme, otherwise shift"
    )
    sigmoid_scale: float = define_option(
        1.0, "sigmoid, shift, flux_shift: below 1 more times in the middle, above 1 fewer", minimum=0
    )
    discrete_flow_shift: float | None = define_option(
        None, "shift, sigma: times are moved to noise by this factor; without it, as the model's own pipeline does"
    )
    weighting_scheme: Literal["none", "uniform", "sigma_sqrt", "cosmap", "logit_normal", "mode"] | None = define_option(
        None, "flow models: sigma_sqrt and cosmap weigh losses; logit_normal and mode choose times for sigma"
    )
    logit_mean: float = define_option(0.0, "logit_normal: above 0 for more noise")
    logit_std: float = define_option(1.0, "logit_normal: below 1 more times in the middle, above 1 fewer", minimum=0)
    mode_scale: float = define_option(
        1.29, "mode: above 0 more times in the middle, below 0 fewer", minimum=-1, maximum=1.75
    )
    noise_offset: float = define_option(
        0.0, "diffusion models: each channel's noise is moved as a whole, by about this much", minimum=0
    )
    noise_offset_random_strength: bool = define_option(False, "each sample takes a random share of noise_offset")
    adaptive_noise_scale: float | None = define_option(
        None, "noise_offset grows with the mean of a channel, times this; below 0 it shrinks, to no less than 0"
    )
    multires_noise_iterations: int = define_option(
        0, "diffusion models: so many layers of coarser and coarser noise are added", minimum=0
    )
    multires_noise_discount: float = define_option(
        0.3, "multires_noise_iterations: each layer is fainter by this", minimum=0
    )
    ip_noise_gamma: float = define_option(
        0.0, "so much noise is added to the model's input that it is not asked for", minimum=0
    )
    ip_noise_gamma_random_strength: bool = define_option(False, "each sample takes a random share of ip_noise_gamma")

    @property
    def flow_timestep_sampling(self) -> str:
        """How the times of a flow model are chosen."""
        return self.timestep_sampling or ("sigma" if self.weighting_scheme else "shift")


@dataclass(frozen=True)
class LossConfig:
    """How the model's answer is judged."""

    loss_type: Literal["l2", "l1", "huber", "smooth_l1"] = define_option(
        "l2", "l2: squares of differences; huber, smooth_l1: large differences count less than their squares"
    )
    huber_schedule: Literal["constant", "exponential", "snr"] = define_option(
        "snr", "constant: the threshold is huber_c; exponential, snr: it falls from 1 at pictures to huber_c at noise"
    )
    huber_c: float = define_option(0.1, "threshold of huber and smooth_l1: differences above it are large")
    huber_scale: float = define_option(1.0, "the threshold is multiplied by this at all times")
    min_snr_gamma: float | None = define_option(
        None, "diffusion models: times with a signal to noise ratio above this count less; 5 is usual", minimum=0
    )
    debiased_estimation_loss: bool = define_option(False, "diffusion models: times with much noise count more")
    scale_v_pred_loss_like_noise_pred: bool = define_option(
        False, "models that predict v: each time counts as it does for models that predict the noise"
    )
    v_pred_like_loss: float | None = define_option(
        None, "models that predict the noise: this share of the loss of v is added", minimum=0
    )
