"""Which state a run goes on from, and whether it may."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.schema import StateConfig
from ..errors import ConfigError, UserError
from .changes import changes
from .state_folder import Found, facts_of, states

logger = logging.getLogger(__name__)

LATEST = "latest"


def chosen(config: StateConfig, folder: Path, name: str) -> Found | None:
    """The state to go on from; nothing where ``--auto_resume`` finds none, or where nobody asked."""
    if config.resume is not None and config.resume != LATEST:
        found = facts_of(Path(config.resume))
        if isinstance(found, str):
            named = Path(config.resume)  # perhaps the folder of all states
            where = named if named.is_dir() and _names(named, name) else folder
            raise UserError(f"--resume: {config.resume} is no whole state: {found}{_others(where, name)}")
        return found
    if config.resume is None and not config.auto_resume:
        if _names(folder, name):
            logger.warning("%s holds states of an earlier run, and this one begins anew; to go on from them, add"
                           " --auto_resume", folder)  # fmt: skip
        return None
    whole = []
    for path in states(folder, name):
        found = facts_of(path)
        if isinstance(found, str):
            logger.warning("%s is passed over: %s", path, found)
        else:
            whole.append(found)
    if whole:
        return max(whole, key=lambda found: found.age)
    if config.resume == LATEST:
        raise UserError(f"--resume latest: there is no state called {name}...-state in {folder.resolve()}; states are"
                        " written with --save_state, and when a signal ends a run")  # fmt: skip
    logger.info("--auto_resume: no state in %s; the run begins", folder)
    return None


def _others(folder: Path, name: str) -> str:
    there = _names(folder, name)
    return f"; in {folder} there are {', '.join(there)}" if there else ""


def _names(folder: Path, name: str) -> list[str]:
    return [path.name for path in states(folder, name)]


def check_changes(found: Found, now: Mapping[str, Any], config: StateConfig) -> None:
    """Tell every difference; those that the result depends on need the user's word."""
    told = list(changes(found.facts, now))
    for change in told:
        logger.warning("since the state was saved: %s", change)
    matter = [str(change) for change in told if change.matters]
    if matter and not config.resume_anyway:
        raise ConfigError([f"--resume: {line}; with it the result is another one. Set it back, or add --resume_anyway"
                           for line in matter])  # fmt: skip
