"""Delete old checkpoints (``save_last_n_*_state``) and old LoRA files (``save_last_n_*``) of a run."""

import logging
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.schema_output import SaveConfig, StateConfig
from .checkpoint_dir import find_checkpoints

logger = logging.getLogger(__name__)


def delete_old_checkpoints(save: SaveConfig, state: StateConfig, *, step: int, num_epochs: int) -> None:
    """Delete checkpoints of ``output_name`` beyond ``save_last_n_epochs_state`` and ``save_last_n_steps_state``.

    Where these are unset, ``save_last_n_epochs`` and ``save_last_n_steps`` are for checkpoints, too, as in sd-scripts.
    ``step`` is that of the newest checkpoint, which is kept, and ``num_epochs`` the number of epochs completed by then.
    """
    pattern = re.compile(rf"{re.escape(save.output_name)}-(?:step(?P<step>\d+)|(?P<epoch>\d+))-state")
    last_epochs = state.save_last_n_epochs_state or save.save_last_n_epochs
    last_steps = state.save_last_n_steps_state or save.save_last_n_steps
    for path in find_checkpoints(Path(save.output_dir), save.output_name):
        number = pattern.fullmatch(path.name)
        if number is None:
            continue
        if number["step"]:
            is_old = last_steps is not None and int(number["step"]) < step - last_steps
        else:
            every = save.save_every_n_epochs or 1
            is_old = last_epochs is not None and int(number["epoch"]) <= num_epochs - every * last_epochs
        if is_old:
            _delete(path)


@dataclass
class AdapterRetention:
    """The LoRA files that this run and the runs it resumed from wrote; deletes old ones. Used on the main rank."""

    config: SaveConfig
    epoch_files: dict[int, list[Path]] = field(default_factory=dict)
    step_files: dict[int, list[Path]] = field(default_factory=dict)

    def to_json(self) -> list[list[Any]]:
        """Export the names of the LoRA files of each epoch and each step, which a checkpoint records."""
        return [
            [[number, [path.name for path in paths]] for number, paths in files.items()]
            for files in (self.epoch_files, self.step_files)
        ]

    @classmethod
    def from_json(cls, config: SaveConfig, names: list[list[Any]]) -> "AdapterRetention":
        """Rebuild from the names of files that ``to_json`` exported into a checkpoint."""
        folder = Path(config.output_dir)
        return cls(config, *({number: [folder / name for name in each] for number, each in part} for part in names))

    def record_epoch_files(self, epoch: int, paths: list[Path]) -> None:
        """Record the files of an epoch, and delete those beyond ``save_last_n_epochs``."""
        self.epoch_files[epoch] = paths
        if self.config.save_last_n_epochs is not None and self.config.save_every_n_epochs is not None:
            _delete_files_up_to(
                self.epoch_files, epoch - self.config.save_every_n_epochs * self.config.save_last_n_epochs
            )

    def record_step_files(self, step: int, paths: list[Path]) -> None:
        """Record the files of a step, and delete those of steps before the last ``save_last_n_steps``."""
        self.step_files[step] = paths
        if self.config.save_last_n_steps is not None:
            _delete_files_up_to(self.step_files, step - self.config.save_last_n_steps - 1)


def _delete_files_up_to(files: dict[int, list[Path]], last: int) -> None:
    for number in [number for number in files if number <= last]:
        for path in files.pop(number):
            _delete(path)


def _delete(path: Path) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        logger.info("removed %s", path)
    except OSError as error:
        logger.warning("%s: cannot be removed: %s", path, error.strerror)
