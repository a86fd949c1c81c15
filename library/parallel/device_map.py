"""Which module of a model goes to which device of one process, and how it gets there."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import Tensor, nn

from ..config.types import DeviceMap
from ..distributed.communicator import Communicator
from ..distributed.devices import HOST, get_free_memory
from ..errors import ConfigError
from .blocks import ParallelPlan
from .strategy import Strategy

SEQUENTIAL_FILL_RATIO = 0.7
"""Of a device's free memory, as far as ``sequential`` fills it with weights; activations need room as well."""


def build_device_map(model: nn.Module, device_map: DeviceMap, free_memory: Sequence[int]) -> dict[str, int]:
    """Module, or weight that is in none of them, -> number of its device."""
    if device_map.device_by_module:
        return dict(_expand_device_map(model, "", dict(device_map.device_by_module), 0))
    whole = list({type(model.get_submodule(name)).__name__ for name in list_unsplit_modules(model)})
    if device_map.preset == "sequential":
        most: dict[Any, Any] = {number: int(SEQUENTIAL_FILL_RATIO * size) for number, size in enumerate(free_memory)}
    else:
        most = get_balanced_memory(model, dict(enumerate(free_memory)), whole)
    found = infer_auto_device_map(model, most, whole)
    if set(found.values()) - set(range(len(free_memory))):
        size = sum(tensor.nbytes for tensor in model.parameters()) / 2**30
        room = " + ".join(f"{room / 2**30:.1f}" for room in free_memory)
        raise ConfigError(
            [
                f"--device_map {device_map}: {size:.1f} GiB of weights do not fit into {room} GiB that are free;"
                " use --quantize_base or --blocks_to_swap without it, or more devices"
            ]
        )
    return {name: int(number) for name, number in found.items()}


def list_unsplit_modules(model: nn.Module) -> list[str]:
    """The names of what stays on one device: the members of the model's lists of blocks, and its other modules.

    Smaller ones cannot be apart, because blocks add what came in to what their layers make of it.
    """
    return [
        name
        for own, child in model.named_children()
        for name in ([f"{own}.{number}" for number in range(len(child))] if isinstance(child, nn.ModuleList) else [own])
    ]


def _expand_device_map(
    module: nn.Module, name: str, places: Mapping[str, int], parent_device: int
) -> Iterator[tuple[str, int]]:
    """What a user's map says, cut down to modules none of which is inside of another."""
    number, start = places.get(name, parent_device), f"{name}." if name else ""
    if name and not any(place.startswith(start) for place in places):
        yield name, number
        return
    for own, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield f"{start}{own}", number
    for own, child in module.named_children():
        yield from _expand_device_map(child, f"{start}{own}", places, number)


def place_weights(model: nn.Module, places: Mapping[str, int], devices: Sequence[torch.device]) -> None:
    """Bring every weight to its device, and leave it the object that it is, which an optimizer may know."""
    for _, tensor, number in iter_weight_devices(model, places):
        tensor.data = tensor.data.to(devices[number])


def iter_weight_devices(model: nn.Module, places: Mapping[str, int]) -> Iterator[tuple[str, Tensor, int]]:
    """Every weight and the number of its device."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # What belongs to the model itself is used between its modules, where the first device computes.
        yield (
            name,
            tensor,
            0 if "." not in name else next(places[place] for place in _iter_parent_names(name) if place in places),
        )


def attach_dispatch_hooks(model: nn.Module, places: Mapping[str, int], devices: Sequence[torch.device]) -> None:
    """Have accelerate bring what each layer is given to where the layer is."""
    where: Any = {name: devices[number] for name, number in places.items()}
    dispatch_model(model, where, main_device=devices[0], force_hooks=True)
    held: Any = model
    del held.hf_device_map  # by which accelerate would refuse a process that a launcher gave a number


def _iter_parent_names(name: str) -> Iterator[str]:
    """A weight and the modules that it is in, the innermost first."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def validate_device_map(model: nn.Module, device_map: DeviceMap) -> Iterator[str]:
    """What is wrong with a map that somebody wrote, seen on the model without its weights."""
    modules, whole, places = dict(model.named_modules()), list_unsplit_modules(model), dict(device_map.device_by_module)
    for name in places:
        if name not in modules:
            yield f"--device_map: {name!r} is no module of this model"
        elif block := next((unit for unit in whole if name.startswith(f"{unit}.")), None):
            yield f"--device_map: {name!r} cannot be apart from the rest of {block!r}; name that"
    missing = [
        name for name, _ in model.named_parameters() if not any(place in places for place in _iter_parent_names(name))
    ]
    if places and missing:
        yield (
            f'--device_map: {len(missing)} weights have no device, such as {missing[0]}; add "": 0, which is for'
            " all that is not named"
        )


logger = logging.getLogger(__name__)


class DeviceMapStrategy(Strategy):
    """Everything but the denoiser is on the first device, and adapters are where their layers are."""

    has_full_model = False

    def __init__(self, comm: Communicator, device_map: DeviceMap):
        super().__init__(comm)
        self.device_map = device_map
        self.base_load_device = HOST  # no device ever holds the whole model

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        denoiser: nn.Module | None = None,
        parallel_plan: ParallelPlan | None = None,
    ) -> tuple[nn.Module, Any]:
        """Bring each block to its device."""
        denoiser, devices = denoiser or model, list_devices(self.device)
        self.devices = devices
        places = build_device_map(denoiser, self.device_map, [get_free_memory(device) for device in devices])
        for part in model.children():
            if part is not denoiser:
                part.to(devices[0])
        place_weights(denoiser, places, devices)
        learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
        attach_dispatch_hooks(denoiser, places, devices)
        if [parameter for parameter in model.parameters() if parameter.requires_grad] != learnt:
            raise AssertionError("accelerate put others in the place of the parameters that learn")
        self._log_placement(denoiser)
        self.model = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        return self.model, self.optimizer

    def _log_placement(self, denoiser: nn.Module) -> None:
        held: Counter[torch.device] = Counter()
        for tensor in denoiser.parameters():
            held[tensor.device] += tensor.nbytes
        for device, size in held.items():
            logger.info("device map: %s holds %.1f MiB of the denoiser", device, size / 2**20)


def list_devices(device: torch.device) -> list[torch.device]:
    """All devices of this kind that the process sees."""
    return [torch.device(device.type, number) for number in range(torch.accelerator.device_count())]
