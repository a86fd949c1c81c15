"""``torch.compile`` of repeated blocks: equal blocks share their graphs, with dynamic shapes where sizes vary.

Backend, mode and fullgraph are set in ``distributed.accelerator.build_dynamo_plugin``, from options and the launcher.

Only what is trained is compiled.  Blocks are compiled by class and not the model as a whole, since dozens of equal
blocks then need one graph.
"""

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

from ..distributed.validate_launch import CUDA_GRAPH_MODES

logger = logging.getLogger(__name__)
CompileDynamic = Literal["auto", "false", "true"]
MAX_RECOMPILES = 4
"""Recompiles of a block class during training, after which its blocks run eagerly."""

MAX_STATIC_SIZES = 2
"""The number of bucket sizes above which ``auto`` compiles dynamic shapes."""

MAX_GRAPHS_PER_SIZE = 4
"""Graphs of a block class for one size: its input requires grad or not, text is masked or not."""

_CACHE_DIR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass
class CompilePhase:
    """The state that all compiled blocks of a run share."""

    is_recording_shapes: bool = False  # run eagerly and record input layouts
    is_warmed_up: bool = False  # every expected graph is compiled


class TensorLayout(NamedTuple):
    """Shape and strides of an input tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_contiguous: bool
    """Whether strides are those of a new tensor, also in dimensions of size 1, which only dynamo guards."""


class BlockCompiler:
    """Compiles the forward of blocks with the same class and parameter shapes, which share their graphs.

    Shapes are static, except dimensions that changed between recorded calls.
    """

    def __init__(self, name: str, block: nn.Module, phase: CompilePhase, options: Mapping[str, Any]):
        self.name, self.phase = name, phase
        self.graph_count = self.recompile_count = 0
        self.has_fallen_back = False
        self._eager_forward = _copy_with_own_code_object(type(block).forward)
        self._compiled_forward: Callable[..., Any] = torch.compile(self._eager_forward, **{**options, "dynamic": False})
        # Keyed by the number of input leaves; dimensions and flags by that number and the index of the leaf.
        self._recorded_layouts: defaultdict[int, list[tuple[TensorLayout | None, ...]]] = defaultdict(list)
        self._dynamic_dims: dict[tuple[int, int], list[int]] = {}
        self._non_contiguous: set[tuple[int, int]] = set()

    def call(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward: eagerly in eval mode, while shapes are recorded, and after a fallback."""
        if self.phase.is_recording_shapes:
            leaves = trees.tree_leaves((args, kwargs))
            self._recorded_layouts[len(leaves)].append(tuple(_get_layout(leaf) for leaf in leaves))
        elif block.training and not self.has_fallen_back:
            return self._call_compiled(block, args, kwargs)
        return self._eager_forward(block, *args, **kwargs)

    def _call_compiled(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._dynamic_dims or self._non_contiguous:
            args, kwargs = self._prepare_inputs(args, kwargs)
        graphs_before = count_graphs()
        output = self._compiled_forward(block, *args, **kwargs)
        if new_graphs := count_graphs() - graphs_before:
            self._count_recompiles(new_graphs)
        return output

    def _prepare_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, tree = trees.tree_flatten((args, kwargs))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if (len(leaves), index) in self._non_contiguous:
                    leaves[index] = leaf = leaf.contiguous().view(leaf.shape)
                for dim in self._dynamic_dims.get((len(leaves), index), ()):
                    torch._dynamo.maybe_mark_dynamic(leaf, dim)
        prepared: tuple[tuple[Any, ...], dict[str, Any]] = trees.tree_unflatten(leaves, tree)
        return prepared

    def set_dynamic_dims(self, allow_dynamic: bool) -> None:
        """Decide from the recorded layouts which dimensions are dynamic, and forget the layouts."""
        for count, calls in self._recorded_layouts.items():
            for index, column in enumerate(zip(*calls, strict=True)):
                layouts = [layout for layout in column if layout is not None]
                if allow_dynamic and (dims := _find_changing_dims(layouts)):
                    self._dynamic_dims[count, index] = dims
                # A slice of a longer tensor has its strides, each of which would be compiled.
                if len({layout.is_contiguous or layout.stride for layout in layouts}) > 1:
                    self._non_contiguous.add((count, index))
        self._recorded_layouts.clear()

    def _count_recompiles(self, new_graphs: int) -> None:
        self.graph_count += new_graphs
        if not self.phase.is_warmed_up:
            return
        self.recompile_count += new_graphs
        if self.recompile_count <= MAX_RECOMPILES:
            logger.warning("torch.compile: %s was recompiled during training: %s", self.name, _get_recompile_reason())
            return
        self.has_fallen_back = True
        logger.warning(
            "torch.compile: %s was recompiled %d times during training, last because of: %s; its blocks run eagerly",
            self.name,
            self.recompile_count,
            _get_recompile_reason(),
        )


class CompiledForward:
    """Replaces a block's ``forward``, so that hooks of the block stay outside of the graph."""

    def __init__(self, compiler: BlockCompiler, block: nn.Module):
        self._compiler, self._block = compiler, block
        self.__signature__ = inspect.signature(block.forward)

    @property
    def is_compiled(self) -> bool:
        return not self._compiler.has_fallen_back

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiler.call(self._block, *args, **kwargs)


def is_compiled(block: Any) -> bool:
    """Whether the block is compiled and has not fallen back to eager."""
    forward = getattr(block, "forward", None)
    return isinstance(forward, CompiledForward) and forward.is_compiled


def count_graphs() -> int:
    """Return the number of graphs that dynamo compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def _copy_with_own_code_object(function: Any) -> Any:
    """Copy a function with its code object, by which dynamo caches graphs and counts recompiles."""
    code = function.__code__.replace(co_filename=function.__code__.co_filename)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _get_layout(leaf: Any) -> TensorLayout | None:
    if not isinstance(leaf, Tensor):
        return None
    new = torch.empty(leaf.shape, device="meta")
    return TensorLayout(tuple(leaf.shape), leaf.stride(), leaf.stride() == new.stride())


def _find_changing_dims(layouts: Sequence[TensorLayout]) -> list[int]:
    """Return the dimensions in which tensors with the first one's number of dimensions differ."""
    shapes = [layout.shape for layout in layouts if len(layout.shape) == len(layouts[0].shape)]
    return [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]


def _get_recompile_reason() -> str:
    """Return dynamo's reason for the latest recompile."""
    for metrics in reversed(get_compilation_metrics()):
        if reason := getattr(metrics, "recompile_reason", None):
            _, _, text = str(reason).partition(": ")
            line, _, _ = (text or str(reason)).partition("\n")
            return re.split(r"\. Guard failed|\s+#", line)[0]
    return "unknown reason"


class Compilation:
    """All compiled blocks of a run, by block class."""

    def __init__(self, dynamic: CompileDynamic, options: Mapping[str, Any]):
        self.dynamic, self._options = dynamic, dict(options)
        self.has_dynamic_shapes = False
        self.block_compilers: dict[Any, BlockCompiler] = {}
        self._phase = CompilePhase()
        self._uses_cuda_graphs = options.get("mode") in CUDA_GRAPH_MODES or options.get("backend") == "cudagraphs"
        # DDPOptimizer splits graphs at gradient buckets; blocks are small enough.
        torch._dynamo.config.optimize_ddp = False
        # LoRA dropout has the token positions as a module attribute, whose length differs between images.
        torch._dynamo.config.force_nn_module_property_static_shapes = False

    def compile_blocks(self, model: nn.Module) -> None:
        """Compile the model's repeated blocks, or the model as a whole if it has none."""
        blocks = dict(find_repeated_blocks(model))
        for name, block in (blocks or {"": model}).items():
            self.compile_module(name, block)

    def compile_module(self, name: str, module: nn.Module) -> None:
        """Compile this module together with equal ones; module and parameter names stay."""
        parameters = ((name, item.shape, item.dtype, item.requires_grad) for name, item in module.named_parameters())
        key = type(module), tuple(parameters)
        if key not in self.block_compilers:
            title = f"{type(module).__name__} {name}".rstrip()
            self.block_compilers[key] = BlockCompiler(title, module, self._phase, self._options)
        module.forward = CompiledForward(self.block_compilers[key], module)

    def mark_step_begin(self) -> None:
        """Tell CUDA graphs that outputs of earlier calls may be overwritten.

        Otherwise torch takes each recomputed block for the begin of a step, and gradients for outputs still in use.
        """
        if self._uses_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def set_activation_memory_budget(self, budget: float) -> None:
        """Set the share of a block's activations that the partitioner saves for backward; 0 keeps the default."""
        import torch._functorch.config

        config: Any = torch._functorch.config
        config.activation_memory_budget = budget or 1.0

    def __str__(self) -> str:
        shapes = "dynamic" if self.has_dynamic_shapes else "static"
        return f"{self.graph_count} graphs ({shapes} shapes) for {len(self.block_compilers)} block classes"

    @property
    def graph_count(self) -> int:
        return sum(compiler.graph_count for compiler in self.block_compilers.values())

    @property
    def recompile_count(self) -> int:
        """Graphs compiled after the warm-up."""
        return sum(compiler.recompile_count for compiler in self.block_compilers.values())

    @contextmanager
    def record_shapes(self) -> Iterator[None]:
        """Let blocks run eagerly and record their input layouts within the context."""
        self._phase.is_recording_shapes = True
        try:
            yield
        finally:
            self._phase.is_recording_shapes = False

    def choose_dynamic_shapes(self, num_sizes: int, texts_vary: bool) -> None:
        """Make recorded dimensions that changed dynamic, or compile ``num_sizes`` static sizes."""
        self.has_dynamic_shapes = self.dynamic == "true" or (
            self.dynamic == "auto" and (texts_vary or num_sizes > MAX_STATIC_SIZES)
        )
        for compiler in self.block_compilers.values():
            compiler.set_dynamic_dims(self.has_dynamic_shapes)
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS_PER_SIZE * num_sizes + 2 * MAX_RECOMPILES)
        accumulated = len(self.block_compilers) * config.recompile_limit
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, accumulated)

    def mark_dynamic(self, tensor: Tensor) -> None:
        """Mark the length of a tensor that is no argument of a block as dynamic."""
        if self.has_dynamic_shapes:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)

    def finish_warmup(self) -> None:
        """Count new graphs as recompiles from now on."""
        self._phase.is_warmed_up = True


