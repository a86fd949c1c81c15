"""The scheduler of a model with what the options say of it, which training and previews both follow."""

import logging
from typing import Any

from ..config.schema import NoiseConfig

logger = logging.getLogger(__name__)


def override_scheduler(scheduler: Any, noise_config: NoiseConfig) -> Any:
    """``scheduler``, or a new one of its kind where the options differ from its file; a contradiction is said."""
    changes = {**_override_prediction_type(scheduler.config, noise_config), **_override_zero_terminal_snr(scheduler.config, noise_config)}
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
    logger.warning("the model's scheduler file says prediction_type %s; v_parameterization asks for %s and is followed",
                   said, wanted)  # fmt: skip
    return {"prediction_type": wanted}


def _override_zero_terminal_snr(config: Any, noise_config: NoiseConfig) -> dict[str, Any]:
    if not noise_config.zero_terminal_snr or config.get("rescale_betas_zero_snr", False):
        return {}
    # Pictures have to be drawn from the last time on, which other spacings leave out (Lin et al. 2023,
    # arXiv 2305.08891).
    return {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
