"""Blocks of layers whose weights are swapped, and streams that show when copies run."""

import torch

from library.parallel.block_swap import BlockOffloader, OffloadedBytes, count_block_bytes
from library.parallel.quantize import QuantizedWeight, convert_frozen_layer

CPU = torch.device("cpu")


def swap_blocks(blocks, quant_type="none", ring_size=0, stream=None, blocks_per_expert=None):
    """Offload the weights of blocks, given as lists of frozen layers; return their offloader."""
    weights = [[QuantizedWeight.quantize(layer.weight, quant_type) for layer in block] for block in blocks]
    sizes = OffloadedBytes.from_blocks([count_block_bytes(block) for block in weights], ring_size)
    offloader = BlockOffloader(CPU, sizes, stream)
    for index, (block, block_weights) in enumerate(zip(blocks, weights, strict=True)):
        expert = index // (blocks_per_expert or len(blocks))
        for layer, fetch in zip(block, offloader.offload_block(block_weights, expert), strict=True):
            convert_frozen_layer(layer, fetch)
    return offloader
