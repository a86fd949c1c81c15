"""Saving the state of a run: copied at once, written in the background, an older one never lost."""

import logging
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.key_names import clean_parameter_name
from ..config.schema_output import StateConfig
from ..distributed.async_copy import HostSnapshot
from ..errors import UserError, format_error
from ..optim.optimizers import load_optimizer_state
from . import checkpoint_dir
from .export import SaveAdapter
from .state import SkippedStep, TrainingRun, TrainState

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
        self.save(
            run,
            self.save_adapter.list_due_names(run)[-1],
            [name for name in run.pending_callbacks if name != type(self).__name__],
        )

    def save(self, run: TrainingRun, name: str, pending: Sequence[str] = ()) -> None:
        """Begin to write the state; one process does, for all have the same."""
        tree = capture_state(run)  # by all, for where a strategy divides it, all have to give their parts
        if run.strategy.comm.is_main:
            self._start_writing(run, tree, name, pending)

    def save_on_this_rank(self, run: TrainingRun, name: str, pending: Sequence[str] = ()) -> Path:
        """Write the state on this process, whichever it is, and wait until it is on disk; talk to nobody."""
        path = self.output_dir / f"{name}-state"
        there = checkpoint_dir.read_checkpoint_info(path)
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
        run.strategy.comm.run_on_main(self._finish_writing)

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
            checkpoint_dir.write_checkpoint(path, {**metadata, "tree": tree}, tensors)
            self._error, self.latest_path = None, path
            logger.info("state saved: %s", path)
            self._remove_old_checkpoints(metadata["step"], run)
        except Exception as error:  # whatever ends this thread must reach the one that waits for it
            why = error if isinstance(error, UserError) else getattr(error, "strerror", None) or format_error(error)
            self._error = f"{path}: the state cannot be saved: {why}"
            checkpoint_dir.remove_partial_checkpoint(path)

    def _remove_old_checkpoints(self, step: int, run: TrainingRun) -> None:
        """As for LoRA files: of epochs so many, of steps those that are not older."""
        name, config, done = run.config.save.output_name, self.config, run.plan.count_completed_epochs(step)
        for path in checkpoint_dir.find_checkpoints(self.output_dir, name):
            number = path.name.removeprefix(name).removesuffix("-state").removeprefix("-")
            is_old = False
            if number.startswith("step") and config.save_last_n_steps_state:
                is_old = int(number.removeprefix("step")) < step - config.save_last_n_steps_state
            elif number.isdecimal() and config.save_last_n_epochs_state:
                is_old = int(number) <= done - config.save_last_n_epochs_state
            if is_old and path != self.latest_path:
                shutil.rmtree(path, ignore_errors=True)


