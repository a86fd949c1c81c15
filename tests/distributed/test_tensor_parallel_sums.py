"""The all-reduces of tensor parallelism: one per shared input and output, and none synchronizes with the host."""

import weakref
from dataclasses import replace

import pytest
import torch
from tiny_pipelines import TINY
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from library.adapters.injection import inject_into_model
from library.config.schema import AdapterConfig
from library.models.families import FAMILIES
from library.parallel.parallel_plan import build_tensor_parallel_plan
from library.parallel.tensor_parallel import TensorParallel

pytestmark = pytest.mark.quick


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, hidden):
        return self.to_out(self.to_q(hidden) * self.to_k(hidden) + self.to_v(hidden))


SHARDED_LAYERS = {
    name: ("rowwise" if name == "to_out" else "colwise", (4,)) for name in ("to_q", "to_k", "to_v", "to_out")
}


def test_layers_with_the_same_input_share_all_reduces():
    sums, model, inputs = [], Attention(), torch.ones(2, 4, requires_grad=True)
    TensorParallel(0, 2, lambda tensor: sums.append(tensor.clone())).shard_layers(model, SHARDED_LAYERS)
    with torch.no_grad():  # not shared with the forward that records gradients
        model.to_q(inputs)
    message = model(inputs)
    assert len(sums) == 1
    message.sum().backward()
    assert len(sums) == 2 and torch.equal(sums[1], inputs.grad)
    other = torch.zeros(2, 4)
    assert torch.equal(model(other), torch.zeros(2, 4)) and model(inputs).any()


def test_inputs_of_layers_are_released():
    model, inputs = Attention(), torch.ones(2, 4)
    TensorParallel(0, 2, lambda tensor: None).shard_layers(model, SHARDED_LAYERS)
    reference = weakref.ref(inputs)
    with torch.no_grad():
        model(inputs)
    del inputs
    assert reference() is None


class CrossDeviceDetector(TorchDispatchMode):
    """Fails for operations on tensors of two devices (except scalars), for which the host would wait."""

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        tensors = [each for each in tree_leaves((arguments, kwargs)) if isinstance(each, torch.Tensor) and each.dim()]
        assert len({each.device for each in tensors}) < 2, function
        return function(*arguments, **(kwargs or {}))


@pytest.mark.parametrize("name", ["flux", pytest.param("sdxl", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [0, 1])
def test_adapters_in_sharded_layers_need_no_host_device_copies(name, rank):
    tiny, family = TINY[name](), FAMILIES.get(name)()
    denoiser, meta = getattr(tiny.pipe, family.facts.denoiser_name), torch.device("meta")
    inject_into_model(denoiser, AdapterConfig(), family.facts.lora.targets, seed=0)
    TensorParallel(rank, 2, lambda tensor: None).shard_layers(
        denoiser, build_tensor_parallel_plan(denoiser, family.facts.blocks.fused_layers)
    )
    denoiser.to(meta)
    batch = replace(
        tiny.batch,
        latents=tiny.batch.latents.to(meta),
        size_conditioning=tiny.batch.size_conditioning.to(meta),
        cond={key: value.to(meta) for key, value in tiny.batch.cond.items()},
    )
    with CrossDeviceDetector():
        family.predict(tiny.pipe, denoiser, batch.latents, torch.full((2,), 500.0, device=meta), batch).sum().backward()
    assert all(weight.grad is not None for name, weight in denoiser.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # SD3 and Qwen-Image do not use the last block's text
        ("sd3", 4 + 4 + 3 + 4),
        ("flux", 2 * (4 + 4) + 2 * (1 + 1)),
        pytest.param("z_image", 4 * (2 + 2), marks=pytest.mark.slow),
        pytest.param("qwen_image", 2 * (4 + 4) - 1, marks=pytest.mark.slow),
        pytest.param("sdxl", 8 * (3 + 3), marks=pytest.mark.slow),
    ],
)
def test_there_is_one_all_reduce_per_input_and_output_of_sharded_layers(name, expected):
    tiny, family, sums = TINY[name](), FAMILIES.get(name)(), []
    denoiser = getattr(tiny.pipe, family.facts.denoiser_name)
    TensorParallel(0, 2, sums.append).shard_layers(
        denoiser, build_tensor_parallel_plan(denoiser, family.facts.blocks.fused_layers)
    )
    latents = tiny.batch.latents.clone().requires_grad_()
    family.predict(tiny.pipe, denoiser, latents, torch.full((2,), 500.0), tiny.batch).sum().backward()
    assert len(sums) == expected
