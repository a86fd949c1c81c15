"""Frozen layers that multiply in fp8 and int8: their error, what they depend on, and where they are refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from problem_lines import format_lines, format_unused
from small_unet import build_unet
from swapped_blocks import CPU
from torch import nn

from library.config import parse_config
from library.config.schema import ModelConfig
from library.config.schema_distributed import ParallelConfig
from library.parallel import quantized_matmul
from library.parallel.frozen_base import quantize_and_offload_base
from library.parallel.quantize import FP8_DTYPE, FrozenLinear, QuantizedWeight, convert_frozen_layer
from library.parallel.quantized_matmul import (
    QuantizedMatmulLinear,
    can_multiply_quantized,
    multiply_by_columns,
    multiply_by_rows,
    quantize_rows,
)
from library.training.validate_model import validate_quantized_matmul

TYPES = ["fp8", "int8"]
INPUTS, OUTPUTS = 64, 96
MAX_ERRORS = {"fp8": 0.045, "int8": 0.02}
"""Of outputs and gradients with normal values: two roundings of 2.7 % for fp8 and of 0.9 % for int8."""


def build_layer(quant_type, frozen_class=QuantizedMatmulLinear):
    torch.manual_seed(0)
    layer = nn.Linear(INPUTS, OUTPUTS).requires_grad_(False)
    weight = layer.weight.clone()
    convert_frozen_layer(layer, QuantizedWeight.quantize(layer.weight, quant_type), frozen_class)
    return layer, weight


def compute(layer, states):
    states = states.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(states)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    output.backward(gradient)
    return output, states.grad, gradient


def compute_error(actual, expected):
    return float((actual.detach().float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("quant_type", TYPES)
def test_outputs_and_gradients_have_the_error_of_two_roundings(quant_type):
    layer, weight = build_layer(quant_type)
    states = torch.randn(2, 50, INPUTS)
    output, grad, gradient = compute(layer, states)
    errors = (
        compute_error(output, F.linear(states, weight, layer.bias)),
        compute_error(grad, gradient.float() @ weight),
    )
    dequantized = compute(build_layer(quant_type, FrozenLinear)[0], states)
    assert all(1e-3 < error < MAX_ERRORS[quant_type] for error in errors), errors
    assert output.dtype == torch.bfloat16 and output.shape == (2, 50, OUTPUTS) and grad.shape == states.shape
    assert not torch.equal(output, dequantized[0]) and not torch.equal(grad, dequantized[1])


@pytest.mark.parametrize("quant_type", TYPES)
def test_products_are_those_of_the_quantized_values_to_the_rounding_of_bf16(quant_type):
    """The kernels of the CPU against products of the same numbers in float64."""
    weight = QuantizedWeight.quantize(torch.randn(OUTPUTS, INPUTS), quant_type)
    values, weight_scale = (tensor.double() for tensor in weight.tensors)
    states, gradient = torch.randn(40, INPUTS).bfloat16(), torch.randn(40, OUTPUTS).bfloat16()
    bias = torch.randn(OUTPUTS).bfloat16()
    rows, scale = (tensor.double() for tensor in quantize_rows(states, None, quant_type))
    expected = (rows @ values.t()) * scale * weight_scale.t() + bias.double()
    torch.testing.assert_close(multiply_by_rows(states, weight, bias).double(), expected, rtol=2**-7, atol=1e-2)
    rows, scale = (tensor.double() for tensor in quantize_rows(gradient, weight.tensors[1].t(), quant_type))
    expected = (rows @ values) * scale
    torch.testing.assert_close(multiply_by_columns(gradient, weight).double(), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("quant_type", TYPES)
def test_a_token_has_the_same_result_in_every_batch(quant_type):
    layer, _ = build_layer(quant_type)
    states = torch.randn(4, 20, INPUTS)
    states[1] *= 100  # its scale is no other image's
    whole = compute(layer, states)[0]
    for index in range(4):
        assert torch.equal(compute(layer, states[index : index + 1])[0], whole[index : index + 1])


def test_rows_are_scaled_to_their_largest_value_and_zeros_stay():
    states = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0] * 4, [3e4, 1.0, -3e4, 0.0]]).bfloat16()
    for quant_type, dtype, largest in (("fp8", FP8_DTYPE, 448.0), ("int8", torch.int8, 127.0)):
        values, scale = quantize_rows(states, None, quant_type)
        assert values.dtype == dtype and not values[1].float().any()
        assert values.float().abs().amax(1).tolist() == [largest, 0.0, largest]
        torch.testing.assert_close(values.float() * scale, states.float(), rtol=0.07, atol=3e4 / 127)
        values, scale = quantize_rows(states, torch.tensor([[2.0, 0.0, 1.0, 1.0]]), quant_type)
        torch.testing.assert_close(
            (values.float() * scale)[0], torch.tensor([2.0, 0.0, 0.5, 0.0]), rtol=0.05, atol=0.01
        )


@pytest.mark.parametrize("quant_type", TYPES)
def test_values_are_multiplied_by_the_scale_that_they_were_divided_by(quant_type):
    """A scale that is rounded in between would make all of them larger or smaller."""
    values = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)).clamp(-3, 3).bfloat16()
    for number in range(4):
        values[:, 0] = 3.5 + number / 64
        quantized, scale = quantize_rows(values, None, quant_type)
        product = (quantized.double() * scale.double() * values.double()).sum() / values.double().square().sum()
        assert abs(float(product) - 1) < 1e-3


@pytest.mark.parametrize("quant_type", TYPES)
def test_modulation_layers_and_other_dtypes_dequantize_their_weight(quant_type):
    layer, dequantizing = (build_layer(quant_type, each)[0] for each in (QuantizedMatmulLinear, FrozenLinear))
    rows = torch.randn(3, INPUTS)
    assert torch.equal(compute(layer, rows)[0], compute(dequantizing, rows)[0])
    tokens = torch.randn(2, 40, INPUTS)
    assert torch.equal(layer(tokens), dequantizing(tokens)), "float32, without autocast"


def test_layers_of_other_classes_formats_and_sides_are_not_converted():
    def can_multiply(layer, kind):
        return can_multiply_quantized(layer, QuantizedWeight.quantize(layer.weight, kind))

    assert can_multiply(nn.Linear(32, 64), "fp8")
    assert not can_multiply(nn.Linear(32, 64), "nf4")
    assert not can_multiply(nn.Linear(33, 64), "int8")
    assert not can_multiply(nn.Conv2d(32, 64, 1), "int8")
    weight = QuantizedWeight.quantize(torch.randn(64, 32), "fp8")
    in_blocks = replace(weight, tensors=(weight.tensors[0], weight.tensors[1].expand(64, 2)))
    e5m2 = replace(weight, tensors=(weight.tensors[0].to(torch.float8_e5m2), weight.tensors[1]))
    assert not any(can_multiply_quantized(nn.Linear(32, 64), each) for each in (in_blocks, e5m2))


@pytest.mark.parametrize("swap", [(), ("--blocks_to_swap", "2", "--block_swap_ring_size", "1")])
def test_the_layers_of_a_model_multiply_in_the_format_of_their_weight(swap):
    flags = ["--quantize_base", "int8", "--quantized_matmul", *swap]
    config = parse_config(flags).config
    model = build_unet().requires_grad_(False)
    quantize_and_offload_base(model, (CPU, CPU), config.model, config.train)
    classes = {type(layer) for layer in model.modules()}
    assert QuantizedMatmulLinear in classes
    model = build_unet().requires_grad_(False)
    quantize_and_offload_base(model, (CPU, CPU), parse_config(flags[:2]).config.model, config.train)
    assert QuantizedMatmulLinear not in {type(layer) for layer in model.modules()}


def test_it_is_refused_where_it_cannot_work_and_named_where_it_has_no_effect(monkeypatch):
    model = ModelConfig(quantize_base="fp8", quantized_matmul=True)
    assert not [*validate_quantized_matmul(model, ParallelConfig(), "bf16", CPU)]
    assert not [*validate_quantized_matmul(model, ParallelConfig(), "", None)], "a plan knows no device"
    lines = format_lines([*validate_quantized_matmul(model, ParallelConfig(tp_size=2), "fp16", torch.device("mps"))])
    assert [line.split(";")[0] for line in lines] == [
        "--quantized_matmul: needs mixed_precision bf16, not fp16",
        "--quantized_matmul: tensor parallelism splits the rows that have one scale",
        "--quantized_matmul: there is no kernel for mps",
    ]
    unused = format_unused(parse_config(["--quantized_matmul"]).unused)
    assert unused == (("--quantized_matmul", "quantize_base is neither fp8 nor int8"),)


def test_a_gpu_without_the_kernel_is_named_with_what_it_lacks(monkeypatch):
    def fail(*_):
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")

    build = torch.ones
    monkeypatch.setattr(quantized_matmul, "has_triton", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *size, device, dtype=None: build(*size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(quantized_matmul, "_try_kernel", fail)
    obstacle = quantized_matmul.find_matmul_obstacle("fp8", torch.device("cuda"))
    assert obstacle.startswith("NVIDIA A100 has no fp8 matmul, which needs Ada, Hopper or later (torch._scaled_mm")
    monkeypatch.setattr(quantized_matmul, "has_triton", lambda: False)
    assert "needs Triton" in quantized_matmul.find_matmul_obstacle("int8", torch.device("cuda"))
