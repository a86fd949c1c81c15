"""Keepers that are called in the place of blocks, and decide what the blocks get and what becomes of what they make.

Through the class, because a compiled block brings a call of its own, and hooks would be compiled with it.  Blocks of
one class go on having one class, or each would be compiled for itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

BlockForward = Callable[..., Any]
BlockHook = Callable[[BlockForward, Any, Any], Any]
"""Called with what the block does, its arguments, and its named arguments."""


class BlockHooks:
    """Those of one model."""

    def __init__(self) -> None:
        self._classes: dict[type, type] = {}
        self._forwards: dict[nn.Module, BlockForward] = {}

    def wrap(self, block: nn.Module, hook: BlockHook) -> None:
        """``keeper`` comes before others that keep this block already."""
        if block not in self._forwards:
            own = type(block)
            self._forwards[block] = partial(own.__call__, block)
            if own not in self._classes:
                self._classes[own] = self._make_hooked_class(own)
            block.__class__ = self._classes[own]
        run = self._forwards[block]  # always the same, for whoever counts blocks
        self._forwards[block] = lambda *args, **named: hook(run, args, named)

    def _make_hooked_class(self, block_class: type) -> type:
        def call_hooked(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._forwards[block](*args, **kwargs)

        return type(block_class.__name__, (block_class,), {"__call__": call_hooked, "__module__": block_class.__module__,
                                           "__qualname__": block_class.__qualname__})  # fmt: skip
