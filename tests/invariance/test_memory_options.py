"""Memory options do not change gradients, or only by the rounding of quantization."""

import gc
import tempfile
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from problem_lines import format_lines, format_unused
from rank_processes import run_on_ranks
from small_unet import build_unet
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from training_runs import even_dataset, max_relative_difference, train_adapter

from benchmarks.memory import count_blocks
from benchmarks.synthetic_run import build_run, load_training_options, write_dataset
from library.config import parse_config
from library.distributed.devices import HOST
from library.errors import ConfigError
from library.estimate.meta_memory_meter import MemoryMeter
from library.parallel import activation_checkpointing, activation_offload, async_copy, frozen_base
from library.parallel.async_copy import CopyStream
from library.parallel.block_swap import WeightOffloader
from library.parallel.frozen_base import quantize_and_offload_base, select_spread_indices
from library.parallel.quantize import (
    NF4_BLOCK_SIZE,
    NF4_LEVELS,
    QuantizedWeight,
    can_convert_frozen_layer,
    convert_frozen_layer,
    take_ranges,
)
from library.training.loop import accumulate_gradients

__all__ = ["even_dataset"]  # a fixture

KINDS = ["none", "fp8", "int8", "nf4"]
MAX_NF4_ERROR = max(later - earlier for earlier, later in pairwise(NF4_LEVELS)) / 2


