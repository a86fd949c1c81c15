"""Gated activations that compute again in backward: equal to those of diffusers to the bit, with less memory."""

import copy
import importlib

import pytest
import torch
from diffusers.models.activations import GEGLU
from diffusers.models.attention import FeedForward
from torch import nn

from library.adapters.injection import inject_into_model, iter_adapter_parameters
from library.adapters.lora_dropout import LoraDropout
from library.adapters.precision import leave_input_casts_to_autocast
from library.config.schema import AdapterConfig
from library.models.recomputed_activations import FEED_FORWARDS, HALVES, recompute_activations
from library.parallel.fuse_lora import fuse_lora_layers


def build_module(name, dtype):
    file, _, kind = name.partition(".")
    package = "diffusers.models" if file == "activations" else "diffusers.models.transformers"
    module = getattr(importlib.import_module(f"{package}.{file}"), kind)
    torch.manual_seed(0)
    return (module() if kind in ("Flux2SwiGLU", "Flux3SwiGLU") else module(16, 24)).to(dtype)


def compute(module, states, dtype):
    """Output, gradients, and the bytes that are saved for backward."""
    states, saved = states.clone().requires_grad_(), {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = module(states)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype))
    return [output.detach(), states.grad, *(each.grad for each in module.parameters())], sum(saved.values())


@pytest.mark.parametrize("name", [*HALVES, *FEED_FORWARDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_equal_to_the_bit_and_less_is_saved(name, dtype):
    plain = build_module(name, dtype)
    recomputed = nn.Sequential(copy.deepcopy(plain))
    assert recompute_activations(recomputed) == 1
    states = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    (expected, before), (actual, after) = (compute(module, states, dtype) for module in (plain, recomputed))
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))
    assert after < before


def test_other_activations_stay():
    class Other(GEGLU):
        def forward(self, states):
            return 2 * super().forward(states)

    model = nn.Sequential(Other(4, 4), nn.GELU())
    assert recompute_activations(model) == 0
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("activation", ["geglu", "gelu-approximate", "linear-silu", "swiglu"])
@pytest.mark.parametrize("drops", [False, True])
def test_a_lora_layer_does_not_keep_the_activation_that_it_reads(activation, drops):
    results = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = FeedForward(16, mult=2, activation_fn=activation).to(torch.bfloat16).train()
        inject_into_model(model, AdapterConfig(network_dim=4), ("net.0.proj", "net.2"), seed=3)
        for name, parameter in iter_adapter_parameters(model):
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(5))
        leave_input_casts_to_autocast(model)
        assert fuse_lora_layers(model, torch.bfloat16) == 2
        if drops:
            dropout = LoraDropout(0.3, 0.0, 0.0)
            dropout.attach(layer.lora_A["default"] for layer in (model.net[0].proj, model.net[2]))
            dropout.sample_keys = torch.tensor([5, 9, 11])
        assert not recomputes or recompute_activations(model) == 1
        states = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
        results.append(compute(model, states, torch.bfloat16))
    (expected, before), (actual, after) = results
    trained = [each is not None for each in expected]
    assert sum(trained) == 2 + 4 and trained == [each is not None for each in actual]
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True) if pair[0] is not None)
    size = 3 * 20 * 32 * 2
    assert before - after >= size, "the output of the activation"
