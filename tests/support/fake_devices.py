"""Fake devices: tensors know their device and have no data, and mixing devices fails as on real hardware."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from library.config.types import DeviceMap
from library.parallel.device_map import (
    attach_dispatch_hooks,
    iter_weight_devices,
    list_unsplit_modules,
)
from library.parallel.device_map import build_device_map as assign_devices

DEVICE_TYPE = "lazy"


def build_device_map(model: nn.Module, count: int) -> DeviceMap:
    """Map the blocks to ``count`` devices evenly, in the model's order."""
    blocks = [name for name in list_unsplit_modules(model) if name.rpartition(".")[2].isdigit()]
    return DeviceMap("", (("", 0), *((name, index * count // len(blocks)) for index, name in enumerate(blocks))))


@contextmanager
def dispatch_to_fake_devices(pipe: Any, component: str, count: int) -> Iterator[dict[torch.device, int]]:
    """Replace the weights of a component by fake tensors, dispatched by accelerate's hooks; yield counts by device."""
    model = getattr(pipe, component)
    devices = [torch.device(DEVICE_TYPE, number) for number in range(count)]
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        device_numbers = assign_devices(model, build_device_map(model, count), ())
        fakes: dict[torch.Tensor, torch.Tensor] = {}
        for _, tensor, number in iter_weight_devices(model, device_numbers):
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=devices[number])
            is_weight = isinstance(tensor, nn.Parameter)
            fakes[tensor] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_weight else fake
        for module in model.modules():
            for leaf, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                setattr(module, leaf, fakes[tensor])
        # All fake tensors have the same address, by which accelerate would find tied weights.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("accelerate.big_modeling.find_tied_parameters", lambda model: [])
            attach_dispatch_hooks(model, device_numbers, devices)
        yield Counter(fake.device for fake in fakes.values())


def move_to_device(device: torch.device, item: Any) -> Any:
    """Return the same tensors on another device, without data."""
    return tree_map(
        lambda each: torch.empty_like(each, device=device) if isinstance(each, torch.Tensor) else each, item
    )