def make_weight(*shape, seed=0):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return rows * torch.logspace(-2, 0, shape[0]).view(-1, *[1] * (len(shape) - 1))  # rows of very different magnitude


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(6, 128), (5, 7), (4, 3, 3, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_quantization_error_is_bounded(kind, shape):
    weight = make_weight(*shape)
    dequantized = QuantizedWeight.quantize(weight, kind).dequantize(torch.float32)
    rows, errors = weight.flatten(1), (dequantized - weight).flatten(1).abs()
    maxima = rows.abs().amax(1, keepdim=True) * (1 + 2**-8)
    if kind == "nf4":
        padded = F.pad(weight.flatten(), (0, -weight.numel() % NF4_BLOCK_SIZE)).view(-1, NF4_BLOCK_SIZE)
        maxima = padded.abs().amax(1, keepdim=True).expand_as(padded).flatten()[: weight.numel()].view_as(rows)
    bound = {
        "none": 0 * maxima,
        "int8": maxima / 127,
        "fp8": 2**-4 * rows.abs() + maxima * 2**-9 / 448 + maxima * 2**-8,
        "nf4": maxima * (MAX_NF4_ERROR + 2**-8),
    }[kind]
    assert dequantized.shape == weight.shape and (errors <= bound).all()
    assert kind == "none" or errors.any()


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


@pytest.mark.parametrize("shape", [(64, 96), (7, 33), (4, 3, 3, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_packed_on_the_meta_device_as_elsewhere(kind, shape):
    weight = torch.randn(shape).bfloat16()
    packed, on_meta = (QuantizedWeight.quantize(each, kind) for each in (weight, weight.to("meta")))
    assert on_meta == replace(packed, tensors=on_meta.tensors)
    for tensor, other in zip(on_meta.tensors, packed.tensors, strict=True):
        assert tensor.is_meta and (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize(("kind", "max_bytes_per_weight"), [("fp8", 4.1), ("int8", 4.1), ("nf4", 6.2)])
def test_dequantization_needs_little_extra_memory(kind, max_bytes_per_weight):
    quantized, meta = QuantizedWeight.quantize(torch.randn(256, 1024).bfloat16(), kind), torch.device("meta")
    quantized = quantized.map_tensors(lambda tensor: tensor.to(meta))
    with MemoryMeter(meta, quantized.tensors) as meter:
        assert quantized.dequantize(torch.bfloat16).shape == (256, 1024)
    assert meter.peak < max_bytes_per_weight * 256 * 1024


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_layer_equals_a_layer_with_the_dequantized_weight(kind, autocast):
    for layer, shape in (
        (nn.Linear(8, 6), (2, 5, 8)),
        (nn.Conv2d(8, 6, 3, stride=2, padding=1), (2, 8, 9, 7)),
        (nn.Linear(8, 6, bias=False), (3, 8)),
    ):
        layer.requires_grad_(False)
        quantized = QuantizedWeight.quantize(layer.weight, kind)
        layer.weight.data = quantized.dequantize(torch.bfloat16 if autocast else torch.float32).float()
        inputs = torch.randn(shape, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = layer(inputs)
        expected_gradient = torch.autograd.grad(output.float().square().sum(), inputs)[0]
        assert can_convert_frozen_layer(layer)
        convert_frozen_layer(layer, quantized)
        saved_tensors = []
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            saved_tensors_hooks(saved_tensors.append, lambda _: None),
        ):
            actual = layer(inputs)
        assert (
            torch.equal(actual, output) and not saved_tensors and not can_convert_frozen_layer(layer)
        )  # no tensor is saved for backward
        assert "weight" not in layer._parameters and not any(item.requires_grad for item in layer.parameters())
        torch.testing.assert_close(torch.autograd.grad(actual.float().square().sum(), inputs)[0], expected_gradient)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_a_quantized_weight_have_the_values_of_the_whole(kind):
    for shape, dim, ranges in (
        ((256, 192), 0, ((64, 64),)),
        ((64, 384), 1, ((0, 64), (192, 128))),  # whole blocks of nf4
        ((32, 96), 1, ((48, 48),)),  # parts of blocks, and rows that end inside of one
        ((6, 10), 0, ((2, 2),)),
        ((4, 9), 1, ((3, 3),)),  # an odd number of values, which no bytes can hold
    ):
        quantized = QuantizedWeight.quantize(torch.randn(shape), kind)
        shard = quantized.take_ranges(dim, ranges)
        expected = take_ranges(quantized.dequantize(torch.float32), dim, ranges)
        assert torch.equal(shard.dequantize(torch.float32), expected) and shard.shape == expected.shape
        if shape[1] % 64 == 0 and kind != "none":
            assert shard.nbytes < quantized.nbytes * (expected.numel() / quantized.shape.numel() + 0.02)


class CopyCounter:
    """Copies tensors, and counts the copies made and alive."""

    def __init__(self):
        self.alive = self.max_alive = self.copy_count = 0

    def copy(self, tensor):
        copy = tensor.clone()
        self.alive, self.copy_count = self.alive + 1, self.copy_count + 1
        self.max_alive = max(self.max_alive, self.alive)
        weakref.finalize(copy, self.release)
        return copy

    def release(self):
        self.alive -= 1


@pytest.mark.quick
def test_no_weight_of_a_layer_without_backward_is_kept_after_its_recomputation():
    """Modulation layers of transformers: their input needs no gradient."""
    device = CopyCounter()
    offloader = WeightOffloader(torch.device("cpu"), device.copy)
    modulation, linear = (nn.Linear(4, 4).requires_grad_(False) for _ in range(2))
    for layer in (modulation, linear):
        convert_frozen_layer(layer, offloader.offload(QuantizedWeight.quantize(layer.weight, "none")))
    inputs, time = torch.ones(1, 4, requires_grad=True), torch.ones(1, 4)
    output = torch.utils.checkpoint.checkpoint(
        lambda x: linear(x).tanh() * modulation(time), inputs, use_reentrant=False
    )
    output.sum().backward()
    gc.collect()
    assert device.alive == 0


@pytest.mark.quick
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_offloaded_weights_are_copied_twice_per_step_and_prefetched(is_checkpointed):
    device = CopyCounter()
    offloader = WeightOffloader(torch.device("cpu"), device.copy)
    layers = [nn.Linear(4, 4).requires_grad_(False) for _ in range(6)]
    for layer in layers:
        convert_frozen_layer(layer, offloader.offload(QuantizedWeight.quantize(layer.weight, "none")))
    counts = []
    for _ in range(3):
        counts_before, inputs = (device.copy_count, offloader.prefetch_hits), torch.ones(1, 4, requires_grad=True)
        hidden = inputs
        for first in range(0, 6, 2):
            block = nn.Sequential(*layers[first : first + 2], nn.Tanh())
            hidden = (
                torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
                if is_checkpointed
                else block(hidden)
            )
        hidden.sum().backward()
        counts.append((device.copy_count - counts_before[0], offloader.prefetch_hits - counts_before[1]))
    gc.collect()
    assert counts[2] == (6 * 2, 6 * 2), counts  # forward and backward, or forward and recomputation; each prefetched
    assert device.max_alive <= (3 if is_checkpointed else 2), "a recomputed block of two layers, and the next layer"


class LazyDevice:
    """Replaces torch's device module; operations run only when an event is synchronized."""

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
        position = 0

        def record(stream):
            nonlocal position
            position = stream.given

        def synchronize():
            self.done, self.waits = max(self.done, position), self.waits + 1

        return SimpleNamespace(record=record, synchronize=synchronize)


@pytest.mark.parametrize(("max_bytes_ahead", "waits", "max_in_flight"), [(400, True, 400), (10**6, False, 6 * 4 * 64)])
def test_fetched_weights_in_flight_are_bounded(max_bytes_ahead, waits, max_in_flight, monkeypatch):
    device = LazyDevice()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    offloader = WeightOffloader(torch.device("cpu"), torch.clone, max_bytes_ahead)
    offloader._copy_stream = CopyStream(torch.device("cpu"), device)
    fetches = [offloader.offload(QuantizedWeight.quantize(torch.zeros(16), "none")) for _ in range(6)]
    bytes_in_flight = []
    for _ in range(4):
        for fetch in fetches:
            size = fetch().nbytes
            device.computing.given += 1  # an operation that uses the weight, whose memory is freed after it
            bytes_in_flight.append((device.computing.given - device.done) * size)
    assert bool(device.waits) == waits
    assert max(bytes_in_flight) <= max_in_flight + 2 * 64, bytes_in_flight
    assert offloader.prefetch_hits > 12


@pytest.mark.quick
@pytest.mark.parametrize(("options", "window"), [((), 2**28), (("--block_swap_window_mb", "700"), 700 * 2**20)])
def test_the_window_is_an_option_and_by_default_holds_the_largest_block(options, window, monkeypatch):
    config = parse_config(["--blocks_to_swap", "2", *options]).config
    for limit in (frozen_base.MIN_WINDOW_BYTES, 4):
        monkeypatch.setattr(frozen_base, "MIN_WINDOW_BYTES", limit)
        denoiser = build_unet().requires_grad_(False)
        offloaded = quantize_and_offload_base(denoiser, (HOST, HOST), config.model, config.train)
        default = max(limit, offloaded.largest_block)
        assert offloaded.window == (window if options else default) and 4 < offloaded.largest_block < offloaded.total


@pytest.mark.quick
@pytest.mark.parametrize("device", ["cuda", "xpu", "cpu", "mps"])
def test_host_memory_is_pinned_where_the_device_has_memory_of_its_own(device, monkeypatch):
    """Pinning needs a device, so calls of ``empty_like`` are recorded."""
    calls = []
    monkeypatch.setattr(
        torch, "empty_like", lambda tensor, device, pin_memory: calls.append((device, pin_memory)) or torch.empty(3)
    )
    fake = SimpleNamespace(is_meta=False, device=torch.device(device), detach=lambda: torch.ones(3))
    assert torch.equal(async_copy.copy_to_host(fake), torch.ones(3))
    assert calls == [("cpu", device in ("cuda", "xpu"))]


@pytest.mark.quick
def test_offloaded_weights_share_blocks_of_pinned_memory(monkeypatch):
    """torch rounds each pinned allocation up to a power of two."""
    monkeypatch.setattr(async_copy, "has_device_memory", lambda device: True)
    monkeypatch.setattr(async_copy.PinnedMemory, "BLOCK_BYTES", 4096)
    empty, allocated = torch.empty, []
    monkeypatch.setattr(
        torch, "empty", lambda size, dtype, pin_memory: allocated.append((size, pin_memory)) or empty(size, dtype=dtype)
    )
    monkeypatch.setattr(async_copy, "copy_to_host", torch.clone)  # of what is not contiguous
    sizes, memory = [(300,), (24, 25), (3, 5), (1,), (640,), (2000,)], async_copy.PinnedMemory()
    tensors = [torch.randn(size, dtype=dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)]
    tensors.append(torch.randn(4, 6).T)

    copies = [memory.copy_to_host(tensor) for tensor in tensors]

    assert all(map(torch.equal, copies, tensors))
    # A tensor larger than a block has one of the next power of two.
    assert allocated == [(4096, True)] * 3 + [(8192, True)] + [(4096, True)]
    assert all(copy.storage_offset() * copy.itemsize % 256 == 0 for copy in copies)
    blocks = {block.data_ptr() for block in memory._blocks}
    assert sum(copy.untyped_storage().data_ptr() in blocks for copy in copies) == len(tensors) - 1


def count_copies(name, *options):
    """Train with all blocks swapped; return the copies of each weight in the third step, when the order is known."""
    copies, weights, init = Counter(), [], WeightOffloader.__init__

    def init_and_count(offloader, device):
        init(offloader, device, lambda tensor: copies.update([id(tensor)]) or tensor.clone())
        weights.append(offloader.host_weights)

    WeightOffloader.__init__ = init_and_count
    flags = ["--pretrained_model_name_or_path", f"random:{name}:tiny", "--resolution", "64", "--network_dim", "2"]
    folder = Path(tempfile.mkdtemp())
    blocks = str(count_blocks(load_training_options(flags)[0]))
    with build_run(write_dataset([*flags, "--blocks_to_swap", blocks, *options], folder, 3), folder) as run:
        steps = run.loader.iter_steps(0)
        for step in range(3):
            copies.clear()
            run.state.step = step
            accumulate_gradients(run, next(steps))
    return sum(len(weight.tensors) for weight in weights[0]), dict(Counter(copies.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd1", "sdxl", "sd3", "flux", "z_image", "qwen_image"])
def test_swapped_weights_of_every_family_are_copied_at_most_twice_per_step(name):
    """Modulation layers, whose input needs no gradient, are copied once without checkpointing."""
    for options in ((), ("--gradient_checkpointing",)):
        ((count, by_copies),) = run_on_ranks(1, count_copies, name, *options)
        assert sum(by_copies.values()) == count > 8 and set(by_copies) <= {1, 2}, (options, by_copies)


def test_blocks_are_spread_evenly():
    assert (
        select_spread_indices(6, 0) == []
        and select_spread_indices(6, 6) == list(range(6))
        and select_spread_indices(6, 2) == [2, 5]
        and select_spread_indices(7, 3) == [2, 4, 6]
    )


def compute_gradients(folder: Path, cases):
    """Return loss and gradients of one step for each case, with no adapter weight at zero."""
    results = []
    for number, flags in enumerate(cases):
        (run_folder := folder / str(number)).mkdir()
        with build_run(
            write_dataset([*flags, "--resolution", "64", "--network_dim", "2"], run_folder, 3), run_folder
        ) as run:
            generator = torch.Generator().manual_seed(1)
            for parameter in run.parameters:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
            for _ in range(
                2 if "--activation_memory_budget" in flags else 1
            ):  # the first step selects the operations to save
                run.optimizer.zero_grad(set_to_none=True)
                loss = accumulate_gradients(run, next(run.loader.iter_steps(0)))
            assert all(parameter.grad.any() for parameter in run.parameters)
            results.append(
                torch.cat([loss.view(1), *(parameter.grad.flatten() for parameter in run.parameters)]).numpy()
            )
    return results


BUDGETS = [("--gradient_checkpointing", "--activation_memory_budget", share) for share in ("0.4", "1")]
EXACT_OPTIONS = [
    *BUDGETS,
    ("--gradient_checkpointing", "--gradient_checkpointing_every", "2"),
    ("--gradient_checkpointing", "--cpu_offload_checkpointing"),
    ("--blocks_to_swap", "2"),
    ("--blocks_to_swap", "2", *BUDGETS[0], "--cpu_offload_checkpointing"),
]
MAX_QUANTIZATION_ERRORS = {"int8": 0.05, "fp8": 0.2, "nf4": 0.5}


@pytest.mark.parametrize(
    ("model", "exact_options", "quantizations"),
    [
        ("random:sd1:tiny", EXACT_OPTIONS, MAX_QUANTIZATION_ERRORS),
        pytest.param("random:flux:tiny", EXACT_OPTIONS[-1:], ["int8"], marks=pytest.mark.slow),
    ],
)
def test_memory_options_do_not_change_gradients(model, exact_options, quantizations, tmp_path):
    quantization_options = [
        ("--quantize_base", quantization, *options)
        for quantization in quantizations
        for options in ((), ("--blocks_to_swap", "2", "--gradient_checkpointing"))
    ]
    cases = [
        ("--pretrained_model_name_or_path", model, *options) for options in ((), *exact_options, *quantization_options)
    ]
    plain, *gradients = map(torch.from_numpy, run_on_ranks(1, compute_gradients, tmp_path, cases)[0])
    for options, gradient in zip(exact_options, gradients, strict=False):
        torch.testing.assert_close(gradient, plain, msg=str(options))
        assert options not in BUDGETS or torch.equal(gradient, plain), "the budget only selects what is recomputed"
    for number, quantization in enumerate(quantizations):
        gradient, swapped = gradients[len(exact_options) + 2 * number :][:2]
        error = float((gradient[1:] - plain[1:]).norm() / plain[1:].norm())
        assert 1e-5 < error < MAX_QUANTIZATION_ERRORS[quantization], (quantization, error)
        torch.testing.assert_close(swapped, gradient)


def test_every_nth_block_is_recomputed_from_offloaded_inputs(monkeypatch):
    copied, copy_to_host = [], activation_offload.copy_to_host
    monkeypatch.setattr(
        activation_offload, "copy_to_host", lambda tensor: copied.append(tensor) or copy_to_host(tensor)
    )
    for interval, expected_calls, is_offloaded in ((1, [2, 2, 2, 2], False), (2, [2, 1, 2, 1], True)):
        blocks, calls = [nn.Linear(3, 3) for _ in range(4)], [0] * 4
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(
                lambda *_, index=number, calls=calls: calls.__setitem__(index, calls[index] + 1)
            )
        checkpointing = activation_checkpointing.BlockCheckpointing(interval, offload=is_offloaded)
        hidden = torch.ones(1, 3, requires_grad=True)
        for block in blocks:
            hidden = checkpointing(block, hidden)
        hidden.sum().backward()
        assert calls == expected_calls
    assert [tuple(tensor.shape) for tensor in copied if tensor.numel()] == [(1, 3)] * 2


@pytest.mark.slow
def test_quantized_offloaded_training_is_the_same_with_two_processes(even_dataset, tmp_path):
    flags = ("--quantize_base", "int8", "--blocks_to_swap", "1", "--optimizer_type", "SGD")
    one_rank, two_ranks = (
        train_adapter(tmp_path / str(ranks), ranks, 4 // ranks, 1, *flags, dataset=even_dataset) for ranks in (1, 2)
    )
    assert max_relative_difference(one_rank, two_ranks) < 1e-4


def find_problems(*flags):
    from library.training.run import run_training

    try:
        run_training(parse_config(flags).require_valid())
    except ConfigError as error:
        return format_lines(error.problems)
    return None


@pytest.mark.quick
def test_invalid_memory_options_are_reported_before_loading(even_dataset, tmp_path):
    flags = ("--dataset_config", str(even_dataset), "--output_dir", str(tmp_path))
    options = (
        "--gradient_checkpointing_every 2 --cpu_offload_checkpointing --activation_memory_budget 0.5 "
        "--blocks_to_swap 1 --torch_compile --profile_steps 1:9 --gradient_checkpointing"
    ).split()
    parsed = parse_config([*flags, *options])
    assert [line.partition(":")[0] for line in format_lines(parsed.problems)] == ["--blocks_to_swap", "--profile_steps"]
    assert {name for name, _ in format_unused(parsed.unused)} == {options[0], options[2]}, "the compiler has the budget"
    unused = format_unused(parse_config([*flags, *options[:-1]]).unused)
    assert {name for name, _ in unused} == {options[0], options[2]}, "nothing is checkpointed"
    unused = format_unused(parse_config([*flags, "--block_swap_window_mb", "9"]).unused)
    assert unused == (("--block_swap_window_mb", "blocks_to_swap is not set"),)
    (problems,) = run_on_ranks(1, find_problems, *flags, "--blocks_to_swap", "99", "--quiet")
    assert len(problems) == 1 and problems[0].startswith("--blocks_to_swap: 99; this model has ")
    assert parse_config([*flags, "--fp8_base"]).config.model.quantize_base == "fp8"
