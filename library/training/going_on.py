"""A run that goes on from where another one ended, and that ends so that the next can go on."""

import logging
import signal
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config import RunConfig
from ..data.prepare import Prepared
from ..data.staged_plan import stages_in
from ..distributed.signals import Signals
from ..distributed.strategy import DataParallel
from ..errors import Stopped
from ..families.detect import Detected
from ..families.identity import glance
from . import state_folder
from .changes import plain_settings
from .export import Export
from .job import Run
from .keep_state import KeepState
from .plan import RunPlan
from .resume import check_changes, chosen
from .retention import Retention
from .run_state import put_back

logger = logging.getLogger(__name__)


class GoingOn:
    """Known before anything is loaded: from which state, and whether it may be."""

    def __init__(self, config: RunConfig, strategy: DataParallel, detected: Detected, prepared: Prepared,
                 plan: RunPlan, started_at: float):  # fmt: skip
        self.config, self.strategy = config, strategy
        self.folder, name = Path(config.save.output_dir), config.save.output_name
        sizes = {bucket.dataset: bucket.batch_size for bucket in plan.batches.buckets}
        together = plan.batches.ranks * plan.batches.accumulation
        self.facts: dict[str, Any] = {
            "settings": plain_settings(config),
            "model": glance(detected),
            "data": prepared.manifest.fingerprint(),
            "batch": [size * together for _, size in sorted(sizes.items())],
            "split": [plan.batches.ranks, plan.batches.accumulation],
            "started_at": started_at,
            "run": strategy.from_main(lambda: state_folder.next_run(self.folder, name)),
            "versions": {"lorikeet": __version__, "torch": torch.__version__},
        }
        self.found = strategy.from_main(lambda: chosen(config.state, self.folder, name))
        if self.found is None:
            return
        self.facts["started_at"] = self.found.facts["started_at"]
        found = self.found
        strategy.on_main(lambda: check_changes(found, self.facts, config.state))
        is_cut_anew = found.facts.get("split", self.facts["split"])[1] != plan.batches.accumulation
        if is_cut_anew and any(stage.plan.has_remainders for stage in stages_in(plan.batches)):
            logger.warning("steps have another number of micro-batches than when the state was saved, and what buckets"
                           " leave over beyond whole steps is put together in another way: some pictures of this epoch"
                           " come twice or not at all, and epochs may be longer or shorter")  # fmt: skip
        logger.info("going on after step %d, from %s", self.found.step, self.found.path)

    @property
    def started_at(self) -> float:
        """When the first of the runs that went on from each other began."""
        return float(self.facts["started_at"])

    def is_complete(self, plan: RunPlan) -> bool:
        """Whether there is nothing left to do."""
        if self.found is None or self.found.step < plan.steps:
            return False
        logger.info("the run is complete: %d of %d steps are done; with a larger --max_train_steps or"
                    " --max_train_epochs it goes on", self.found.step, plan.steps)  # fmt: skip
        return True

    def restore(self, run: Run) -> None:
        """Put ``run`` where the state was; every process gets it from one that read it."""
        if self.found is None:
            return
        found = self.found
        tensors = self.strategy.from_main(lambda: state_folder.tensors_of(found))
        put_back(run, found.facts, tensors)

    def pay(self, run: Run) -> None:
        """Do what the run before left undone at its last step; what it wrote is this run's to remove."""
        if self.found is None:
            return
        facts, save = self.found.facts, self.config.save
        owed, is_here = facts["owed"], facts["settings"]["output_dir"] == save.output_dir
        for action in run.actions:
            if isinstance(action, Export) and is_here:
                action.kept = Retention.of_names(save, facts.get("files", [[], []]))
            if type(action).__name__ in owed and action.is_due(run):
                action(run)

    def stop(self, run: Run, keeper: KeepState, owed: tuple[str, ...], signals: Signals) -> Stopped:
        """Keep the state; what comes back is to be raised."""
        name = self.config.save.output_name
        keeper.save(run, f"{name}-step{run.state.step:08d}", owed)
        keeper.finish(run)
        number = signals.asked or signal.SIGTERM  # another process got it
        code = self.config.state.requeue_exit_code
        path = self.folder / f"{name}-step{run.state.step:08d}-state"
        return Stopped(
            f"{signal.Signals(number).name} after step {run.state.step} of {run.plan.steps}; the state is in {path}.\n"
            "  To go on: the same command with --auto_resume",
            128 + number if code is None else code,
        )
