"""Where the denoiser's frozen weights rest while nobody computes with them: in fewer bits, or in host memory."""

import logging
from typing import Any

import torch
from torch import nn

from ..config import RunConfig
from ..distributed.frozen import can_convert_frozen_layer, convert_frozen_layer
from ..distributed.packing import QuantizedWeight
from ..distributed.strategy import Strategy
from ..distributed.swapping import WeightOffloader
from ..errors import ConfigError
from ..families.base import Family
from ..families.detect import DetectedModel
from ..families.unloaded import load_components_on_meta

logger = logging.getLogger(__name__)


def is_quantized_or_offloaded(config: RunConfig) -> bool:
    """Whether any of it is to rest."""
    return bool(config.train.blocks_to_swap) or config.model.base_storage != "float"


def validate_quantize_offload(config: RunConfig, has_full_model: bool) -> list[str]:
    """Only a process that has all frozen weights can let them rest."""
    if has_full_model or not is_quantized_or_offloaded(config):
        return []
    name = "blocks_to_swap" if config.train.blocks_to_swap else "base_storage"
    return [f"--{name}: this run spreads the frozen weights over processes, which are then not where they could rest;"
            " take one of the two"]  # fmt: skip


def check_quantize_offload(config: RunConfig, strategy: Strategy, family: Family, detected: DetectedModel) -> None:
    """Whether it can be done is known before anything is loaded."""
    wanted = config.train.blocks_to_swap
    if problems := validate_quantize_offload(config, strategy.has_full_model):
        raise ConfigError(problems)
    if wanted and strategy.is_compile_enabled:
        raise ConfigError(["--blocks_to_swap: weights that come and go cannot be compiled, and accelerate's settings"
                           " ask for that; --no-torch_compile switches it off"])  # fmt: skip
    if wanted:
        there = len(find_innermost_blocks(getattr(load_components_on_meta(detected, (family.denoiser_name,)), family.denoiser_name)))
        if wanted > there:
            raise ConfigError([f"--blocks_to_swap: {wanted}; this model has {there} blocks"])


def quantize_and_offload_base(config: RunConfig, denoiser: nn.Module, device: torch.device) -> int:
    """Of blocks in fewer bits, and of some blocks in host memory; spread evenly, so that there is time between them.

    Returns how many bytes are in host memory now.
    """
    kind, blocks = config.model.base_storage, find_innermost_blocks(denoiser)
    swap, swapped = WeightOffloader(device), set(select_spread_indices(len(blocks), config.train.blocks_to_swap))
    before = after = away = 0
    for number, block in enumerate(blocks):
        for layer in block.modules():
            if not can_convert_frozen_layer(layer) or (kind == "float" and number not in swapped):
                continue
            own: Any = layer
            packed = QuantizedWeight.quantize(own.weight.to(device), kind)
            before += own.weight.nbytes
            convert_frozen_layer(layer, swap.offload(packed) if number in swapped else packed.get)
            after += 0 if number in swapped else packed.nbytes
            away += packed.nbytes if number in swapped else 0
    logger.info("frozen weights of %d blocks: %.2f GB of %.2f GB stay on the device, in %s; %d blocks rest in host"
                " memory", len(blocks), after / 1e9, before / 1e9, kind, len(swapped))  # fmt: skip
    return away


def find_innermost_blocks(denoiser: Any) -> list[nn.Module]:
    """Those of which a model has many, in its own order; diffusers knows what they are called."""
    named = (getattr(denoiser, kind, None) or () for kind in ("_repeated_blocks", "_no_split_modules"))
    names = {name for several in named for name in several}
    found = [module for module in denoiser.modules() if type(module).__name__ in names]
    known = set(found)
    return [module for module in found if not known & set(list(module.modules())[1:])]  # the innermost


def select_spread_indices(count: int, wanted: int) -> list[int]:
    """``wanted`` of ``count`` places, as evenly as can be."""
    return [place for place in range(count) if (place + 1) * wanted // count > place * wanted // count]
