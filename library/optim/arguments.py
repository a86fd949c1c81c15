"""Keyword arguments written as ``name=value`` (``optimizer_args``, ``lr_scheduler_args``), and import of classes."""

import ast
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..config.types import split_keyword_args
from ..errors import ConfigError, UserError
from ..problems import Problem


def parse_keyword_args(args: Sequence[str], option: str) -> dict[str, Any]:
    """Parse ``["weight_decay=0.01", "betas=0.9,0.99"]``; values are Python literals."""
    arguments: dict[str, Any] = {}
    problems = []
    for name, text in split_keyword_args(args):
        if text is None or not name.isidentifier():
            problems.append(Problem(option, f"{name!r} is not name=value"))
            continue
        try:
            arguments[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            problems.append(
                Problem(option, f"{name}: {text!r} is not a Python literal (a number, True, a list or 'text')")
            )
    if problems:
        raise ConfigError(problems)
    return arguments


def find_unknown_args(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """The names that are no parameter of ``function``; ``**kwargs`` do not count, since they would hide a typo."""
    parameters = inspect.signature(function).parameters.values()
    known = {item.name for item in parameters if item.kind is not inspect.Parameter.VAR_KEYWORD}
    return [name for name in names if name not in known]


def import_class(import_path: str, option: str, name: str, pip_package: str | None = None) -> Any:
    """Import ``package.module.Name`` or ``package.module:Name``; ``option`` and ``name`` are for the message."""
    module_name, _, attribute = import_path.replace(":", ".").rpartition(".")
    suggestion = f"; pip install {pip_package}" if pip_package else ""
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise UserError(Problem(option, f"{name}: {error}{suggestion}")) from None
    except AttributeError:
        raise UserError(Problem(option, f"{name}: module {module_name} has no {attribute!r}{suggestion}")) from None
