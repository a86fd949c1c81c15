"""Block swap: one copy for each block, ahead of use, into a ring of buffers, without races and to the bit."""

import pytest
import torch
from stream_races import FakeStreams, RaceDetector
from swapped_blocks import CPU, swap_blocks
from torch import nn
from torch.utils.checkpoint import checkpoint

from library.config import parse_config
from library.parallel import async_copy
from library.parallel.async_copy import CopyStream
from library.parallel.block_swap import BlockOffloader, OffloadedBytes
from library.parallel.frozen_base import quantize_and_offload_base

DEPTH = 6
QUANT_TYPES = ["none", "fp8", "int8", "nf4"]


class Block(nn.Module):
    """Two frozen layers, and a modulation layer whose input needs no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.modulation = (nn.Linear(8, 8).requires_grad_(False) for _ in range(3))

    def forward(self, hidden, time):
        return hidden + self.second(self.first(hidden).tanh()) * self.modulation(time)


def build_blocks():
    torch.manual_seed(0)
    return [Block() for _ in range(DEPTH)]


def run_step(blocks, is_checkpointed=False, passes=1):
    """Run forward and backward; return the gradient of the input."""
    hidden = inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    time = torch.full((1, 8), 0.5)
    for _ in range(passes):
        for block in blocks:
            hidden = checkpoint(block, hidden, time, use_reentrant=False) if is_checkpointed else block(hidden, time)
    hidden.square().sum().backward()
    return inputs.grad


def list_layers(blocks):
    return [[block.first, block.second, block.modulation] for block in blocks]


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("ring_size", [1, 2, 3, DEPTH])
def test_gradients_are_equal_to_the_bit_and_copies_are_ordered_by_events(ring_size, is_checkpointed):
    streams, blocks = FakeStreams(), build_blocks()
    offloader = swap_blocks(list_layers(blocks), "none", ring_size, CopyStream(CPU, streams))
    expected = run_step(build_blocks())
    for _ in range(3):
        with RaceDetector(streams) as detector:
            gradient = run_step(blocks, is_checkpointed)
        assert torch.equal(gradient, expected)
        assert not detector.races, detector.races
    assert offloader.copied_blocks > 0


def test_a_copy_that_does_not_wait_for_the_last_use_of_its_buffer_is_a_race(monkeypatch):
    """The detector finds what the test above is for."""
    streams, blocks = FakeStreams(), build_blocks()
    stream = CopyStream(CPU, streams)
    swap_blocks(list_layers(blocks), "none", 2, stream)
    monkeypatch.setattr(streams.Stream, "wait_stream", lambda self, other: None)
    with RaceDetector(streams) as detector:
        run_step(blocks)
    assert detector.races


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("ring_size", [2, 3, 4])
def test_each_block_is_copied_once_in_each_direction_but_where_it_is_still_there(ring_size, is_checkpointed):
    blocks = build_blocks()
    offloader = swap_blocks(list_layers(blocks), "none", ring_size, CopyStream(CPU, FakeStreams()))
    run_step(blocks, is_checkpointed)
    for _ in range(2):
        copied, ahead = offloader.copied_blocks, offloader.copied_ahead
        run_step(blocks, is_checkpointed)
        # The last blocks of the forward are there when the backward begins, and the first ones in the next step.
        copies = 2 * (DEPTH - ring_size)
        assert offloader.copied_blocks - copied == copies
        assert offloader.copied_ahead - ahead == copies, "every copy was started before its block was visited"


def test_a_single_buffer_is_filled_when_its_block_is_visited():
    blocks = build_blocks()
    offloader = swap_blocks(list_layers(blocks), "none", 1, CopyStream(CPU, FakeStreams()))
    for _ in range(3):
        copied = offloader.copied_blocks
        assert torch.equal(run_step(blocks), run_step(build_blocks()))
    assert offloader.copied_blocks - copied == 2 * (DEPTH - 1) and offloader.copied_ahead == 0


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_swapped_weights_have_the_values_and_strides_of_those_on_the_device(quant_type):
    convolution = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last).requires_grad_(False)
    linear = nn.Linear(5, 7).bfloat16().requires_grad_(False)
    originals = [convolution.weight, linear.weight]
    strides = [weight.stride() for weight in originals]
    swap_blocks([[convolution], [linear]], quant_type, 1)
    for layer, original, stride in zip((convolution, linear), originals, strides, strict=True):
        weight, other = layer.weight, (linear if layer is convolution else convolution).weight
        assert weight.data_ptr() != other.data_ptr(), "the weight of a layer is no view of a buffer that is reused"
        if quant_type == "none":
            assert torch.equal(weight, original) and weight.stride() == stride
        else:
            assert float((weight - original).norm() / original.norm()) < 0.15


def test_orders_that_change_and_forwards_without_backward_have_the_right_weights():
    """Previews run forwards alone; a pass may visit blocks in another order than the last one."""
    blocks, plain = build_blocks(), build_blocks()
    swap_blocks(list_layers(blocks), "int8", 3, CopyStream(CPU, FakeStreams()))
    swap_blocks(list_layers(plain), "int8", DEPTH)
    time, states = torch.full((1, 8), 0.5), torch.ones(2, 8)
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 2, 2, 0], [0, 1, 2, 3, 4, 5]):
        with torch.no_grad():
            outputs = [[each[index](states, time) for index in order] for each in (blocks, plain)]
        assert all(map(torch.equal, *outputs))
        assert torch.equal(run_step(blocks, True, passes=2), run_step(plain, passes=2))


def test_no_device_memory_is_allocated_after_the_blocks_are_offloaded():
    meta, blocks = torch.device("meta"), build_blocks()
    offloader = swap_blocks(list_layers(blocks), "fp8", 2)
    pointers = {buffer.bytes.data_ptr() for buffer in offloader._ring}
    for _ in range(3):
        run_step(blocks)
        tensors = [tensor for weight in offloader._weights for tensor in weight.tensors]
        assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= pointers
    assert offloader.sizes.device_bytes == 2 * len(offloader.blocks[0].bytes)
    on_meta = BlockOffloader(meta, offloader.sizes)
    assert sum(buffer.bytes.nbytes for buffer in on_meta._ring) == offloader.sizes.device_bytes


@pytest.mark.parametrize(
    ("block_bytes", "requested", "ring_size"),
    [
        ([], 0, 0),
        ([700 * 2**20] * 9, 0, 2),
        ([98 * 2**20] * 9, 0, 5),
        ([2**20] * 9, 0, 9),
        ([2**20] * 9, 4, 4),
        ([2**20] * 3, 4, 3),
        ([5, 2**29], 1, 1),
    ],
)
def test_the_ring_has_two_buffers_or_as_many_as_fit_unless_it_is_given(block_bytes, requested, ring_size):
    sizes = OffloadedBytes.from_blocks(block_bytes, requested)
    assert (sizes.total, sizes.ring_size) == (sum(block_bytes), ring_size)
    assert sizes.device_bytes == ring_size * max(block_bytes, default=0)


def test_the_size_of_the_ring_is_an_option():
    from small_unet import build_unet

    for options, expected in (((), 2), (("--block_swap_ring_size", "1"), 1)):
        config = parse_config(["--blocks_to_swap", "2", *options]).config
        unet = build_unet().requires_grad_(False)
        offloader = quantize_and_offload_base(unet, (CPU, CPU), config.model, config.train)
        sizes = offloader.sizes
        assert sum(map(len, offloader.device_buffers)) == sizes.device_bytes
        assert sizes.ring_size == expected and 0 < sizes.largest_block < sizes.total


def test_blocks_share_few_allocations_of_pinned_memory(monkeypatch):
    """torch rounds each pinned allocation up to a power of two."""
    monkeypatch.setattr(async_copy, "has_device_memory", lambda device: True)
    monkeypatch.setattr(async_copy.PinnedMemory, "MIN_ALLOCATION", 1024)
    monkeypatch.setattr(async_copy.PinnedMemory, "MAX_ALLOCATION", 8192)
    empty, allocated = torch.empty, []
    monkeypatch.setattr(
        torch, "empty", lambda size, dtype, pin_memory: allocated.append((size, pin_memory)) or empty(size, dtype=dtype)
    )
    sizes = [1360] * 10
    memory = async_copy.PinnedMemory(sum(sizes))
    buffers = [memory.allocate(size, CPU) for size in sizes]
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert [len(buffer) for buffer in buffers] == sizes
    assert all((buffer == number).all() for number, buffer in enumerate(buffers)), "no two blocks share bytes"
    # Six blocks of 1360 bytes fill 8192; one by one they would take 2048 each.
    assert allocated == [(8192, True), (4096, True), (2048, True)]


def test_an_idle_expert_waits_in_host_memory_if_the_ring_holds_the_blocks_of_one():
    """Steps of the same expert copy nothing; a step of the other copies each of its blocks once."""
    streams, blocks = FakeStreams(), build_blocks()
    experts, expected = (blocks[: DEPTH // 2], blocks[DEPTH // 2 :]), build_blocks()
    offloader = swap_blocks(
        list_layers(blocks), "none", DEPTH // 2, CopyStream(CPU, streams), blocks_per_expert=DEPTH // 2
    )
    copied = []
    for expert in (0, 0, 1, 1, 1, 0, 1):
        before = offloader.copied_blocks
        with RaceDetector(streams) as detector:
            gradient = run_step(experts[expert], is_checkpointed=True)
        assert torch.equal(gradient, run_step(expected[: DEPTH // 2] if expert == 0 else expected[DEPTH // 2 :]))
        assert not detector.races, detector.races
        copied.append(offloader.copied_blocks - before)
    assert copied == [DEPTH // 2, 0, DEPTH // 2, 0, 0, DEPTH // 2, DEPTH // 2]
