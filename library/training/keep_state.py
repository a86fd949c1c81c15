"""Saving the state of a run: copied at once, written in the background, an older one never lost."""

import logging
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.schema import StateConfig
from ..distributed.host_copy import HostSnapshot
from ..errors import UserError
from ..traceback_file import format_error
from . import state_folder
from .export import SaveAdapter
from .job import TrainingRun
from .run_state import collect_state_metadata, serialize_state, capture_state

logger = logging.getLogger(__name__)


class SaveCheckpoint:
    """Comes last among the actions of a run: what is kept is a step with which everything was done."""

    is_deferrable = False

    def __init__(self, config: StateConfig, save_adapter: SaveAdapter, output_dir: Path, metadata: Mapping[str, Any]):
        self.config, self.save_adapter, self.output_dir, self.metadata = config, save_adapter, output_dir, metadata
        self._snapshot = HostSnapshot()
        self._writer: threading.Thread | None = None
        self._error: str | None = None
        self.latest_path: Path | None = None

    def should_run(self, run: TrainingRun) -> bool:
        if run.state.step >= run.plan.steps:
            return self.config.save_state or self.config.save_state_on_train_end
        return self.config.save_state and self.save_adapter.should_run(run)

    def __call__(self, run: TrainingRun) -> None:
        self.save(run, self.save_adapter.list_due_names(run)[-1], [name for name in run.pending_callbacks if name != type(self).__name__])

    def save(self, run: TrainingRun, name: str, pending: Sequence[str] = ()) -> None:
        """Begin to write the state; one process does, for all have the same."""
        tree = capture_state(run)  # by all, for where a strategy divides it, all have to give their parts
        if run.strategy.is_main:
            self._start_writing(run, tree, name, pending)

    def save_on_this_rank(self, run: TrainingRun, name: str, pending: Sequence[str] = ()) -> Path:
        """Write the state on this process, whichever it is, and wait until it is on disk; talk to nobody."""
        path = self.output_dir / f"{name}-state"
        there = state_folder.read_checkpoint_info(path)
        if not isinstance(there, str) and there.metadata.get("run") == self.metadata["run"]:
            return path  # another process of this run wrote it
        self._start_writing(run, capture_state(run), name, pending)
        self._finish_writing()
        return path

    def _start_writing(self, run: TrainingRun, tree: dict[str, Any], name: str, pending: Sequence[str]) -> None:
        self._join_writer()
        if self._error is not None:
            logger.warning("%s; training goes on, and the next state is tried when it is due", self._error)
        self._snapshot.capture(tree)
        facts = {**self.metadata, **collect_state_metadata(run), "owed": list(pending), "saved_at": time.time()}
        facts["files"] = self.save_adapter.retention.to_json() if self.save_adapter.retention is not None else [[], []]
        path = self.output_dir / f"{name}-state"
        self._writer = threading.Thread(target=self._write_checkpoint, args=(path, facts, run), daemon=False)
        self._writer.start()

    def wait_until_written(self, run: TrainingRun) -> None:
        """Wait until the last state is on disk; if it is not, every process ends with the reason."""
        run.strategy.run_on_main(self._finish_writing)

    def _finish_writing(self) -> None:
        self._join_writer()
        if self._error is not None:
            raise UserError(self._error)

    def _join_writer(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write_checkpoint(self, path: Path, metadata: dict[str, Any], run: TrainingRun) -> None:
        try:
            tree, tensors = serialize_state(self._snapshot.wait())
            state_folder.write_checkpoint(path, {**metadata, "tree": tree}, tensors)
            self._error, self.latest_path = None, path
            logger.info("state saved: %s", path)
            self._remove_old_checkpoints(metadata["step"], run)
        except Exception as error:  # whatever ends this thread must reach the one that waits for it
            why = error if isinstance(error, UserError) else getattr(error, "strerror", None) or format_error(error)
            self._error = f"{path}: the state cannot be saved: {why}"
            state_folder.remove_partial_checkpoint(path)

    def _remove_old_checkpoints(self, step: int, run: TrainingRun) -> None:
        """As for LoRA files: of epochs so many, of steps those that are not older."""
        name, config, done = run.config.save.output_name, self.config, run.plan.count_completed_epochs(step)
        for path in state_folder.find_checkpoints(self.output_dir, name):
            number = path.name.removeprefix(name).removesuffix("-state").removeprefix("-")
            is_old = False
            if number.startswith("step") and config.save_last_n_steps_state:
                is_old = int(number.removeprefix("step")) < step - config.save_last_n_steps_state
            elif number.isdecimal() and config.save_last_n_epochs_state:
                is_old = int(number) <= done - config.save_last_n_epochs_state
            if is_old and path != self.latest_path:
                shutil.rmtree(path, ignore_errors=True)
