"""Weights of experts that are parameters of three axes are quantized and swapped as those of linear layers are."""

import copy
from types import SimpleNamespace

import pytest
import torch
from family_cases import build_case
from swapped_blocks import CPU
from torch import nn

from library.config import parse_config
from library.estimate.base_storage import BlockWeights
from library.models.detect import DetectedModel
from library.parallel.frozen_base import quantize_and_offload_base
from library.parallel.quantize import ExpertMatrices, FrozenExpertMatrices, QuantizedWeight, split_expert_weights
from library.training.resume import describe_base, find_changes

__all__ = ["build_case"]  # a fixture


def count_bytes(denoiser):
    return sum(parameter.nbytes for parameter in denoiser.parameters())


def predict_with_gradient(family, tiny, denoiser):
    noisy = tiny.batch.latents.clone().requires_grad_()
    predicted = family.predict(tiny.pipe, denoiser, noisy, torch.full((len(noisy),), 500.0), tiny.batch)
    predicted.square().sum().backward()
    return predicted.detach(), noisy.grad


def build_stored(pipe, *words):
    denoiser, config = copy.deepcopy(pipe.transformer).requires_grad_(False), parse_config([*words]).config
    offloader = quantize_and_offload_base(denoiser, (CPU, CPU), config.model, config.train)
    return denoiser, offloader


@pytest.mark.slow
@pytest.mark.parametrize("is_swapped", [False, True])
def test_expert_weights_are_swapped_and_quantized_with_the_blocks_that_they_are_of(is_swapped, build_case):
    family, tiny = build_case("nucleus_image")
    plain = copy.deepcopy(tiny.pipe.transformer).requires_grad_(False)
    expected = predict_with_gradient(family, tiny, plain)
    experts = sum(
        weight.nbytes for module in plain.modules() for weight in module.parameters(False) if weight.ndim == 3
    )
    assert experts > 0.1 * count_bytes(plain)
    words, estimates = ["--blocks_to_swap", "2"] if is_swapped else [], BlockWeights(copy.deepcopy(plain).to("meta"))

    if is_swapped:
        swapped, offloader = build_stored(tiny.pipe, *words)
        assert all(map(torch.equal, predict_with_gradient(family, tiny, swapped), expected))
        assert offloader.sizes.total > experts / len(plain.transformer_blocks)
        assert count_bytes(plain) - count_bytes(swapped) == estimates.store("none", 2).saved_bytes

    rounded, _ = build_stored(tiny.pipe, "--quantize_base", "int8", *words)
    for ours, theirs in zip(predict_with_gradient(family, tiny, rounded), expected, strict=True):
        assert 0 < (ours - theirs).norm() < 0.1 * theirs.norm()
    assert (
        count_bytes(plain) - count_bytes(rounded) == estimates.store("int8", 2 * is_swapped).saved_bytes > experts / 2
    )
    layers = [module for module in rounded.modules() if isinstance(module, ExpertMatrices)]
    assert layers and all(isinstance(layer, FrozenExpertMatrices) for layer in layers)
    assert {layer.fetch_weight().quant_type for layer in layers} == {"int8"}


def test_each_row_of_each_expert_has_a_scale_of_its_own():
    module = nn.Module()
    module.expert_weights = ("matrices",)
    weight = torch.randn(3, 8, 16) * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
    module.matrices = nn.Parameter(weight, requires_grad=False)
    split_expert_weights(module)
    assert torch.equal(module.matrices.split(module.matrices.weight), weight)
    rounded = QuantizedWeight.quantize(module.matrices.weight, "int8").dequantize(torch.float32).view_as(weight)
    assert all((rounded[i] - weight[i]).norm() < 0.02 * weight[i].norm() for i in range(3))
    module = nn.Module()
    module.expert_weights, module.matrices = ("matrices",), nn.Parameter(weight)
    split_expert_weights(module)
    assert isinstance(module.matrices, nn.Parameter), "what is trained stays a parameter of its own name"


def test_a_checkpoint_whose_experts_were_not_rounded_is_not_resumed_without_a_word():
    """Versions that rounded linear layers alone recorded the same ``quantize_base``."""

    def find(saved, family="nucleus_image", *words):
        config, strategy = parse_config([*words]).config, SimpleNamespace(nf4_kernel=None, can_quantize_base=True)
        current = {"settings": {}, **describe_base(config, strategy, DetectedModel(family, "", 16))}
        return current, [str(change) for change in find_changes(saved, current) if change.changes_result]

    old = {"settings": {"quantize_base": "int8"}}
    current, (line,) = find(old, "nucleus_image", "--quantize_base", "int8")
    assert "matrices of experts: none -> int8" in line
    recorded = {**old, **current, "settings": old["settings"]}
    assert find(recorded, "nucleus_image", "--quantize_base", "int8")[1] == []
    assert find(old, "flux", "--quantize_base", "int8")[1] == find({"settings": {}})[1] == []
