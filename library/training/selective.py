"""Which results inside of a block are kept for the backward pass, and which are computed again.

Kept are those of matrix multiplications, convolutions and attention: first the ones that need most operations for the
room that they take, until a share of all of them is kept.  Everything else is cheap, and is computed again from them.

torch's own selective checkpointing wants every operation to come again in the same order.  Where weights are fetched
inside of a block, ahead or not, that is not so; here only expensive ones have to.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from ..distributed.memory import is_out_of_memory

ATTENTION = "aten._scaled_dot_product_"
"""How torch's kinds of attention begin, of which the table of operations does not have all."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""For a block's forward, and for when it is computed again."""


@dataclass(frozen=True)
class Costly:
    """One result of an expensive operation."""

    flops: float
    size: int  # in bytes


@dataclass
class Selection:
    """What to keep of each block, for each size of what comes in.

    At first nothing is kept, and it is found out what is computed again; torch stops there when it has all it needs, so
    that results which no gradient is made of are not among them.
    """

    budget: float
    _kept: dict[Hashable, frozenset[int]] = field(default_factory=dict)

    def contexts(self, block: Any, given: Any) -> Callable[[], Contexts]:
        """For ``torch.utils.checkpoint``: inside, this is done for the block and what comes into it."""
        shapes = tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(given))
        key = (block, shapes)
        kept = self._kept.get(key)
        if kept is not None:
            storage = _Storage(kept)
            return lambda: (_Keeping(storage), _Reusing(storage))
        return lambda: (nullcontext(), _Counting(lambda found: self._kept.__setitem__(key, chosen(found, self.budget))))


def chosen(found: Sequence[Costly], budget: float) -> frozenset[int]:
    """The numbers of those to keep: of a larger budget all that a smaller one keeps, and more."""
    room = budget * sum(each.size for each in found)
    kept: list[int] = []
    for number in sorted(range(len(found)), key=lambda number: (-_worth(found[number]), found[number].size, number)):
        room -= found[number].size
        if room < 0:
            break
        kept.append(number)
    return frozenset(kept)


def _worth(each: Costly) -> float:
    return each.flops / max(each.size, 1)


class _Storage:
    """What one call of a block keeps, by the number of the operation."""

    def __init__(self, numbers: frozenset[int]):
        self.numbers = numbers
        self._results: dict[int, tuple[Any, list[tuple[Tensor, int]], Any]] = {}

    def keep(self, number: int, operation: Any, result: Any) -> None:
        """Detached: the result itself will belong to the graph that keeps this storage."""
        leaves, tree = tree_flatten(result)
        kept = [(_detached(leaf), leaf._version) if isinstance(leaf, Tensor) else (leaf, 0) for leaf in leaves]
        self._results[number] = operation, kept, tree

    def take(self, number: int, operation: Any) -> tuple[Any] | None:
        """The result, once; nothing where it was not kept, or was written into since."""
        same, kept, tree = self._results.pop(number, (None, [], None))
        if same is not operation or any(isinstance(leaf, Tensor) and leaf._version != then for leaf, then in kept):
            return None
        return (tree_unflatten([leaf for leaf, _ in kept], tree),)


def _detached(tensor: Tensor) -> Tensor:
    """Beneath autograd, and still counting how often anybody writes into it."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _Numbering(TorchDispatchMode, ABC):  # type: ignore[no-untyped-call]
    """Counts expensive operations; whatever else happens in a block may be another thing each time."""

    def __init__(self, storage: _Storage):
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage, self.count = storage, 0

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if not _is_costly(operation):
            return operation(*given, **(named or {}))
        self.count += 1
        return self.result(self.count - 1, operation, lambda: operation(*given, **(named or {})))

    @abstractmethod
    def result(self, number: int, operation: Any, compute: Callable[[], Any]) -> Any:
        """What is made of the operation with this number."""


class _Keeping(_Numbering):  # type: ignore[no-untyped-call]
    """For the forward pass."""

    def result(self, number: int, operation: Any, compute: Callable[[], Any]) -> Any:
        result = compute()
        if number in self.storage.numbers:
            self.storage.keep(number, operation, result)
        return result


class _Reusing(_Numbering):  # type: ignore[no-untyped-call]
    """For when it is computed again."""

    def result(self, number: int, operation: Any, compute: Callable[[], Any]) -> Any:
        kept = self.storage.take(number, operation)
        return compute() if kept is None else kept[0]


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes expensive operations, and hands them over at the end."""

    def __init__(self, hand_over: Callable[[Sequence[Costly]], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.hand_over = hand_over
        self.found: list[Costly] = []

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        result = operation(*given, **(named or {}))
        if _is_costly(operation):
            size = sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            self.found.append(Costly(_flops(operation, given, named or {}, result), size))
        return result

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if not (isinstance(error, Exception) and is_out_of_memory(error)):  # with any other error torch stops early
            self.hand_over(self.found)


def _is_costly(operation: Any) -> bool:
    return operation.overloadpacket in flop_registry or str(operation.overloadpacket).startswith(ATTENTION)


def _flops(operation: Any, given: Any, named: Any, result: Any) -> float:
    count = flop_registry.get(operation.overloadpacket)
    if count is not None:
        return float(count(*given, **named, out_val=result))
    query, key, value = given[:3]  # attention: (batch, heads, length, width) each
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return float(2 * scores * (query.shape[-1] + value.shape[-1]))
