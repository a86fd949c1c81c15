"""Arguments written as ``name=value`` and classes named by their import path."""

import ast
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ConfigError


def parse_keyword_args(args: Sequence[str], option: str) -> dict[str, Any]:
    """``["weight_decay=0.01", "betas=0.9,0.99"]`` as keyword arguments, values written as in Python."""
    arguments: dict[str, Any] = {}
    problems = []
    for word in args:
        name, equals, text = word.partition("=")
        if not equals or not name.strip().isidentifier():
            problems.append(f"--{option}: {word!r} is not name=value")
            continue
        try:
            arguments[name.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            problems.append(
                f"--{option}: {name}: {text!r} is no number, true/false word, list or 'text'; write it as in Python"
            )
    if problems:
        raise ConfigError(problems)
    return arguments


def find_unknown_args(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Those of ``names`` that ``function`` does not name; one that swallows any name would ignore them in silence."""
    parameters = inspect.signature(function).parameters.values()
    known = {item.name for item in parameters if item.kind is not inspect.Parameter.VAR_KEYWORD}
    return [name for name in names if name not in known]


def import_class(import_path: str, option: str, name: str, pip_package: str | None = None) -> Any:
    """What ``path`` (``package.module.Name``, or with a colon) stands for; ``called`` is what the user wrote."""
    module_name, _, attribute = import_path.replace(":", ".").rpartition(".")
    way_out = f"; pip install {pip_package}" if pip_package else ""
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError([f"--{option}: {name}: {error}{way_out}"]) from None
    except AttributeError:
        raise ConfigError([f"--{option}: {name}: module {module_name} has no {attribute!r}{way_out}"]) from None
