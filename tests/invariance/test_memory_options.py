"""Memory options do not change gradients, or only by the rounding of quantization."""

import gc
import weakref
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rank_processes import run_on_ranks
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from training_runs import even_dataset, max_relative_difference, train_adapter

from benchmarks.synthetic_run import build_run, write_dataset
from library.config import parse_config
from library.distributed.async_copy import CopyStream
from library.errors import ConfigError
from library.estimate.memory_meter import MemoryMeter
from library.parallel import offload
from library.parallel.offload import WeightOffloader, select_spread_indices
from library.parallel.quantize import (
    NF4_BLOCK_SIZE,
    NF4_LEVELS,
    QuantizedWeight,
    can_convert_frozen_layer,
    convert_frozen_layer,
)
from library.training import activation_checkpointing

__all__ = ["even_dataset"]  # a fixture

KINDS = ["none", "fp8", "int8", "nf4"]
WIDEST = max(later - earlier for earlier, later in pairwise(NF4_LEVELS)) / 2


def weight_of(*shape, seed=0):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return rows * torch.logspace(-2, 0, shape[0]).view(-1, *[1] * (len(shape) - 1))  # rows of very different size


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(6, 128), (5, 7), (4, 3, 3, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_quantization_error_is_bounded(kind, shape):
    weight = weight_of(*shape)
    found = QuantizedWeight.quantize(weight, kind).dequantize(torch.float32)
    rows, off = weight.flatten(1), (found - weight).flatten(1).abs()
    most = rows.abs().amax(1, keepdim=True) * (1 + 2**-8)
    if kind == "nf4":
        padded = F.pad(weight.flatten(), (0, -weight.numel() % NF4_BLOCK_SIZE)).view(-1, NF4_BLOCK_SIZE)
        most = padded.abs().amax(1, keepdim=True).expand_as(padded).flatten()[: weight.numel()].view_as(rows)
    bound = {
        "none": 0 * most,
        "int8": most / 127,
        "fp8": 2**-4 * rows.abs() + most * 2**-9 / 448 + most * 2**-8,
        "nf4": most * (WIDEST + 2**-8),
    }[kind]
    assert found.shape == weight.shape and (off <= bound).all()
    assert kind == "none" or off.any()


def test_representable_values_are_dequantized_exactly():
    for kind, weight in {
        "int8": torch.arange(-127.0, 128).view(1, -1) / 64,
        "nf4": torch.tensor(NF4_LEVELS).repeat(2 * NF4_BLOCK_SIZE // 16).view(2, -1) / 2,
        "fp8": torch.tensor([[448.0, -3.5, 0.25, 0.0]]) / 4,
    }.items():
        assert torch.equal(QuantizedWeight.quantize(weight, kind).dequantize(torch.float32), weight), kind


def test_a_quantized_weight_has_the_size_of_its_type():
    size = {kind: QuantizedWeight.quantize(torch.randn(64, 1024).bfloat16(), kind).nbytes / 65536 for kind in KINDS}
    assert size["none"] == 2 and 1 < size["int8"] == size["fp8"] < 1.01 and 0.5 < size["nf4"] < 0.54


@pytest.mark.parametrize(("kind", "most"), [("fp8", 4.1), ("int8", 4.1), ("nf4", 6.2)])
def test_dequantization_needs_little_extra_memory(kind, most):
    packed, meta = QuantizedWeight.quantize(torch.randn(256, 1024).bfloat16(), kind), torch.device("meta")
    packed = packed.map_tensors(lambda tensor: tensor.to(meta))
    with MemoryMeter(meta, packed.tensors) as meter:
        assert packed.dequantize(torch.bfloat16).shape == (256, 1024)
    assert meter.peak < most * 256 * 1024


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_layer_equals_a_layer_with_the_dequantized_weight(kind, autocast):
    for layer, shape in (
        (nn.Linear(8, 6), (2, 5, 8)),
        (nn.Conv2d(8, 6, 3, stride=2, padding=1), (2, 8, 9, 7)),
        (nn.Linear(8, 6, bias=False), (3, 8)),
    ):
        layer.requires_grad_(False)
        packed = QuantizedWeight.quantize(layer.weight, kind)
        layer.weight.data = packed.dequantize(torch.bfloat16 if autocast else torch.float32).float()
        given = torch.randn(shape, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = layer(given)
        wanted = torch.autograd.grad(output.float().square().sum(), given)[0]
        assert can_convert_frozen_layer(layer)
        convert_frozen_layer(layer, lambda packed=packed: packed)
        kept = []
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), saved_tensors_hooks(kept.append, lambda _: None):
            found = layer(given)
        assert (
            torch.equal(found, output) and not kept and not can_convert_frozen_layer(layer)
        )  # nothing waits for the backward pass
        assert [name for name, _ in layer.named_parameters()] == ["bias"][: layer.bias is not None]
        torch.testing.assert_close(torch.autograd.grad(found.float().square().sum(), given)[0], wanted)


class Device:
    """Copies, and knows how many of its copies are alive."""

    def __init__(self):
        self.alive = self.most = self.made = 0

    def copy(self, tensor):
        found = tensor.clone()
        self.alive, self.made = self.alive + 1, self.made + 1
        self.most = max(self.most, self.alive)
        weakref.finalize(found, self.gone)
        return found

    def gone(self):
        self.alive -= 1


@pytest.mark.quick
@pytest.mark.parametrize("is_twice", [False, True])
def test_offloaded_weights_are_prefetched_and_at_most_two_are_on_the_device(is_twice):
    device = Device()
    swap = WeightOffloader(torch.device("cpu"), device.copy)
    layers = [nn.Linear(4, 4).requires_grad_(False) for _ in range(6)]
    for layer in layers:
        convert_frozen_layer(layer, swap.offload(QuantizedWeight.quantize(layer.weight, "none")))
    fetched = []
    for _ in range(3):
        before, given = (device.made, swap.prefetch_hits), torch.ones(1, 4, requires_grad=True)
        now = given
        for first in range(0, 6, 2):
            block = nn.Sequential(*layers[first : first + 2], nn.Tanh())
            now = torch.utils.checkpoint.checkpoint(block, now, use_reentrant=False) if is_twice else block(now)
        now.sum().backward()
        fetched.append((device.made - before[0], swap.prefetch_hits - before[1]))
    gc.collect()
    passes = 3 if is_twice else 2
    assert fetched[2] == (6 * passes, 6 * passes), fetched  # one copy for each use, each sent ahead
    assert device.most <= 2


class LazyDevice:
    """In the place of torch's module for a device that computes nothing before somebody waits for it."""

    class Stream:
        def __init__(self, device):
            self.given = 0

        def wait_stream(self, other):
            pass

    def __init__(self):
        self.computing, self.done, self.waits = self.Stream(None), 0, 0

    def current_stream(self, device):
        return self.computing

    def stream(self, stream):
        return nullcontext()

    def Event(self):
        place = 0

        def record(stream):
            nonlocal place
            place = stream.given

        def synchronize():
            self.done, self.waits = max(self.done, place), self.waits + 1

        return SimpleNamespace(record=record, synchronize=synchronize)


@pytest.mark.parametrize(("room", "waits", "most"), [(400, True, 400), (10**6, False, 6 * 4 * 64)])
def test_fetched_weights_in_flight_are_bounded(room, waits, most, monkeypatch):
    device = LazyDevice()
    monkeypatch.setattr(offload, "MAX_BYTES_AHEAD", room)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    swap = WeightOffloader(torch.device("cpu"), torch.clone)
    swap._copy_stream = CopyStream(torch.device("cpu"), device)
    fetches = [swap.offload(QuantizedWeight.quantize(torch.zeros(16), "none")) for _ in range(6)]
    held = []
    for _ in range(4):
        for fetch in fetches:
            size = fetch().nbytes
            device.computing.given += 1  # what is computed with it, and its memory is free when the device has
            held.append((device.computing.given - device.done) * size)
    assert bool(device.waits) == waits
    assert max(held) <= most + 2 * 64, held
    assert swap.prefetch_hits > 12


def test_blocks_are_spread_evenly():
    assert (
        select_spread_indices(6, 0) == []
        and select_spread_indices(6, 6) == list(range(6))
        and select_spread_indices(6, 2) == [2, 5]
        and select_spread_indices(7, 3) == [2, 4, 6]
    )


def gradients(folder: Path, cases):
    """Return loss and gradients of one step for each case, with no adapter weight at zero."""
    found = []
    for number, words in enumerate(cases):
        (own := folder / str(number)).mkdir()
        with build_run(write_dataset([*words, "--resolution", "64", "--network_dim", "2"], own, 3), own) as run:
            draw = torch.Generator().manual_seed(1)
            for item in run.parameters:
                item.data = torch.randn(item.shape, generator=draw) * 0.05
            for _ in range(2 if "--activation_memory_budget" in words else 1):  # the first finds out what to keep
                run.optimizer.zero_grad(set_to_none=True)
                loss = run.oom_recovery.compute_gradients(run.strategy, run.task, next(run.loader.iter_steps(0)), 0)
            assert all(item.grad.any() for item in run.parameters)
            found.append(torch.cat([loss.view(1), *(item.grad.flatten() for item in run.parameters)]).numpy())
    return found


BUDGETS = [("--gradient_checkpointing", "--activation_memory_budget", share) for share in ("0.4", "1")]
SAME = [
    *BUDGETS,
    ("--gradient_checkpointing", "--gradient_checkpointing_every", "2"),
    ("--gradient_checkpointing", "--cpu_offload_checkpointing"),
    ("--blocks_to_swap", "2"),
    ("--blocks_to_swap", "2", *BUDGETS[0], "--cpu_offload_checkpointing"),
]
OFF = {"int8": 0.05, "fp8": 0.2, "nf4": 0.5}


@pytest.mark.parametrize(
    ("model", "same", "kinds"),
    [("random:sd1:tiny", SAME, OFF), pytest.param("random:flux:tiny", SAME[-1:], ["int8"], marks=pytest.mark.slow)],
)
def test_memory_options_do_not_change_gradients(model, same, kinds, tmp_path):
    fewer = [
        ("--quantize_base", kind, *more)
        for kind in kinds
        for more in ((), ("--blocks_to_swap", "2", "--gradient_checkpointing"))
    ]
    cases = [("--pretrained_model_name_or_path", model, *more) for more in ((), *same, *fewer)]
    plain, *found = map(torch.from_numpy, run_on_ranks(1, gradients, tmp_path, cases)[0])
    for more, one in zip(same, found, strict=False):
        torch.testing.assert_close(one, plain, msg=str(more))
        assert more not in BUDGETS or torch.equal(one, plain), "the budget only decides what is recomputed"
    for number, kind in enumerate(kinds):
        one, swapped = found[len(same) + 2 * number :][:2]
        off = float((one[1:] - plain[1:]).norm() / plain[1:].norm())
        assert 1e-5 < off < OFF[kind], (kind, off)
        torch.testing.assert_close(swapped, one)


def test_every_nth_block_is_recomputed_from_offloaded_inputs(monkeypatch):
    sent, honest = [], activation_checkpointing.copy_to_host
    monkeypatch.setattr(activation_checkpointing, "copy_to_host", lambda tensor: sent.append(tensor) or honest(tensor))
    for every, times, to_host in ((1, [2, 2, 2, 2], False), (2, [2, 1, 2, 1], True)):
        blocks, calls = [nn.Linear(3, 3) for _ in range(4)], [0] * 4
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, at=number, calls=calls: calls.__setitem__(at, calls[at] + 1))
        call = activation_checkpointing.BlockCheckpointing(every, offload=to_host)
        now = torch.ones(1, 3, requires_grad=True)
        for block in blocks:
            now = call(block, now)
        now.sum().backward()
        assert calls == times
    assert [tuple(tensor.shape) for tensor in sent if tensor.numel()] == [(1, 3)] * 2


@pytest.mark.slow
def test_quantized_offloaded_training_is_the_same_with_two_processes(even_dataset, tmp_path):
    flags = ("--quantize_base", "int8", "--blocks_to_swap", "1", "--optimizer_type", "SGD")
    one, two = (
        train_adapter(tmp_path / str(ranks), ranks, 4 // ranks, 1, *flags, dataset=even_dataset) for ranks in (1, 2)
    )
    assert max_relative_difference(one, two) < 1e-4


def refused(*words):
    from library.training.run import run_training

    try:
        run_training(parse_config(words).require_valid())
    except ConfigError as error:
        return error.problems
    return None


@pytest.mark.quick
def test_invalid_memory_options_are_reported_before_loading(even_dataset, tmp_path):
    words = ("--dataset_config", str(even_dataset), "--output_dir", str(tmp_path))
    found = parse_config(
        [
            *words,
            *(
                "--gradient_checkpointing_every 2 --cpu_offload_checkpointing --activation_memory_budget 0.5 "
                "--blocks_to_swap 1 --torch_compile --profile_steps 1:9"
            ).split(),
        ]
    ).problems
    assert [problem.partition(":")[0] for problem in found] == [
        *(
            "--gradient_checkpointing_every --activation_memory_budget --cpu_offload_checkpointing "
            "--gradient_checkpointing_every --cpu_offload_checkpointing --blocks_to_swap --profile_steps"
        ).split(),
    ]
    (problems,) = run_on_ranks(1, refused, *words, "--blocks_to_swap", "99", "--quiet")
    assert len(problems) == 1 and problems[0].startswith("--blocks_to_swap: 99; this model has ")
    assert parse_config([*words, "--fp8_base"]).config.model.quantize_base == "fp8"
