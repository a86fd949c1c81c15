"""Selective activation checkpointing: a larger budget saves more, most FLOPs per byte first; gradients stay."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from library.training.activation_checkpointing import BlockCheckpointing, ExpensiveOp, select_ops_to_save

ops = st.lists(st.builds(ExpensiveOp, st.floats(0, 1e12), st.integers(0, 10**9), st.booleans()), max_size=12)


@given(ops, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_budget_saves_a_superset_and_no_budget_is_exceeded(found, one, other):
    less, more = (select_ops_to_save(found, budget) for budget in sorted((one, other)))
    whole = sum(each.size for each in found)
    assert less <= more and sum(found[number].size for number in more) <= max(one, other) * whole + 1e-3
    assert not any(found[number].is_mutated for number in more)
    candidates = {number for number, op in enumerate(found) if not op.is_mutated}
    assert select_ops_to_save(found, 1) == candidates
    worth = [found[number].flops / max(found[number].size, 1) for number in range(len(found))]
    assert all(worth[kept] >= worth[left] for kept in more for left in candidates - more)


class Block(nn.Module):
    """Attention and a layer that makes much of little, as in a transformer."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, given):
        query, key, value = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.into(given).chunk(3, -1))
        given = given + self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return given + self.narrow(nn.functional.gelu(self.wide(given)))


class Alive(TorchDispatchMode):
    """How many bytes of what was computed still exist, and how many expensive operations there were."""

    def __init__(self):
        super().__init__()
        self.bytes = self.products = 0

    def __torch_dispatch__(self, operation: Any, types, given=(), named=None):
        result = operation(*given, **(named or {}))
        self.products += operation.overloadpacket is torch.ops.aten.addmm
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes():
                storage = leaf.untyped_storage()
                if not getattr(storage, "is_counted", False):
                    storage.is_counted = True
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self.gone, storage.nbytes())
        return result

    def gone(self, size: int) -> None:
        self.bytes -= size


def one_step(way, blocks):
    """Bytes that wait for the backward pass, products computed in it, and all gradients."""
    given = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with Alive() as alive:
        now = given
        for block in blocks:
            now = way(block, now)
        loss = now.square().sum()
        waiting, before = alive.bytes, alive.products
        loss.backward()
    weights = [item for block in blocks for item in block.parameters()]
    gradients = torch.cat([given.grad.flatten(), *(item.grad.flatten() for item in weights)])
    for item in weights:
        item.grad = None
    return waiting, alive.products - before, gradients


@pytest.mark.parametrize("every", [1, 2])
def test_saved_activations_grow_with_the_budget_and_gradients_are_bitwise_equal(every):
    torch.manual_seed(0)
    blocks = [Block() for _ in range(4)]
    *_, plain = one_step(lambda block, now: block(now), blocks)
    waiting, again = [], []
    for budget in (0.0, 0.2, 0.5, 0.8, 1.0):
        way = BlockCheckpointing(every, offload=False, budget=budget)
        one_step(way, blocks)  # in which it is found out what there is
        bytes_, products, gradients = one_step(way, blocks)
        assert torch.equal(gradients, plain)
        waiting.append(bytes_)
        again.append(products)
    checkpointed = 4 // every
    assert waiting == sorted(set(waiting)) and again == sorted(again, reverse=True)
    assert again[0] - again[-1] == 3 * checkpointed, "of the last product of a block no gradient is made"
    made = 2 * 24 * (96 + 32 + 32 + 128) * 4 + 2 * 2 * 24 * 4  # with what attention remembers of its sums
    for budget, bytes_ in zip((0.2, 0.5, 0.8, 1.0), waiting[1:], strict=True):
        assert bytes_ - waiting[0] <= budget * made * checkpointed


class Short(Block):
    """Finds no memory when it is computed again for the first time."""

    calls = 0

    def forward(self, given):
        self.calls += 1
        if self.calls == 2:
            self.into(given)
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(given)


def test_a_recomputation_that_ran_out_of_memory_does_not_select_operations():
    ways = [BlockCheckpointing(1, offload=False, budget=1.0) for _ in range(2)]
    block = Short()
    with pytest.raises(torch.OutOfMemoryError):
        one_step(ways[0], [block])
    kept = [[one_step(way, [block])[:2] for _ in range(2)] for way in ways]
    assert kept[0] == kept[1] and kept[0][1][1] < kept[0][0][1]


class Awkward(nn.Module):
    """Writes into what it multiplied, and fetches something every other time."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 32)
        self.calls = 0

    def forward(self, given):
        self.calls += 1
        fetched = torch.cat([torch.ones(1), torch.ones(1)]).mean() if self.calls % 2 else 1.0
        return given + self.two(self.one(given).mul_(1.5)) * fetched


def test_outputs_modified_in_place_are_recomputed_and_cheap_operations_may_differ():
    torch.manual_seed(0)
    blocks = [Awkward() for _ in range(2)]
    *_, plain = one_step(lambda block, now: block(now), blocks)
    way = BlockCheckpointing(1, offload=False, budget=1.0)
    for _ in range(2):
        *_, gradients = one_step(way, blocks)
        assert torch.equal(gradients, plain)
