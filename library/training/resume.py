"""Resuming from a checkpoint: select it, compare its settings with those of this run, and run pending callbacks.

Weights, optimizer, EMA and counters are put back by ``checkpoint.restore_state``; the files of a checkpoint are read
and written by ``training.checkpoint_dir``.  A checkpoint does not depend on world size or strategy.

No batches are skipped, and no states of random generators restored: the batches of a step come from the batch plan, and
random draws from the seed and the step (``library.randomness``).  The loop starts the data loader at the step of the
restored state.
"""

import logging
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..cache.model_fingerprint import compute_quick_file_fingerprint, compute_quick_model_fingerprint
from ..config import RunConfig
from ..config.kohya_compat import upgrade_settings
from ..config.options import flatten_config, iter_options
from ..config.schema import AdapterConfig
from ..config.schema_objective import NoiseConfig
from ..config.schema_output import StateConfig
from ..config.unused_options import find_unused_options
from ..dataloader.batch_plan import get_planned_stages
from ..dataloader.prepare import PreparedData
from ..dataloader.run_plan import RunPlan
from ..distributed.config_agreement import NF4_KERNEL
from ..distributed.signals import StopSignals
from ..errors import RunInterrupted, UserError
from ..models.detect import DetectedModel
from ..models.own_families import compute_family_fingerprint, get_family_facts
from ..models.validate_options import collect_model_traits
from ..optim.optimizers import is_same_optimizer
from ..parallel.quantize import BUILT_IN_KERNEL
from ..parallel.shard_files import load_shards
from ..parallel.stored_base import DEQUANTIZED, describe_rounding, explain_dequantization, infer_rounding
from ..parallel.strategy import Strategy
from ..problems import Problem
from . import checkpoint_dir
from .checkpoint import SaveCheckpoint, name_parameters, restore_state
from .checkpoint_dir import CheckpointInfo, find_checkpoints, read_checkpoint_info
from .checkpoint_retention import AdapterRetention
from .hub_download import download_checkpoint
from .preflight import check_setting_changes
from .state import TrainingRun

logger = logging.getLogger(__name__)
LATEST = "latest"
STORED_ROUNDING = "stored_rounding"
"""What ``quantize_base`` does with weights that files store quantized, in the metadata of checkpoints."""
EXPERT_ROUNDING = "expert_rounding"
"""How ``quantize_base`` rounds the matrices of experts, in the metadata of checkpoints."""
COMPARED_METADATA = {
    "model": "the model",
    "data": "the images, captions or their settings",
    "batch": "images per step",
    "training_adapter": "the training adapter",
    "noise_levels": "the model family's default noise levels",
    "family": "the model family of your own",
}
"""The names in messages of what a checkpoint records besides the settings."""


@dataclass(frozen=True)
class SettingChange:
    """A difference between a checkpoint and this run."""

    name: str
    old: Any
    new: Any
    changes_result: bool
    detail: str = ""

    def __str__(self) -> str:
        if self.name in ("model", "data", "training_adapter"):
            return f"{COMPARED_METADATA[self.name]} changed{self.detail}"
        if self.name == "family":
            return f"{COMPARED_METADATA[self.name]}{_describe_family_change(self.old, self.new)}"
        if self.name == "noise_levels":
            texts = [value or "those of its pipeline" for value in (self.old, self.new)]
            return f"{COMPARED_METADATA[self.name]}: {' -> '.join(texts)}"
        name, values = COMPARED_METADATA.get(self.name, self.name), map(_format_value, (self.old, self.new))
        return f"{name}: {' -> '.join(values)}{self.detail}"


def serialize_settings(config: RunConfig) -> dict[str, Any]:
    """Convert every option to a JSON value."""
    return {
        name: value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
        for name, value in flatten_config(config).items()
    }


def describe_base(config: RunConfig, strategy: Strategy, detected: DetectedModel) -> dict[str, Any]:
    """Describe for a checkpoint how frozen weights are rounded, and by what they are dequantized."""
    reason = explain_dequantization(config.model, config.adapter, can_quantize=strategy.can_quantize_base)
    rounding = describe_rounding(config.model, detected.stored_formats, reason)
    has_experts = get_family_facts(detected.family).blocks.has_expert_matrices
    experts = config.model.quantize_base if has_experts and not config.adapter.is_full else "none"
    return {"nf4_kernel": strategy.nf4_kernel, STORED_ROUNDING: rounding, EXPERT_ROUNDING: experts}


