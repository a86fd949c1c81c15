"""Checkpoints on the host: copied on a stream of their own, without races, each once in each direction."""

import pytest
import torch
from stream_races import FakeStreams, RaceDetector
from torch import nn

from library.parallel import activation_offload
from library.parallel.activation_checkpointing import BlockCheckpointing
from library.parallel.activation_offload import ActivationOffload
from library.parallel.async_copy import CopyStream

DEPTH = 5
NEEDS_DEVICE = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")


class Block(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.linear, self.log = nn.Linear(8, 8), log

    def forward(self, hidden, scale):
        self.log.append("block")
        return hidden + self.linear(hidden).tanh() * scale


def run_step(blocks, checkpoint, device="cpu"):
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    hidden, scale = inputs, torch.full((1,), 0.5, device=device)
    for block in blocks:
        hidden = checkpoint(block, hidden, scale)
    loss = hidden.square().sum()
    del hidden
    loss.backward()
    weights = [weight for block in blocks for weight in block.parameters()]
    gradients = [inputs.grad, *(weight.grad for weight in weights)]
    for weight in weights:
        weight.grad = None
    return torch.cat([gradient.flatten() for gradient in gradients])


def build_blocks(log=None):
    torch.manual_seed(0)
    return [Block([] if log is None else log) for _ in range(DEPTH)]


def build_checkpointing(streams):
    checkpointing = BlockCheckpointing(1, offload=True)
    offload = ActivationOffload(lambda device: CopyStream(device, streams))
    checkpointing._context = offload.offload_saved_tensors
    return checkpointing


def run_with_detector(monkeypatch, checkpointing, streams, blocks, log=None):
    with RaceDetector(streams) as detector:
        copy_to_host, log = activation_offload.copy_to_host, [] if log is None else log
        monkeypatch.setattr(
            activation_offload,
            "copy_to_host",
            lambda tensor: log.append("out") or detector.mark_pinned(copy_to_host(tensor)),
        )
        gradients = run_step(blocks, checkpointing)
    monkeypatch.setattr(activation_offload, "copy_to_host", copy_to_host)
    return gradients, detector


def test_gradients_are_equal_and_copies_are_ordered_by_events(monkeypatch):
    expected = run_step(build_blocks(), lambda block, *inputs: block(*inputs))
    streams = FakeStreams()
    checkpointing = build_checkpointing(streams)
    blocks = build_blocks()
    for _ in range(3):
        gradients, detector = run_with_detector(monkeypatch, checkpointing, streams, blocks)
        assert torch.equal(gradients, expected)
        assert not detector.races, detector.races
        copies_out, copies_back = 2 * DEPTH, 2 * (DEPTH - 1)  # the last block's inputs are still there
        assert detector.copy_count == copies_out + copies_back


def test_the_inputs_of_a_block_are_copied_back_before_the_block_after_it_is_recomputed(monkeypatch):
    log, streams = [], FakeStreams()
    blocks, checkpointing = build_blocks(log), build_checkpointing(streams)
    prefetch = activation_offload.OffloadedTensor.prefetch

    def prefetch_and_log(tensor):
        log.extend(["back"] if tensor._tensor is None else [])
        prefetch(tensor)

    monkeypatch.setattr(activation_offload.OffloadedTensor, "prefetch", prefetch_and_log)
    run_with_detector(monkeypatch, checkpointing, streams, blocks, log)
    forward, backward = log[: 3 * DEPTH], log[3 * DEPTH :]
    assert forward == ["out", "out", "block"] * DEPTH
    assert backward == ["back", "back", "block"] * (DEPTH - 1) + ["block"]


def run_after_nothing(stream, copy):
    return stream.run_on_stream(copy), stream.record_event()


@pytest.mark.parametrize(
    ("owner", "name", "broken", "race"),
    [
        (CopyStream, "run_after_compute", run_after_nothing, "aten.copy_.default before an earlier operation is done"),
        (CopyStream, "wait_for_event", lambda *_: None, "aten.mul.Tensor before an earlier operation is done"),
        (
            activation_offload.OffloadedTensor,
            "release",
            lambda tensor: vars(tensor).update(_tensor=None),
            "memory is freed",
        ),
    ],
)
def test_missing_events_are_races(owner, name, broken, race, monkeypatch):
    """What the tests above rely on."""
    streams = FakeStreams()
    monkeypatch.setattr(owner, name, broken)
    *_, detector = run_with_detector(monkeypatch, build_checkpointing(streams), streams, build_blocks())
    assert any(line.startswith(race) for line in detector.races), set(detector.races)


def test_an_input_that_is_modified_in_place_later_is_an_error():
    class InPlace(Block):
        def forward(self, hidden, scale):
            return super().forward(hidden, scale) if hidden.grad_fn is None else hidden.mul_(scale) + 1

    with pytest.raises(RuntimeError, match="modified its input in place"):
        run_step([InPlace([]) for _ in range(3)], BlockCheckpointing(1, offload=True))


def test_a_step_that_failed_leaves_no_copy_behind(monkeypatch):
    class Failing(Block):
        has_failed = False

        def forward(self, hidden, scale):
            if not self.has_failed and torch._C._current_graph_task_id() != -1:
                self.has_failed = True
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(hidden, scale)

    streams = FakeStreams()
    blocks, checkpointing = build_blocks(), build_checkpointing(streams)
    blocks[2] = Failing([])
    with pytest.raises(torch.OutOfMemoryError):
        run_with_detector(monkeypatch, checkpointing, streams, blocks)
    monkeypatch.undo()
    _, detector = run_with_detector(monkeypatch, checkpointing, streams, blocks)
    assert not detector.races, detector.races


@NEEDS_DEVICE
def test_gradients_on_a_device_are_equal_with_little_memory():
    """Large enough that copies and kernels overlap; every tenth repetition would show a race."""
    device = torch.accelerator.current_accelerator()
    module = torch.get_device_module(device)
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).to(device)
    inputs = torch.randn(8192, 2048, device=device, requires_grad=True)
    peaks, results = [], []
    for checkpointing in (BlockCheckpointing(1, offload=False), *[BlockCheckpointing(1, offload=True)] * 10):
        inputs.grad = None
        module.reset_peak_memory_stats()
        hidden = inputs
        for block in blocks:
            hidden = checkpointing(block, hidden)
        hidden.square().mean().backward()
        torch.accelerator.synchronize()
        peaks.append(module.max_memory_allocated())
        results.append(inputs.grad.clone())
    assert all(torch.equal(gradient, results[0]) for gradient in results)
    assert max(peaks[1:]) < peaks[0] - 5 * inputs.nbytes
