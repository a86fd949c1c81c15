"""Saving the state of a run: copied at once, written in the background, an older one never lost."""

import logging
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.schema import StateConfig
from ..distributed.host_copy import HostCopy
from ..errors import UserError
from ..traceback_file import sentence
from . import state_folder
from .export import Export
from .job import Run
from .run_state import facts_of_run, kept, tree_of

logger = logging.getLogger(__name__)


class KeepState:
    """Comes last among the actions of a run: what is kept is a step with which everything was done."""

    can_wait = False

    def __init__(self, config: StateConfig, export: Export, folder: Path, facts: Mapping[str, Any]):
        self.config, self.export, self.folder, self.facts = config, export, folder, facts
        self._copy = HostCopy()
        self._writer: threading.Thread | None = None
        self._error: str | None = None
        self.latest: Path | None = None

    def is_due(self, run: Run) -> bool:
        if run.state.step >= run.plan.steps:
            return self.config.save_state or self.config.save_state_on_train_end
        return self.config.save_state and self.export.is_due(run)

    def __call__(self, run: Run) -> None:
        self.save(run, self.export.names(run)[-1], [name for name in run.owed if name != type(self).__name__])

    def save(self, run: Run, name: str, owed: Sequence[str] = ()) -> None:
        """Begin to write the state; one process does, for all have the same."""
        tree = tree_of(run)  # by all, for where a strategy divides it, all have to give their parts
        if run.strategy.is_main:
            self._begin(run, tree, name, owed)

    def save_here(self, run: Run, name: str, owed: Sequence[str] = ()) -> Path:
        """Write the state on this process, whichever it is, and wait until it is on disk; talk to nobody."""
        path = self.folder / f"{name}-state"
        there = state_folder.facts_of(path)
        if not isinstance(there, str) and there.facts.get("run") == self.facts["run"]:
            return path  # another process of this run wrote it
        self._begin(run, tree_of(run), name, owed)
        self._end()
        return path

    def _begin(self, run: Run, tree: dict[str, Any], name: str, owed: Sequence[str]) -> None:
        self._join()
        if self._error is not None:
            logger.warning("%s; training goes on, and the next state is tried when it is due", self._error)
        self._copy.take(tree)
        facts = {**self.facts, **facts_of_run(run), "owed": list(owed), "saved_at": time.time()}
        facts["files"] = self.export.kept.names() if self.export.kept is not None else [[], []]
        path = self.folder / f"{name}-state"
        self._writer = threading.Thread(target=self._write, args=(path, facts, run), daemon=False)
        self._writer.start()

    def finish(self, run: Run) -> None:
        """Wait until the last state is on disk; if it is not, every process ends with the reason."""
        run.strategy.on_main(self._end)

    def _end(self) -> None:
        self._join()
        if self._error is not None:
            raise UserError(self._error)

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write(self, path: Path, facts: dict[str, Any], run: Run) -> None:
        try:
            tree, tensors = kept(self._copy.give())
            state_folder.write(path, {**facts, "tree": tree}, tensors)
            self._error, self.latest = None, path
            logger.info("state saved: %s", path)
            self._remove_old(facts["step"], run)
        except Exception as error:  # whatever ends this thread must reach the one that waits for it
            why = error if isinstance(error, UserError) else getattr(error, "strerror", None) or sentence(error)
            self._error = f"{path}: the state cannot be saved: {why}"
            state_folder.remove_begun(path)

    def _remove_old(self, step: int, run: Run) -> None:
        """As for LoRA files: of epochs so many, of steps those that are not older."""
        name, config, done = run.config.save.output_name, self.config, run.plan.epochs_done(step)
        for path in state_folder.states(self.folder, name):
            number = path.name.removeprefix(name).removesuffix("-state").removeprefix("-")
            is_old = False
            if number.startswith("step") and config.save_last_n_steps_state:
                is_old = int(number.removeprefix("step")) < step - config.save_last_n_steps_state
            elif number.isdecimal() and config.save_last_n_epochs_state:
                is_old = int(number) <= done - config.save_last_n_epochs_state
            if is_old and path != self.latest:
                shutil.rmtree(path, ignore_errors=True)
