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

MAX_RECOMPILES = 4
"""So many graphs of a kind may be compiled while a run trains; then its blocks go on as they are."""


@dataclass
class CompilePhase:
    """What the blocks of a run do at the moment; they all look at the same one."""

    is_recording_shapes: bool = False  # note the sizes of what comes in, and compile nothing
    is_warmed_up: bool = False  # all that was planned is compiled


class TensorLayout(NamedTuple):
    """How a tensor came in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_contiguous: bool


class BlockCompiler:
    """The blocks of one class whose weights have the same shapes: they share their graphs.

    Everything is compiled for the sizes that come in, but for those that were seen to change.
    """

    def __init__(self, name: str, block: nn.Module, phase: CompilePhase, options: Mapping[str, Any]):
        self.name, self.phase = name, phase
        self.graph_count = self.recompile_count = 0
        self.has_fallen_back = False
        self._eager_forward = _copy_with_own_code_object(type(block).forward)
        self._compiled_forward: Callable[..., Any] = torch.compile(self._eager_forward, **{**options, "dynamic": False})
        self._recorded_layouts: defaultdict[int, list[tuple[TensorLayout | None, ...]]] = defaultdict(list)  # by how many came in
        self._dynamic_dims: dict[tuple[int, int], list[int]] = {}  # how many came in, which of them -> dimensions
        self._non_contiguous: set[tuple[int, int]] = set()

    def call(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The block's forward; while it only draws or is measured, and when it has given up, as it is."""
        if self.phase.is_recording_shapes:
            leaves = trees.tree_leaves((args, kwargs))
            self._recorded_layouts[len(leaves)].append(tuple(_get_layout(leaf) for leaf in leaves))
        elif block.training and not self.has_fallen_back:
            return self._call_compiled(block, args, kwargs)
        return self._eager_forward(block, *args, **kwargs)

    def _call_compiled(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._dynamic_dims or self._non_contiguous:
            args, kwargs = self._prepare_inputs(args, kwargs)
        before = count_graphs()
        result = self._compiled_forward(block, *args, **kwargs)
        if found := count_graphs() - before:
            self._count_recompiles(found)
        return result

    def _prepare_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, tree = trees.tree_flatten((args, kwargs))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if (len(leaves), place) in self._non_contiguous:
                    leaves[place] = leaf = leaf.contiguous()
                for dimension in self._dynamic_dims.get((len(leaves), place), ()):
                    torch._dynamo.maybe_mark_dynamic(leaf, dimension)
        prepared: tuple[tuple[Any, ...], dict[str, Any]] = trees.tree_unflatten(leaves, tree)
        return prepared

    def set_dynamic_dims(self, allow_dynamic: bool) -> None:
        """Take what was seen for what will come."""
        for count, calls in self._recorded_layouts.items():
            for place, column in enumerate(zip(*calls, strict=True)):
                layouts = [layout for layout in column if layout is not None]
                if allow_dynamic and (dimensions := _find_changing_dims(column)):
                    self._dynamic_dims[count, place] = dimensions
                # A part of a longer tensor has the strides of the whole, which would be compiled for one by one.
                if len({layout.is_contiguous or layout.stride for layout in layouts}) > 1:
                    self._non_contiguous.add((count, place))

    def clear_recorded_layouts(self) -> None:
        """What was seen."""
        self._recorded_layouts.clear()

    def _count_recompiles(self, new_graphs: int) -> None:
        self.graph_count += new_graphs
        if not self.phase.is_warmed_up:
            return
        self.recompile_count += new_graphs
        if self.recompile_count <= MAX_RECOMPILES:
            logger.warning("%s was compiled again while training: %s", self.name, _get_recompile_reason())
            return
        self.has_fallen_back = True
        logger.warning("%s was compiled again %d times while training, lately because of %s; it goes on uncompiled",
                       self.name, self.recompile_count, _get_recompile_reason())  # fmt: skip


class CompiledForward:
    """Takes the place of a block's own ``forward``; hooks of the block stay outside of what is compiled."""

    def __init__(self, compiler: BlockCompiler, block: nn.Module):
        self._compiler, self._block = compiler, block
        self.__signature__ = inspect.signature(block.forward)

    @property
    def is_compiled(self) -> bool:
        """Whether it still is."""
        return not self._compiler.has_fallen_back

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiler.call(self._block, *args, **kwargs)


def is_compiled(block: Any) -> bool:
    """Whether a block of a run goes through a compiler, and has not given up."""
    forward = getattr(block, "forward", None)
    return isinstance(forward, CompiledForward) and forward.is_compiled


def count_graphs() -> int:
    """Of this process."""
    return int(counters["stats"]["unique_graphs"])


def _copy_with_own_code_object(function: Any) -> Any:
    """The same function with another code object: dynamo keeps graphs, and counts them, for each of those."""
    code = function.__code__.replace(co_filename=function.__code__.co_filename)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _get_layout(leaf: Any) -> TensorLayout | None:
    return TensorLayout(tuple(leaf.shape), leaf.stride(), leaf.is_contiguous()) if isinstance(leaf, Tensor) else None


def _find_changing_dims(column: tuple[TensorLayout | None, ...]) -> list[int]:
    """Dimensions in which these differ; tensors of another rank are another thing."""
    shapes = [layout.shape for layout in column if layout is not None]
    shapes = [shape for shape in shapes if len(shape) == len(shapes[0])]
    return [number for number, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]


def _get_recompile_reason() -> str:
    """What dynamo says of the latest graph that it had to make again."""
    for metrics in reversed(get_compilation_metrics()):
        if reason := getattr(metrics, "recompile_reason", None):
            _, _, what = str(reason).partition(": ")
            line, _, _ = (what or str(reason)).partition("\n")
            return re.split(r"\. Guard failed|\s+#", line)[0]
    return "something that dynamo does not tell"
