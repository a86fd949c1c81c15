"""What the places that set this very run disagree about: looked at once, at its start."""

import os
import sys
from collections.abc import Mapping

from ..config import RunConfig
from ..errors import ConfigError
from .claims import Sources
from .devices import this_machine
from .launch_command import LaunchCommand, launch_of_this_process
from .launch_file import launch_file
from .start import too_few
from .verdicts import verdicts
from .world import World


def contradictions_of_this_run(config: RunConfig, given: frozenset[str]) -> list[str]:
    """A line for each disagreement that is allowed but discouraged; ``given`` names the options somebody wrote."""
    sources = sources_of(launch_of_this_process(), os.environ, config, {name: f"option {name}" for name in given})
    return [verdict.contradiction for verdict in verdicts(sources) if verdict.contradiction and not verdict.is_error]


def launch_problems(config: RunConfig, world: World) -> list[str]:
    """What this process was asked to be and is not, as the command line of its launcher shows."""
    launch = world.launch
    if launch is None:
        return []
    problem = too_few(sources_of(launch, os.environ), world.size)
    problems = [problem] if problem else []
    ours, flag = config.train.gradient_accumulation_steps, launch.given.get("gradient_accumulation_steps")
    if flag not in (None, ours):
        problems.append(f"accelerate launch --gradient_accumulation_steps {flag}: accelerate hands it to DeepSpeed "
                        f"only, and {ours} would count; write it behind {launch.script[-1]}")  # fmt: skip
    return problems


def sources_of(
    launch: LaunchCommand | None,
    environment: Mapping[str, str],
    config: RunConfig | None = None,
    places: Mapping[str, str] | None = None,
    *,
    is_typed: bool = False,
) -> Sources:
    """Everything that can be known about a command, or about this process when there is none.

    In a command that is only typed, a broken file of accelerate's is told; a launcher that runs has read it already.
    """
    before = (launch.environment if launch is not None else None) or environment
    try:
        file = launch_file(launch)
    except ConfigError:
        if is_typed:
            raise
        file = None
    return Sources(config, places or {}, launch, file, before, this_machine(before), sys.platform == "win32")