def find_repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost repeated blocks: members of a ``ModuleList`` whose class diffusers or transformers lists."""
    classes: Iterable[str] = getattr(model, "_repeated_blocks", None) or getattr(model, "_no_split_modules", None) or ()
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer: list[str] = []
    for name, module in model.named_modules():
        parent, _, _ = name.rpartition(".")
        if type(module).__name__ in classes and parent in lists and not name.startswith(tuple(outer)):
            outer.append(f"{name}.")
            yield name, module


def compile_model(
    modules: Sequence[nn.Module], denoiser: nn.Module, plugin: Any, dynamic: CompileDynamic, *, per_block: bool = False
) -> Compilation:
    """Compile the repeated blocks of all modules; the denoiser as a whole if accelerate's plugin asks for it."""
    if plugin.dynamic and dynamic == "auto":
        dynamic = "true"
    compilation = Compilation(dynamic, plugin.to_kwargs())
    for module in modules:
        if module is denoiser and not (plugin.use_regional_compilation or per_block):
            compilation.compile_module("", module)
        else:
            compilation.compile_blocks(module)
    return compilation


def set_compile_cache_dir(path: Path, *, override: bool) -> None:
    """Cache compiled graphs in ``path``, in this process and its children; ``override`` the user's own setting."""
    import torch._functorch.config
    import torch._inductor.config

    torch._inductor.config.fx_graph_cache = True
    torch._functorch.config.enable_autograd_cache = True
    if override:
        os.environ[_CACHE_DIR_VARIABLE] = str(path)
    else:
        os.environ.setdefault(_CACHE_DIR_VARIABLE, str(path))
