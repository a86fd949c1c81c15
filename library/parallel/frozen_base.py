"""Quantize the frozen base weights (``--quantize_base``), and select the blocks whose weights are offloaded.

Weights that are kept as the model's files store them (``stored_base``) are quantized again only where that saves more
than a quarter of their bytes.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..config.schema import ModelConfig, TrainConfig
from .block_swap import BlockOffloader, OffloadedBytes, count_block_bytes
from .parallel_plan import name_experts
from .quantize import (
    FrozenLayer,
    QuantizedWeight,
    can_convert_frozen_layer,
    convert_frozen_layer,
    split_expert_weights,
)
from .quantized_matmul import QuantizedMatmulLinear, can_multiply_quantized

logger = logging.getLogger(__name__)
MAX_REQUANTIZED_SHARE = 0.75
"""Stored weights are quantized again if they then have fewer than this share of their bytes."""


def is_quantized_or_offloaded(model: ModelConfig, train: TrainConfig, denoiser: nn.Module | None = None) -> bool:
    """Whether any part of the base model is quantized, by an option or by its files, or offloaded."""
    is_stored = denoiser is not None and any(isinstance(module, FrozenLayer) for module in denoiser.modules())
    return bool(train.blocks_to_swap) or model.quantize_base != "none" or is_stored


def can_store_layer(layer: nn.Module) -> bool:
    """Whether the weight of a layer is quantized, or can be."""
    return isinstance(layer, FrozenLayer) or can_convert_frozen_layer(layer)


def quantize_and_offload_base(
    denoiser: nn.Module,
    devices: tuple[torch.device, torch.device],
    model: ModelConfig,
    train: TrainConfig,
    nf4_kernel: str | None = None,
) -> BlockOffloader:
    """Quantize the frozen weights of all blocks, and offload some blocks, evenly spread so that copies overlap.

    ``devices``: where weights are quantized, and where they are kept until the strategy distributes the model;
    ``nf4_kernel``: that of the strategy, which estimates lack.
    """
    device, base_device = devices
    split_expert_weights(denoiser)
    blocks, quant_type = find_innermost_blocks(denoiser), model.quantize_base
    swapped = set(select_spread_indices(len(blocks), train.blocks_to_swap))
    experts = number_experts(denoiser, blocks)
    layers: list[list[Any]] = [[*filter(can_store_layer, block.modules())] for block in blocks]
    offloaded = OffloadedBytes.from_blocks(
        [size for index in sorted(swapped) if (size := _count_host_bytes(layers[index], quant_type))],
        train.block_swap_ring_size,
    )
    offloader = BlockOffloader(device, offloaded)
    bytes_before = bytes_on_device = 0
    for index, block_layers in enumerate(layers):
        if quant_type == "none" and index not in swapped:  # what its file stores quantized moves alone
            block_layers = [layer for layer in block_layers if isinstance(layer, FrozenLayer)]
        bytes_before += sum(pack_weight(layer).nbytes for layer in block_layers)
        if index in swapped:
            weights = [_quantize(layer, device, quant_type, nf4_kernel) for layer in block_layers]
            fetches = offloader.offload_block(weights, experts[index]) if weights else []
            for layer, weight, fetch in zip(block_layers, weights, fetches, strict=True):
                convert_frozen_layer(layer, fetch, _select_class(layer, weight, model))
            continue
        for layer in block_layers:
            weight = _quantize(layer, device, quant_type, nf4_kernel)
            weight_on_base = weight.map_tensors(lambda tensor: tensor.to(base_device))
            convert_frozen_layer(layer, weight_on_base, _select_class(layer, weight, model))
            bytes_on_device += weight.nbytes
    count = sum(isinstance(layer, QuantizedMatmulLinear) for layer in denoiser.modules())
    if model.quantized_matmul:
        logger.info("base model: %d layers multiply in %s", count, quant_type)
    logger.info(
        "base model: frozen weights of %d blocks: %.2f GB -> %.2f GB (%s%s), %d blocks offloaded (%.2f GB, %d buffers)",
        len(blocks),
        bytes_before / 1e9,
        bytes_on_device / 1e9,
        quant_type,
        "" if nf4_kernel is None else f", {nf4_kernel} kernel",
        len(swapped),
        offloaded.total / 1e9,
        offloaded.ring_size,
    )
    return offloader


def _select_class(layer: nn.Module, weight: QuantizedWeight, model: ModelConfig) -> type[FrozenLayer] | None:
    """Select the class of a layer that multiplies in the format of its weight, or None."""
    is_in_format = weight.quant_type == model.quantize_base
    if model.quantized_matmul and is_in_format and can_multiply_quantized(layer, weight):
        return QuantizedMatmulLinear
    return None


def list_experts(denoiser: nn.Module) -> list[nn.Module]:
    """List the experts of a denoiser, of which each step uses one."""
    return [*name_experts(denoiser).values()]


def number_experts(denoiser: nn.Module, blocks: Sequence[nn.Module]) -> list[int]:
    """Number the experts that the blocks are of."""
    experts = enumerate(list_experts(denoiser))
    numbers = {module: number for number, expert in experts for module in expert.modules()}
    return [numbers[block] for block in blocks]


def _count_host_bytes(layers: Sequence[Any], quant_type: str) -> int:
    meta = torch.device("meta")
    return count_block_bytes([_quantize(layer, meta, quant_type, None) for layer in layers])


def pack_weight(layer: Any) -> QuantizedWeight:
    """Return the weight of a layer: that of its file where it is stored quantized."""
    return layer.fetch_weight() if isinstance(layer, FrozenLayer) else QuantizedWeight.quantize(layer.weight, "none")


def should_quantize(weight: QuantizedWeight, quant_type: str) -> bool:
    """Whether ``quantize_base`` rounds a weight, which may be quantized already."""
    if "none" in (quant_type, weight.quant_type):
        return quant_type != "none"
    rounded = QuantizedWeight.quantize(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), quant_type)
    return rounded.nbytes < MAX_REQUANTIZED_SHARE * weight.nbytes


def _quantize(layer: Any, device: torch.device, quant_type: str, nf4_kernel: str | None) -> QuantizedWeight:
    own = pack_weight(layer)
    weight = own.map_tensors(lambda tensor: tensor.to(device))
    if should_quantize(own, quant_type):
        is_float = own.quant_type == "none"
        source = weight.tensors[0] if is_float else weight.dequantize(torch.float32)
        weight = replace(QuantizedWeight.quantize(source, quant_type), dtype=own.dtype)
    return weight if nf4_kernel is None else replace(weight, nf4_kernel=nf4_kernel)


def find_innermost_blocks(denoiser: Any) -> list[nn.Module]:
    """Return the blocks that diffusers lists as repeated or not to be split, without those that contain others."""
    attributes = (getattr(denoiser, name, None) or () for name in ("_repeated_blocks", "_no_split_modules"))
    class_names = {name for names in attributes for name in names}
    blocks = [module for module in denoiser.modules() if type(module).__name__ in class_names]
    known = set(blocks)
    return [block for block in blocks if not known & set(list(block.modules())[1:])]


def select_spread_indices(count: int, num_selected: int) -> list[int]:
    """Return ``num_selected`` of the indices below ``count``, evenly spread."""
    return [index for index in range(count) if (index + 1) * num_selected // count > index * num_selected // count]
