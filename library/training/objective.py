"""From options and a loaded model to what is asked of it in training."""

import logging
from typing import Any

from ..config import RunConfig
from ..config.objective_rules import asked, misfits
from ..diffusion.objective import Objective
from ..diffusion.process import FlowMatching
from ..diffusion.weighting import endless
from ..errors import ConfigError
from ..families.base import Family
from ..families.scheduler import following

logger = logging.getLogger(__name__)


def objective_of(config: RunConfig, family: Family, pipe: Any) -> Objective:
    """What the model is asked; from here on its scheduler, which draws previews, follows the options, too."""
    pipe.scheduler = following(pipe.scheduler, config.noise)
    process = family.process(pipe)
    # Small files need not tell what a model predicts, so this is certain only now that it is loaded.
    problems = [f"--{names[0]}: {problem}"
                for names, problem in misfits(config, family.facts.title, process.prediction)]  # fmt: skip
    problems += [f"--{name}: the model's last time has no signal, and so a weight without end; leave it out"
                 for name in endless(process, config.loss)]  # fmt: skip
    if problems:
        raise ConfigError(problems)
    times = config.noise.flow_sampling if isinstance(process, FlowMatching) else "uniform"
    settings = "".join(f", {name} {value}" for name, value in asked(config).items())
    logger.info("the model predicts %s; times are %s%s", process.prediction, times, settings)
    return Objective(process, config.noise, config.loss)
