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
from torch.utils.flop_counter import FlopCounterMode

from library.adapters import injection, precision
from library.config.schema import AdapterConfig
from library.parallel.activation_checkpointing import BlockCheckpointing, ExpensiveOp, select_ops_to_save
from library.parallel.fuse_lora import fuse_lora_layers

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


def build_fused_blocks(*, adds_in_place):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(2)).bfloat16()
    injection.inject_into_model(blocks, AdapterConfig(network_dim=4), ("into", "out", "wide", "narrow"), seed=3)
    for name, parameter in injection.iter_adapter_parameters(blocks):
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    precision.leave_input_casts_to_autocast(blocks)
    assert fuse_lora_layers(blocks, torch.bfloat16, adds_in_place=adds_in_place) == 8
    return blocks.train()


def run_fused_step(checkpointing, blocks):
    """Return the FLOPs of the backward pass with its recomputation, and all gradients."""
    hidden = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    blocks.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = hidden
        for block in blocks:
            output = checkpointing(block, output)
    with FlopCounterMode(display=False) as counter:
        output.float().square().sum().backward()
    gradients = [weight.grad.flatten() for weight in blocks.parameters() if weight.requires_grad]
    return counter.get_total_flops(), torch.cat([hidden.grad.flatten(), *gradients])


def test_a_budget_saves_the_outputs_of_the_base_of_fused_lora_layers():
    _, plain = run_fused_step(lambda block, hidden: block(hidden), build_fused_blocks(adds_in_place=True))
    flops = []
    for budget in (0.0, 0.5, 1.0):
        blocks, checkpointing = (
            build_fused_blocks(adds_in_place=False),
            BlockCheckpointing(1, offload=False, budget=budget),
        )
        for _ in range(2):
            count, gradients = run_fused_step(checkpointing, blocks)
            assert torch.equal(gradients, plain)
        flops.append(count)
    forward = 2 * 2 * 48 * 32 * (96 + 32 + 128 + 128)  # the products of the bases of both blocks
    assert flops == sorted(flops, reverse=True) and flops[0] - flops[2] > forward


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
