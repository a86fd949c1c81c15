"""LoRA layers that read one input: as exact as peft's, whichever of them are called, and with which input."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from library.adapters import injection, precision
from library.adapters.lora_dropout import LoraDropout
from library.config.schema import AdapterConfig
from library.parallel import quantized_matmul
from library.parallel.fuse_lora import fuse_lora_layers
from library.parallel.lora_linear import FusedLoraForward
from library.parallel.quantize import QuantizedWeight, convert_frozen_layer
from library.parallel.quantized_matmul import QUANT_TYPES, QuantizedMatmulLinear

WIDTH, KEY_WIDTH, TOKENS = 48, 32, 96
NAMES = ("to_q", "to_k", "to_v")


class Attention(nn.Module):
    def __init__(self, is_cross=False):
        super().__init__()
        self.is_cross_attention = is_cross
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.to_k, self.to_v = (nn.Linear(WIDTH, KEY_WIDTH, bias=False) for _ in range(2))
        self.used = NAMES

    def forward(self, states, context=None):
        context = states if context is None else context
        outputs = [getattr(self, name)(states if name == "to_q" else context) for name in NAMES]
        return torch.cat([each for name, each in zip(NAMES, outputs, strict=True) if name in self.used], dim=-1)


def build_attention(
    kind="peft", *, is_cross=False, shares_down=False, dtype=torch.bfloat16, alpha=2.5, quant_type=None
):
    torch.manual_seed(0)
    model = Attention(is_cross).to(dtype).requires_grad_(False)
    injection.inject_into_model(model, AdapterConfig(network_dim=6, network_alpha=alpha), NAMES, seed=3)
    if shares_down:
        for name in NAMES[1:]:
            getattr(model, name).lora_A = model.to_q.lora_A
    with torch.no_grad():
        for name, parameter in injection.iter_adapter_parameters(model):
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    precision.leave_input_casts_to_autocast(model)
    if quant_type is not None:
        for name in NAMES:
            base = getattr(model, name).base_layer
            convert_frozen_layer(base, QuantizedWeight.quantize(base.weight, quant_type), QuantizedMatmulLinear)
    if kind != "peft":
        assert fuse_lora_layers(model, torch.bfloat16) == 3
    if kind == "single":
        for name in NAMES:
            get_forward(model, name).group = None
    return model.train()


def get_forward(model, name):
    forward = vars(getattr(model, name))["forward"]
    assert isinstance(forward, FusedLoraForward)
    return forward


def build_input(seed=1, dtype=torch.bfloat16):
    states = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return states.to(dtype)


def compute(model, *inputs, autocast=torch.bfloat16, run=None):
    """Output, gradients of the inputs and of the adapter."""
    inputs = [each.detach().clone().requires_grad_() for each in inputs]
    model.zero_grad()
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        output = (run or model)(*inputs)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype))
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"output": output.detach(), **{str(i): each.grad for i, each in enumerate(inputs)}, **gradients}


def compute_exactly(model, *inputs):
    exact = copy.deepcopy(model)
    for name in NAMES:
        getattr(exact, name).cast_input_dtype_enabled = True
    return compute(exact.double(), *(each.double() for each in inputs), autocast=None)


def measure_errors(results, exact):
    return {name: float((results[name].double() - value).norm() / value.norm()) for name, value in exact.items()}


def count_functions(output, name):
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return sum(node.name() == name for node in seen)


@pytest.mark.parametrize("shares_down", [False, True])
@pytest.mark.parametrize("alpha", [2.5, 6.0])
@pytest.mark.parametrize("is_cross", [False, True])
def test_outputs_and_gradients_are_as_exact_as_those_of_peft(shares_down, alpha, is_cross):
    options = {"shares_down": shares_down, "alpha": alpha, "is_cross": is_cross}
    plain, fused = build_attention(**options), build_attention("fused", **options)
    errors = {"peft": [], "fused": []}
    for seed in range(8):
        inputs = [build_input(seed), build_input(seed + 50)][: 1 + is_cross]
        exact = compute_exactly(plain, *inputs)
        for name, model in (("peft", plain), ("fused", fused)):
            errors[name].append(measure_errors(compute(model, *inputs), exact))
    for name in exact:
        before, after = (sum(each[name] for each in errors[kind]) for kind in ("peft", "fused"))
        assert after <= 1.05 * before, (name, before, after)
    with torch.autocast("cpu", torch.bfloat16):
        output = fused(*inputs)
    assert count_functions(output, "_LoraProjectionsBackward") == 1
    assert count_functions(output, "_LoraLinearBackward") == is_cross


@pytest.mark.parametrize("kind", ["single", "fused"])
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_layers_that_multiply_quantized_round_as_in_peft(quant_type, kind, monkeypatch):
    """Both quantize inputs and gradients, which changes results by more than the order of additions does."""
    products = {"multiply_by_rows": 0, "multiply_by_columns": 0}

    def count(name, function):
        def multiply(*args):
            products[name] += 1
            return function(*args)

        return multiply

    for name in products:
        monkeypatch.setattr(quantized_matmul, name, count(name, getattr(quantized_matmul, name)))
    plain, fused = (build_attention(each, quant_type=quant_type) for each in ("peft", kind))
    errors, exact_model = {"peft": [], "fused": []}, build_attention()
    for seed in range(8):
        exact = compute_exactly(exact_model, build_input(seed))
        for name, model in (("peft", plain), ("fused", fused)):
            errors[name].append(measure_errors(compute(model, build_input(seed)), exact))
    for name in exact:
        before, after = (sum(each[name] for each in errors[kind]) for kind in ("peft", "fused"))
        assert after <= 1.05 * before, (name, before, after)
    assert products == dict.fromkeys(products, 8 * 2 * len(NAMES))
    with torch.autocast("cpu", torch.bfloat16):
        output = fused(build_input())
    assert count_functions(output, "_LoraProjectionsBackward") == (kind == "fused")


@pytest.mark.parametrize("shares_down", [False, True])
@pytest.mark.parametrize("used", [("to_q",), ("to_k", "to_v"), ("to_q", "to_v")])
def test_layers_whose_output_is_not_used_get_no_gradient(used, shares_down):
    plain, fused = (build_attention(kind, shares_down=shares_down) for kind in ("single", "fused"))
    plain.used = fused.used = used
    expected, actual = compute(plain, build_input()), compute(fused, build_input())
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].float(), value.float(), rtol=0.05, atol=0.02 * float(value.abs().max()))


def test_an_input_that_differs_between_the_layers_is_noticed():
    plain, fused = build_attention("single"), build_attention("fused")
    expected, actual = (compute(model, build_input(), build_input(7)) for model in (plain, fused))
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].float(), value.float(), rtol=0.05, atol=0.02 * float(value.abs().max()))


def test_an_input_that_was_changed_in_place_is_noticed():
    model, other = build_attention("fused"), build_attention("single")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = build_input()
        model.to_q(states)
        states.mul_(2)
        assert torch.equal(model.to_k(states), other.to_k(states))


def test_layers_that_are_not_called_keep_no_memory_after_the_next_forward():
    model = build_attention("fused")
    group = get_forward(model, "to_q").group
    with torch.autocast("cpu", torch.bfloat16):
        model.to_q(build_input())
        model(build_input())
    assert group.pending.discarded == 2
    assert group.pending.pop(get_forward(model, "to_k"), build_input()) is None


def test_checkpointing_changes_no_bit():
    model = build_attention("fused")
    expected = compute(model, build_input())
    actual = compute(model, build_input(), run=lambda states: checkpoint(model, states, use_reentrant=False))
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_dropout_is_applied_layer_by_layer():
    results = []
    for kind in ("single", "fused"):
        model, dropout = build_attention(kind), LoraDropout(0.3, 0.0, 0.0)
        dropout.attach(getattr(model, name).lora_A["default"] for name in NAMES)
        dropout.sample_keys = torch.tensor([5, 9])
        results.append(compute(model, build_input()))
    assert all(torch.equal(results[1][name], value) for name, value in results[0].items())


def test_each_step_computes_with_the_latest_weights():
    model, other = build_attention("fused"), build_attention("fused")
    compute(model, build_input())
    for each in (model, other):
        for _, parameter in injection.iter_adapter_parameters(each):
            parameter.data.mul_(1.5)
    expected, actual = compute(other, build_input()), compute(model, build_input())
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    for each in (model, other):
        for name in NAMES:
            down = getattr(each, name).lora_A["default"]
            down.weight = nn.Parameter(down.weight.detach() * 2)  # another tensor
    expected, actual = compute(other, build_input()), compute(model, build_input())
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
