"""Overrides of the model's scheduler config: ``v_parameterization`` and ``zero_terminal_snr``, which rescales betas."""

import logging
from dataclasses import replace
from typing import Any

from diffusers import DDPMScheduler

from ..config.schema_objective import NoiseConfig
from ..diffusion.process import DiscreteProcess, NoiseProcess

logger = logging.getLogger(__name__)


def override_scheduler(scheduler: Any, noise_config: NoiseConfig) -> Any:
    """Apply ``v_parameterization`` and ``zero_terminal_snr`` where they differ from the model's scheduler config."""
    changes = {
        **_override_prediction_type(scheduler.config, noise_config),
        **_override_zero_terminal_snr(scheduler.config, noise_config),
    }
    if not changes:
        return scheduler
    # diffusers ignores the values of settings listed in _use_default_values.
    unset = [name for name in scheduler.config.get("_use_default_values", ()) if name not in changes]
    return type(scheduler).from_config({**scheduler.config, **changes, "_use_default_values": unset})


def _override_prediction_type(config: Any, noise_config: NoiseConfig) -> dict[str, Any]:
    own = config.get("prediction_type", "epsilon")
    prediction_type = {None: own, True: "v_prediction", False: "epsilon"}[noise_config.v_parameterization]
    if prediction_type == own:
        return {}
    logger.warning("v_parameterization overrides prediction_type %s of the scheduler config: %s", own, prediction_type)
    return {"prediction_type": prediction_type}


def _override_zero_terminal_snr(config: Any, noise_config: NoiseConfig) -> dict[str, Any]:
    if not noise_config.zero_terminal_snr or config.get("rescale_betas_zero_snr", False):
        return {}
    # Sampling has to start at the last timestep, which other spacings omit (Lin et al. 2023, arXiv 2305.08891).
    return {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


def use_original_snr(process: NoiseProcess, scheduler: Any) -> NoiseProcess:
    """Give loss weightings the SNR of the schedule before zero terminal SNR rescaled it, as sd-scripts does."""
    if not isinstance(process, DiscreteProcess) or not scheduler.config.get("rescale_betas_zero_snr", False):
        return process
    ddpm_class: Any = DDPMScheduler
    original = ddpm_class.from_config({**scheduler.config, "rescale_betas_zero_snr": False})
    return replace(process, weighting_alphas_cumprod=original.alphas_cumprod)
