"""What is different from when a state was saved, and what of it the result depends on."""

import logging
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..cache.model_fingerprint import compute_quick_model_fingerprint
from ..config import RunConfig
from ..config.kohya_compat import upgrade_settings
from ..config.options import flatten_config, iter_options
from ..config.schema_output import StateConfig
from ..data.batch_plan import get_planned_stages
from ..data.prepare import PreparedData
from ..data.run_plan import RunPlan
from ..distributed.communicator import Communicator
from ..distributed.signals import StopSignals
from ..errors import ConfigError, RunInterrupted, UserError
from ..models.detect import DetectedModel
from . import checkpoint_dir
from .checkpoint import SaveCheckpoint, restore_state
from .checkpoint_dir import CheckpointInfo, find_checkpoints, read_checkpoint_info
from .export import AdapterRetention, SaveAdapter
from .state import TrainingRun

RESULT_NEUTRAL_GROUPS = {
    "distributed",
    "sharding",
    "parallel",
    "deepspeed",
    "save",
    "state",
    "preview",
    "validate",
    "log",
    "cache",
}
"""Where and how the work is done, what is written and told."""


RESULT_NEUTRAL_OPTIONS = {
    *("max_train_steps", "max_train_epochs", "gradient_checkpointing", "max_nan_steps", "on_oom", "dry_run"),
    *(
        "gradient_checkpointing_every",
        "activation_memory_budget",
        "cpu_offload_checkpointing",
        "blocks_to_swap",
        "profile_steps",
    ),
    *("max_data_loader_n_workers", "prefetch_factor", "on_invalid_images", "max_invalid_images"),
    # batch and pictures are compared themselves, wherever they come from
    *("gradient_accumulation_steps", "train_batch_size", "dataset_config"),
    # so is the model, wherever its files lie
    *("pretrained_model_name_or_path", "family", "v2", "vae", "clip_l", "clip_g", "t5xxl", "text_encoder", "ae"),
    "tokenizer_cache_dir",
}
"""Settings of the other groups that change nothing in the result, or are seen in another way."""


COMPARED_METADATA = {
    "model": "the model",
    "data": "the pictures, captions or their settings",
    "batch": "pictures in a step",
}
"""Facts of a state beside the settings."""


@dataclass(frozen=True)
class SettingChange:
    """Something that is another one now."""

    name: str
    old: Any
    new: Any
    changes_result: bool  # to the result

    def __str__(self) -> str:
        if self.name in ("model", "data"):
            return f"{COMPARED_METADATA[self.name]} changed"
        return f"{COMPARED_METADATA.get(self.name, self.name)}: {_format_value(self.old)} -> {_format_value(self.new)}"


def serialize_settings(config: RunConfig) -> dict[str, Any]:
    """Every option as JSON can hold it."""
    return {
        name: value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
        for name, value in flatten_config(config).items()
    }


def find_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[SettingChange]:
    """From the facts of a state to those of the run that is to go on."""
    for what in COMPARED_METADATA:
        if saved[what] != current[what]:
            yield SettingChange(what, saved[what], current[what], changes_result=True)
    groups = {option.name: option.group for option in iter_options(RunConfig)}
    defaults = {option.name: option.default for option in iter_options(RunConfig)}
    saved_settings = upgrade_settings(saved["settings"])
    for name, new in current["settings"].items():
        old = saved_settings.get(name, defaults[name])  # an option that is younger than the state
        if old != new and groups[name] != "state":
            yield SettingChange(
                name,
                old,
                new,
                changes_result=groups[name] not in RESULT_NEUTRAL_GROUPS and name not in RESULT_NEUTRAL_OPTIONS,
            )


def _format_value(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


logger = logging.getLogger(__name__)


class Resume:
    """Known before anything is loaded: from which state, and whether it may be."""

    def __init__(
        self,
        config: RunConfig,
        comm: Communicator,
        detected: DetectedModel,
        prepared: PreparedData,
        plan: RunPlan,
        started_at: float,
    ):
        self.config, self.comm = config, comm
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
            "run": comm.run_on_main_and_broadcast(
                lambda: checkpoint_dir.compute_next_run_number(self.output_dir, name)
            ),
            "versions": {"lorikeet": __version__, "torch": torch.__version__},
        }
        self.checkpoint = comm.run_on_main_and_broadcast(lambda: select_checkpoint(config.state, self.output_dir, name))
        if self.checkpoint is None:
            return
        self.metadata["started_at"] = self.checkpoint.metadata["started_at"]
        found = self.checkpoint
        comm.run_on_main(lambda: check_changes(found, self.metadata, config.state))
        is_cut_anew = found.metadata.get("split", self.metadata["split"])[1] != plan.batch_plan.accumulation_steps
        if is_cut_anew and any(stage.batch_plan.has_remainders for stage in get_planned_stages(plan.batch_plan)):
            logger.warning(
                "steps have another number of micro-batches than when the state was saved, and what buckets"
                " leave over beyond whole steps is put together in another way: some pictures of this epoch"
                " come twice or not at all, and epochs may be longer or shorter"
            )
        logger.info("going on after step %d, from %s", self.checkpoint.step, self.checkpoint.path)

    @property
    def started_at(self) -> float:
        """When the first of the runs that went on from each other began."""
        return float(self.metadata["started_at"])

    def is_complete(self, plan: RunPlan) -> bool:
        """Whether there is nothing left to do."""
        if self.checkpoint is None or self.checkpoint.step < plan.steps:
            return False
        logger.info(
            "the run is complete: %d of %d steps are done; with a larger --max_train_steps or"
            " --max_train_epochs it goes on",
            self.checkpoint.step,
            plan.steps,
        )
        return True

    def restore(self, run: TrainingRun) -> None:
        """Put ``run`` where the state was; every process gets it from one that read it."""
        if self.checkpoint is None:
            return
        found = self.checkpoint
        tensors = self.comm.run_on_main_and_broadcast(lambda: checkpoint_dir.load_checkpoint_tensors(found))
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

    def save_and_exit(
        self, run: TrainingRun, save_checkpoint: SaveCheckpoint, pending: tuple[str, ...], signals: StopSignals
    ) -> RunInterrupted:
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


LATEST = "latest"


def select_checkpoint(config: StateConfig, output_dir: Path, name: str) -> CheckpointInfo | None:
    """The state to go on from; nothing where ``--auto_resume`` finds none, or where nobody asked."""
    if config.resume is not None and config.resume != LATEST:
        found = read_checkpoint_info(Path(config.resume))
        if isinstance(found, str):
            named = Path(config.resume)  # perhaps the folder of all states
            where = named if named.is_dir() and _list_checkpoint_names(named, name) else output_dir
            raise UserError(
                f"--resume: {config.resume} is no whole state: {found}{_format_other_checkpoints(where, name)}"
            )
        return found
    if config.resume is None and not config.auto_resume:
        if _list_checkpoint_names(output_dir, name):
            logger.warning(
                "%s holds states of an earlier run, and this one begins anew; to go on from them, add --auto_resume",
                output_dir,
            )
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
        raise UserError(
            f"--resume latest: there is no state called {name}...-state in {output_dir.resolve()}; states are"
            " written with --save_state, and when a signal ends a run"
        )
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
    if matter and not config.force_resume:
        raise ConfigError(
            [
                f"--resume: {line}; with it the result is another one. Set it back, or add --force_resume"
                for line in matter
            ]
        )
