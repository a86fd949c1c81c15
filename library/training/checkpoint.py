"""Checkpoints: capture and restore the state of a run (adapter, EMA, optimizer, counters), and the callback.

Old checkpoints and LoRA files are deleted by ``checkpoint_retention``.  No states of random generators are saved: every
draw is a function of the seed and the step (``library.randomness``).

``accelerator.save_state`` is not used: it writes the whole frozen model, RNG states, and the optimizer by position.
Here every tensor has a name, nothing is pickled, and another world size or strategy can read the file.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.component_key_names import clean_parameter_name
from ..config.schema_output import StateConfig
from ..errors import UserError, format_error
from ..optim.optimizers import is_same_optimizer, load_optimizer_state
from ..parallel.async_copy import HostSnapshot
from ..parallel.shard_files import ShardWriter, describe_sharded, shard_whole_tensors, split_sharded
from ..parallel.strategy import Strategy
from ..problems import Problem
from . import checkpoint_dir
from .checkpoint_dir import SHARDS_KEY
from .checkpoint_retention import delete_old_checkpoints
from .save_weights import SaveWeights
from .state import SkippedStep, TrainingRun, TrainState

logger = logging.getLogger(__name__)


class SaveCheckpoint:
    """Save a checkpoint: copy the state to host memory, then write it in a background thread.

    The last callback of a run, so that a checkpoint is of a step whose callbacks are done.
    """

    id = "save_checkpoint"
    is_deferrable = False

    def __init__(self, config: StateConfig, save_adapter: SaveWeights, output_dir: Path, metadata: Mapping[str, Any]):
        self.config, self.save_adapter, self.output_dir, self.metadata = config, save_adapter, output_dir, metadata
        self._snapshot = HostSnapshot()
        self._shard_writer: ShardWriter | None = None
        self._writer: threading.Thread | None = None
        self._error: str | None = None
        self.latest_path: Path | None = None

    def should_run(self, run: TrainingRun) -> bool:
        if run.state.step >= run.plan.steps:
            return self.config.save_state or self.config.save_state_on_train_end
        return self.config.save_state and self.save_adapter.should_run(run)

    def on_train_begin(self, run: TrainingRun) -> None: ...

    def __call__(self, run: TrainingRun) -> None:
        pending = [name for name in run.pending_callbacks if name != self.id]
        is_uploaded = self.config.save_state_to_huggingface
        self.save(run, self.save_adapter.list_due_names(run)[-1], pending, is_uploaded)

    def save(self, run: TrainingRun, name: str, pending: Sequence[str] = (), is_uploaded: bool = False) -> None:
        """Start writing a checkpoint, and uploading it where that is asked for; a collective."""
        tree = capture_state(run)  # collective with a sharded optimizer state
        if run.strategy.writes_shards:
            self._start_writing_shards(run, tree, name, pending, is_uploaded)
        elif run.strategy.comm.is_main:
            self._start_writing(run, tree, name, pending, is_uploaded)

    def save_on_this_rank(self, run: TrainingRun, name: str, pending: Sequence[str] = ()) -> Path:
        """Write a checkpoint on this rank and wait until it is on disk, without any collective."""
        path = self.output_dir / f"{name}-state"
        existing = checkpoint_dir.read_checkpoint_info(path)
        if not isinstance(existing, str) and existing.metadata.get("run") == self.metadata["run"]:
            return path  # another rank of this run wrote it
        self._start_writing(run, capture_state(run), name, pending)
        self._finish_writing()
        return path

    def _start_writing(
        self, run: TrainingRun, tree: dict[str, Any], name: str, pending: Sequence[str], is_uploaded: bool = False
    ) -> None:
        self._wait_for_former_checkpoint()
        self._snapshot.capture(tree)
        metadata = self._collect_metadata(run, pending)
        path = self.output_dir / f"{name}-state"

        def write() -> None:
            tree, tensors = serialize_state(self._snapshot.wait())
            checkpoint_dir.write_checkpoint(path, {**metadata, "tree": tree}, tensors)
            self._finish_checkpoint(path, run, metadata["step"], is_uploaded)

        self._start_thread(path, write)

    def _start_writing_shards(
        self, run: TrainingRun, tree: dict[str, Any], name: str, pending: Sequence[str], is_uploaded: bool
    ) -> None:
        """Start writing on all ranks: each its parts, the main rank the rest when all parts are there."""
        self._wait_for_former_checkpoint()
        comm, path = run.strategy.comm, self.output_dir / f"{name}-state"
        metadata = self._collect_metadata(run, pending)
        if self._shard_writer is None:
            self._shard_writer = ShardWriter(comm, copies=not run.strategy.has_offloaded_state_in_files)
        writer = self._shard_writer
        new, error = comm.run_on_main_and_broadcast(lambda: _try_to_create_partial_dir(path))
        json_tree, tensors = serialize_state(tree)
        whole, sharded = split_sharded(tensors)
        self._snapshot.capture(whole)
        written = None if error else writer.start(new, sharded)
        metadata |= {"tree": json_tree, SHARDS_KEY: describe_sharded(sharded)}

        def write() -> None:
            files = writer.finish(new, written, error)
            if comm.is_main:
                checkpoint_dir.complete_checkpoint(path, new, metadata, self._snapshot.wait(), files)
                self._finish_checkpoint(path, run, metadata["step"], is_uploaded)

        self._start_thread(path, write)

    def _wait_for_former_checkpoint(self) -> None:
        self._join_writer()
        if self._error is not None:
            logger.warning("%s; training continues, and the next checkpoint is saved when it is due", self._error)

    def _collect_metadata(self, run: TrainingRun, pending: Sequence[str]) -> dict[str, Any]:
        metadata = {**self.metadata, **collect_state_metadata(run), "pending": list(pending), "saved_at": time.time()}
        return {**metadata, "files": self.save_adapter.retention.to_json()}

    def wait_until_written(self, run: TrainingRun) -> None:
        """Wait until the last checkpoint is on disk; raise on all ranks if it could not be written."""
        self._join_writer()  # on all ranks, each of which may write a part
        run.strategy.comm.run_on_main(self._finish_writing)

    def _finish_writing(self) -> None:
        self._join_writer()
        if self._error is not None:
            raise UserError(self._error)

    def _join_writer(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _start_thread(self, path: Path, write: Callable[[], None]) -> None:
        """Run ``write`` in the background; keep its error for the thread that waits for it."""

        def run_and_keep_error() -> None:
            try:
                write()
                self._error = None
            except Exception as error:
                named = isinstance(error, UserError)
                cause = error if named else getattr(error, "strerror", None) or format_error(error)
                self._error = f"{path}: the checkpoint cannot be saved: {cause}"
                checkpoint_dir.remove_partial_checkpoint(path)

        self._writer = threading.Thread(target=run_and_keep_error, daemon=False)
        self._writer.start()

    def _finish_checkpoint(self, path: Path, run: TrainingRun, step: int, is_uploaded: bool) -> None:
        """Upload a checkpoint that is complete, and delete old ones."""
        self.latest_path = path
        logger.info("checkpoint saved: %s", path)
        if is_uploaded and self.save_adapter.uploader is not None:
            self.save_adapter.uploader.upload_checkpoint(path)
        done = run.plan.count_completed_epochs(step)
        delete_old_checkpoints(run.config.save, self.config, step=step, num_epochs=done)


def _try_to_create_partial_dir(path: Path) -> tuple[Path, str | None]:
    """Create the directory for the parts of all ranks; return it with the error, if there is one."""
    try:
        return checkpoint_dir.create_partial_dir(path), None
    except OSError as error:
        return path, error.strerror or str(error)


def flatten_state(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert ``tree`` to JSON and move its tensors into ``tensors``, named by their path from ``name`` on."""
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, Mapping):
        return {"dict": [[key, flatten_state(value, f"{name}/{key}", tensors)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        items = [flatten_state(value, f"{name}/{number}", tensors) for number, value in enumerate(tree)]
        return items if isinstance(tree, list) else {"tuple": items}
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    raise TypeError(f"{name} is a {type(tree).__name__}, which a checkpoint cannot hold")


def unflatten_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild what ``flatten_state`` took apart."""
    if isinstance(tree, list):
        return [unflatten_state(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "tuple":
        return tuple(unflatten_state(item, tensors) for item in value)
    return {key: unflatten_state(item, tensors) for key, item in value}


def capture_state(run: TrainingRun) -> dict[str, Any]:
    """Collect adapter, EMA, optimizer and gradient scaler. Collective with a sharded optimizer state."""
    names, gather = name_parameters(run), run.strategy.gather_state
    ema_params = list(zip(names.items(), run.ema.shadow_params, strict=True)) if run.ema is not None else []
    scaler = run.strategy.accelerator.scaler
    return {
        "adapter": {name: gather(parameter, parameter.detach()) for parameter, name in names.items()},
        "ema": {name: gather(parameter, average) for (parameter, name), average in ema_params},
        "optimizer": _export_optimizer_state(run, names),
        "scaler": scaler.state_dict() if scaler is not None else {},
    }


def collect_state_metadata(run: TrainingRun) -> dict[str, Any]:
    """Collect the counters and lists of a run that belong in a checkpoint."""
    skipped = [[item.step, str(item.loss), str(item.grad_norm)] for item in run.nan_guard.skipped_steps]
    return {
        "step": run.state.step,
        "samples": run.state.samples,
        "has_trained": run.state.has_trained,
        "check_interval": run.nan_guard.check_interval,
        "skipped_steps": skipped,
        "bad_samples": run.bad_samples.problems,
        "optimizer_defaults": flatten_state(_select_plain_values(run.optimizer.defaults), "", {}),
    }


def serialize_state(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Split the state into JSON and named tensors."""
    tensors: dict[str, Tensor] = {}
    try:
        return {name: flatten_state(part, name, tensors) for name, part in state.items()}, tensors
    except TypeError as error:
        raise UserError(Problem("save_state", f"the state of this optimizer cannot be saved: {error}")) from None


def restore_state(run: TrainingRun, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Load a checkpoint into ``run``."""
    names = name_parameters(run)
    tensors = shard_whole_tensors(tensors, names, run.strategy.take_shard)
    tree = {name: unflatten_state(part, tensors) for name, part in metadata["tree"].items()}
    _check_shapes(names, tree["adapter"])
    with torch.no_grad():
        for parameter, name in names.items():
            parameter.copy_(tree["adapter"][name])
        run.strategy.sync_master_weights()
        if run.ema is not None:  # an EMA that is new in this run starts from the checkpoint's weights
            for mine, name in zip(run.ema.shadow_params, names.values(), strict=True):
                mine.copy_((tree["ema"] or tree["adapter"])[name])
    if is_same_optimizer(metadata["settings"]["optimizer_type"], run.config.optim.optimizer_type):
        _restore_optimizer(run, names, tree["optimizer"], unflatten_state(metadata["optimizer_defaults"], {}))
    else:
        logger.warning("the optimizer differs from the checkpoint's; its state starts from scratch")
    if run.strategy.accelerator.scaler is not None and tree["scaler"]:
        run.strategy.accelerator.scaler.load_state_dict(tree["scaler"])
    run.state = TrainState(metadata["step"], metadata["samples"], metadata["has_trained"])
    run.nan_guard.skipped_steps = [
        SkippedStep(step, float(loss), float(norm)) for step, loss, norm in metadata["skipped_steps"]
    ]
    run.nan_guard.check_interval = metadata.get("check_interval", run.nan_guard.check_interval)
    run.bad_samples.problems = dict(metadata["bad_samples"])


def name_parameters(run: TrainingRun) -> dict[nn.Parameter, str]:
    """Name each trainable parameter once, by its first name in the model."""
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in run.strategy.iter_trained_weights(run.model):
        first_names.setdefault(parameter, clean_parameter_name(name))
    return {parameter: first_names[parameter] for parameter in run.parameters}


def _check_shapes(names: Mapping[nn.Parameter, str], saved: Mapping[str, Tensor]) -> None:
    own = {name: tuple(parameter.shape) for parameter, name in names.items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if own != theirs:
        different = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        raise UserError(
            Problem(
                "resume",
                f"{len(different)} of {len(own)} adapter weights differ from the checkpoint in name or"
                f" shape, for example {different[0]}: {theirs.get(different[0], 'none')} in the"
                f" checkpoint, {own.get(different[0], 'none')} now",
            )
        )


def _export_optimizer_state(run: TrainingRun, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """Name parameters in the optimizer state, whose own indices would shift when a parameter is added."""
    exported = dict(run.optimizer.state_dict())
    numbers = _map_parameter_names(run, names, exported["param_groups"])
    state = {numbers[number]: value for number, value in exported.pop("state").items()}
    for parameter, name in names.items():
        if name in state:
            state[name] = {key: _gather_value(run.strategy, parameter, value) for key, value in state[name].items()}
    groups = [
        {**group, "params": [numbers[number] for number in group["params"]]} for group in exported["param_groups"]
    ]
    return {**exported, "state": state, "param_groups": groups}


def _gather_value(strategy: Strategy, parameter: nn.Parameter, value: Any) -> Any:
    is_of_weight = isinstance(value, Tensor) and value.shape == parameter.shape
    return strategy.gather_state(parameter, value) if is_of_weight else value


def _map_parameter_names(run: TrainingRun, names: Mapping[nn.Parameter, str], groups: Any) -> dict[int, str]:
    return {
        number: names[parameter]
        for mine, theirs in zip(run.optimizer.param_groups, groups, strict=True)
        for parameter, number in zip(mine["params"], theirs["params"], strict=True)
    }


def _restore_optimizer(
    run: TrainingRun, names: Mapping[nn.Parameter, str], saved: dict[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Load the optimizer state; hyperparameters that were changed since keep their new values."""
    own = run.optimizer.state_dict()
    number_names = _map_parameter_names(run, names, own["param_groups"])
    numbers = {name: number for number, name in number_names.items()}
    changed = {
        key for key, value in _select_plain_values(run.optimizer.defaults).items() if defaults.get(key, value) != value
    }
    before = {frozenset(group["params"]): group for group in saved["param_groups"]}
    groups = []
    for mine in own["param_groups"]:
        members = frozenset(number_names[number] for number in mine["params"])
        theirs = before.get(members, {})  # empty if parameters are grouped differently now
        groups.append(
            {**mine, **{key: value for key, value in theirs.items() if key not in changed}, "params": mine["params"]}
        )
    state = {numbers[name]: value for name, value in saved["state"].items()}
    load_optimizer_state(run.optimizer, {**saved, "state": state, "param_groups": groups})


def _select_plain_values(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Select the hyperparameters that JSON can hold."""
    return {
        key: value
        for key, value in defaults.items()
        if value is None or isinstance(value, (bool, int, float, str, tuple, list))
    }
