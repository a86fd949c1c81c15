"""Registries: tables of names whose objects are imported on first use; names under which classes are looked up.

The table of model families is in ``models.families``, that of strategies in ``parallel.strategy_registry``.
"""

import gc
import importlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
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
        if name in self.entries:
            module = importlib.import_module(module_name, self.package)
        else:
            module = self._import_user_module(name, module_name)
        if not hasattr(module, attribute):
            classes = [key for key, value in vars(module).items() if isinstance(value, type)]
            text = f"{self.label} {name!r}: module {module_name} has no {attribute!r}{suggest_name(attribute, classes)}"
            raise ConfigError([Problem("", text)])
        return cast(Entry, getattr(module, attribute))

    def _import_user_module(self, name: str, module_name: str) -> ModuleType:
        """Import a module of the user, also from the current directory, which a script's own path does not have."""
        directory = str(Path.cwd())
        if directory not in sys.path and "" not in sys.path:
            sys.path.append(directory)  # at the end, so that files there hide no installed module
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            is_own = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
            fix = f"start in the directory that has it (now {directory}), or set PYTHONPATH to that" if is_own else ""
            raise ConfigError([Problem("", f"{self.label} {name!r}: {error}", fix)]) from None
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            text = f"{self.label} {name!r}: importing {module_name} failed: {describe_exception(error)}"
            raise ConfigError([Problem("", text)]) from None


def describe_exception(error: BaseException) -> str:
    """Describe an error in code of the user in one line, with the last file and line that it comes from."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, SyntaxError):  # its text names the line
        return f"{type(error).__name__}: {text}"
    frame = next(iter(reversed(traceback.extract_tb(error.__traceback__))), None)
    place = f" ({Path(frame.filename).name}:{frame.lineno})" if frame is not None else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


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
