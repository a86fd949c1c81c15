"""Activation checkpointing: which blocks are recomputed in the backward pass, what of them is saved, and where."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ..config.schema import TrainConfig
from ..distributed.async_copy import copy_to_host
from ..distributed.memory import is_out_of_memory
from ..parallel.compile import is_compiled

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Around the forward pass of a block, and around its recomputation."""


def enable_activation_checkpointing(models: Iterable[nn.Module], denoiser: nn.Module, train: TrainConfig) -> None:
    """Switch checkpointing on in all models; the options on blocks, budget and offloading are the denoiser's."""
    for model in models:
        if model is denoiser:
            every, budget = train.gradient_checkpointing_every, train.activation_memory_budget
            blocks = BlockCheckpointing(every, offload=train.cpu_offload_checkpointing, budget=budget)
            model.enable_gradient_checkpointing(blocks)  # type: ignore[operator]
            continue
        # transformers 5.20, the last one for Python 3.10, has the old name alone, which later ones deprecate.
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})


class BlockCheckpointing:
    """Call a block under torch's checkpointing; diffusers' models take this as their checkpointing function."""

    def __init__(self, every: int, *, offload: bool, budget: float = 0.0):
        self.every, self._context = every, _offload_saved_tensors if offload else nullcontext
        self._selection = OpSelection(budget) if budget else None
        self._numbers: dict[Any, int] = {}

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        """Blocks are numbered in the order of their first call, and every n-th is checkpointed."""
        if self._numbers.setdefault(block, len(self._numbers)) % self.every:
            return block(*args, **kwargs)
        if self._selection is not None:
            if is_compiled(block):  # where the budget is torch's own activation_memory_budget
                return block(*args, **kwargs)
            kwargs["context_fn"] = self._selection.build_context_fn(block, (args, kwargs))
        with self._context():
            return checkpoint(block.__call__, *args, use_reentrant=False, **kwargs)


@contextmanager
def _offload_saved_tensors() -> Iterator[None]:
    """Keep what is saved for the backward pass in pinned host memory, without waiting for the copies.

    torch 2.11's ``save_on_cpu`` waits for each.
    """

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        return tensor.device, copy_to_host(tensor)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    with saved_tensors_hooks(pack, unpack):
        yield


@dataclass(frozen=True)
class ExpensiveOp:
    """One call of a matrix multiplication, convolution or attention in a block."""

    flops: float
    size: int  # of its result, in bytes
    is_mutated: bool = False
    """Whether its result is written into afterwards, so that it cannot be saved."""


@dataclass
class OpSelection:
    """Which results of expensive operations are saved, for each block and each set of input shapes.

    The first backward pass saves nothing and records what is recomputed: torch stops the recomputation as soon as it
    has all that gradients need, so results that no gradient needs are not among the candidates.
    """

    budget: float  # the share of their bytes that may be saved
    _saved: dict[Hashable, frozenset[int]] = field(default_factory=dict)

    def build_context_fn(self, block: Any, inputs: Any) -> Callable[[], Contexts]:
        """Build what ``torch.utils.checkpoint`` takes as ``context_fn`` for this call of the block."""
        shapes = tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(inputs))
        key = block, shapes
        if key in self._saved:
            return partial(_build_selective_contexts, self._saved[key])
        return lambda: (nullcontext(), _OpRecorder(partial(self._select, key)))

    def _select(self, key: Hashable, ops: Sequence[ExpensiveOp]) -> None:
        self._saved[key] = select_ops_to_save(ops, self.budget)


def select_ops_to_save(ops: Sequence[ExpensiveOp], budget: float) -> frozenset[int]:
    """Select by FLOPs per byte until the budget is spent; a larger budget saves all that a smaller one does."""

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
    """Build torch's selective checkpointing with a policy that goes by the number of an expensive operation."""
    numbers = count(), count()  # in the forward pass; in the recomputation, where torch 2.11 asks the policy again

    def policy(context: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_saved = next(numbers[context.is_recompute]) in saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    forward, recompute = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return _ExpensiveOpsOnly(forward), _ExpensiveOpsOnly(recompute)


class _ExpensiveOpsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Show a mode of torch's selective checkpointing nothing but expensive operations.

    It demands that all it sees comes again in the same order. Fetching swapped, quantized or sharded weights differs
    from call to call.
    """

    def __init__(self, mode: Any):
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_expensive(op):
            return op(*args, **(kwargs or {}))
        return self.mode.__torch_dispatch__(op, types, args, kwargs)


class _OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the expensive operations of a recomputation, and hand them over at its end."""

    def __init__(self, hand_over: Callable[[Sequence[ExpensiveOp]], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.hand_over = hand_over
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
        if isinstance(error, Exception) and is_out_of_memory(error):  # with any other error torch stops early
            return
        ops = []
        for flops, tensors in calls:
            is_mutated = any(tensor._version != version for tensor, version in tensors)
            ops.append(ExpensiveOp(flops, sum(tensor.nbytes for tensor, _ in tensors), is_mutated))
        self.hand_over(ops)


def _is_expensive(op: Any) -> bool:
    """torch's table of FLOPs lacks attention on CPUs and on devices that bring their own."""
    packet = op.overloadpacket
    return packet in flop_registry or str(packet).startswith("aten._scaled_dot_product_")


def _count_flops(op: Any, args: Any, kwargs: Any, result: Any) -> float:
    formula = flop_registry.get(op.overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    query, key, value = args[:3]
    return float(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]
