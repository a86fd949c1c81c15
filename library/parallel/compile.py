"""One kind of block, compiled once for all blocks that are alike, in as few graphs as sizes allow."""

import inspect
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters, get_compilation_metrics
from torch.utils import _pytree as trees

from ..distributed.preflight import CUDA_GRAPH_MODES

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
        self._recorded_layouts: defaultdict[int, list[tuple[TensorLayout | None, ...]]] = defaultdict(
            list
        )  # by how many came in
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
        logger.warning(
            "%s was compiled again %d times while training, lately because of %s; it goes on uncompiled",
            self.name,
            self.recompile_count,
            _get_recompile_reason(),
        )


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


CompileDynamic = Literal["auto", "false", "true"]


MAX_STATIC_SIZES = 2
"""Of more sizes than this, ``auto`` makes one dynamic one."""


MAX_GRAPHS_PER_SIZE = 4
"""At most, of one kind of block: gradients may be wanted of what comes into it or not, text may be masked or not."""


_CACHE_DIR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class Compilation:
    """All that is compiled in a run, by kinds of blocks."""

    def __init__(self, dynamic: CompileDynamic, options: Mapping[str, Any]):
        self.dynamic, self._options = dynamic, dict(options)
        self.has_dynamic_shapes = False
        self.block_compilers: dict[Any, BlockCompiler] = {}
        self._phase = CompilePhase()
        self._uses_cuda_graphs = options.get("mode") in CUDA_GRAPH_MODES or options.get("backend") == "cudagraphs"
        # DDP's own way of compiling cuts graphs where it exchanges gradients; blocks are cut small enough.
        torch._dynamo.config.optimize_ddp = False
        # Dropout, a part of modules, is told which tokens it sees; of another picture they are not as many.
        torch._dynamo.config.force_nn_module_property_static_shapes = False

    def compile_blocks(self, model: nn.Module) -> None:
        """The blocks of which ``model`` has many; the model as a whole where it has none."""
        blocks = dict(find_repeated_blocks(model))
        for name, block in (blocks or {"": model}).items():
            self.compile_module(name, block)

    def compile_module(self, name: str, module: nn.Module) -> None:
        """This module, together with others that are alike; its name stays, and the names of its weights."""
        key = (
            type(module),
            tuple(
                (name, weight.shape, weight.dtype, weight.requires_grad) for name, weight in module.named_parameters()
            ),
        )
        if key not in self.block_compilers:
            title = " ".join(word for word in (type(module).__name__, name) if word)
            self.block_compilers[key] = BlockCompiler(title, module, self._phase, self._options)
        module.forward = CompiledForward(self.block_compilers[key], module)

    def mark_step_begin(self) -> None:
        """Nothing that was computed until now is needed any more, but what was copied.

        What is recorded on a device writes into the same memory each time.  Without this word, torch would take each
        block that is computed again for backward for the begin of another step, and gradients for what is left of it.
        """
        if self._uses_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def set_activation_memory_budget(self, budget: float) -> None:
        """Of what a block computes on its way forward, keep this share for the way back; 0 leaves it as it is."""
        import torch._functorch.config

        config: Any = torch._functorch.config
        config.activation_memory_budget = budget or 1.0

    def __str__(self) -> str:
        way = "for sizes that change" if self.has_dynamic_shapes else "for each size"
        return f"{self.graph_count} graphs {way}, of {len(self.block_compilers)} kinds of blocks"

    @property
    def graph_count(self) -> int:
        """Compiled so far."""
        return sum(kind.graph_count for kind in self.block_compilers.values())

    @property
    def recompile_count(self) -> int:
        """Those of them that nobody had planned."""
        return sum(kind.recompile_count for kind in self.block_compilers.values())

    @contextmanager
    def record_shapes(self) -> Iterator[None]:
        """Inside, nothing is compiled, and it is noted what comes into the blocks."""
        self._phase.is_recording_shapes = True
        try:
            yield
        finally:
            self._phase.is_recording_shapes = False

    def choose_dynamic_shapes(self, num_sizes: int, texts_vary: bool) -> None:
        """Let sizes that were seen to change be dynamic, or compile ``sizes`` of them one by one."""
        self.has_dynamic_shapes = self.dynamic == "true" or (
            self.dynamic == "auto" and (texts_vary or num_sizes > MAX_STATIC_SIZES)
        )
        for kind in self.block_compilers.values():
            kind.set_dynamic_dims(self.has_dynamic_shapes)
            kind.clear_recorded_layouts()
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS_PER_SIZE * num_sizes + 2 * MAX_RECOMPILES)
        wanted = len(self.block_compilers) * config.recompile_limit
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, wanted)

    def mark_dynamic(self, tensor: Tensor) -> None:
        """What comes into blocks by a way of its own, too, gets another length from time to time."""
        if self.has_dynamic_shapes:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)

    def finish_warmup(self) -> None:
        """From now on a new graph is one too many."""
        self._phase.is_warmed_up = True


def find_repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks that make up a model, as diffusers names them, or else what is not to be split over devices."""
    kinds: Iterable[str] = getattr(model, "_repeated_blocks", None) or getattr(model, "_no_split_modules", None) or ()
    rows = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    outer: list[str] = []
    for name, module in model.named_modules():
        row, _, _ = name.rpartition(".")
        if type(module).__name__ in kinds and f"{row}." in rows and not name.startswith(tuple(outer)):
            outer.append(f"{name}.")
            yield name, module


def compile_model(
    modules: Sequence[nn.Module], denoiser: nn.Module, plugin: Any, dynamic: CompileDynamic, *, per_block: bool = False
) -> Compilation:
    """Compile the blocks of all parts, or the denoiser as a whole, as accelerate's plugin says, or ``by_blocks``."""
    if plugin.dynamic and dynamic == "auto":
        dynamic = "true"
    found = Compilation(dynamic, plugin.to_kwargs())
    for part in modules:
        if part is denoiser and not (plugin.use_regional_compilation or per_block):
            found.compile_module("", part)
        else:
            found.compile_blocks(part)
    return found


def set_compile_cache_dir(path: Path, *, override: bool) -> None:
    """Have torch keep what it compiles, for this process and its children; unless named, what the user set stays."""
    import torch._functorch.config
    import torch._inductor.config

    torch._inductor.config.fx_graph_cache = True
    torch._functorch.config.enable_autograd_cache = True
    if override:
        os.environ[_CACHE_DIR_VARIABLE] = str(path)
    else:
        os.environ.setdefault(_CACHE_DIR_VARIABLE, str(path))
