"""Compilation of what is trained, block by block, before anything is wrapped around it."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .compiled_block import MAX_RECOMPILES, CompiledForward, BlockCompiler, CompilePhase
from .refusals import CUDA_GRAPH_MODES

logger = logging.getLogger(__name__)

CompileShapes = Literal["auto", "static", "dynamic"]
MAX_STATIC_SIZES = 2
"""Of more sizes than this, ``auto`` makes one dynamic one."""
MAX_GRAPHS_PER_SIZE = 4
"""At most, of one kind of block: gradients may be wanted of what comes into it or not, text may be masked or not."""

_CACHE_DIR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class Compilation:
    """All that is compiled in a run, by kinds of blocks."""

    def __init__(self, shapes: CompileShapes, options: Mapping[str, Any]):
        self.shapes, self._options = shapes, dict(options)
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
        key = (type(module), tuple((name, weight.shape, weight.dtype, weight.requires_grad)
                                   for name, weight in module.named_parameters()))  # fmt: skip
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
        self.has_dynamic_shapes = self.shapes == "dynamic" or (
            self.shapes == "auto" and (texts_vary or num_sizes > MAX_STATIC_SIZES))  # fmt: skip
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


def compile_model(modules: Sequence[nn.Module], denoiser: nn.Module, plugin: Any, shapes: CompileShapes, *, per_block: bool = False
             ) -> Compilation:  # fmt: skip
    """Compile the blocks of all parts, or the denoiser as a whole, as accelerate's plugin says, or ``by_blocks``."""
    if plugin.dynamic and shapes == "auto":
        shapes = "dynamic"
    found = Compilation(shapes, plugin.to_kwargs())
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
