"""Each family with its tiny pipeline, and recorders of denoiser calls."""

import copy
import functools

import pytest
import torch
from tiny_pipelines import HEIGHT, TINY, WIDTH, shrink_references
from torch import nn

from library.models.families import FAMILIES
from library.tools.family_check.cases import (
    ForwardOnlyWrapper,
    Recorder,
    find_call_differences,
    make_generators,
    take_rows,
)

__all__ = ["ForwardOnlyWrapper", "Recorder", "make_generators", "take_rows"]  # for the tests
SIZE = {"height": HEIGHT, "width": WIDTH}


@pytest.fixture(scope="session")
def build_case():
    """Family and tiny pipeline by name; the pipeline is a copy of one that is built once."""
    build = functools.cache(_build_case)
    return lambda name: copy.deepcopy(build(name))


QUICK = ("sd1", "flux", "qwen_image")
"""The families that ``make test`` runs: a U-Net, and transformers with one and with two streams.  The others, and
variants, run with the slow tests."""


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


def get_modules(family, pipe):
    """The components that have weights."""
    return {name: part for name in family.facts.components if isinstance(part := getattr(pipe, name), nn.Module)}


def make_pixels(count=2):
    return torch.rand(count, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(5)) * 2 - 1


def assert_same_call(ours, theirs):
    """Compare the tensor arguments of two calls of a denoiser."""
    assert list(find_call_differences(ours, theirs)) == []
