"""Each family with its tiny pipeline, and recorders of denoiser calls."""

import copy
import functools
import inspect
from dataclasses import replace

import pytest
import torch
from tiny_pipelines import HEIGHT, TINY, WIDTH, shrink_references
from torch import nn

from library.models.families import FAMILIES

SIZE = {"height": HEIGHT, "width": WIDTH}


class ForwardOnlyWrapper(nn.Module):
    """Like DDP or FSDP: only ``forward`` works; the attributes of the inner module are hidden."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.inner(*args, **kwargs)


class Recorder:
    """Record each call of a module, bound to the parameter names, and its output."""

    def __init__(self, module):
        self.calls, self.outputs, self.signature = [], [], inspect.signature(module.forward)
        module.register_forward_hook(self.record, with_kwargs=True)

    def record(self, module, args, kwargs, output):
        self.calls.append(self.signature.bind(*args, **kwargs).arguments)
        self.outputs.append(output[0])


def flatten_tensors(value):
    """The tensors and integers inside ``value``, in order, as float64."""
    if isinstance(value, torch.Tensor):
        return [value.double()]
    if type(value) is int:
        return [torch.tensor(value).double()]
    if isinstance(value, dict):
        return [tensor for key in sorted(value) for tensor in flatten_tensors(value[key])]
    return [tensor for item in value for tensor in flatten_tensors(item)] if isinstance(value, list | tuple) else []


@pytest.fixture(scope="session")
def build_case():
    """Family and tiny pipeline by name; the pipeline is a copy of one that is built once."""
    build = functools.cache(_build_case)
    return lambda name: copy.deepcopy(build(name))


QUICK = tuple("built_in sd1 sd3 flux z_image qwen_image".split())
"""The families that ``make test`` runs: one of each architecture.  The others, and variants, run with the slow tests."""


def list_cases(names):
    """Parameters of a fixture."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(params=list_cases(TINY))
def case(request, build_case, monkeypatch):
    """Every family, and each variant with a different denoiser call or different target modules."""
    shrink_references(monkeypatch)
    return build_case(request.param)


@pytest.fixture(params=list_cases(name for name in TINY if name in FAMILIES.list_names()))
def each_family(request, build_case, monkeypatch):
    """Every family once."""
    shrink_references(monkeypatch)
    return build_case(request.param)


def _build_case(name):
    tiny = TINY[name]()
    tiny.pipe.set_progress_bar_config(disable=True)
    return FAMILIES.get(tiny.family)(), tiny


def take_rows(batch, count):
    """The first samples of a batch."""
    cond = {name: value[:count] for name, value in batch.cond.items()}
    controls = tuple(latents[:count] for latents in batch.control_latents)
    names = ("latents", "size_conditioning", "loss_weights", "global_positions", "sample_keys")
    rows = {name: getattr(batch, name)[:count] for name in names}
    return replace(batch, cond=cond, control_latents=controls, **rows)


def get_modules(family, pipe):
    """The components that have weights."""
    return {name: part for name in family.facts.components if isinstance(part := getattr(pipe, name), nn.Module)}


def make_pixels(count=2):
    return torch.rand(count, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(5)) * 2 - 1


def make_generators(count=2):
    return [torch.Generator().manual_seed(100 + number) for number in range(count)]


def assert_same_call(ours, theirs):
    """Compare the tensor arguments of two calls of a denoiser."""
    assert {name for name in theirs if flatten_tensors(theirs[name])} == {
        name for name in ours if flatten_tensors(ours[name])
    }
    for name, value in ours.items():
        for a, b in zip(flatten_tensors(value), flatten_tensors(theirs[name]), strict=True):
            torch.testing.assert_close(a, b.expand_as(a), msg=lambda text, name=name: f"argument {name!r}: {text}")
