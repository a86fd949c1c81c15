"""Whether a model can be taken apart as it was asked, known before it is loaded."""

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..config import RunConfig
from ..distributed.chain import BlockSequence
from ..distributed.device_map import validate_device_map
from ..distributed.skips import UNetBlockSequence
from ..distributed.structure import ParallelPlan
from ..errors import ConfigError
from ..families.base import Family
from ..families.detect import DetectedModel
from ..families.layer_tokens import map_layer_token_streams
from ..families.tensor_cuts import build_tensor_parallel_plan
from ..families.unloaded import load_components_on_meta
from ..optim.optimizers import resolve_optimizer


def build_block_sequence(family: Family, denoiser: Any) -> BlockSequence:
    """The denoiser's blocks in the order in which they run."""
    if family.has_skip_connections:
        return UNetBlockSequence.from_unet(denoiser)
    return BlockSequence.from_lists(denoiser, family.block_lists, family.block_activation_args)


def build_parallel_plan(family: Family, denoiser: nn.Module) -> ParallelPlan:
    """How the denoiser can be taken apart."""
    return ParallelPlan(build_block_sequence(family, denoiser), build_tensor_parallel_plan(denoiser), family.block_token_args,
                     map_layer_token_streams(denoiser, family.block_lists, family.block_activation_args))  # fmt: skip


def check_model_parallel(config: RunConfig, family: Family, detected: DetectedModel) -> None:
    """Raise with what does not fit, and what would."""
    wanted = config.parallel.model_parallel_size > 1 or config.parallel.device_map is not None
    if wanted and (problems := [*validate_model_parallel(config, family, detected)]):
        raise ConfigError(problems)


def validate_model_parallel(config: RunConfig, family: Family, detected: DetectedModel) -> Iterator[str]:
    """What does not fit, and what would."""
    denoiser = getattr(load_components_on_meta(detected, (family.denoiser_name,)), family.denoiser_name)
    if config.parallel.device_map is not None:
        yield from validate_device_map(denoiser, config.parallel.device_map)
        if resolve_optimizer(config.optim.optimizer_type).is_lr_free:
            yield (f"--device_map: {config.optim.optimizer_type} adds up numbers of all weights, which would be on"
                   " several devices; use another optimizer, or --pp_size")  # fmt: skip
    yield from _validate_pipeline(config, family, denoiser)
    if config.parallel.cp_size > 1 and not family.block_lists:
        size, title = config.parallel.cp_size, family.facts.title
        yield (f"--cp_size {size}: {title} has convolutions, which look at more than a part of a picture; use --tp_size"
               f" {size}, or --fsdp")  # fmt: skip
        return
    yield from _validate_attention_heads(config, denoiser)


def _validate_pipeline(config: RunConfig, family: Family, denoiser: nn.Module) -> Iterator[str]:
    """A pipeline needs blocks that follow each other, and enough of them."""
    stages, title = config.parallel.pp_size, family.facts.title
    if stages > 1:
        blocks = len(build_block_sequence(family, denoiser).blocks)
        each = 2 if config.parallel.pp_schedule == "interleaved" else 1
        if blocks < stages * each:
            why = f" with {each} stages each" if each > 1 else ""
            yield (f"--pp_size {stages}: {title} has {blocks} blocks, too few for {stages} devices{why}; use"
                   f" {max(1, blocks // each)}")  # fmt: skip


def _validate_attention_heads(config: RunConfig, denoiser: Any) -> Iterator[str]:
    """Whoever shares layers or tokens has some of the heads each in attention."""
    asked = {name: size for name, size in config.parallel.model_parallel_sizes.items() if name != "pp_size" and size > 1}
    parts = math.prod(asked.values())
    heads = {denoiser.get_submodule(name.rpartition(".")[0]).heads for name in build_tensor_parallel_plan(denoiser)
             if name.endswith(".to_q")}  # fmt: skip
    if odd := sorted(number for number in heads if number % parts):
        fits = [size for size in range(2, parts + 8) if not any(number % size for number in heads)]
        instead = f"use {' or '.join(map(str, fits))}" if fits else "use --fsdp"
        said = " ".join(f"--{name} {size}" for name, size in asked.items())
        to, in_all = (f" to {parts}", " in all" if fits else "") if len(asked) > 1 else ("", "")
        yield f"{said}: {odd[0]} heads of attention cannot be dealt out evenly{to}; {instead}{in_all}"
