"""Whether a model can be taken apart as it was asked, known before it is loaded."""

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..config import RunConfig
from ..distributed.chain import Chain
from ..distributed.device_map import unplaced
from ..distributed.skips import SkipChain
from ..distributed.structure import Structure
from ..errors import ConfigError
from ..families.base import Family
from ..families.detect import Detected
from ..families.layer_tokens import layer_tokens
from ..families.tensor_cuts import tensor_cuts
from ..families.unloaded import unloaded
from ..optim.optimizers import find


def chain_of(family: Family, denoiser: Any) -> Chain:
    """The denoiser's blocks in the order in which they run."""
    if family.hands_on_skips:
        return SkipChain.of_unet(denoiser)
    return Chain.of(denoiser, family.block_lists, family.block_flow)


def structure_of(family: Family, denoiser: nn.Module) -> Structure:
    """How the denoiser can be taken apart."""
    return Structure(chain_of(family, denoiser), tensor_cuts(denoiser), family.block_tokens,
                     layer_tokens(denoiser, family.block_lists, family.block_flow))  # fmt: skip


def refuse_misfits(config: RunConfig, family: Family, model: Detected) -> None:
    """Raise with what does not fit, and what would."""
    wanted = config.parallel.together > 1 or config.parallel.device_map is not None
    if wanted and (problems := [*misfits(config, family, model)]):
        raise ConfigError(problems)


def misfits(config: RunConfig, family: Family, model: Detected) -> Iterator[str]:
    """What does not fit, and what would."""
    denoiser = getattr(unloaded(model, (family.denoiser,)), family.denoiser)
    if config.parallel.device_map is not None:
        yield from unplaced(denoiser, config.parallel.device_map)
        if find(config.optim.optimizer_type).finds_its_rate:
            yield (f"--device_map: {config.optim.optimizer_type} adds up numbers of all weights, which would be on"
                   " several devices; use another optimizer, or --pp_size")  # fmt: skip
    yield from _stages(config, family, denoiser)
    if config.parallel.cp_size > 1 and not family.block_lists:
        size, title = config.parallel.cp_size, family.facts.title
        yield (f"--cp_size {size}: {title} has convolutions, which look at more than a part of a picture; use --tp_size"
               f" {size}, or --fsdp")  # fmt: skip
        return
    yield from _heads(config, denoiser)


def _stages(config: RunConfig, family: Family, denoiser: nn.Module) -> Iterator[str]:
    """A pipeline needs blocks that follow each other, and enough of them."""
    stages, title = config.parallel.pp_size, family.facts.title
    if stages > 1:
        blocks = len(chain_of(family, denoiser).blocks)
        each = 2 if config.parallel.pp_schedule == "interleaved" else 1
        if blocks < stages * each:
            why = f" with {each} stages each" if each > 1 else ""
            yield (f"--pp_size {stages}: {title} has {blocks} blocks, too few for {stages} devices{why}; use"
                   f" {max(1, blocks // each)}")  # fmt: skip


def _heads(config: RunConfig, denoiser: Any) -> Iterator[str]:
    """Whoever shares layers or tokens has some of the heads each in attention."""
    asked = {name: size for name, size in config.parallel.sizes.items() if name != "pp_size" and size > 1}
    parts = math.prod(asked.values())
    heads = {denoiser.get_submodule(name.rpartition(".")[0]).heads for name in tensor_cuts(denoiser)
             if name.endswith(".to_q")}  # fmt: skip
    if odd := sorted(number for number in heads if number % parts):
        fits = [size for size in range(2, parts + 8) if not any(number % size for number in heads)]
        instead = f"use {' or '.join(map(str, fits))}" if fits else "use --fsdp"
        said = " ".join(f"--{name} {size}" for name, size in asked.items())
        to, in_all = (f" to {parts}", " in all" if fits else "") if len(asked) > 1 else ("", "")
        yield f"{said}: {odd[0]} heads of attention cannot be dealt out evenly{to}; {instead}{in_all}"
