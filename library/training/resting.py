"""Where the denoiser's frozen weights rest while nobody computes with them: in fewer bits, or in host memory."""

import logging
from typing import Any

import torch
from torch import nn

from ..config import RunConfig
from ..distributed.frozen import can_rest, let_rest
from ..distributed.packing import Packed
from ..distributed.strategy import DataParallel
from ..distributed.swapping import Swap
from ..errors import ConfigError
from ..families.base import Family
from ..families.detect import Detected
from ..families.unloaded import unloaded

logger = logging.getLogger(__name__)


def is_wanted(config: RunConfig) -> bool:
    """Whether any of it is to rest."""
    return bool(config.train.blocks_to_swap) or config.model.base_storage != "float"


def spread_problems(config: RunConfig, has_whole_model: bool) -> list[str]:
    """Only a process that has all frozen weights can let them rest."""
    if has_whole_model or not is_wanted(config):
        return []
    name = "blocks_to_swap" if config.train.blocks_to_swap else "base_storage"
    return [f"--{name}: this run spreads the frozen weights over processes, which are then not where they could rest;"
            " take one of the two"]  # fmt: skip


def rehearse_resting(config: RunConfig, strategy: DataParallel, family: Family, model: Detected) -> None:
    """Whether it can be done is known before anything is loaded."""
    wanted = config.train.blocks_to_swap
    if problems := spread_problems(config, strategy.has_whole_model):
        raise ConfigError(problems)
    if wanted and strategy.compiles:
        raise ConfigError(["--blocks_to_swap: weights that come and go cannot be compiled, and accelerate's settings"
                           " ask for that; --no-torch_compile switches it off"])  # fmt: skip
    if wanted:
        there = len(blocks_of(getattr(unloaded(model, (family.denoiser,)), family.denoiser)))
        if wanted > there:
            raise ConfigError([f"--blocks_to_swap: {wanted}; this model has {there} blocks"])


def let_weights_rest(config: RunConfig, denoiser: nn.Module, device: torch.device) -> int:
    """Of blocks in fewer bits, and of some blocks in host memory; spread evenly, so that there is time between them.

    Returns how many bytes are in host memory now.
    """
    kind, blocks = config.model.base_storage, blocks_of(denoiser)
    swap, swapped = Swap(device), set(spread(len(blocks), config.train.blocks_to_swap))
    before = after = away = 0
    for number, block in enumerate(blocks):
        for layer in block.modules():
            if not can_rest(layer) or (kind == "float" and number not in swapped):
                continue
            own: Any = layer
            packed = Packed.of(own.weight.to(device), kind)
            before += own.weight.nbytes
            let_rest(layer, swap.take(packed) if number in swapped else packed.itself)
            after += 0 if number in swapped else packed.nbytes
            away += packed.nbytes if number in swapped else 0
    logger.info("frozen weights of %d blocks: %.2f GB of %.2f GB stay on the device, in %s; %d blocks rest in host"
                " memory", len(blocks), after / 1e9, before / 1e9, kind, len(swapped))  # fmt: skip
    return away


def blocks_of(denoiser: Any) -> list[nn.Module]:
    """Those of which a model has many, in its own order; diffusers knows what they are called."""
    named = (getattr(denoiser, kind, None) or () for kind in ("_repeated_blocks", "_no_split_modules"))
    names = {name for several in named for name in several}
    found = [module for module in denoiser.modules() if type(module).__name__ in names]
    known = set(found)
    return [module for module in found if not known & set(list(module.modules())[1:])]  # the innermost


def spread(count: int, wanted: int) -> list[int]:
    """``wanted`` of ``count`` places, as evenly as can be."""
    return [place for place in range(count) if (place + 1) * wanted // count > place * wanted // count]
