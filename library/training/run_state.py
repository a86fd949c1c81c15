"""What a run is at this moment, as facts and tensors, and a run put back to where it was."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.keys import clean
from ..errors import UserError
from ..optim.optimizers import remember
from .job import BadStep, Run, State
from .packing import packed, unpacked

logger = logging.getLogger(__name__)


def tree_of(run: Run) -> dict[str, Any]:
    """Everything on the device that the next step depends on, and the program's own small words beside it."""
    names = _names(run)
    values = dict(zip(names.values(), run.average.values, strict=True)) if run.average is not None else {}
    scaler = run.strategy.accelerator.scaler
    return {
        "adapter": {name: parameter.detach() for parameter, name in names.items()},
        "average": values,
        "optimizer": _by_name(run, names),
        "scaler": scaler.state_dict() if scaler is not None else {},
    }


def facts_of_run(run: Run) -> dict[str, Any]:
    """What else the next step depends on."""
    bad = [[item.step, str(item.loss), str(item.gradient_norm)] for item in run.watch.bad]
    return {
        "step": run.state.step,
        "samples": run.state.samples,
        "has_learnt": run.state.has_learnt,
        "bad_steps": bad,
        "bad_pictures": run.bad_samples.found,
        "optimizer_defaults": packed(_plain(run.optimizer.defaults), "", {}),
    }


def kept(tree: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """A tree as JSON and tensors."""
    tensors: dict[str, Tensor] = {}
    try:
        return {name: packed(part, name, tensors) for name, part in tree.items()}, tensors
    except TypeError as error:
        raise UserError(f"--save_state: the state of this optimizer cannot be kept: {error}") from None


def put_back(run: Run, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Make ``run`` what it was when the state was saved."""
    tree = {name: unpacked(part, tensors) for name, part in facts["tree"].items()}
    names = _names(run)
    _check_fits(names, tree["adapter"])
    with torch.no_grad():
        for parameter, name in names.items():
            parameter.copy_(tree["adapter"][name])
        run.strategy.adapter_was_written()
        if run.average is not None:  # one that nobody asked for before begins where the state ends
            for mine, name in zip(run.average.values, names.values(), strict=True):
                mine.copy_((tree["average"] or tree["adapter"])[name])
    if facts["settings"]["optimizer_type"] == run.config.optim.optimizer_type:
        _restore_optimizer(run, names, tree["optimizer"], unpacked(facts["optimizer_defaults"], {}))
    else:
        logger.warning("another optimizer: it begins without memory of the steps before")
    if run.strategy.accelerator.scaler is not None and tree["scaler"]:
        run.strategy.accelerator.scaler.load_state_dict(tree["scaler"])
    run.state = State(facts["step"], facts["samples"], facts["has_learnt"])
    run.watch.bad = [BadStep(step, float(loss), float(norm)) for step, loss, norm in facts["bad_steps"]]
    run.bad_samples.found = dict(facts["bad_pictures"])


def _names(run: Run) -> dict[nn.Parameter, str]:
    """What learns, each once, by the first name that it has in the model."""
    found: dict[nn.Parameter, str] = {}
    for name, parameter in run.strategy.unwrapped(run.adapter).named_parameters():
        found.setdefault(parameter, clean(name))
    return {parameter: found[parameter] for parameter in run.parameters}


def _check_fits(names: Mapping[nn.Parameter, str], saved: Mapping[str, Tensor]) -> None:
    own = {name: tuple(parameter.shape) for parameter, name in names.items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if own != theirs:
        different = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        raise UserError(f"--resume: the adapter of the state is another one: {len(different)} of {len(own)} weights"
                        f" differ in name or size, for example {different[0]}:"
                        f" {theirs.get(different[0], 'none')} in the state,"
                        f" {own.get(different[0], 'none')} now")  # fmt: skip


def _by_name(run: Run, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """An optimizer knows parameters by numbers, which are another model's as soon as anything is added."""
    told = dict(run.optimizer.state_dict())
    numbers = _numbers(run, names, told["param_groups"])
    state = {numbers[number]: value for number, value in told.pop("state").items()}
    groups = [{**group, "params": [numbers[number] for number in group["params"]]} for group in told["param_groups"]]
    return {**told, "state": state, "param_groups": groups}


def _numbers(run: Run, names: Mapping[nn.Parameter, str], groups: Any) -> dict[int, str]:
    return {number: names[parameter]
            for mine, theirs in zip(run.optimizer.param_groups, groups, strict=True)
            for parameter, number in zip(mine["params"], theirs["params"], strict=True)}  # fmt: skip


def _restore_optimizer(run: Run, names: Mapping[nn.Parameter, str], saved: dict[str, Any],
                       defaults: Mapping[str, Any]) -> None:  # fmt: skip
    """Its memory is that of the state; settings that were changed since are those of now."""
    own = run.optimizer.state_dict()
    number_names = _numbers(run, names, own["param_groups"])
    numbers = {name: number for number, name in number_names.items()}
    changed = {key for key, value in _plain(run.optimizer.defaults).items() if defaults.get(key, value) != value}
    before = {frozenset(group["params"]): group for group in saved["param_groups"]}
    groups = []
    for mine in own["param_groups"]:
        members = frozenset(number_names[number] for number in mine["params"])
        theirs = before.get(members, {})  # none where rates are now given to other parts of the adapter
        groups.append({**mine, **{key: value for key, value in theirs.items() if key not in changed},
                       "params": mine["params"]})  # fmt: skip
    state = {numbers[name]: value for name, value in saved["state"].items()}
    remember(run.optimizer, {**saved, "state": state, "param_groups": groups})


def _plain(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer that are numbers, words and the like."""
    return {key: value for key, value in defaults.items()
            if value is None or isinstance(value, (bool, int, float, str, tuple, list))}  # fmt: skip
