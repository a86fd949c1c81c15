"""Which results inside of a block are kept for the backward pass, and which are computed again.

Kept are those of matrix multiplications, convolutions and attention: first the ones that need most operations for the
room that they take, until a share of all of them is kept.  Everything else is cheap, and is computed again from them.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

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
            return lambda: create_selective_checkpoint_contexts(_Policy(kept))  # type: ignore[no-untyped-call]
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


class _Policy:
    """Says of each operation whether its result is kept; both passes come by the same ones in the same order."""

    def __init__(self, kept: frozenset[int]):
        self.kept = kept
        self.seen = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *given: Any, **named: Any) -> CheckpointPolicy:
        if not _is_costly(operation):
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = self.seen[context.is_recompute]
        self.seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if number in self.kept else CheckpointPolicy.PREFER_RECOMPUTE


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
        self.hand_over(self.found)  # also where an error goes by, which is how torch stops


def _is_costly(operation: Any) -> bool:
    return operation.overloadpacket in flop_registry or str(operation.overloadpacket).startswith(ATTENTION)


def _flops(operation: Any, given: Any, named: Any, result: Any) -> float:
    count = flop_registry.get(operation.overloadpacket)
    if count is not None:
        return float(count(*given, **named, out_val=result))
    query, key, value = given[:3]  # attention: (batch, heads, length, width) each
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return float(2 * scores * (query.shape[-1] + value.shape[-1]))
