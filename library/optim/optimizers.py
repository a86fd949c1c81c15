"""Optimizers by name: a table of what is known, and any class by its import path."""

import ast
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config.schema import OptimConfig
from ..errors import ConfigError
from ..registry import did_you_mean


@dataclass(frozen=True)
class OptimizerInfo:
    """Where an optimizer comes from."""

    path: str
    extra: str | None = None  # the package to install when it is missing


OPTIMIZERS = {
    "AdamW": OptimizerInfo("torch.optim.AdamW"),
    "SGD": OptimizerInfo("torch.optim.SGD"),
}

ELSEWHERE = {
    "AdamW8bit": "bitsandbytes.optim.AdamW8bit",
    "PagedAdamW": "bitsandbytes.optim.PagedAdamW",
    "PagedAdamW8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "PagedAdamW32bit": "bitsandbytes.optim.PagedAdamW32bit",
    "Lion8bit": "bitsandbytes.optim.Lion8bit",
    "PagedLion8bit": "bitsandbytes.optim.PagedLion8bit",
    "Lion": "bitsandbytes.optim.Lion",
}
"""Names of sd-scripts for classes that its users have installed."""


def make_optimizer(config: OptimConfig, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Build the optimizer that the settings name; every mistake in its name or arguments is a ``ConfigError``."""
    optimizer_class = find_class(config.optimizer_type)
    arguments = read_arguments(config.optimizer_args)
    try:
        inspect.signature(optimizer_class).bind(parameters, lr=config.learning_rate, **arguments)
        return optimizer_class(parameters, lr=config.learning_rate, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"--optimizer_args: {config.optimizer_type} does not take them: {error}"]) from None


def find_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The class that ``--optimizer_type`` means."""
    known = {entry.lower(): entry for entry in OPTIMIZERS}
    name = name or "AdamW"  # as in sd-scripts, where the default is written as nothing
    info = OPTIMIZERS.get(known.get(name.lower(), name))
    if info is None and name in ELSEWHERE:
        raise ConfigError([f"--optimizer_type: not yet: {name} by this name; where its package is installed, write "
                           f"{ELSEWHERE[name]}"])  # fmt: skip
    if info is None and "." not in name and ":" not in name:
        hint = did_you_mean(name, OPTIMIZERS) or f"; known are {', '.join(OPTIMIZERS)} and any package.module.Class"
        raise ConfigError([f"--optimizer_type: no optimizer {name!r}{hint}"])
    info = info or OptimizerInfo(name)
    module_name, _, attribute = info.path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        install = f"; pip install {info.extra}" if info.extra else ""
        raise ConfigError([f"--optimizer_type: {name}: {error}{install}"]) from None
    except AttributeError:
        raise ConfigError([f"--optimizer_type: {name}: module {module_name} has no {attribute!r}"]) from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError([f"--optimizer_type: {name} is no optimizer"])
    return found


def read_arguments(words: Sequence[str]) -> dict[str, Any]:
    """``["weight_decay=0.01", "betas=0.9,0.99"]`` as keyword arguments, values written as in Python."""
    arguments: dict[str, Any] = {}
    problems = []
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.strip().isidentifier():
            problems.append(f"--optimizer_args: {word!r} is not name=value")
            continue
        try:
            arguments[name.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            problems.append(f"--optimizer_args: {name}: {text!r} is no number, true/false word, list or 'text'; "
                            "write it as in Python")  # fmt: skip
    if problems:
        raise ConfigError(problems)
    return arguments


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group this rate; in place where it is a tensor, so that compiled steps keep it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
