"""From options and a loaded model to what is asked of it in training."""

import logging
from typing import Any

from ..config import RunConfig
from ..config.objective_rules import find_active_options, validate_objective_for_model
from ..diffusion.objective import Objective
from ..diffusion.process import FlowMatchingProcess
from ..diffusion.weighting import find_unbounded_weightings
from ..errors import ConfigError
from ..families.base import Family
from ..families.scheduler import override_scheduler

logger = logging.getLogger(__name__)


def build_objective(config: RunConfig, family: Family, pipe: Any) -> Objective:
    """What the model is asked; from here on its scheduler, which draws previews, follows the options, too."""
    pipe.scheduler = override_scheduler(pipe.scheduler, config.noise)
    process = family.build_noise_process(pipe)
    # Small files need not tell what a model predicts, so this is certain only now that it is loaded.
    problems = [f"--{names[0]}: {problem}"
                for names, problem in validate_objective_for_model(config, family.facts.title, process.prediction_type)]  # fmt: skip
    problems += [f"--{name}: the model's last time has no signal, and so a weight without end; leave it out"
                 for name in find_unbounded_weightings(process, config.loss)]  # fmt: skip
    if problems:
        raise ConfigError(problems)
    times = config.noise.flow_timestep_sampling if isinstance(process, FlowMatchingProcess) else "uniform"
    settings = "".join(f", {name} {value}" for name, value in find_active_options(config).items())
    logger.info("the model predicts %s; times are %s%s", process.prediction_type, times, settings)
    return Objective(process, config.noise, config.loss)
