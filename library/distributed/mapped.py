"""One process with several devices: each has some of the blocks, and what goes through them goes along.

accelerate's hooks bring what a layer is given to the layer's device, and autograd brings gradients back.
"""

import logging
from collections import Counter
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..config.values import DeviceMap
from .device_map import attach_dispatch_hooks, build_device_map, place_weights
from .devices import HOST, get_free_memory
from .strategy import Strategy
from .structure import ParallelPlan

logger = logging.getLogger(__name__)


class DeviceMapStrategy(Strategy):
    """Everything but the denoiser is on the first device, and adapters are where their layers are."""

    has_full_model = False

    def __init__(self, accelerator: Accelerator, device_map: DeviceMap):
        super().__init__(accelerator)
        self.device_map = device_map
        self.base_load_device = HOST  # no device ever holds the whole model

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, denoiser: nn.Module | None = None,
        parallel_plan: ParallelPlan | None = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
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
