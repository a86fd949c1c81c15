"""One kind of block, compiled once for all blocks that are alike, in as few graphs as sizes allow."""

import inspect
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters, get_compilation_metrics
from torch.utils import _pytree as trees

logger = logging.getLogger(__name__)

LATE_GRAPHS = 4
"""So many graphs of a kind may be compiled while a run trains; then its blocks go on as they are."""


@dataclass
class Phase:
    """What the blocks of a run do at the moment; they all look at the same one."""

    is_watching: bool = False  # note the sizes of what comes in, and compile nothing
    is_warm: bool = False  # all that was planned is compiled


class Layout(NamedTuple):
    """How a tensor came in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_contiguous: bool


class Kind:
    """The blocks of one class whose weights have the same shapes: they share their graphs.

    Everything is compiled for the sizes that come in, but for those that were seen to change.
    """

    def __init__(self, name: str, block: nn.Module, phase: Phase, how: Mapping[str, Any]):
        self.name, self.phase = name, phase
        self.graphs = self.late = 0
        self.has_given_up = False
        self._plain = _with_cache_of_its_own(type(block).forward)
        self._compiled: Callable[..., Any] = torch.compile(self._plain, **{**how, "dynamic": False})
        self._seen: defaultdict[int, list[tuple[Layout | None, ...]]] = defaultdict(list)  # by how many came in
        self._dynamic: dict[tuple[int, int], list[int]] = {}  # how many came in, which of them -> dimensions
        self._uneven: set[tuple[int, int]] = set()

    def call(self, block: nn.Module, *given: Any, **named: Any) -> Any:
        """The block's forward; while it only draws or is measured, and when it has given up, as it is."""
        if self.phase.is_watching:
            leaves = trees.tree_leaves((given, named))
            self._seen[len(leaves)].append(tuple(_layout(leaf) for leaf in leaves))
        elif block.training and not self.has_given_up:
            return self._called(block, given, named)
        return self._plain(block, *given, **named)

    def _called(self, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._dynamic or self._uneven:
            given, named = self._prepared(given, named)
        before = graphs_so_far()
        result = self._compiled(block, *given, **named)
        if found := graphs_so_far() - before:
            self._count(found)
        return result

    def _prepared(self, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, tree = trees.tree_flatten((given, named))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if (len(leaves), place) in self._uneven:
                    leaves[place] = leaf = leaf.contiguous()
                for dimension in self._dynamic.get((len(leaves), place), ()):
                    torch._dynamo.maybe_mark_dynamic(leaf, dimension)
        prepared: tuple[tuple[Any, ...], dict[str, Any]] = trees.tree_unflatten(leaves, tree)
        return prepared

    def learn(self, is_dynamic: bool) -> None:
        """Take what was seen for what will come."""
        for count, calls in self._seen.items():
            for place, column in enumerate(zip(*calls, strict=True)):
                layouts = [layout for layout in column if layout is not None]
                if is_dynamic and (dimensions := _changes(column)):
                    self._dynamic[count, place] = dimensions
                # A part of a longer tensor has the strides of the whole, which would be compiled for one by one.
                if len({layout.is_contiguous or layout.stride for layout in layouts}) > 1:
                    self._uneven.add((count, place))

    def forget(self) -> None:
        """What was seen."""
        self._seen.clear()

    def _count(self, found: int) -> None:
        self.graphs += found
        if not self.phase.is_warm:
            return
        self.late += found
        if self.late <= LATE_GRAPHS:
            logger.warning("%s was compiled again while training: %s", self.name, _reason())
            return
        self.has_given_up = True
        logger.warning("%s was compiled again %d times while training, lately because of %s; it goes on uncompiled",
                       self.name, self.late, _reason())  # fmt: skip


class Forward:
    """Takes the place of a block's own ``forward``; hooks of the block stay outside of what is compiled."""

    def __init__(self, kind: Kind, block: nn.Module):
        self._kind, self._block = kind, block
        self.__signature__ = inspect.signature(block.forward)

    @property
    def is_compiled(self) -> bool:
        """Whether it still is."""
        return not self._kind.has_given_up

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._kind.call(self._block, *given, **named)


def is_compiled(block: Any) -> bool:
    """Whether a block of a run goes through a compiler, and has not given up."""
    forward = getattr(block, "forward", None)
    return isinstance(forward, Forward) and forward.is_compiled


def graphs_so_far() -> int:
    """Of this process."""
    return int(counters["stats"]["unique_graphs"])


def _with_cache_of_its_own(function: Any) -> Any:
    """The same function with another code object: dynamo keeps graphs, and counts them, for each of those."""
    code = function.__code__.replace(co_filename=function.__code__.co_filename)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _layout(leaf: Any) -> Layout | None:
    return Layout(tuple(leaf.shape), leaf.stride(), leaf.is_contiguous()) if isinstance(leaf, Tensor) else None


def _changes(column: tuple[Layout | None, ...]) -> list[int]:
    """Dimensions in which these differ; tensors of another rank are another thing."""
    shapes = [layout.shape for layout in column if layout is not None]
    shapes = [shape for shape in shapes if len(shape) == len(shapes[0])]
    return [number for number, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]


def _reason() -> str:
    """What dynamo says of the latest graph that it had to make again."""
    for metrics in reversed(get_compilation_metrics()):
        if reason := getattr(metrics, "recompile_reason", None):
            _, _, what = str(reason).partition(": ")
            line, _, _ = (what or str(reason)).partition("\n")
            return re.split(r"\. Guard failed|\s+#", line)[0]
    return "something that dynamo does not tell"