def describe_default_noise_levels(noise: NoiseConfig, detected: DetectedModel) -> str | None:
    """Describe the defaults of the model's family that a run is trained with, where they are not its pipeline's.

    None is also what checkpoints of releases have that knew only those of the pipeline.
    """
    is_flow = detected.prediction_type == "flow"
    return get_family_facts(detected.family).training_noise.describe_used_defaults(noise) if is_flow else None


def _describe_family_change(old: str | None, new: str | None) -> str:
    """Describe the change of a user's family, of which a checkpoint has the import path and the hash of its source."""
    names = [value.partition(" ")[0] if value else "a registered one" for value in (old, new)]
    if names[0] == names[1]:
        return f": the source of {names[0]} changed"
    return f": {' -> '.join(names)}"


def _hash_training_adapter(adapter: AdapterConfig) -> str | None:
    return compute_quick_file_fingerprint([adapter.training_adapter]) if adapter.training_adapter else None


def find_settings_without_effect(config: RunConfig, detected: DetectedModel) -> Collection[str]:
    """Find the settings without effect on this run that older checkpoints recorded as they were set."""
    return find_unused_options(config, frozenset({"learning_rate"}), collect_model_traits(detected, config.adapter))


def find_changes(
    saved: Mapping[str, Any], current: Mapping[str, Any], without_effect: Collection[str] = ()
) -> Iterator[SettingChange]:
    """Find the differences between a checkpoint and the run that resumes from it.

    Settings ``without_effect`` are not compared: they had none in the checkpoint's run, if all others are equal.
    """
    for key in COMPARED_METADATA:
        if saved.get(key) != current.get(key):  # None: without training adapter
            yield SettingChange(key, saved.get(key), current.get(key), changes_result=True)
    kernel, saved_kernel = current.get("nf4_kernel"), saved.get("nf4_kernel", BUILT_IN_KERNEL)
    if kernel != saved_kernel and None not in (kernel, saved_kernel):  # rounds differently, as another torch does
        yield SettingChange(NF4_KERNEL, saved_kernel, kernel, changes_result=False)
    yield from _find_rounding_change(saved, current)
    options = {option.name: option for option in iter_options(RunConfig)}
    saved_settings = upgrade_settings(saved["settings"])
    for name, new in current["settings"].items():
        option = options[name]
        old = saved_settings.get(name, option.default)  # an option that is newer than the checkpoint
        if name == "optimizer_type" and is_same_optimizer(old, new):
            continue
        if old != new and option.group != "state" and name not in without_effect:
            is_compared = option.changes_result and not option.is_compared_by_content
            yield SettingChange(name, old, new, changes_result=is_compared)


