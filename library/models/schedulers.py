"""What drawing pictures needs beside a pipeline: a scheduler by kohya's sampler name, and modules at rest."""

import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from diffusers import DDPMScheduler

from ..config.schema_objective import NoiseConfig
from ..diffusion.process import NoiseProcess, build_discrete_process
from ..errors import ConfigError
from ..registry import suggest_name

SAMPLERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ddim": ("DDIMScheduler", {"clip_sample": False}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpmsolver++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
}
"""Sampler names to a diffusers class and the settings that differ from the model's own scheduler."""


def build_scheduler(sampler: str, model_scheduler: Any) -> Any:
    """A new scheduler with the noise table of the model's own."""
    if sampler not in SAMPLERS:
        raise ConfigError([f"unknown sampler {sampler!r}{suggest_name(sampler, SAMPLERS)}"])
    name, settings = SAMPLERS[sampler]
    kind = getattr(importlib.import_module("diffusers"), name)
    zero_snr = "rescale_betas_zero_snr"
    if model_scheduler.config.get(zero_snr) and zero_snr not in inspect.signature(kind.__init__).parameters:
        raise ConfigError([f"sampler {sampler} cannot start from noise alone, as zero terminal SNR needs it; use ddim"])
    try:
        return kind.from_config(model_scheduler.config, **settings)
    except ImportError as error:
        raise ConfigError([f"sampler {sampler}: {str(error).strip()}"]) from None


def build_flow_scheduler(sampler: str | None, model_scheduler: Any, flow_shift: float | None = None) -> Any:
    """A new scheduler as the model's own, or one that moves its times by ``flow_shift``."""
    if sampler not in (None, "euler"):
        raise ConfigError([f"sampler {sampler}: flow-matching models draw with euler; leave it out"])
    settings = {} if flow_shift is None else {"shift": flow_shift, "use_dynamic_shifting": False}
    return type(model_scheduler).from_config(model_scheduler.config, **settings)


logger = logging.getLogger(__name__)


def override_scheduler(scheduler: Any, noise_config: NoiseConfig) -> Any:
    """``scheduler``, or a new one of its kind where the options differ from its file; a contradiction is said."""
    changes = {
        **_override_prediction_type(scheduler.config, noise_config),
        **_override_zero_terminal_snr(scheduler.config, noise_config),
    }
    if not changes:
        return scheduler
    # diffusers drops the values of settings that it remembers as not given.
    unset = [name for name in scheduler.config.get("_use_default_values", ()) if name not in changes]
    return type(scheduler).from_config({**scheduler.config, **changes, "_use_default_values": unset})


def _override_prediction_type(config: Any, noise_config: NoiseConfig) -> dict[str, Any]:
    said = config.get("prediction_type", "epsilon")
    wanted = {None: said, True: "v_prediction", False: "epsilon"}[noise_config.v_parameterization]
    if wanted == said:
        return {}
    logger.warning(
        "the model's scheduler file says prediction_type %s; v_parameterization asks for %s and is followed",
        said,
        wanted,
    )
    return {"prediction_type": wanted}


def _override_zero_terminal_snr(config: Any, noise_config: NoiseConfig) -> dict[str, Any]:
    if not noise_config.zero_terminal_snr or config.get("rescale_betas_zero_snr", False):
        return {}
    # Pictures have to be drawn from the last time on, which other spacings leave out (Lin et al. 2023,
    # arXiv 2305.08891).
    return {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


def build_noise_process(pipe: Any) -> NoiseProcess:
    """The process with the noise table of training; a folder may name any scheduler to draw with."""
    scheduler: Any = DDPMScheduler
    trained = scheduler.from_config(pipe.scheduler.config)
    return build_discrete_process(trained.alphas_cumprod, trained.config.prediction_type)
