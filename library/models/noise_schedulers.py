"""Noise schedulers: the samplers of previews by sd-scripts' names, and the schedule that a model was trained with."""

import importlib
import inspect
import logging
import warnings
from collections.abc import Mapping
from typing import Any

from diffusers import DDPMScheduler

from ..diffusion.process import NoiseProcess, build_discrete_process
from ..errors import UserError
from ..name_suggestions import suggest_name

logger = logging.getLogger(__name__)

_SAMPLERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ddim": ("DDIMScheduler", {"clip_sample": False}),
    "ddpm": ("DDPMScheduler", {"clip_sample": False}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "lms": ("LMSDiscreteScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpm_2": ("KDPM2DiscreteScheduler", {}),
    "dpm_2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "dpmsolver": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},  # it cannot sample down to sigma 0
    ),
    "dpmsolver++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpmsingle": ("DPMSolverSinglestepScheduler", {"algorithm_type": "dpmsolver++"}),
}
SAMPLERS = {**_SAMPLERS, **{f"k_{name}": _SAMPLERS[name] for name in ("lms", "euler", "euler_a", "dpm_2", "dpm_2_a")}}
"""The diffusers class of each sampler, and its config where it differs from the model's own scheduler."""


def build_scheduler(sampler: str, model_scheduler: Any) -> Any:
    """Build the scheduler of a sampler with the noise schedule of the model's own; ddim where that is impossible."""
    if sampler not in SAMPLERS:
        raise UserError(f"unknown sampler {sampler!r}{suggest_name(sampler, SAMPLERS)}")
    name, settings = SAMPLERS[sampler]
    scheduler_class = getattr(importlib.import_module("diffusers"), name)
    zero_snr = "rescale_betas_zero_snr"
    try:
        if model_scheduler.config.get(zero_snr):
            if zero_snr not in inspect.signature(scheduler_class.__init__).parameters:
                raise ValueError("it does not support zero terminal SNR")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # diffusers recommends dpmsolver++ in place of dpmsolver
            return scheduler_class.from_config(model_scheduler.config, **settings)
    except (ImportError, ValueError) as error:
        logger.info("previews: ddim replaces the sampler %s: %s", sampler, str(error).strip())
        return build_scheduler("ddim", model_scheduler)


def build_flow_scheduler(model_scheduler: Any, flow_shift: float | None = None) -> Any:
    """Build a copy of a flow-matching model's scheduler, with the shift ``flow_shift`` if it is set."""
    name = "flow_shift" if "flow_shift" in model_scheduler.config else "shift"
    settings: dict[str, Any] = {} if flow_shift is None else {name: flow_shift}
    if settings and "use_dynamic_shifting" in model_scheduler.config:
        settings["use_dynamic_shifting"] = False
    return type(model_scheduler).from_config(model_scheduler.config, **settings)


def build_ddpm_process(scheduler: Any) -> NoiseProcess:
    """The noise process that an epsilon or v model was trained with, whatever scheduler it is sampled with."""
    ddpm_class: Any = DDPMScheduler
    ddpm = ddpm_class.from_config(scheduler.config)
    return build_discrete_process(ddpm.alphas_cumprod, ddpm.config.prediction_type)
