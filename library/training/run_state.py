"""What a run is at this moment, as facts and tensors, and a run put back to where it was."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.keys import clean_parameter_name
from ..errors import UserError
from ..optim.optimizers import load_optimizer_state
from .job import SkippedStep, TrainingRun, TrainState
from .packing import flatten_state, unflatten_state

logger = logging.getLogger(__name__)


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
    run.nan_guard.skipped_steps = [SkippedStep(step, float(loss), float(norm)) for step, loss, norm in metadata["bad_steps"]]
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
        raise UserError(f"--resume: the adapter of the state is another one: {len(different)} of {len(own)} weights"
                        f" differ in name or size, for example {different[0]}:"
                        f" {theirs.get(different[0], 'none')} in the state,"
                        f" {own.get(different[0], 'none')} now")  # fmt: skip


def _export_optimizer_state(run: TrainingRun, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """An optimizer knows parameters by numbers, which are another model's as soon as anything is added."""
    told = dict(run.optimizer.state_dict())
    numbers = _map_parameter_names(run, names, told["param_groups"])
    state = {numbers[number]: value for number, value in told.pop("state").items()}
    groups = [{**group, "params": [numbers[number] for number in group["params"]]} for group in told["param_groups"]]
    return {**told, "state": state, "param_groups": groups}


def _map_parameter_names(run: TrainingRun, names: Mapping[nn.Parameter, str], groups: Any) -> dict[int, str]:
    return {number: names[parameter]
            for mine, theirs in zip(run.optimizer.param_groups, groups, strict=True)
            for parameter, number in zip(mine["params"], theirs["params"], strict=True)}  # fmt: skip


def _restore_optimizer(run: TrainingRun, names: Mapping[nn.Parameter, str], saved: dict[str, Any],
                       defaults: Mapping[str, Any]) -> None:  # fmt: skip
    """Its memory is that of the state; settings that were changed since are those of now."""
    own = run.optimizer.state_dict()
    number_names = _map_parameter_names(run, names, own["param_groups"])
    numbers = {name: number for number, name in number_names.items()}
    changed = {key for key, value in _select_plain_values(run.optimizer.defaults).items() if defaults.get(key, value) != value}
    before = {frozenset(group["params"]): group for group in saved["param_groups"]}
    groups = []
    for mine in own["param_groups"]:
        members = frozenset(number_names[number] for number in mine["params"])
        theirs = before.get(members, {})  # none where rates are now given to other parts of the adapter
        groups.append({**mine, **{key: value for key, value in theirs.items() if key not in changed},
                       "params": mine["params"]})  # fmt: skip
    state = {numbers[name]: value for name, value in saved["state"].items()}
    load_optimizer_state(run.optimizer, {**saved, "state": state, "param_groups": groups})


def _select_plain_values(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer that are numbers, words and the like."""
    return {key: value for key, value in defaults.items()
            if value is None or isinstance(value, (bool, int, float, str, tuple, list))}  # fmt: skip
