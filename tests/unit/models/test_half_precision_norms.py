"""Norms that write half precision: as exact as autocast's float32 norms with a cast for each reader."""

import copy

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from library.estimate.meta_memory_meter import AutocastEmulation
from library.models.half_precision_norms import HalfPrecisionNorm, write_norms_in_half_precision

WIDTH = 32
NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH, eps=1e-5),
    "LayerNorm without weights": lambda: nn.LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False),
    "GroupNorm": lambda: nn.GroupNorm(4, WIDTH, eps=1e-6),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "RMSNorm of diffusers": lambda: RMSNorm(WIDTH, eps=1e-6),
    "RMSNorm of diffusers without weights": lambda: RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False),
    "RMSNorm of diffusers with a bias": lambda: RMSNorm(WIDTH, eps=1e-6, bias=True),
}
CASES = [(name, False) for name in NORMS] + [(name, True) for name in NORMS if name != "GroupNorm"]
"""Norms with and without modulation; no model modulates the output of a GroupNorm."""


class Readers(nn.Module):
    """A norm whose output three projections read, after the modulation of a transformer if it has one."""

    def __init__(self, norm, is_modulated):
        super().__init__()
        self.norm, self.is_modulated = norm, is_modulated
        self.scale = nn.Parameter(torch.randn(WIDTH) * 0.3)
        self.readers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, states):
        states = self.norm(states)
        if self.is_modulated:
            states = states * (1 + self.scale) + self.scale
        elif states.dim() == 4:
            states = torch.nn.functional.silu(states).flatten(2).mT
        return torch.stack([reader(states) for reader in self.readers])


def build_model(name, *, is_modulated=False, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = Readers(NORMS[name](), is_modulated)
    with torch.no_grad():
        for parameter in model.norm.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.to(dtype).requires_grad_(False)


def build_input(name, dtype, seed):
    shape = (2, WIDTH, 6, 6) if name == "GroupNorm" else (2, 40, WIDTH)
    states = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    return states.to(dtype)


def compute(model, states, dtype=torch.bfloat16):
    """Compute as under CUDA's autocast: a CPU's alone would leave norms in half precision."""
    states = states.clone().requires_grad_()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None), AutocastEmulation(dtype):
        output = model(states)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    (grad,) = torch.autograd.grad(output, states, weights.to(output.dtype))
    return output.detach(), grad


def measure_errors(results, exact):
    return [
        float((result.double() - value).norm() / value.norm()) for result, value in zip(results, exact, strict=True)
    ]


@pytest.mark.parametrize(("name", "is_modulated"), CASES)
@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32])
def test_outputs_and_gradients_are_about_as_exact_as_those_of_autocast(name, is_modulated, input_dtype):
    plain, half = (build_model(name, is_modulated=is_modulated) for _ in range(2))
    assert write_norms_in_half_precision(half, torch.bfloat16) == 1
    sums = torch.zeros(2, 2)
    for seed in range(6):
        states = build_input(name, input_dtype, seed)
        exact = compute(copy.deepcopy(plain).double(), states.double(), dtype=None)
        sums += torch.tensor([measure_errors(compute(model, states), exact) for model in (plain, half)])
    (output_before, grad_before), (output, grad) = (sums / 6).tolist()
    has_more_roundings = is_modulated or name == "GroupNorm"  # modulation and SiLU are in half precision as well
    assert output <= (1.4 if has_more_roundings else 1.02) * output_before
    assert grad <= 1.7 * grad_before  # gradients of the readers are added in half precision
    assert max(output, grad) < 6e-3


@pytest.mark.parametrize("name", NORMS)
def test_float32_is_left_alone(name):
    plain, half = (build_model(name, dtype=torch.float32) for _ in range(2))
    write_norms_in_half_precision(half, torch.bfloat16)
    states = build_input(name, torch.float32, 1)
    for expected, actual in zip(compute(plain, states, None), compute(half, states, None), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", NORMS)
def test_the_output_is_cast_for_no_reader(name):
    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten._to_copy.default
            return function(*args, **(kwargs or {}))

    counts = []
    for is_half in (False, True):
        model, states = build_model(name).to("meta"), build_input(name, torch.bfloat16, 1).to("meta")
        if is_half:
            write_norms_in_half_precision(model, torch.bfloat16)
        with Casts() as casts, AutocastEmulation(torch.bfloat16):
            model(states)
        counts.append(casts.count)
    assert counts[0] >= 1 and counts[1] == 0


def test_norms_that_are_trained_or_that_have_an_own_forward_stay():
    class Other(nn.LayerNorm):
        def forward(self, states):
            return 2 * super().forward(states)

    model = nn.ModuleDict({"trained": nn.LayerNorm(4), "other": Other(4).requires_grad_(False)})
    assert write_norms_in_half_precision(model, torch.bfloat16) == 0
    assert not any(isinstance(vars(each).get("forward"), HalfPrecisionNorm) for each in model.modules())
