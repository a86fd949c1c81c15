"""Which state a run goes on from, and whether it may."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.schema import StateConfig
from ..errors import ConfigError, UserError
from .changes import find_changes
from .state_folder import CheckpointInfo, read_checkpoint_info, find_checkpoints

logger = logging.getLogger(__name__)

LATEST = "latest"


def select_checkpoint(config: StateConfig, output_dir: Path, name: str) -> CheckpointInfo | None:
    """The state to go on from; nothing where ``--auto_resume`` finds none, or where nobody asked."""
    if config.resume is not None and config.resume != LATEST:
        found = read_checkpoint_info(Path(config.resume))
        if isinstance(found, str):
            named = Path(config.resume)  # perhaps the folder of all states
            where = named if named.is_dir() and _list_checkpoint_names(named, name) else output_dir
            raise UserError(f"--resume: {config.resume} is no whole state: {found}{_format_other_checkpoints(where, name)}")
        return found
    if config.resume is None and not config.auto_resume:
        if _list_checkpoint_names(output_dir, name):
            logger.warning("%s holds states of an earlier run, and this one begins anew; to go on from them, add"
                           " --auto_resume", output_dir)  # fmt: skip
        return None
    whole = []
    for path in find_checkpoints(output_dir, name):
        found = read_checkpoint_info(path)
        if isinstance(found, str):
            logger.warning("%s is passed over: %s", path, found)
        else:
            whole.append(found)
    if whole:
        return max(whole, key=lambda found: found.sort_key)
    if config.resume == LATEST:
        raise UserError(f"--resume latest: there is no state called {name}...-state in {output_dir.resolve()}; states are"
                        " written with --save_state, and when a signal ends a run")  # fmt: skip
    logger.info("--auto_resume: no state in %s; the run begins", output_dir)
    return None


def _format_other_checkpoints(output_dir: Path, name: str) -> str:
    there = _list_checkpoint_names(output_dir, name)
    return f"; in {output_dir} there are {', '.join(there)}" if there else ""


def _list_checkpoint_names(output_dir: Path, name: str) -> list[str]:
    return [path.name for path in find_checkpoints(output_dir, name)]


def check_changes(checkpoint: CheckpointInfo, current: Mapping[str, Any], config: StateConfig) -> None:
    """Tell every difference; those that the result depends on need the user's word."""
    told = list(find_changes(checkpoint.metadata, current))
    for change in told:
        logger.warning("since the state was saved: %s", change)
    matter = [str(change) for change in told if change.changes_result]
    if matter and not config.resume_anyway:
        raise ConfigError([f"--resume: {line}; with it the result is another one. Set it back, or add --resume_anyway"
                           for line in matter])  # fmt: skip