def flatten_state(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON can hold of ``tree``; its tensors go into ``tensors`` under names that begin with ``name``."""
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
    raise TypeError(f"{name} is a {type(tree).__name__}, which cannot be kept in a file")


def unflatten_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The other way round."""
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
    """Everything on the device that the next step depends on, and the program's own small words beside it."""
    names = _name_parameters(run)
    values = dict(zip(names.values(), run.ema.shadow_params, strict=True)) if run.ema is not None else {}
    scaler = run.strategy.accelerator.scaler
    return {
        "adapter": {name: parameter.detach() for parameter, name in names.items()},
        "average": values,
        "optimizer": _export_optimizer_state(run, names),
        "scaler": scaler.state_dict() if scaler is not None else {},
    }


def collect_state_metadata(run: TrainingRun) -> dict[str, Any]:
    """What else the next step depends on."""
    bad = [[item.step, str(item.loss), str(item.grad_norm)] for item in run.nan_guard.skipped_steps]
    return {
        "step": run.state.step,
        "samples": run.state.samples,
        "has_learnt": run.state.has_trained,
        "bad_steps": bad,
        "bad_pictures": run.bad_samples.problems,
        "optimizer_defaults": flatten_state(_select_plain_values(run.optimizer.defaults), "", {}),
    }


def serialize_state(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """A tree as JSON and tensors."""
    tensors: dict[str, Tensor] = {}
    try:
        return {name: flatten_state(part, name, tensors) for name, part in state.items()}, tensors
    except TypeError as error:
        raise UserError(f"--save_state: the state of this optimizer cannot be kept: {error}") from None


def restore_state(run: TrainingRun, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Make ``run`` what it was when the state was saved."""
    tree = {name: unflatten_state(part, tensors) for name, part in metadata["tree"].items()}
    names = _name_parameters(run)
    _check_shapes(names, tree["adapter"])
    with torch.no_grad():
        for parameter, name in names.items():
            parameter.copy_(tree["adapter"][name])
        run.strategy.sync_optimizer_copies()
        if run.ema is not None:  # one that nobody asked for before begins where the state ends
            for mine, name in zip(run.ema.shadow_params, names.values(), strict=True):
                mine.copy_((tree["average"] or tree["adapter"])[name])
    if metadata["settings"]["optimizer_type"] == run.config.optim.optimizer_type:
        _restore_optimizer(run, names, tree["optimizer"], unflatten_state(metadata["optimizer_defaults"], {}))
    else:
        logger.warning("another optimizer: it begins without memory of the steps before")
    if run.strategy.accelerator.scaler is not None and tree["scaler"]:
        run.strategy.accelerator.scaler.load_state_dict(tree["scaler"])
    run.state = TrainState(metadata["step"], metadata["samples"], metadata["has_learnt"])
    run.nan_guard.skipped_steps = [
        SkippedStep(step, float(loss), float(norm)) for step, loss, norm in metadata["bad_steps"]
    ]
    run.bad_samples.problems = dict(metadata["bad_pictures"])


def _name_parameters(run: TrainingRun) -> dict[nn.Parameter, str]:
    """What learns, each once, by the first name that it has in the model."""
    found: dict[nn.Parameter, str] = {}
    for name, parameter in run.strategy.unwrap_model(run.model).named_parameters():
        found.setdefault(parameter, clean_parameter_name(name))
    return {parameter: found[parameter] for parameter in run.parameters}


def _check_shapes(names: Mapping[nn.Parameter, str], saved: Mapping[str, Tensor]) -> None:
    own = {name: tuple(parameter.shape) for parameter, name in names.items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if own != theirs:
        different = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        raise UserError(
            f"--resume: the adapter of the state is another one: {len(different)} of {len(own)} weights"
            f" differ in name or size, for example {different[0]}:"
            f" {theirs.get(different[0], 'none')} in the state,"
            f" {own.get(different[0], 'none')} now"
        )


def _export_optimizer_state(run: TrainingRun, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """An optimizer knows parameters by numbers, which are another model's as soon as anything is added."""
    told = dict(run.optimizer.state_dict())
    numbers = _map_parameter_names(run, names, told["param_groups"])
    state = {numbers[number]: value for number, value in told.pop("state").items()}
    groups = [{**group, "params": [numbers[number] for number in group["params"]]} for group in told["param_groups"]]
    return {**told, "state": state, "param_groups": groups}


def _map_parameter_names(run: TrainingRun, names: Mapping[nn.Parameter, str], groups: Any) -> dict[int, str]:
    return {
        number: names[parameter]
        for mine, theirs in zip(run.optimizer.param_groups, groups, strict=True)
        for parameter, number in zip(mine["params"], theirs["params"], strict=True)
    }


def _restore_optimizer(
    run: TrainingRun, names: Mapping[nn.Parameter, str], saved: dict[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Its memory is that of the state; settings that were changed since are those of now."""
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
        theirs = before.get(members, {})  # none where rates are now given to other parts of the adapter
        groups.append(
            {**mine, **{key: value for key, value in theirs.items() if key not in changed}, "params": mine["params"]}
        )
    state = {numbers[name]: value for name, value in saved["state"].items()}
    load_optimizer_state(run.optimizer, {**saved, "state": state, "param_groups": groups})


def _select_plain_values(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer that are numbers, words and the like."""
    return {
        key: value
        for key, value in defaults.items()
        if value is None or isinstance(value, (bool, int, float, str, tuple, list))
    }
