"""Schedulers: the samplers of previews by sd-scripts' names, and overrides of the model's scheduler config."""

import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from diffusers import DDPMScheduler

from ..config.schema_objective import NoiseConfig
from ..diffusion.process import NoiseProcess, build_discrete_process
from ..errors import UserError
from ..registry import suggest_name

logger = logging.getLogger(__name__)

SAMPLERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ddim": ("DDIMScheduler", {"clip_sample": False}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpmsolver++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
}
"""Sampler -> diffusers class, and its config where it differs from the model's own scheduler."""


def build_scheduler(sampler: str, model_scheduler: Any) -> Any:
    """Build the scheduler of a sampler with the noise schedule of the model's own."""
    if sampler not in SAMPLERS:
        raise UserError(f"unknown sampler {sampler!r}{suggest_name(sampler, SAMPLERS)}")
    name, settings = SAMPLERS[sampler]
    scheduler_class = getattr(importlib.import_module("diffusers"), name)
    zero_snr = "rescale_betas_zero_snr"
    if model_scheduler.config.get(zero_snr) and zero_snr not in inspect.signature(scheduler_class.__init__).parameters:
        raise UserError(f"sampler {sampler} does not support zero terminal SNR; use ddim")
    try:
        return scheduler_class.from_config(model_scheduler.config, **settings)
    except ImportError as error:
        raise UserError(f"sampler {sampler}: {str(error).strip()}") from None


def build_flow_scheduler(sampler: str | None, model_scheduler: Any, flow_shift: float | None = None) -> Any:
    """Build a copy of a flow-matching model's scheduler, with the shift ``flow_shift`` if it is set."""
    if sampler not in (None, "euler"):
        raise UserError(f"sampler {sampler}: flow-matching models are sampled with euler; leave it out")
    settings = {} if flow_shift is None else {"shift": flow_shift, "use_dynamic_shifting": False}
    return type(model_scheduler).from_config(model_scheduler.config, **settings)


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


def build_ddpm_process(scheduler: Any) -> NoiseProcess:
    """The noise process that an epsilon or v model was trained with, whatever scheduler it is sampled with."""
    ddpm_class: Any = DDPMScheduler
    ddpm = ddpm_class.from_config(scheduler.config)
    return build_discrete_process(ddpm.alphas_cumprod, ddpm.config.prediction_type)
