"""Gated activations that compute again in backward: equal to those of diffusers to the bit, with less memory."""

import copy

import pytest
import torch
from diffusers.models.activations import GEGLU, SwiGLU
from diffusers.models.transformers.transformer_flux2 import Flux2SwiGLU
from diffusers.models.transformers.transformer_z_image import FeedForward
from torch import nn

from library.models.gated_activations import recompute_gated_activations

MODULES = {
    "GEGLU": lambda: GEGLU(16, 24),
    "SwiGLU": lambda: SwiGLU(16, 24, bias=False),
    "Flux2SwiGLU": Flux2SwiGLU,
    "Z-Image": lambda: FeedForward(16, 24),
}


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


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_equal_to_the_bit_and_less_is_saved(name, dtype):
    torch.manual_seed(0)
    plain = MODULES[name]().to(dtype)
    recomputed = nn.Sequential(copy.deepcopy(plain))
    assert recompute_gated_activations(recomputed) == 1
    states = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    (expected, before), (actual, after) = (compute(module, states, dtype) for module in (plain, recomputed))
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))
    assert after < before


def test_other_activations_stay():
    class Other(GEGLU):
        def forward(self, states):
            return 2 * super().forward(states)

    model = nn.Sequential(Other(4, 4), nn.GELU())
    assert recompute_gated_activations(model) == 0
    assert "forward" not in vars(model[0])
