"""Memory options do not change gradients, or only by the rounding of quantization."""

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from problem_lines import format_lines, format_unused
from rank_processes import run_on_ranks
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from training_runs import even_dataset, max_relative_difference, train_adapter

from benchmarks.memory import count_blocks
from benchmarks.synthetic_run import build_run, load_training_options, write_dataset
from library.config import parse_config
from library.errors import ConfigError
from library.estimate.meta_memory_meter import MemoryMeter
from library.parallel import activation_checkpointing, activation_offload, async_copy
from library.parallel.block_swap import BlockOffloader
from library.parallel.frozen_base import select_spread_indices
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


def count_copies(name, *options):
    """Train with all blocks swapped; return the number of blocks, and the copies in the third step, all and ahead."""
    offloaders, init = [], BlockOffloader.__init__
    BlockOffloader.__init__ = lambda offloader, *arguments: offloaders.append(offloader) or init(offloader, *arguments)
    flags = ["--pretrained_model_name_or_path", f"random:{name}:tiny", "--resolution", "64", "--network_dim", "2"]
    folder = Path(tempfile.mkdtemp())
    swap = ("--blocks_to_swap", str(count_blocks(load_training_options(flags)[0])), "--block_swap_ring_size", "2")
    with build_run(write_dataset([*flags, *swap, *options], folder, 3), folder) as run:
        steps, counts = run.loader.iter_steps(0), (0, 0)
        for step in range(3):
            counts = offloaders[0].copied_blocks, offloaders[0].copied_ahead
            run.state.step = step
            accumulate_gradients(run, next(steps))
    return len(offloaders[0].blocks), offloaders[0].copied_blocks - counts[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd1", "sdxl", "sd3", "flux", "z_image", "qwen_image"])
def test_swapped_blocks_of_every_family_are_copied_at_most_twice_per_step(name):
    for options in ((), ("--gradient_checkpointing",)):
        ((blocks, copies),) = run_on_ranks(1, count_copies, name, *options)
        assert copies == 2 * max(0, blocks - 2), options


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
    unused = format_unused(parse_config([*flags, "--block_swap_ring_size", "3"]).unused)
    assert unused == (("--block_swap_ring_size", "blocks_to_swap is not set"),)
    (problems,) = run_on_ranks(1, find_problems, *flags, "--blocks_to_swap", "99", "--quiet")
    assert len(problems) == 1 and problems[0].startswith("--blocks_to_swap: 99; this model has ")
    assert parse_config([*flags, "--fp8_base"]).config.model.quantize_base == "fp8"
