"""Fused LoRA layers: equal to peft in float32, as exact in half precision, and peft's own wherever they do not apply."""

import copy

import pytest
import torch
from swapped_blocks import swap_blocks
from torch import nn
from torch.utils.checkpoint import checkpoint

from library.adapters import injection, precision
from library.adapters.lora_dropout import LoraDropout
from library.config.schema import AdapterConfig
from library.parallel.fuse_lora import fuse_lora_layers
from library.parallel.lora_linear import FusedLoraForward
from library.parallel.quantize import QuantizedWeight, convert_frozen_layer

INPUTS, OUTPUTS, TOKENS = 48, 40, 96
QUANT_TYPES = ("none", "int8", "fp8", "nf4")


class Layers(nn.Module):
    """Two layers one after the other, so that the first has a gradient for its input to pass on."""

    def __init__(self, bias=True):
        super().__init__()
        self.to_q = nn.Linear(INPUTS, OUTPUTS, bias=bias)
        self.to_out = nn.Linear(OUTPUTS, INPUTS, bias=bias)

    def forward(self, states):
        return self.to_out(torch.tanh(self.to_q(states)))


def build_layers(*, dtype=torch.bfloat16, rank=6, alpha=2.5, bias=True):
    torch.manual_seed(0)
    model = Layers(bias).to(dtype)
    config = AdapterConfig(network_dim=rank, network_alpha=alpha)
    injection.inject_into_model(model, config, ("to_q", "to_out"), seed=3)
    with torch.no_grad():
        for name, parameter in injection.iter_adapter_parameters(model):
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    precision.leave_input_casts_to_autocast(model)
    return model.train()


def build_input(dtype=torch.bfloat16, seed=1):
    states = torch.randn(2, TOKENS, INPUTS, generator=torch.Generator().manual_seed(seed))
    return states.to(dtype).requires_grad_()


def compute(model, states, *, autocast=torch.bfloat16, run=None):
    """Output, gradient of the input and gradients of the adapter."""
    states = states.detach().clone().requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        output = (run or model)(states)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype))
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"output": output.detach(), "input": states.grad, **gradients}


def measure_errors(results, exact):
    return {
        name: float((results[name].double() - value).norm() / value.norm().clamp_min(1e-30))
        for name, value in exact.items()
    }


def compute_exactly(model, states):
    exact = copy.deepcopy(model)
    for layer in (exact.to_q, exact.to_out):
        layer.__dict__.pop("forward", None)
        layer.cast_input_dtype_enabled = True
    return compute(exact.double(), states.double(), autocast=None)


@pytest.mark.parametrize("bias", [True, False])
def test_in_float32_everything_is_equal_to_peft_to_the_bit(bias):
    plain, fused = build_layers(dtype=torch.float32, bias=bias), build_layers(dtype=torch.float32, bias=bias)
    assert fuse_lora_layers(fused, torch.bfloat16) == 2
    expected = compute(plain, build_input(torch.float32), autocast=None)
    actual = compute(fused, build_input(torch.float32), autocast=None)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("rank", "alpha"), [(6, 2.5), (8, 8.0), (4, 1.0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32])
def test_in_half_precision_outputs_and_gradients_are_as_exact_as_those_of_peft(rank, alpha, bias, input_dtype):
    plain, fused = (build_layers(rank=rank, alpha=alpha, bias=bias) for _ in range(2))
    fuse_lora_layers(fused, torch.bfloat16)
    errors = {"peft": [], "fused": []}
    for seed in range(8):
        states = build_input(input_dtype, seed)
        exact = compute_exactly(plain, states)
        results = {"peft": compute(plain, states), "fused": compute(fused, states)}
        assert not torch.equal(results["peft"]["output"], results["fused"]["output"]), "the fused layers have run"
        dtypes = [{key: value.dtype for key, value in result.items()} for result in results.values()]
        assert dtypes[0] == dtypes[1]
        for name, result in results.items():
            errors[name].append(measure_errors(result, exact))
    for name in exact:
        before, after = (sum(each[name] for each in errors[kind]) for kind in ("peft", "fused"))
        assert after <= 1.05 * before, (name, before, after)


def test_gradients_accumulate_over_micro_batches():
    model = build_layers()
    fuse_lora_layers(model, torch.bfloat16)
    once = compute(model, build_input())
    with torch.autocast("cpu", torch.bfloat16):
        output = model(build_input())
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, 2 * once[name])


