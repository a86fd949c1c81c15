"""Replaces the ``forward`` of the LoRA layers of a model by fused ones, and says which layers stay peft's."""

import logging
from collections import Counter
from typing import Any

import torch
from torch import nn

from ..adapters.injection import ADAPTER_NAME, find_linear_lora_layers
from ..adapters.update_norms import find_adapter_layers
from .lora_linear import FusedLoraForward, HalfPrecisionCopies
from .lora_projections import PendingOutputs, ProjectionGroup, find_projections
from .quantize import FrozenLinear
from .quantized_matmul import QuantizedMatmulLinear

logger = logging.getLogger(__name__)


def fuse_lora_layers(model: nn.Module, dtype: torch.dtype, *, adds_in_place: bool = True) -> int:
    """Fuse the LoRA layers of a model that is trained under autocast to ``dtype``; return their number.

    Call it before the model is wrapped, after its base is quantized and its adapter is on the device.  Selective
    checkpointing needs layers that do not add the LoRA in place, or it cannot save the output of the base.
    """
    layers: list[Any] = [layer for layer in find_linear_lora_layers(model) if _can_fuse(layer)]
    _report_other_layers(model, layers)
    if not layers:
        return 0
    parameters = [getattr(layer, half)[ADAPTER_NAME].weight for layer in layers for half in ("lora_A", "lora_B")]
    copies, pending, report = HalfPrecisionCopies(parameters, dtype), PendingOutputs(), _PeftReport(model)
    devices = {parameter.device: _multiplies_to_float32(parameter.device, dtype) for parameter in parameters}
    for layer in layers:
        is_to_float32 = devices[layer.lora_A[ADAPTER_NAME].weight.device]
        layer.forward = FusedLoraForward(
            layer, copies, multiplies_to_float32=is_to_float32, adds_in_place=adds_in_place, report_peft=report
        )
    for forwards in find_projections(model):
        group = ProjectionGroup(forwards, pending)
        copies.stack(group.downs)
        for forward in forwards:
            forward.group = group
    model.register_forward_pre_hook(pending.clear)
    model.register_forward_pre_hook(copies.refresh)
    return len(layers)


def _can_fuse(layer: Any) -> bool:
    return type(layer.base_layer) in (nn.Linear, FrozenLinear, QuantizedMatmulLinear)


def _report_other_layers(model: nn.Module, fused: list[Any]) -> None:
    names, ids = Counter[str](), set(map(id, fused))
    layers: Any = find_adapter_layers(model).values()
    for layer in layers:
        if id(layer) not in ids:
            variant = getattr(layer, "lora_variant", {}).get(ADAPTER_NAME, layer)  # such as DoRA
            names[f"{type(variant).__name__} on {type(layer.get_base_layer()).__name__}"] += 1
    if names:
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
        logger.info("fused layers: %s has layers that peft computes: %s", type(model).__name__, kinds)


class _PeftReport:
    """Says once that peft computes layers of a model whose modules were changed after fusing."""

    def __init__(self, model: nn.Module):
        self._name, self._is_said = type(model).__name__, False

    def __call__(self) -> None:
        if not self._is_said:
            self._is_said = True
            logger.info(
                "fused layers: peft computes those layers of %s that have hooks or are sharded (tensor parallelism,"
                " ZeRO 3, a training adapter)",
                self._name,
            )


def _multiplies_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies matrices of this dtype to float32; its table of operations does not say."""
    matrix = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.mm(matrix, matrix, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError):
        return False
    return True
