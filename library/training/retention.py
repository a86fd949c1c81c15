"""Which older LoRA files of a run are taken away when a new one is there: those that sd-scripts would."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.schema import SaveConfig

logger = logging.getLogger(__name__)


@dataclass
class AdapterRetention:
    """Knows what this run wrote, with those that it goes on from, and never touches anything else; on the process
    that writes."""

    config: SaveConfig
    epoch_files: dict[int, list[Path]] = field(default_factory=dict)
    step_files: dict[int, list[Path]] = field(default_factory=dict)

    def to_json(self) -> list[list[Any]]:
        """All that was written, for a state."""
        return [[[number, [path.name for path in paths]] for number, paths in written.items()]
                for written in (self.epoch_files, self.step_files)]  # fmt: skip

    @classmethod
    def from_json(cls, config: SaveConfig, names: list[list[Any]]) -> "AdapterRetention":
        """As it was when a state was saved."""
        folder = Path(config.output_dir)
        return cls(config, *({number: [folder / name for name in each] for number, each in part} for part in names))

    def record_epoch_save(self, epoch: int, paths: list[Path]) -> None:
        """Of the epochs that were saved, the last n stay."""
        self.epoch_files[epoch] = paths
        if self.config.save_last_n_epochs is not None and self.config.save_every_n_epochs is not None:
            _delete_files_up_to(self.epoch_files, epoch - self.config.save_every_n_epochs * self.config.save_last_n_epochs)

    def record_step_save(self, step: int, paths: list[Path]) -> None:
        """What was saved in the last n steps stays."""
        self.step_files[step] = paths
        if self.config.save_last_n_steps is not None:
            _delete_files_up_to(self.step_files, step - self.config.save_last_n_steps - 1)


def _delete_files_up_to(written: dict[int, list[Path]], last: int) -> None:
    """All that was written up to ``last``."""
    for number in [each for each in written if each <= last]:
        for path in written.pop(number):
            try:
                path.unlink(missing_ok=True)
                logger.info("removed %s", path)
            except OSError as error:
                logger.warning("%s: cannot be removed: %s", path, error.strerror)
