"""Gradient (activation) checkpointing: every n-th block, offloaded to the host, or selective with a memory budget.

Selective checkpointing decides in the first backward pass, when the sizes are known, which matrix multiplications,
convolutions and attention outputs to save: those with the most FLOPs per byte, up to a budget.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ..config.schema import TrainConfig
from ..distributed.step_phases import is_out_of_memory
from .activation_offload import ActivationOffload
from .compile import is_compiled

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of the forward pass of a block and of its recomputation."""


def enable_activation_checkpointing(models: Iterable[nn.Module], denoiser: nn.Module, train: TrainConfig) -> None:
    """Enable checkpointing in all models; block interval, budget and offloading apply to the denoiser."""
    for model in models:
        if model is denoiser:
            every, budget = train.gradient_checkpointing_every, train.activation_memory_budget
            blocks = BlockCheckpointing(every, offload=train.cpu_offload_checkpointing, budget=budget)
            model.enable_gradient_checkpointing(blocks)  # type: ignore[operator]
            continue
        # transformers 5.20, the last version for Python 3.10, has only the old name, which later versions deprecate.
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})


class BlockCheckpointing:
    """The checkpointing function of diffusers models: calls a block with ``torch.utils.checkpoint``."""

    def __init__(self, every: int, *, offload: bool, budget: float = 0.0):
        self.every, self._context = every, ActivationOffload().offload_saved_tensors if offload else nullcontext
        self._selection = OpSelection(budget) if budget else None
        self._numbers: dict[Any, int] = {}

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        """Checkpoint every n-th block, in the order of their first call."""
        if self._numbers.setdefault(block, len(self._numbers)) % self.every:
            return block(*args, **kwargs)
        if self._selection is not None:
            if is_compiled(block):  # torch.compile applies the budget itself (activation_memory_budget)
                return block(*args, **kwargs)
            kwargs["context_fn"] = self._selection.build_context_fn(block, (args, kwargs))
        with self._context():
            # Nothing draws from torch's generators, whose state a CUDA graph could not read.
            return checkpoint(block.__call__, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@dataclass(frozen=True)
class ExpensiveOp:
    """One call of a matrix multiplication, convolution or attention in a block."""

    flops: float
    size: int  # bytes of the output
    is_mutated: bool = False
    """Whether the output is modified in place later, so that it cannot be saved."""


@dataclass
class OpSelection:
    """Selects the expensive operations whose outputs are saved, for each block and each set of input shapes.

    The first forward pass saves nothing, and its recomputation is recorded. torch stops recomputing once all saved
    tensors are restored, so outputs that the backward pass does not need are not candidates.
    """

    budget: float  # fraction of the output bytes that may be saved
    _saved: dict[Hashable, frozenset[int]] = field(default_factory=dict)

    def build_context_fn(self, block: Any, inputs: Any) -> Callable[[], Contexts]:
        """Build the ``context_fn`` of ``torch.utils.checkpoint`` for this call of the block."""
        shapes = tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(inputs))
        key = block, shapes
        if key in self._saved:
            return partial(_build_selective_contexts, self._saved[key])
        return lambda: (nullcontext(), _OpRecorder(partial(self._select, key)))

    def _select(self, key: Hashable, ops: Sequence[ExpensiveOp]) -> None:
        self._saved[key] = select_ops_to_save(ops, self.budget)


def select_ops_to_save(ops: Sequence[ExpensiveOp], budget: float) -> frozenset[int]:
    """Select by FLOPs per byte until the budget is used up; a larger budget selects a superset of a smaller one."""

    def rank(number: int) -> tuple[float, int, int]:
        return -ops[number].flops / max(ops[number].size, 1), ops[number].size, number

    free = budget * sum(op.size for op in ops)
    saved: list[int] = []
    for number in sorted((number for number, op in enumerate(ops) if not op.is_mutated), key=rank):
        free -= ops[number].size
        if free < 0:
            break
        saved.append(number)
    return frozenset(saved)


def _build_selective_contexts(saved: frozenset[int]) -> Contexts:
    """Build torch's selective checkpointing contexts with a policy by the index of an expensive operation."""
    numbers = count(), count()  # forward pass; recomputation, where torch 2.11 calls the policy again

    def policy(context: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_saved = next(numbers[context.is_recompute]) in saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    forward, recompute = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return _ExpensiveOpsOnly(forward), _ExpensiveOpsOnly(recompute)


class _ExpensiveOpsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hide all but expensive operations from a dispatch mode of torch's selective checkpointing.

    The mode requires the same operations in the same order in the recomputation, but those that fetch swapped,
    quantized or sharded weights vary between calls.
    """

    def __init__(self, mode: Any):
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_expensive(op):
            return op(*args, **(kwargs or {}))
        return self.mode.__torch_dispatch__(op, types, args, kwargs)


class _OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the expensive operations of a recomputation and pass them to ``on_exit``."""

    def __init__(self, on_exit: Callable[[Sequence[ExpensiveOp]], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_exit = on_exit
        self.calls: list[tuple[float, list[tuple[Tensor, int]]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if _is_expensive(op):
            tensors = [(leaf, leaf._version) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.calls.append((_count_flops(op, args, kwargs or {}, result), tensors))
        return result

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        calls, self.calls = self.calls, []
        if isinstance(error, Exception) and is_out_of_memory(error):  # others end it early on purpose
            return
        ops = []
        for flops, tensors in calls:
            is_mutated = any(tensor._version != version for tensor, version in tensors)
            ops.append(ExpensiveOp(flops, sum(tensor.nbytes for tensor, _ in tensors), is_mutated))
        self.on_exit(ops)


def bypass_op_selection() -> AbstractContextManager[Any]:
    """Return a context whose operations selective checkpointing does not count, as they are not those of the block."""
    modes = _get_current_dispatch_mode_stack()
    if any(isinstance(mode, (_ExpensiveOpsOnly, _OpRecorder)) for mode in modes):
        return _disable_current_modes()
    return nullcontext()


def _is_expensive(op: Any) -> bool:
    """Whether torch counts FLOPs of the operation, or it is attention on a CPU or a device that torch's table lacks."""
    packet = op.overloadpacket
    return packet in flop_registry or str(packet).startswith("aten._scaled_dot_product_")


def _count_flops(op: Any, args: Any, kwargs: Any, result: Any) -> float:
    formula = flop_registry.get(op.overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    query, key, value = args[:3]
    return float(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]
