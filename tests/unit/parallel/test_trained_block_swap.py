"""Block swap of trained weights: updates equal to the bit, copies without races, everything in its place between."""

import pytest
import torch
from stream_races import FakeStreams, RaceDetector
from swapped_blocks import CPU
from torch import nn
from torch.utils.checkpoint import checkpoint

from library.config.schema import TrainConfig
from library.optim.fused_backward import FusedBackward
from library.optim.stochastic_rounding import StochasticRounding
from library.parallel.async_copy import CopyStream
from library.parallel.trained_block_swap import swap_trained_blocks

DEPTH = 6


class Block(nn.Module):
    """Two layers with a norm, and a vector of its own that nothing saves for backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.shift = nn.LayerNorm(8), nn.Parameter(torch.zeros(8))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, hidden):
        return hidden + self.second(self.first(self.norm(hidden)).tanh()) * self.scale + self.shift


class Denoiser(nn.Module):
    _repeated_blocks = ("Block",)

    def __init__(self, is_checkpointed):
        super().__init__()
        self.entry, self.is_checkpointed = nn.Linear(8, 8), is_checkpointed
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, hidden, order=range(DEPTH)):
        hidden = self.entry(hidden)
        for index in order:
            block = self.blocks[index]
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.is_checkpointed else block(hidden)
        return hidden


def build_denoiser(is_checkpointed=False, dtype=torch.float32):
    torch.manual_seed(0)
    return Denoiser(is_checkpointed).to(dtype)


class Trainer:
    """Trains a denoiser with a fused backward pass, with some of its blocks swapped."""

    def __init__(self, swapped, optimizer=torch.optim.AdamW, ring_size=2, streams=None, **settings):
        self.model, stream = build_denoiser(**settings), streams and CopyStream(CPU, streams)
        train = TrainConfig(blocks_to_swap=swapped, block_swap_ring_size=ring_size)
        self.swap = swap_trained_blocks(self.model, CPU, train, stream) if swapped else None
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        rounding = None
        if self.model.entry.weight.dtype == torch.bfloat16:
            names = {weight: name for name, weight in self.model.named_parameters()}
            rounding = StochasticRounding(self.optimizer, 7, names)
        if self.swap is not None:
            self.swap.watch(self.model)
        self.fused = FusedBackward(self.optimizer, 0.5, rounding, self.swap)

    def step(self, number, orders=(range(DEPTH),)):
        """Take a step with a micro-batch for each order of blocks."""
        self.fused.start_step(number)
        for index, order in enumerate(orders):
            generator = torch.Generator().manual_seed(10 * number + index)
            inputs = torch.randn(4, 8, generator=generator).to(self.model.entry.weight.dtype)
            loss = self.model(inputs, order).float().square().mean()
            with self.fused.run_micro_batch(loss, is_last=index == len(orders) - 1):
                loss.backward()

    def read(self):
        weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        return weights, self.optimizer.state_dict()["state"]


def assert_equal(one, other):
    for left, right in zip(one.read(), other.read(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("swapped", "ring_size", "is_checkpointed", "dtype"),
    [
        (DEPTH, 1, False, torch.float32),
        (DEPTH, 2, True, torch.bfloat16),
        (3, 2, False, torch.bfloat16),
        (DEPTH, DEPTH, True, torch.float32),
    ],
)
def test_weights_and_state_are_those_without_swap_to_the_bit_and_copies_are_ordered(
    swapped, ring_size, is_checkpointed, dtype
):
    streams, settings = FakeStreams(), {"is_checkpointed": is_checkpointed, "dtype": dtype}
    trainer, plain = Trainer(swapped, ring_size=ring_size, streams=streams, **settings), Trainer(0, **settings)
    start = plain.read()[0]
    for number in range(2):
        with RaceDetector(streams) as detector:
            trainer.step(number)
            trainer.read()
        plain.step(number)
        assert not detector.races, detector.races
        assert_equal(trainer, plain)
    assert not any(torch.equal(start[name], value) for name, value in plain.read()[0].items())
    assert trainer.swap.copied_blocks > 0 and trainer.fused.num_updated == len(start)


ORDERS = (range(DEPTH), [5, 3, 1, 0, 2, 4], [0, 1, 1, 0], [2])
"""Blocks that are called twice, in another order, or in none of the later micro-batches."""


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_accumulated_gradients_wait_in_host_memory_and_reach_weights_that_the_last_micro_batch_does_not(
    is_checkpointed,
):
    streams = FakeStreams()
    trainer = Trainer(DEPTH, streams=streams, is_checkpointed=is_checkpointed)
    plain = Trainer(0, is_checkpointed=is_checkpointed)
    for number in range(2):
        with RaceDetector(streams) as detector:
            trainer.step(number, ORDERS)
            trainer.read()
        plain.step(number, ORDERS)
        assert not detector.races, detector.races
        assert_equal(trainer, plain)
        assert trainer.fused.num_updated == len(list(plain.model.parameters()))


def test_a_block_that_is_left_and_used_again_is_updated_once_with_the_sum_of_its_gradients():
    """On a GPU its weights have a gradient for each use, as their data was elsewhere in between."""
    trainer, plain = Trainer(DEPTH, torch.optim.SGD), Trainer(0, torch.optim.SGD)
    for number in range(2):
        for each in (trainer, plain):
            each.step(number, ([0, 1, 2, 0, 1, 2, 0],))
        assert_equal(trainer, plain)
        assert trainer.fused.num_updated == 2 + 3 * len(list(Block().parameters()))
    weight = trainer.model.blocks[0].first.weight
    before, total = weight.detach().clone(), torch.zeros(16, 8)
    trainer.fused.start_step(2)
    with trainer.fused.run_micro_batch(torch.ones(()), is_last=True):
        trainer.swap._uses[trainer.swap._block_of[weight]] = 3
        for factor in (0.25, 0.125, 0.0625):
            assert torch.equal(weight, before), "not before the last"
            weight.grad = torch.full((16, 8), factor)
            total += weight.grad
            trainer.fused._handle_gradient(weight)
    assert torch.allclose(weight, before - 1e-2 * total * (0.5 / total.norm()).clamp(max=1))


def test_between_steps_weights_may_be_read_and_written_and_forwards_may_run():
    """As previews, validation with EMA weights, and checkpoints do."""
    trainer, plain = Trainer(DEPTH, ring_size=DEPTH), Trainer(0)
    inputs = torch.linspace(-1, 1, 32).view(4, 8)
    for number in range(2):
        trainer.step(number)
        plain.step(number)
        outputs = []
        for each in (trainer, plain):
            with torch.no_grad():
                before = [weight.clone() for weight in each.model.parameters()]
                for factor in (2.0, 0.5):
                    for weight in each.model.parameters():
                        weight.mul_(factor)
                    outputs.append(each.model(inputs))
                each.model.zero_grad()
                for weight, value in zip(each.model.parameters(), before, strict=True):
                    weight.copy_(value)
        assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
        assert not torch.equal(outputs[0], outputs[1])
    trainer.step(2)
    plain.step(2)
    assert_equal(trainer, plain)


def test_a_loss_that_is_not_finite_changes_nothing_and_the_next_step_is_as_it_would_be():
    trainer, plain = Trainer(DEPTH), Trainer(0)
    for each in (trainer, plain):
        each.fused.start_step(0)
        for index in range(2):
            loss = each.model(torch.ones(2, 8)).sum() * (float("nan") if index else 1)
            with each.fused.run_micro_batch(loss, is_last=index == 1):
                loss.backward()
        each.step(1)
    assert_equal(trainer, plain)


def test_weights_and_large_state_are_in_host_memory_between_steps_and_small_state_is_not_copied():
    """Two "devices" on a CPU are told apart by the memory that tensors share."""

    class Factored(torch.optim.AdamW):
        def step(self):
            super().step()
            for group in self.param_groups:
                for weight in group["params"]:
                    self.state[weight].setdefault("rows", torch.zeros(1))

    trainer = Trainer(DEPTH, Factored)
    trainer.step(0)
    ring = {buffer.bytes.untyped_storage().data_ptr() for buffer in trainer.swap._ring}
    host = {id(tensor) for tensor in trainer.swap._host_buffers.values()}
    for weight in (weight for weight in trainer.swap.swapped_weights if weight.dim() == 2):
        assert weight.untyped_storage().data_ptr() not in ring and weight.grad is None
        state = trainer.optimizer.state[weight]
        assert id(state["exp_avg"]) in host and id(state["exp_avg_sq"]) in host
        assert id(state["rows"]) not in host and id(state["step"]) not in host
    moments = {id(state["exp_avg"]) for state in trainer.optimizer.state.values()}
    trainer.step(1)
    swapped = {id(trainer.optimizer.state[weight]["exp_avg"]) for weight in trainer.swap.swapped_weights}
    assert swapped <= moments, "host memory is allocated once"


def test_moving_the_model_leaves_swapped_weights_where_they_are_and_moves_the_rest():
    trainer = Trainer(3)
    trainer.model.to(torch.float64)
    dtypes = {name: value.dtype for name, value in trainer.model.state_dict().items()}
    swapped = {name for name, weight in trainer.model.named_parameters() if weight in trainer.swap.swapped_weights}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == swapped
    assert len(swapped) == 3 * len(list(Block().parameters()))
    assert dtypes["blocks.1.scale"] == torch.float64


def test_weights_that_several_modules_share_stay_on_the_device():
    model = build_denoiser()
    model.blocks[1].second.weight = model.blocks[2].second.weight
    swapped = swap_trained_blocks(model, CPU, TrainConfig(blocks_to_swap=DEPTH)).swapped_weights
    assert model.blocks[1].second.weight not in swapped and model.blocks[1].first.weight in swapped
