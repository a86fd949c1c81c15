"""Registries: tables of names whose objects are imported on first use; names under which classes are looked up.

The table of model families is in ``models.families``, that of strategies in ``parallel.strategy_registry``.
"""

import gc
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar, cast

from .errors import ConfigError
from .name_suggestions import suggest_name
from .problems import Problem

Entry = TypeVar("Entry")
Class = TypeVar("Class", bound=type)


def copy_class_name(subclass: Class, original: type) -> Class:
    """Give a subclass the name of the original, under which diffusers and transformers save it and look it up."""
    for name in ("__module__", "__qualname__", "__name__"):
        setattr(subclass, name, getattr(original, name))
    return subclass


class Registry(Generic[Entry]):
    """A fixed table of names; users can give their own ``package.module:attribute`` instead of a name."""

    def __init__(self, label: str, package: str, entries: Mapping[str, str]):
        self.label, self.package, self.entries = label, package, dict(entries)

    def list_names(self) -> list[str]:
        return sorted(self.entries)

    def get(self, name: str) -> Entry:
        """Import and return the object of a name."""
        target = self.entries.get(name, name if ":" in name else None)
        if target is None:
            hint = suggest_name(name, self.entries) or f"; available: {', '.join(self.list_names())}"
            raise ConfigError([Problem("", f"unknown {self.label} {name!r}{hint}")])
        module_name, _, attribute = target.partition(":")
        try:
            module = importlib.import_module(module_name, self.package)
        except ModuleNotFoundError as error:
            raise ConfigError([Problem("", f"{self.label} {name!r}: {error}")]) from None
        if not hasattr(module, attribute):
            raise ConfigError([Problem("", f"{self.label} {name!r}: module {module_name} has no {attribute!r}")])
        return cast(Entry, getattr(module, attribute))


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while libraries are imported, which saves a fifth of the time, then freeze it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
