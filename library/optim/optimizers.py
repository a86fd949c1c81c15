"""Build optimizers by name: names of sd-scripts, of ``torch.optim``, or import paths.

The table of names is in optimizer_names.py, parameter groups are made in training/param_groups.py, schedules in
lr_schedulers.py, and the rates of a step are set and read in learning_rates.py.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..config.schema_optim import OptimConfig
from ..errors import UserError
from ..name_suggestions import suggest_name
from ..problems import Problem
from .arguments import find_unknown_args, import_class, parse_keyword_args
from .optimizer_names import OPTIMIZERS, OptimizerInfo


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share a peak learning rate; metrics report it under ``name``."""

    name: str
    parameters: Sequence[torch.nn.Parameter]
    lr: float


def build_optimizer(
    config: OptimConfig, param_groups: Sequence[ParamGroup], *, is_sharded: bool = False, is_partly_idle: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer; a mistake in its name or arguments raises ``UserError``.

    ``is_sharded``: its parameters will be replaced by shards (DTensors), for which torch 2.13 has no fused SGD.
    ``is_partly_idle``: some steps have gradients of a part only; torch's fused SGD fails if the rest has no momentum.
    """
    info = resolve_optimizer(config.optimizer_type)
    optimizer_class = _import_optimizer_class(info, config.optimizer_type)
    arguments = _build_optimizer_args(config, info, optimizer_class)
    groups: list[dict[str, Any]] = [{"params": list(group.parameters), "lr": group.lr} for group in param_groups]
    lr: float | None = config.learning_rate
    if uses_relative_step(config):  # Adafactor accepts no learning rate then, in no group
        groups, lr = [{"params": list(group.parameters)} for group in param_groups], None
    try:
        arguments = {"lr": lr, **arguments}
        is_unfit = is_sharded or (is_partly_idle and bool(arguments.get("momentum")))
        can_fuse = not (is_unfit and optimizer_class is torch.optim.SGD)
        return _instantiate_optimizer(optimizer_class, groups, arguments, can_fuse=can_fuse)
    except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
        raise UserError(Problem("optimizer_args", f"{config.optimizer_type or 'AdamW'}: {error}")) from None


def _instantiate_optimizer(
    optimizer_class: type[torch.optim.Optimizer],
    param_groups: list[dict[str, Any]],
    arguments: dict[str, Any],
    *,
    can_fuse: bool,
) -> torch.optim.Optimizer:
    """Use the fused implementation of torch optimizers where the device has one, unless the arguments choose."""
    has_fused = can_fuse and (
        optimizer_class is getattr(torch.optim, optimizer_class.__name__, None)
        and "fused" in inspect.signature(optimizer_class).parameters
    )
    # On CPU, torch's fused SGD silently does nothing in half precision.
    is_float32 = all(weight.dtype == torch.float32 for group in param_groups for weight in group["params"])
    if has_fused and is_float32 and not {"fused", "foreach", "capturable", "differentiable"} & set(arguments):
        try:
            return optimizer_class([dict(group) for group in param_groups], **{**arguments, "fused": True})
        except RuntimeError:  # no fused implementation for this device
            pass
    return optimizer_class(param_groups, **arguments)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Describe an optimizer by its name and, for those of torch, the implementation that it uses."""
    group, name = optimizer.param_groups[0], type(optimizer).__name__
    if "foreach" not in group:
        return name
    if group.get("fused"):
        return f"{name} (fused)"
    return f"{name} (for-loop)" if group["foreach"] is False else f"{name} (foreach if supported)"


def resolve_optimizer(name: str) -> OptimizerInfo:
    """Look up ``--optimizer_type``: a name in ``OPTIMIZERS``, in ``torch.optim``, or an import path."""
    name = name or "AdamW"  # sd-scripts' default is an empty string
    known = {entry.lower(): info for entry, info in OPTIMIZERS.items()}
    if name.lower() in known:
        return known[name.lower()]
    if "." in name or ":" in name:
        return OptimizerInfo(name)
    if isinstance(getattr(torch.optim, name, None), type):
        return OptimizerInfo(f"torch.optim.{name}")
    hint = suggest_name(name, OPTIMIZERS) or f"; known are {', '.join(OPTIMIZERS)} and any package.module.Class"
    raise UserError(Problem("optimizer_type", f"no optimizer {name!r}{hint}"))


def is_same_optimizer(one: str, other: str) -> bool:
    """Whether two values of ``--optimizer_type`` name one optimizer: ``AdamW``, ``adamw`` and ``torch.optim.AdamW``."""
    infos = (resolve_optimizer(name) for name in (one, other))
    first, second = ((info.import_path.replace(":", "."), dict(info.default_args)) for info in infos)
    return first == second


def _import_optimizer_class(info: OptimizerInfo, name: str) -> type[torch.optim.Optimizer]:
    optimizer_class = import_class(info.import_path, "optimizer_type", name, info.pip_package)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise UserError(Problem("optimizer_type", f"{name} is not a torch.optim.Optimizer"))
    return optimizer_class


def _build_optimizer_args(config: OptimConfig, info: OptimizerInfo, optimizer_class: type) -> dict[str, Any]:
    arguments = parse_keyword_args(config.optimizer_args, "optimizer_args")
    arguments = {info.arg_aliases.get(name, name): value for name, value in arguments.items()}
    unknown = find_unknown_args(optimizer_class, list(arguments))
    if unknown or "lr" in arguments:
        names = ", ".join(map(repr, unknown)) or "'lr', which is --learning_rate"
        raise UserError(Problem("optimizer_args", f"{config.optimizer_type or 'AdamW'} does not take {names}"))
    return {**info.default_args, **arguments}


def uses_relative_step(config: OptimConfig) -> bool:
    """Whether this is Adafactor without ``relative_step=False``, which computes its own learning rate."""
    if resolve_optimizer(config.optimizer_type) is not OPTIMIZERS["Adafactor"]:
        return False
    return bool(parse_keyword_args(config.optimizer_args, "optimizer_args").get("relative_step", True))


@contextmanager
def use_eval_weights(optimizer: Any) -> Iterator[None]:
    """Switch a schedule-free optimizer to its averaged weights, for previews, validation and saving.

    Its own switch back rounds, so the training weights are restored from a copy.
    """
    if not callable(getattr(optimizer, "eval", None)):
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    backup = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for parameter, value in zip(parameters, backup, strict=True):
                parameter.copy_(value)


def load_optimizer_state(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Load an optimizer state exactly.

    ``Optimizer.load_state_dict`` aliases the tensors it can and casts the others to the parameter's dtype; here they
    are copied, and state of a higher precision keeps its dtype.
    """
    state_dict = copy.deepcopy(dict(state_dict))
    optimizer.load_state_dict(state_dict)
    for group, saved_group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved_group["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            for key, value in state_dict["state"].get(index, {}).items():
                loaded = state.get(key)
                if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                    state[key] = value.to(loaded.device)