def test_checkpointing_changes_no_bit():
    model = build_layers()
    fuse_lora_layers(model, torch.bfloat16)
    expected = compute(model, build_input())
    actual = compute(model, build_input(), run=lambda states: checkpoint(model, states, use_reentrant=False))
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize("rates", [(0.3, 0.0, 0.0), (0.2, 0.25, 0.3)])
def test_dropout_drops_what_it_drops_in_peft(rates):
    plain, fused = build_layers(), build_layers()
    fuse_lora_layers(fused, torch.bfloat16)
    results = []
    for model in (plain, fused):
        dropout = LoraDropout(*rates)
        dropout.attach(layer.lora_A["default"] for layer in (model.to_q, model.to_out))
        dropout.sample_keys = torch.tensor([5, 9])
        results.append(compute(model, build_input()))
    expected, actual = results
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].float(), value.float(), rtol=0.05, atol=0.02 * float(value.abs().max()))
    without = compute(build_layers(), build_input())
    assert float((without["output"] - expected["output"]).abs().max()) > 0.01, "something was dropped"


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("is_swapped", [True, False])
def test_a_quantized_or_swapped_base_is_fetched_in_forward_and_in_backward(quant_type, is_swapped):
    plain, fused = build_layers(), build_layers()
    offloader = None
    for model in (plain, fused):
        layers = (model.to_q.base_layer, model.to_out.base_layer)
        if is_swapped:
            offloader = swap_blocks([[layer] for layer in layers], quant_type, 1)
            continue
        for layer in layers:
            convert_frozen_layer(layer, QuantizedWeight.quantize(layer.weight, quant_type))
    assert fuse_lora_layers(fused, torch.bfloat16) == 2
    expected, actual = (compute(model, build_input()) for model in (plain, fused))
    assert not torch.equal(actual["output"], expected["output"])
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].float(), value.float(), rtol=0.05, atol=0.02 * float(value.abs().max()))
    for _ in range(3 if is_swapped else 0):
        compute(fused, build_input())
    assert not is_swapped or offloader.copied_blocks > 0


def test_names_weights_and_state_dict_are_those_of_peft():
    plain, fused = build_layers(), build_layers()
    fuse_lora_layers(fused, torch.bfloat16)
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [type(each) for each in fused.modules()] == [type(each) for each in plain.modules()]
    expected, actual = (injection.get_adapter_state_dict(model) for model in (plain, fused))
    assert expected.keys() == actual.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_model_computes_with_weights_that_were_changed_behind_autograds_back():
    model, other = build_layers(), build_layers()
    for each in (model, other):
        fuse_lora_layers(each, torch.bfloat16)
    compute(model, build_input())
    for each in (model, other):
        for _, parameter in injection.iter_adapter_parameters(each):
            parameter.data.mul_(1.5)  # as some optimizers do, unseen by the version of the parameter
    expected, actual = compute(other, build_input()), compute(model, build_input())
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_a_layer_that_is_called_by_itself_computes_with_the_latest_weights():
    model, other = build_layers(), build_layers()
    for each in (model, other):
        fuse_lora_layers(each, torch.bfloat16)
    compute(model, build_input(), run=model.to_q)
    for each in (model, other):
        with torch.no_grad():
            each.to_q.lora_B["default"].weight.mul_(2)
    expected, actual = (compute(each, build_input(), run=each.to_q)["output"] for each in (other, model))
    assert torch.equal(actual, expected)


def add_base_hook(model):
    model.to_q.base_layer.register_forward_hook(lambda module, inputs, output: output + 1)


def replace_forward(model):
    down = model.to_q.lora_A["default"]
    forward = down.forward
    down.forward = lambda states: forward(states) * 2


def add_up_hook(model):
    model.to_q.lora_B["default"].register_forward_hook(lambda module, inputs, output: output * 2)


def disable(model):
    model.to_q.enable_adapters(False)


def merge(model):
    model.to_q.merge()


@pytest.mark.parametrize("change", [add_base_hook, replace_forward, add_up_hook, disable, merge])
def test_layers_that_need_more_are_left_to_peft(change):
    plain, fused = build_layers(), build_layers()
    fuse_lora_layers(fused, torch.bfloat16)
    for model in (plain, fused):
        change(model)
    expected, actual = (compute(model, build_input(), run=model.to_q)["output"] for model in (plain, fused))
    assert torch.equal(actual, expected)


def test_dora_is_left_to_peft():
    model = Layers()
    config = AdapterConfig(network_dim=4, network_args=("use_dora=True",))
    injection.inject_into_model(model, config, ("to_q", "to_out"), seed=3)
    assert fuse_lora_layers(model, torch.bfloat16) == 0
    assert not any(isinstance(vars(each).get("forward"), FusedLoraForward) for each in model.modules())


def test_an_adapter_in_half_precision_gets_gradients_in_half_precision():
    plain, fused = build_layers(), build_layers()
    for model in (plain, fused):
        precision.cast_trainable_parameters(model, torch.bfloat16)
    fuse_lora_layers(fused, torch.bfloat16)
    expected, actual = (compute(model, build_input()) for model in (plain, fused))
    assert {name: value.dtype for name, value in actual.items()} == {k: v.dtype for k, v in expected.items()}
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].float(), value.float(), rtol=0.05, atol=0.02 * float(value.abs().max()))
