"""Optimizers of other programs: our name, and the arguments that differ from the defaults of the class used here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .imported import ImportedConfig


@dataclass(frozen=True)
class KnownOptimizer:
    """An optimizer of another program."""

    name: str
    """Ours, for ``optimizer_type``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the other program sets, where the class used here has another default."""
    difference: str = ""
    """What is not the same; it is listed."""


def set_optimizer(
    result: ImportedConfig, key: str, value: Any, known: Mapping[str, KnownOptimizer], given: Mapping[str, Any]
) -> None:
    """Set optimizer and arguments; arguments that were given override those that the other program sets."""
    optimizer = known.get(str(value).lower())
    if optimizer is None:
        reason = "no such optimizer here; AdamW is used, with the same arguments; set optimizer_type by hand"
        result.list_change(key, value, reason)
        optimizer = KnownOptimizer("AdamW")
    elif optimizer.difference:
        result.list_change(key, value, optimizer.difference)
    result.set_option("optimizer_type", optimizer.name)
    arguments = {**optimizer.arguments, **given}
    words = [f"{name}={format_argument(item)}" for name, item in arguments.items() if item is not None]
    if words:
        result.set_option("optimizer_args", words)


def format_argument(value: Any) -> str:
    """Format a value as a Python literal without spaces."""
    return repr(tuple(value) if isinstance(value, list) else value).replace(" ", "")
