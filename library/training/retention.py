"""Which older LoRA files of a run are taken away when a new one is there: those that sd-scripts would."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.schema import SaveConfig

logger = logging.getLogger(__name__)


@dataclass
class Retention:
    """Knows what this run wrote, with those that it goes on from, and never touches anything else; on the process
    that writes."""

    save: SaveConfig
    of_epochs: dict[int, list[Path]] = field(default_factory=dict)
    of_steps: dict[int, list[Path]] = field(default_factory=dict)

    def names(self) -> list[list[Any]]:
        """All that was written, for a state."""
        return [[[number, [path.name for path in paths]] for number, paths in written.items()]
                for written in (self.of_epochs, self.of_steps)]  # fmt: skip

    @classmethod
    def of_names(cls, save: SaveConfig, names: list[list[Any]]) -> "Retention":
        """As it was when a state was saved."""
        folder = Path(save.output_dir)
        return cls(save, *({number: [folder / name for name in each] for number, each in part} for part in names))

    def wrote_epoch(self, epoch: int, paths: list[Path]) -> None:
        """Of the epochs that were saved, the last n stay."""
        self.of_epochs[epoch] = paths
        if self.save.save_last_n_epochs is not None and self.save.save_every_n_epochs is not None:
            _remove(self.of_epochs, epoch - self.save.save_every_n_epochs * self.save.save_last_n_epochs)

    def wrote_step(self, step: int, paths: list[Path]) -> None:
        """What was saved in the last n steps stays."""
        self.of_steps[step] = paths
        if self.save.save_last_n_steps is not None:
            _remove(self.of_steps, step - self.save.save_last_n_steps - 1)


def _remove(written: dict[int, list[Path]], last: int) -> None:
    """All that was written up to ``last``."""
    for number in [each for each in written if each <= last]:
        for path in written.pop(number):
            try:
                path.unlink(missing_ok=True)
                logger.info("removed %s", path)
            except OSError as error:
                logger.warning("%s: cannot be removed: %s", path, error.strerror)
