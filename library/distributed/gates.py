"""Keepers that are called in the place of blocks, and decide what the blocks get and what becomes of what they make.

Through the class, because a compiled block brings a call of its own, and hooks would be compiled with it.  Blocks of
one class go on having one class, or each would be compiled for itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

Run = Callable[..., Any]
Keeper = Callable[[Run, Any, Any], Any]
"""Called with what the block does, its arguments, and its named arguments."""


class Gates:
    """Those of one model."""

    def __init__(self) -> None:
        self._classes: dict[type, type] = {}
        self._runs: dict[nn.Module, Run] = {}

    def shut(self, block: nn.Module, keeper: Keeper) -> None:
        """``keeper`` comes before others that keep this block already."""
        if block not in self._runs:
            own = type(block)
            self._runs[block] = partial(own.__call__, block)
            if own not in self._classes:
                self._classes[own] = self._gated(own)
            block.__class__ = self._classes[own]
        run = self._runs[block]  # always the same, for whoever counts blocks
        self._runs[block] = lambda *args, **named: keeper(run, args, named)

    def _gated(self, own: type) -> type:
        def call(block: nn.Module, *args: Any, **named: Any) -> Any:
            return self._runs[block](*args, **named)

        return type(own.__name__, (own,), {"__call__": call, "__module__": own.__module__,
                                           "__qualname__": own.__qualname__})  # fmt: skip