def _find_rounding_change(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[SettingChange]:
    """Find whether ``quantize_base`` now rounds other weights: those that files store quantized, those of experts."""
    new, old = current.get(STORED_ROUNDING), saved.get(STORED_ROUNDING)
    if new is not None and STORED_ROUNDING not in saved:
        old = infer_rounding(saved["settings"])
    if old != new and None not in (old, new):  # else the model or quantize_base changed, too
        fix = "add" if old == DEQUANTIZED else "remove"
        detail = f"; to go on with the same base, {fix} --dequantize_base"
        yield SettingChange(
            "weights that the model's files store quantized", old, new, changes_result=True, detail=detail
        )
    new = current.get(EXPERT_ROUNDING, "none")
    is_known = EXPERT_ROUNDING in saved or STORED_ROUNDING in saved  # by the version that began to round them
    if new != "none" and not is_known and upgrade_settings(saved["settings"]).get("quantize_base") == new:
        detail = "; the version of the checkpoint did not round them, which no option does"
        yield SettingChange("matrices of experts", "none", new, changes_result=True, detail=detail)


def judge_first_step(
    changes: Iterable[SettingChange], *, checkpoint_step: int, first_step: int
) -> Iterator[SettingChange]:
    """Accept another ``initial_step`` or ``initial_epoch`` if it is left out, or names the step of the checkpoint.

    A run goes on after the step of its checkpoint, which users of sd-scripts name beside ``--resume``.
    """
    for change in changes:
        if change.name in ("initial_step", "initial_epoch"):
            if first_step in (0, checkpoint_step):
                change = replace(change, changes_result=False)
            else:
                text = f", which leaves out {first_step} steps; the checkpoint is of step {checkpoint_step}"
                change = replace(change, detail=text)
        yield change


def _format_value(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Resume:
    """The checkpoint that a run resumes from, if any, and the metadata of the checkpoints that it saves."""

    def __init__(
        self,
        config: RunConfig,
        strategy: Strategy,
        detected: DetectedModel,
        prepared: PreparedData,
        plan: RunPlan,
        started_at: float,
    ):
        self.comm, self.save_config, self.state_config = strategy.comm, config.save, config.state
        self.output_dir, name = Path(config.save.output_dir), config.save.output_name
        batches = plan.batch_plan
        batch_sizes = {bucket.dataset_index_in_file: bucket.batch_size for bucket in batches.buckets}
        micro_batches = batches.dp_size * batches.accumulation_steps
        self.metadata: dict[str, Any] = {
            "settings": serialize_settings(config),
            "model": compute_quick_model_fingerprint(detected),
            "data": prepared.manifest.compute_fingerprint(),
            "sample_digests": prepared.manifest.compute_sample_digests(),
            "training_adapter": _hash_training_adapter(config.adapter),
            "noise_levels": describe_default_noise_levels(config.noise, detected),
            "family": compute_family_fingerprint(detected.family),
            "batch": [size * micro_batches for _, size in sorted(batch_sizes.items())],
            "split": [batches.dp_size, batches.accumulation_steps],
            "started_at": started_at,
            "run": self.comm.run_on_main_and_broadcast(
                lambda: checkpoint_dir.compute_next_run_number(self.output_dir, name)
            ),
            "versions": {"lorikeet": __version__, "torch": torch.__version__},
            **describe_base(config, strategy, detected),
        }
        self.checkpoint = self.comm.run_on_main_and_broadcast(
            lambda: select_checkpoint(config.state, self.output_dir, name)
        )
        if (checkpoint := self.checkpoint) is None:
            return
        self.metadata["started_at"] = checkpoint.metadata["started_at"]
        self.comm.run_on_main(
            lambda: _check_changes(
                checkpoint,
                self.metadata,
                prepared,
                first_step=plan.first_step,
                force_resume=config.state.force_resume,
                without_effect=find_settings_without_effect(config, detected),
            )
        )
        saved_split = checkpoint.metadata.get("split", self.metadata["split"])
        has_remainders = any(stage.batch_plan.has_remainders for stage in get_planned_stages(batches))
        if saved_split[1] != batches.accumulation_steps and has_remainders:
            logger.warning(
                "the number of micro-batches per step differs from the checkpoint's, so incomplete batches of a"
                " bucket are filled differently: some images of this epoch are trained twice or not at all, and"
                " the length of an epoch may change"
            )
        logger.info("resuming after step %d from %s", checkpoint.step, checkpoint.path)

    @property
    def started_at(self) -> float:
        """When the first run of the chain of resumed runs started."""
        return float(self.metadata["started_at"])

    def is_complete(self, plan: RunPlan) -> bool:
        """Whether the checkpoint is of the last step."""
        if self.checkpoint is None or self.checkpoint.step < plan.steps:
            return False
        logger.info(
            "training is complete: %d of %d steps; to train longer, raise --max_train_steps or --max_train_epochs",
            self.checkpoint.step,
            plan.steps,
        )
        return True

    def restore(self, run: TrainingRun) -> None:
        """Load the checkpoint, which the main rank reads, into ``run`` on all ranks; each reads its own shards."""
        if (checkpoint := self.checkpoint) is not None:
            tensors = self.comm.load_on_main_and_broadcast(lambda: checkpoint_dir.load_checkpoint_tensors(checkpoint))
            listed = checkpoint.metadata.get(checkpoint_dir.SHARDS_KEY, {})
            shards = load_shards(checkpoint.path, listed, run.strategy, name_parameters(run))
            restore_state(run, checkpoint.metadata, {**tensors, **shards})

    def restore_retention(self) -> AdapterRetention | None:
        """Return the LoRA files that earlier runs wrote to this output_dir, which this run may delete."""
        if self.checkpoint is None or self.checkpoint.metadata["settings"]["output_dir"] != self.save_config.output_dir:
            return None
        return AdapterRetention.from_json(self.save_config, self.checkpoint.metadata.get("files", [[], []]))

    def run_pending_callbacks(self, run: TrainingRun) -> None:
        """Run the callbacks that the stopped run left undone after its last step."""
        pending = self.checkpoint.metadata["pending"] if self.checkpoint is not None else []
        for callback in run.callbacks:
            if callback.id in pending and callback.should_run(run):
                callback(run)

    def save_and_exit(
        self, run: TrainingRun, save_checkpoint: SaveCheckpoint, pending: tuple[str, ...], signals: StopSignals
    ) -> RunInterrupted:
        """Save a checkpoint and return the exception that ends the run with its exit code."""
        name = f"{self.save_config.output_name}-step{run.state.step:08d}"
        save_checkpoint.save(run, name, pending)
        save_checkpoint.wait_until_written(run)
        number = signals.received or signal.SIGTERM  # None if only another rank received it
        reason = signals.reason or signal.Signals(number).name
        code = self.state_config.requeue_exit_code
        return RunInterrupted(
            f"{reason} after step {run.state.step} of {run.plan.steps}; checkpoint saved to"
            f" {self.output_dir / f'{name}-state'}.\n  To resume: run the same command with --auto_resume",
            128 + number if code is None else code,
        )


def select_checkpoint(config: StateConfig, output_dir: Path, name: str) -> CheckpointInfo | None:
    """Select the checkpoint to resume from; None without ``--resume``, or if ``--auto_resume`` finds none."""
    if config.resume is not None and config.resume != LATEST:
        path = download_checkpoint(config.resume) if config.resume_from_huggingface else Path(config.resume)
        info = read_checkpoint_info(path)
        if isinstance(info, str):
            # The directory that holds the checkpoints may have been given in place of one of them.
            parent = path if path.is_dir() and _list_checkpoint_names(path, name) else output_dir
            others = _list_checkpoint_names(parent, name)
            hint = f"; checkpoints in {parent}: {', '.join(others)}" if others else ""
            raise UserError(Problem("resume", f"{config.resume} is not a complete checkpoint: {info}{hint}"))
        return info
    if config.resume is None and not config.auto_resume:
        if _list_checkpoint_names(output_dir, name):
            logger.warning(
                "%s has checkpoints of an earlier run, but this run starts from scratch; to resume, add --auto_resume",
                output_dir,
            )
        return None
    complete = []
    for path in find_checkpoints(output_dir, name):
        info = read_checkpoint_info(path)
        if isinstance(info, str):
            logger.warning("skipping incomplete checkpoint %s: %s", path, info)
        else:
            complete.append(info)
    if complete:
        return max(complete, key=lambda info: info.sort_key)
    if config.resume == LATEST:
        raise UserError(
            Problem(
                "resume",
                f"no checkpoint {name}*-state in {output_dir.resolve()}",
                "checkpoints are saved with --save_state, and when a signal stops a run",
                value="latest",
            )
        )
    logger.info("--auto_resume: no checkpoint in %s; starting from scratch", output_dir)
    return None


def _list_checkpoint_names(output_dir: Path, name: str) -> list[str]:
    return [path.name for path in find_checkpoints(output_dir, name)]


def _check_changes(
    checkpoint: CheckpointInfo,
    current: Mapping[str, Any],
    prepared: PreparedData,
    *,
    first_step: int,
    force_resume: bool,
    without_effect: Collection[str],
) -> None:
    """Warn of every changed setting; raise if one changes the result, unless ``--force_resume`` is given."""
    saved_data = checkpoint.metadata["data"]
    if saved_data != current["data"] and saved_data == prepared.manifest.compute_former_fingerprint():
        current = {**current, "data": saved_data}
    found = find_changes(checkpoint.metadata, current, without_effect)
    changes = list(judge_first_step(found, checkpoint_step=checkpoint.step, first_step=first_step))
    if digests := checkpoint.metadata.get("sample_digests"):
        detail = f" ({prepared.manifest.describe_difference(digests)})"
        changes = [replace(change, detail=detail) if change.name == "data" else change for change in changes]
    for change in changes:
        logger.warning("changed since the checkpoint was saved: %s", change)
    check_setting_changes([change for change in changes if change.changes_result], force_resume)
