"""Whether a model can be taken apart as it was asked, known before it is loaded."""

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..config import RunConfig
from ..errors import ConfigError
from ..models.base import Family
from ..models.detect import DetectedModel
from ..models.loading import load_components_on_meta
from ..models.parallel_plan import build_tensor_parallel_plan
from ..optim.optimizers import resolve_optimizer
from ..parallel.offload import find_innermost_blocks, is_quantized_or_offloaded
from ..parallel.preflight import validate_device_map
from ..parallel.strategy import Strategy
from .setup import build_block_sequence


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
            yield (
                f"--device_map: {config.optim.optimizer_type} adds up numbers of all weights, which would be on"
                " several devices; use another optimizer, or --pp_size"
            )
    yield from _validate_pipeline(config, family, denoiser)
    if config.parallel.cp_size > 1 and not family.block_lists:
        size, title = config.parallel.cp_size, family.facts.title
        yield (
            f"--cp_size {size}: {title} has convolutions, which look at more than a part of a picture; use --tp_size"
            f" {size}, or --fsdp"
        )
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
            yield (
                f"--pp_size {stages}: {title} has {blocks} blocks, too few for {stages} devices{why}; use"
                f" {max(1, blocks // each)}"
            )


def _validate_attention_heads(config: RunConfig, denoiser: Any) -> Iterator[str]:
    """Whoever shares layers or tokens has some of the heads each in attention."""
    asked = {
        name: size for name, size in config.parallel.model_parallel_sizes.items() if name != "pp_size" and size > 1
    }
    parts = math.prod(asked.values())
    heads = {
        denoiser.get_submodule(name.rpartition(".")[0]).heads
        for name in build_tensor_parallel_plan(denoiser)
        if name.endswith(".to_q")
    }
    if odd := sorted(number for number in heads if number % parts):
        fits = [size for size in range(2, parts + 8) if not any(number % size for number in heads)]
        instead = f"use {' or '.join(map(str, fits))}" if fits else "use --fsdp"
        said = " ".join(f"--{name} {size}" for name, size in asked.items())
        to, in_all = (f" to {parts}", " in all" if fits else "") if len(asked) > 1 else ("", "")
        yield f"{said}: {odd[0]} heads of attention cannot be dealt out evenly{to}; {instead}{in_all}"


def validate_quantize_offload(config: RunConfig, has_full_model: bool) -> list[str]:
    """Only a process that has all frozen weights can let them rest."""
    if has_full_model or not is_quantized_or_offloaded(config.model, config.train):
        return []
    name = "blocks_to_swap" if config.train.blocks_to_swap else "quantize_base"
    return [
        f"--{name}: this run spreads the frozen weights over processes, which are then not where they could rest;"
        " take one of the two"
    ]


def check_quantize_offload(config: RunConfig, strategy: Strategy, family: Family, detected: DetectedModel) -> None:
    """Whether it can be done is known before anything is loaded."""
    wanted = config.train.blocks_to_swap
    if problems := validate_quantize_offload(config, strategy.has_full_model):
        raise ConfigError(problems)
    if wanted and strategy.is_compile_enabled:
        raise ConfigError(
            [
                "--blocks_to_swap: weights that come and go cannot be compiled, and accelerate's settings"
                " ask for that; --no-torch_compile switches it off"
            ]
        )
    if wanted:
        there = len(
            find_innermost_blocks(
                getattr(load_components_on_meta(detected, (family.denoiser_name,)), family.denoiser_name)
            )
        )
        if wanted > there:
            raise ConfigError([f"--blocks_to_swap: {wanted}; this model has {there} blocks"])
