"""The LoRA layers of other trainers, as the operations that each does in training without dropout."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from library.adapters.injection import ADAPTER_NAME, find_linear_lora_layers


class PeerForward:
    """The matrices of one of peft's layers, for the ``forward`` of another trainer."""

    def __init__(self, layer: Any):
        self.base, self.down, self.up = layer.base_layer, layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]
        self.scale: float = layer.scaling[ADAPTER_NAME]


class SdScriptsForward(PeerForward):
    """Do what ``LoRAModule.forward`` of sd-scripts does: the multiplier and the scale are numbers."""

    multiplier = 1.0

    def __call__(self, states: Tensor) -> Tensor:
        result: Tensor = self.base(states) + self.up(self.down(states)) * self.multiplier * self.scale
        return result


class AiToolkitForward(PeerForward):
    """Do what ``ToolkitModuleMixin.forward`` of ai-toolkit does: the multiplier is a tensor, one number a sample."""

    def __init__(self, layer: Any):
        super().__init__(layer)
        self.multiplier = torch.ones(1, device=self.down.weight.device)

    def __call__(self, states: Tensor) -> Tensor:
        output: Tensor = self.base(states)
        update: Tensor = self.up(self.down(states.to(self.down.weight.dtype))) * self.scale
        multiplier = self.multiplier
        if len(update) != len(multiplier):
            multiplier = multiplier.repeat_interleave(len(update))
        scaled = update * multiplier.view(-1, *[1] * (update.dim() - 1))
        return output + scaled.to(output.dtype)


class OneTrainerForward(PeerForward):
    """Do what ``LoRAModule.forward`` of OneTrainer does: alpha is a tensor, which the rank divides in each call."""

    def __init__(self, layer: Any):
        super().__init__(layer)
        self.rank = layer.r[ADAPTER_NAME]
        self.alpha = torch.tensor(self.scale * self.rank, device=self.down.weight.device)

    def __call__(self, states: Tensor) -> Tensor:
        result: Tensor = self.base(states) + self.up(self.down(states)) * (self.alpha / self.rank)
        return result


PEERS: Mapping[str, type[PeerForward]] = {
    "as sd-scripts": SdScriptsForward,
    "as ai-toolkit": AiToolkitForward,
    "as OneTrainer": OneTrainerForward,
}


def use_peer_layers(model: nn.Module, peer: type[PeerForward]) -> None:
    """Let the LoRA layers of a model compute as another trainer does."""
    for layer in find_linear_lora_layers(model):
        layer.forward = peer(layer)  # type: ignore[assignment]
