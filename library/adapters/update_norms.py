"""How long the update of each adapted layer is: the Frobenius norm of what is added to its weight."""

from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .keys import clean_parameter_name


def find_adapter_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Those with an adapter, by name."""
    return {clean_parameter_name(name): layer for name, layer in model.named_modules() if _is_adapter_layer(layer)}


def compute_update_norms(model: nn.Module) -> dict[str, float]:
    """Name of a layer -> the norm; 0 where nothing was learnt.  It waits for the device once."""
    return compute_layer_update_norms(find_adapter_layers(model))


def _is_adapter_layer(layer: nn.Module) -> bool:
    return isinstance(layer, BaseTunerLayer)


@torch.no_grad()
def compute_layer_update_norms(layers: Mapping[str, nn.Module]) -> dict[str, float]:
    """The same of layers that were looked up before, which takes longer than to compute their norms."""
    found = [_compute_update_norm(layer) for layer in layers.values()]
    norms = torch.stack([norm.to(found[0].device) for norm in found])  # layers may be on several devices
    return dict(zip(layers, norms.tolist(), strict=True))


def _compute_update_norm(layer: Any) -> Tensor:
    """Of ``scale * up @ down`` by products of the size of the rank; of other kinds as peft makes the update."""
    weights = layer.adapter_layer_names
    if "lora_A" in weights:
        down, up = (getattr(layer, name)["default"].weight.flatten(1).float() for name in ("lora_A", "lora_B"))
        square: Tensor = ((up.T @ up) * (down @ down.T)).sum().clamp(min=0)
        return square.sqrt().mul(layer.scaling["default"])
    if {"hada_w1_a", "lokr_w1"} & set(weights):
        update: Tensor = layer.get_delta_weight("default")
    else:  # rotations begin with weights of zero, which stand for none
        update = torch.cat([weight.flatten() for name, weight in layer.named_parameters() if "default" in name])
    return update.float().square().sum().sqrt()
