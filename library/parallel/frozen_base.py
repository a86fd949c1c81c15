"""Quantize the frozen base weights (``--quantize_base``), and select the blocks whose weights are offloaded."""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..config.schema import ModelConfig, TrainConfig
from .block_swap import MIN_WINDOW_BYTES, OffloadedBytes, WeightOffloader
from .quantize import QuantizedWeight, can_convert_frozen_layer, convert_frozen_layer

logger = logging.getLogger(__name__)


def is_quantized_or_offloaded(model: ModelConfig, train: TrainConfig) -> bool:
    """Whether any part of the base model is quantized or offloaded."""
    return bool(train.blocks_to_swap) or model.quantize_base != "none"


def quantize_and_offload_base(
    denoiser: nn.Module,
    devices: tuple[torch.device, torch.device],
    model: ModelConfig,
    train: TrainConfig,
    nf4_kernel: str | None = None,
) -> OffloadedBytes:
    """Quantize the frozen weights of all blocks, and offload some blocks, evenly spread so that copies overlap.

    ``devices``: where weights are quantized, and where they are kept until the strategy distributes the model;
    ``nf4_kernel``: that of the strategy, which estimates lack.
    """
    device, base_device = devices
    blocks, quant_type, offloader = find_innermost_blocks(denoiser), model.quantize_base, WeightOffloader(device)
    swapped = set(select_spread_indices(len(blocks), train.blocks_to_swap))
    bytes_before = bytes_on_device = 0
    offloaded = dict.fromkeys(swapped, 0)
    for index, block in enumerate(blocks):
        for layer in block.modules():
            if not can_convert_frozen_layer(layer) or (quant_type == "none" and index not in swapped):
                continue
            own: Any = layer
            bytes_before += own.weight.nbytes
            weight = QuantizedWeight.quantize(own.weight.to(device), quant_type)
            weight = weight if nf4_kernel is None else replace(weight, nf4_kernel=nf4_kernel)
            if index in swapped:
                convert_frozen_layer(layer, offloader.offload(weight))
                offloaded[index] += weight.nbytes
            else:
                convert_frozen_layer(layer, weight.map_tensors(lambda tensor: tensor.to(base_device)))
                bytes_on_device += weight.nbytes
    largest_block = max(offloaded.values(), default=0)
    offloader.window_bytes = train.block_swap_window_mb * 2**20 or max(MIN_WINDOW_BYTES, largest_block)
    result = OffloadedBytes(sum(offloaded.values()), largest_block, offloader.window_bytes)
    logger.info(
        "base model: frozen weights of %d blocks: %.2f GB -> %.2f GB (%s%s), %d blocks offloaded (%.2f GB)",
        len(blocks),
        bytes_before / 1e9,
        bytes_on_device / 1e9,
        quant_type,
        "" if nf4_kernel is None else f", {nf4_kernel} kernel",
        len(swapped),
        result.total / 1e9,
    )
    return result


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
