"""Checks of the adapter settings that depend on the model's layers: patterns, block indices and ranks."""

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from ..config.network_arg_types import LAST_BLOCK
from ..config.network_args import NetworkArgs, get_network_args
from ..config.schema import AdapterConfig
from ..problems import Problem
from .peft_types import RankAlpha, count_input_features
from .targets_rank_alpha import (
    BLOCK_INDEX_ARGS,
    TargetLayer,
    list_pattern_names,
    matches_full_name,
    matches_pattern,
)


def validate_ranks(
    layers: Sequence[TargetLayer], rank_alphas: Mapping[str, RankAlpha], config: AdapterConfig
) -> Iterator[Problem]:
    """Check ``network_args`` against all target layers and the ranks that were assigned to them."""
    arguments = get_network_args(config)
    problems = [
        *_find_unmatched_patterns(layers, arguments),
        *_find_missing_blocks(layers, arguments),
        *_find_unequal_fused_ranks(layers, rank_alphas),
    ]
    if not rank_alphas and not problems:
        problems = ["no layer is left to train"]
    yield from (Problem("network_args", text) for text in problems)


def validate_boft_ranks(model: nn.Module, adapter_type: str, rank_alphas: Mapping[str, RankAlpha]) -> Iterator[Problem]:
    """BOFT has one even block size for all layers, which has to divide their input features."""
    if adapter_type != "boft" or not rank_alphas:
        return
    ranks = sorted({size.rank for size in rank_alphas.values()})
    if len(ranks) > 1:
        yield Problem(
            "network_args", f"boft needs the same rank for all layers, but there are {', '.join(map(str, ranks))}"
        )
        return
    if ranks[0] % 2:
        yield Problem("network_dim", f"{ranks[0]} is odd, but boft needs an even number")
        return
    for name in rank_alphas:
        features = count_input_features(model.get_submodule(name))
        if features % ranks[0]:
            yield Problem(
                "network_dim", f"boft needs a divisor of the {features} input features of {name}, not {ranks[0]}"
            )
            return


def _find_unmatched_patterns(layers: Sequence[TargetLayer], network_args: NetworkArgs) -> Iterator[str]:
    first, *others = list_pattern_names(layers[0], network_args)
    example = f"for example {first}{f' ({others[0]})' if others else ''}"
    for argument in ("network_reg_dims", "network_reg_lrs"):
        for pattern, _ in getattr(network_args, argument):
            if not any(matches_pattern(pattern, layer, network_args) for layer in layers):
                yield f"{argument}: {pattern!r} matches no module, {example}"
    for argument in ("exclude_patterns", "include_patterns"):
        for pattern in getattr(network_args, argument):
            if not any(matches_full_name(pattern, layer, network_args) for layer in layers):
                yield f"{argument}: {pattern!r} matches no full module name, {example}; .* matches anything"


def _find_missing_blocks(layers: Sequence[TargetLayer], network_args: NetworkArgs) -> Iterator[str]:
    for argument, pattern in BLOCK_INDEX_ARGS:
        matches = [re.search(pattern, layer.kohya_name) for layer in layers]
        last = max((int(match[1]) for match in matches if match is not None), default=-1)
        indices = [index for pair in getattr(network_args, argument) or () for index in pair if index != LAST_BLOCK]
        if indices and max(indices) > last:
            yield f"{argument}: there is no block {max(indices)}; the last one is {last}"


def _find_unequal_fused_ranks(layers: Sequence[TargetLayer], rank_alphas: Mapping[str, RankAlpha]) -> Iterator[str]:
    """Modules that are one in the original model share their lora_A, so they need the same rank."""
    fused: dict[str, set[RankAlpha]] = {}
    for layer in layers:
        if layer.name in rank_alphas:
            fused.setdefault(layer.kohya_name, set()).add(rank_alphas[layer.name])
    for original, sizes in fused.items():
        if len(sizes) > 1:
            ranks = " and ".join(str(rank) for rank in sorted({size.rank for size in sizes}))
            yield f"{original} is one module in sd-scripts, but its parts have ranks {ranks}"
