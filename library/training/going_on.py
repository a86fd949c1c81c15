"""A run that goes on from where another one ended, and that ends so that the next can go on."""

import logging
import signal
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config import RunConfig
from ..data.prepare import PreparedData
from ..data.staged_plan import get_planned_stages
from ..distributed.signals import StopSignals
from ..distributed.strategy import Strategy
from ..errors import RunInterrupted
from ..families.detect import DetectedModel
from ..families.identity import compute_quick_model_fingerprint
from . import state_folder
from .changes import serialize_settings
from .export import SaveAdapter
from .job import TrainingRun
from .keep_state import SaveCheckpoint
from .plan import RunPlan
from .resume import check_changes, select_checkpoint
from .retention import AdapterRetention
from .run_state import restore_state

logger = logging.getLogger(__name__)


class Resume:
    """Known before anything is loaded: from which state, and whether it may be."""

    def __init__(self, config: RunConfig, strategy: Strategy, detected: DetectedModel, prepared: PreparedData,
                 plan: RunPlan, started_at: float):  # fmt: skip
        self.config, self.strategy = config, strategy
        self.output_dir, name = Path(config.save.output_dir), config.save.output_name
        sizes = {bucket.dataset_number: bucket.batch_size for bucket in plan.batch_plan.buckets}
        together = plan.batch_plan.dp_size * plan.batch_plan.accumulation_steps
        self.metadata: dict[str, Any] = {
            "settings": serialize_settings(config),
            "model": compute_quick_model_fingerprint(detected),
            "data": prepared.manifest.compute_fingerprint(),
            "batch": [size * together for _, size in sorted(sizes.items())],
            "split": [plan.batch_plan.dp_size, plan.batch_plan.accumulation_steps],
            "started_at": started_at,
            "run": strategy.run_on_main_and_broadcast(lambda: state_folder.compute_next_run_number(self.output_dir, name)),
            "versions": {"lorikeet": __version__, "torch": torch.__version__},
        }
        self.checkpoint = strategy.run_on_main_and_broadcast(lambda: select_checkpoint(config.state, self.output_dir, name))
        if self.checkpoint is None:
            return
        self.metadata["started_at"] = self.checkpoint.metadata["started_at"]
        found = self.checkpoint
        strategy.run_on_main(lambda: check_changes(found, self.metadata, config.state))
        is_cut_anew = found.metadata.get("split", self.metadata["split"])[1] != plan.batch_plan.accumulation_steps
        if is_cut_anew and any(stage.batch_plan.has_remainders for stage in get_planned_stages(plan.batch_plan)):
            logger.warning("steps have another number of micro-batches than when the state was saved, and what buckets"
                           " leave over beyond whole steps is put together in another way: some pictures of this epoch"
                           " come twice or not at all, and epochs may be longer or shorter")  # fmt: skip
        logger.info("going on after step %d, from %s", self.checkpoint.step, self.checkpoint.path)

    @property
    def started_at(self) -> float:
        """When the first of the runs that went on from each other began."""
        return float(self.metadata["started_at"])

    def is_complete(self, plan: RunPlan) -> bool:
        """Whether there is nothing left to do."""
        if self.checkpoint is None or self.checkpoint.step < plan.steps:
            return False
        logger.info("the run is complete: %d of %d steps are done; with a larger --max_train_steps or"
                    " --max_train_epochs it goes on", self.checkpoint.step, plan.steps)  # fmt: skip
        return True

    def restore(self, run: TrainingRun) -> None:
        """Put ``run`` where the state was; every process gets it from one that read it."""
        if self.checkpoint is None:
            return
        found = self.checkpoint
        tensors = self.strategy.run_on_main_and_broadcast(lambda: state_folder.load_checkpoint_tensors(found))
        restore_state(run, found.metadata, tensors)

    def run_pending_callbacks(self, run: TrainingRun) -> None:
        """Do what the run before left undone at its last step; what it wrote is this run's to remove."""
        if self.checkpoint is None:
            return
        facts, save = self.checkpoint.metadata, self.config.save
        owed, is_here = facts["owed"], facts["settings"]["output_dir"] == save.output_dir
        for action in run.callbacks:
            if isinstance(action, SaveAdapter) and is_here:
                action.retention = AdapterRetention.from_json(save, facts.get("files", [[], []]))
            if type(action).__name__ in owed and action.should_run(run):
                action(run)

    def save_and_exit(self, run: TrainingRun, save_checkpoint: SaveCheckpoint, pending: tuple[str, ...], signals: StopSignals) -> RunInterrupted:
        """Keep the state; what comes back is to be raised."""
        name = self.config.save.output_name
        save_checkpoint.save(run, f"{name}-step{run.state.step:08d}", pending)
        save_checkpoint.wait_until_written(run)
        number = signals.received or signal.SIGTERM  # another process got it
        code = self.config.state.requeue_exit_code
        path = self.output_dir / f"{name}-step{run.state.step:08d}-state"
        return RunInterrupted(
            f"{signal.Signals(number).name} after step {run.state.step} of {run.plan.steps}; the state is in {path}.\n"
            "  To go on: the same command with --auto_resume",
            128 + number if code is None else code,
        )
