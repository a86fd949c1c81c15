"""Base weights that the model's files store quantized, kept as they are stored: fp8, int8, nf4, fp4 and GGUF.

``Family.load`` leaves their layers empty, with a ``StoredWeight`` each; here they become layers that dequantize in each
product, as with ``quantize_base``.  Nothing is rounded a second time: a product sees the weight that would be there if
it had been dequantized when it was loaded.  Weights outside of blocks are few and are dequantized.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..config.schema import AdapterConfig, ModelConfig
from ..distributed.device_memory import get_total_memory, has_device_memory
from ..models.gguf_blocks import BLOCK_SIZES
from ..models.stored_weights import StoredWeight
from ..models.weights import STORED_WEIGHT
from .frozen_base import find_innermost_blocks, should_quantize
from .quantize import PACKED_TYPES, QuantizedWeight, convert_frozen_layer

logger = logging.getLogger(__name__)
MAX_DEQUANTIZED_SHARE = 0.5
"""The share of a device's memory up to which the log names ``dequantize_base``."""


def explain_dequantization(model: ModelConfig, adapter: AdapterConfig, *, can_quantize: bool) -> str | None:
    """Say why the base is dequantized when it is loaded; None where its weights are kept as they are stored.

    ``can_quantize``: whether the strategy holds quantized weights.
    """
    if model.dequantize_base:
        return "as dequantize_base asks for"
    if adapter.is_full:
        return "as they are trained"
    if adapter.base_weights:
        return "as base_weights are merged into them"
    return None if can_quantize else "as ZeRO 3 cannot shard quantized weights"


KEPT, DEQUANTIZED = "kept where that takes little more memory", "dequantized before they are rounded"
"""What ``quantize_base`` does with weights that files store quantized."""


def describe_rounding(model: ModelConfig, stored_formats: Sequence[str], reason: str | None) -> str | None:
    """Describe what ``quantize_base`` does with stored weights; None where kept and dequantized ones are equal.

    ``reason``: why they are dequantized, if they are (``explain_dequantization``).
    """
    if not stored_formats or model.quantize_base == "none":
        return None
    return KEPT if reason is None else DEQUANTIZED


def infer_rounding(settings: Mapping[str, Any]) -> str:
    """Infer ``describe_rounding`` from the settings of a checkpoint that did not record it.

    Versions without ``dequantize_base`` dequantized every base.
    """
    is_merged = settings.get("base_weights") not in (None, "()")
    return DEQUANTIZED if settings.get("dequantize_base", True) or is_merged else KEPT


def keep_stored_layers(denoiser: nn.Module, quantize_base: str = "none", device: torch.device | None = None) -> int:
    """Convert the layers of blocks that were left empty, dequantize the others, and say so; return their number.

    ``quantize_base`` rounds the weights that it makes much smaller, later; ``device`` is the one that trains.
    """
    inside = {layer for block in find_innermost_blocks(denoiser) for layer in block.modules()}
    kept, rounded, num_others, bytes_kept, bytes_before, name = Counter[str](), Counter[str](), 0, 0, 0, ""
    layers: list[Any] = [layer for layer in denoiser.modules() if hasattr(layer, STORED_WEIGHT)]
    for layer in layers:
        stored, dtype = getattr(layer, STORED_WEIGHT), layer.weight.dtype
        name = str(dtype).removeprefix("torch.")
        delattr(layer, STORED_WEIGHT)
        if layer not in inside:
            layer.weight = nn.Parameter(stored.to(dtype=dtype), requires_grad=False)
            num_others += 1
            continue
        weight = pack_stored_weight(stored, dtype)
        convert_frozen_layer(layer, weight)
        if should_quantize(weight, quantize_base):
            rounded[stored.format] += 1
        else:
            kept[stored.format] += 1
            bytes_kept, bytes_before = bytes_kept + weight.nbytes, bytes_before + weight.shape.numel() * dtype.itemsize
    if kept:
        message = "base model: %s layers stay as they are stored (%.2f GB instead of %.2f GB in %s)"
        logger.info(message, _format_counts(kept), bytes_kept / 1e9, bytes_before / 1e9, name)
        if device is not None and has_room(bytes_before, device):
            message = "base model: steps are faster with --dequantize_base, which this device may have room for"
            logger.info(message)
    if rounded:
        message = "base model: %s layers are stored quantized, and quantize_base %s rounds them again"
        logger.warning(message, _format_counts(rounded), quantize_base)
    if num_others:
        logger.info("base model: %d layers outside of its blocks are dequantized to %s", num_others, name)
    return kept.total() + rounded.total()


def has_room(num_bytes: int, device: torch.device) -> bool:
    """Whether dequantized weights would take less than half of the memory of a device that has its own."""
    return has_device_memory(device) and num_bytes < MAX_DEQUANTIZED_SHARE * get_total_memory(device)


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def pack_stored_weight(stored: StoredWeight, dtype: torch.dtype) -> QuantizedWeight:
    """Return a stored weight as layers keep it; values and scales stay what they are.

    ``dtype``: that of the weight if it were dequantized.
    """
    tensors = tuple(tensor.contiguous() for tensor in stored.tensors)
    known = (*PACKED_TYPES, *BLOCK_SIZES)
    if stored.format in known:
        return QuantizedWeight(stored.format, stored.shape, dtype, tensors)
    # fp8, int8, and ordinary floats with a scale: values in some dtype, which the layer keeps
    return QuantizedWeight("int8" if stored.format == "int8" else "fp8", stored.shape, dtype, tensors)
