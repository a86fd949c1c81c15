"""Frozen convolutions of few positions are matrix products: as exact as torch's, and they keep no input."""

import copy

import pytest
import torch
from torch import nn

from library.models import small_convolutions
from library.models.small_convolutions import multiply_small_convolutions

CHANNELS = 48, 40


@pytest.fixture(autouse=True)
def take_small_weights(monkeypatch):
    monkeypatch.setattr(small_convolutions, "MIN_WEIGHTS", 48 * 40 * 9)


def build_pair(**settings):
    torch.manual_seed(0)
    plain = nn.Conv2d(*CHANNELS, 3, **settings).requires_grad_(False)
    products = nn.Sequential(copy.deepcopy(plain))
    return plain, products, multiply_small_convolutions(products)


def build_states(*sides):
    return torch.randn(2, CHANNELS[0], *sides, generator=torch.Generator().manual_seed(1))


def compute(module, states):
    """Output, gradient of the input, and the shapes of what is saved for backward."""
    states, saved = states.clone().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (saved.append(each.shape), each)[1], lambda each: each):
        output = module(states)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
    (output * weights).sum().backward()
    return output.detach(), states.grad, saved


@pytest.mark.parametrize("settings", [{"padding": 1}, {"padding": 1, "stride": 2}, {"bias": False, "padding": (0, 1)}])
def test_results_are_as_exact_as_those_of_torch_and_no_input_is_kept(settings):
    plain, products, count = build_pair(**settings)
    assert count == 1
    states = build_states(4, 6)
    exact = compute(copy.deepcopy(plain).double(), states.double())
    ours, theirs = compute(products, states), compute(plain, states)
    for expected, ours_value, theirs_value in zip(exact[:2], ours[:2], theirs[:2], strict=True):
        errors = [float((value - expected).norm() / expected.norm()) for value in (ours_value, theirs_value)]
        assert ours_value.is_contiguous() and errors[0] < max(2 * errors[1], 3e-7)
    assert states.shape in theirs[2] and states.shape not in ours[2]


def test_other_convolutions_are_those_of_torch():
    plain, products, _ = build_pair(padding=1)
    assert build_states(16, 16).shape in compute(products, build_states(16, 16))[2], "many positions"
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain(build_states(4, 4)), products(build_states(4, 4)))
    _, gradient, _ = compute(products.requires_grad_(True), build_states(4, 4))
    expected = compute(plain.requires_grad_(True), build_states(4, 4))
    assert torch.equal(gradient, expected[1]) and torch.equal(products[0].weight.grad, plain.weight.grad)
    with torch.device("meta"):
        others = [
            nn.Conv2d(*CHANNELS, 3, dilation=2),
            nn.Conv2d(512, 512, 1),
            nn.Conv2d(16, 16, 3),
            nn.Conv1d(64, 64, 9),
        ]
        assert multiply_small_convolutions(nn.ModuleList(others)) == 0


def test_only_weights_beyond_the_caches_are_taken(monkeypatch):
    monkeypatch.undo()
    with torch.device("meta"):
        deep, middle = nn.Conv2d(1280, 1280, 3), nn.Conv2d(640, 640, 3)
    assert [multiply_small_convolutions(each) for each in (deep, middle)] == [1, 0]
