"""Selective activation checkpointing: a larger budget saves more, most FLOPs per byte first, with bitwise equal gradients."""

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

from library.parallel.activation_checkpointing import BlockCheckpointing, ExpensiveOp, select_ops_to_save

ops = st.lists(st.builds(ExpensiveOp, st.floats(0, 1e12), st.integers(0, 10**9), st.booleans()), max_size=12)


@given(ops, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_budget_saves_a_superset_and_no_budget_is_exceeded(ops, first_budget, second_budget):
    smaller, larger = (select_ops_to_save(ops, budget) for budget in sorted((first_budget, second_budget)))
    total_bytes = sum(op.size for op in ops)
    assert (
        smaller <= larger
        and sum(ops[number].size for number in larger) <= max(first_budget, second_budget) * total_bytes + 1e-3
    )
    assert not any(ops[number].is_mutated for number in larger)
    candidates = {number for number, op in enumerate(ops) if not op.is_mutated}
    assert select_ops_to_save(ops, 1) == candidates
    flops_per_byte = [ops[number].flops / max(ops[number].size, 1) for number in range(len(ops))]
    assert all(
        flops_per_byte[saved] >= flops_per_byte[recomputed] for saved in larger for recomputed in candidates - larger
    )


class Block(nn.Module):
    """A transformer block: attention and an MLP with a wide hidden layer."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, hidden):
        query, key, value = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.into(hidden).chunk(3, -1))
        hidden = hidden + self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return hidden + self.narrow(nn.functional.gelu(self.wide(hidden)))


class ActivationCounter(TorchDispatchMode):
    """Counts the bytes of live activations and the number of matrix products."""

    def __init__(self):
        super().__init__()
        self.bytes = self.products = 0

    def __torch_dispatch__(self, operation: Any, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.products += operation.overloadpacket is torch.ops.aten.addmm
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes():
                storage = leaf.untyped_storage()
                if not getattr(storage, "is_counted", False):
                    storage.is_counted = True
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self.release, storage.nbytes())
        return result

    def release(self, size: int) -> None:
        self.bytes -= size


def run_step(checkpoint, blocks):
    """Return the bytes saved for backward, the matrix products computed in backward, and all gradients."""
    inputs = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with ActivationCounter() as counter:
        hidden = inputs
        for block in blocks:
            hidden = checkpoint(block, hidden)
        loss = hidden.square().sum()
        saved_bytes, products_in_forward = counter.bytes, counter.products
        loss.backward()
    weights = [weight for block in blocks for weight in block.parameters()]
    gradients = torch.cat([inputs.grad.flatten(), *(weight.grad.flatten() for weight in weights)])
    for weight in weights:
        weight.grad = None
    return saved_bytes, counter.products - products_in_forward, gradients


@pytest.mark.parametrize("every", [1, 2])
def test_saved_activations_grow_with_the_budget_and_gradients_are_bitwise_equal(every):
    torch.manual_seed(0)
    blocks = [Block() for _ in range(4)]
    *_, plain = run_step(lambda block, hidden: block(hidden), blocks)
    saved_bytes, recomputed_products = [], []
    for budget in (0.0, 0.2, 0.5, 0.8, 1.0):
        checkpointing = BlockCheckpointing(every, offload=False, budget=budget)
        run_step(checkpointing, blocks)  # records the operations of a block
        bytes_, products, gradients = run_step(checkpointing, blocks)
        assert torch.equal(gradients, plain)
        saved_bytes.append(bytes_)
        recomputed_products.append(products)
    checkpointed = 4 // every
    assert saved_bytes == sorted(set(saved_bytes)) and recomputed_products == sorted(recomputed_products, reverse=True)
    assert recomputed_products[0] - recomputed_products[-1] == 3 * checkpointed, (
        "the output of the last product of a block is not needed in backward"
    )
    block_bytes = 2 * 24 * (96 + 32 + 32 + 128) * 4 + 2 * 2 * 24 * 4  # with the logsumexp of attention
    for budget, bytes_ in zip((0.2, 0.5, 0.8, 1.0), saved_bytes[1:], strict=True):
        assert bytes_ - saved_bytes[0] <= budget * block_bytes * checkpointed


class OutOfMemoryBlock(Block):
    """Raises out of memory at its first recomputation."""

    calls = 0

    def forward(self, hidden):
        self.calls += 1
        if self.calls == 2:
            self.into(hidden)
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(hidden)


def test_a_recomputation_that_ran_out_of_memory_does_not_select_operations():
    checkpointings = [BlockCheckpointing(1, offload=False, budget=1.0) for _ in range(2)]
    block = OutOfMemoryBlock()
    with pytest.raises(torch.OutOfMemoryError):
        run_step(checkpointings[0], [block])
    results = [[run_step(checkpointing, [block])[:2] for _ in range(2)] for checkpointing in checkpointings]
    assert results[0] == results[1] and results[0][1][1] < results[0][0][1]


class InPlaceBlock(nn.Module):
    """Modifies an output in place, and runs additional cheap operations every other call."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 32)
        self.calls = 0

    def forward(self, hidden):
        self.calls += 1
        factor = torch.cat([torch.ones(1), torch.ones(1)]).mean() if self.calls % 2 else 1.0
        return hidden + self.two(self.one(hidden).mul_(1.5)) * factor


def test_outputs_modified_in_place_are_recomputed_and_cheap_operations_may_differ():
    torch.manual_seed(0)
    blocks = [InPlaceBlock() for _ in range(2)]
    *_, plain = run_step(lambda block, hidden: block(hidden), blocks)
    checkpointing = BlockCheckpointing(1, offload=False, budget=1.0)
    for _ in range(2):
        *_, gradients = run_step(checkpointing, blocks)
        assert torch.equal(gradients, plain)
