"""Device maps: split the denoiser over several devices of one process, with accelerate's dispatch hooks."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config.types import DeviceMap
from ..distributed.communicator import Communicator
from ..distributed.device_memory import get_free_memory
from ..distributed.devices import HOST
from ..errors import ConfigError
from ..problems import Problem
from .ddp import DDPStrategy
from .parallel_plan import ParallelPlan
from .strategy import StrategySettings

logger = logging.getLogger(__name__)
SEQUENTIAL_FILL_RATIO = 0.7
"""The part of a device's free memory that ``sequential`` fills with weights; the rest is for activations."""


def build_device_map(model: nn.Module, device_map: DeviceMap, free_memory: Sequence[int]) -> dict[str, int]:
    """Map each module, or parameter that is in none of them, to a device index."""
    if device_map.device_by_module:
        return dict(_expand_device_map(model, "", dict(device_map.device_by_module), 0))
    unsplit_classes = list({type(model.get_submodule(name)).__name__ for name in list_unsplit_modules(model)})
    max_memory: dict[Any, Any]
    if device_map.preset == "sequential":
        max_memory = {index: int(SEQUENTIAL_FILL_RATIO * free) for index, free in enumerate(free_memory)}
    else:
        max_memory = get_balanced_memory(model, dict(enumerate(free_memory)), unsplit_classes)
    devices = infer_auto_device_map(model, max_memory, unsplit_classes)
    if set(devices.values()) - set(range(len(free_memory))):
        needed = sum(tensor.nbytes for tensor in model.parameters()) / 2**30
        available = " + ".join(f"{free / 2**30:.1f}" for free in free_memory)
        text = f"{needed:.1f} GiB of weights do not fit into {available} GiB of free memory"
        fix = "use more devices, --quantize_base nf4, or --blocks_to_swap instead of the device map"
        raise ConfigError([Problem("device_map", text, fix, value=str(device_map))])
    return {name: int(device) for name, device in devices.items()}


def list_unsplit_modules(model: nn.Module) -> list[str]:
    """Return the names of modules that stay on one device: the blocks, and the model's other direct children.

    Smaller modules cannot be split: blocks add their input to the output of their layers.
    """
    return [
        name
        for child_name, child in model.named_children()
        for name in (
            [f"{child_name}.{index}" for index in range(len(child))]
            if isinstance(child, nn.ModuleList)
            else [child_name]
        )
    ]


def _expand_device_map(
    module: nn.Module, name: str, devices: Mapping[str, int], parent_device: int
) -> Iterator[tuple[str, int]]:
    """Expand the user's map to modules of which none contains another."""
    device, prefix = devices.get(name, parent_device), f"{name}." if name else ""
    if name and not any(key.startswith(prefix) for key in devices):
        yield name, device
        return
    for tensor_name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield f"{prefix}{tensor_name}", device
    for child_name, child in module.named_children():
        yield from _expand_device_map(child, f"{prefix}{child_name}", devices, device)


def place_weights(model: nn.Module, device_indices: Mapping[str, int], devices: Sequence[torch.device]) -> None:
    """Move every weight to its device in place: the optimizer holds the same parameter objects."""
    for _, tensor, device in iter_weight_devices(model, device_indices):
        tensor.data = tensor.data.to(devices[device])


def iter_weight_devices(model: nn.Module, device_indices: Mapping[str, int]) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the name of every weight, the weight, and its device index."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # Weights of the model itself are used between its modules, on the first device.
        is_own = "." not in name
        yield (
            name,
            tensor,
            0 if is_own else next(device_indices[key] for key in iter_parent_names(name) if key in device_indices),
        )


def attach_dispatch_hooks(model: nn.Module, device_indices: Mapping[str, int], devices: Sequence[torch.device]) -> None:
    """Attach accelerate's hooks, which move inputs to the device of each module."""
    device_map: Any = {name: devices[index] for name, index in device_indices.items()}
    dispatch_model(model, device_map, main_device=devices[0], force_hooks=True)
    dispatched: Any = model
    del dispatched.hf_device_map  # with it accelerate refuses a process that a launcher gave a rank


def iter_parent_names(name: str) -> Iterator[str]:
    """Yield the name of a weight and those of the modules that contain it, innermost first."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


class DeviceMapStrategy(DDPStrategy):
    """One process, with the denoiser split over its devices; everything else is on the first device."""

    has_full_model = False

    def __init__(self, comm: Communicator, settings: StrategySettings):
        super().__init__(comm, settings)
        self.device_map = settings.device_map or DeviceMap("balanced")
        self.base_load_device = HOST  # no device has to hold the full model

    def wrap(self, model: nn.Module, optimizer: Optimizer, plan: ParallelPlan | None = None) -> tuple[nn.Module, Any]:
        denoiser, devices = (plan and plan.denoiser) or model, list_devices(self.device)
        self.devices = devices
        device_indices = build_device_map(denoiser, self.device_map, [get_free_memory(device) for device in devices])
        for child in model.children():
            if child is not denoiser:
                child.to(devices[0])
        place_weights(denoiser, device_indices, devices)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        attach_dispatch_hooks(denoiser, device_indices, devices)
        if [parameter for parameter in model.parameters() if parameter.requires_grad] != trainable:
            raise AssertionError("accelerate replaced trainable parameters, which the optimizer holds")
        _log_placement(denoiser)
        self.model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        return self.model, self.optimizer


def _log_placement(denoiser: nn.Module) -> None:
    num_bytes: Counter[torch.device] = Counter()
    for parameter in denoiser.parameters():
        num_bytes[parameter.device] += parameter.nbytes
    for device, size in num_bytes.items():
        logger.info("device map: %.1f MiB of the denoiser on %s", size / 2**20, device)


def list_devices(device: torch.device) -> list[torch.device]:
    """Return all devices of this type that the process sees."""
    return [torch.device(device.type, index) for index in range(torch.accelerator.device_count())]
