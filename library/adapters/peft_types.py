"""The kinds of adapters that peft has, behind one door: put into a model, made to start from a seed, measured."""

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import BOFTConfig, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftConfig, inject_adapter_in_model
from torch import nn

from ..config.network_args import NetworkArgs
from ..randomness import derive_generator

ADAPTER_WEIGHT_PATTERN = (
    r"\.(?:lora_[AB]|lora_magnitude_vector|hada_[wt]\d|lokr_[wt]\d|oft_R|boft_[Rs])(?:_[ab])?(?:\.|$)"
)
"""What stands between the name of a module and that of a weight of its adapter."""


RANDOM_INIT_WEIGHTS = (
    "lora_A",
    "hada_w1_a",
    "hada_w1_b",
    "hada_w2_a",
    "lokr_w1_b",
    "lokr_w2",
    "lokr_w2_a",
    "lokr_w2_b",
)
"""Weights that start at random; another one of their adapter starts at zero, so that it does nothing."""


TYPES_WITH_ALPHA = ("lora", "dora", "loha", "lokr")


@dataclass(frozen=True)
class RankAlpha:
    """How large the adapter of one module is: its update is scaled by ``alpha / rank``."""

    rank: int
    alpha: float


def inject_peft_layers(
    model: nn.Module,
    adapter_type: str,
    network_args: NetworkArgs,
    rank_alphas: Mapping[str, RankAlpha],
    seed_names: Mapping[str, str],
    seed: int,
) -> dict[str, RankAlpha]:
    """Give each named module an adapter, in float32, and return what they became.

    ``seeds`` are the names by which the modules draw their start, so that it is the same on every process.
    """
    if not rank_alphas:
        return {}
    # On the meta device peft draws no random numbers; the weights are made below.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to load the CUDA extension|Setting boft_n_butterfly_factor")
        for settings in _build_peft_configs(model, adapter_type, network_args, rank_alphas):
            inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    for name in rank_alphas:
        _init_adapter_weights(model.get_submodule(name), seed_names[name], seed)
    return {name: _read_rank_alpha(model.get_submodule(name), adapter_type, size) for name, size in rank_alphas.items()}


def _build_peft_configs(
    model: nn.Module, adapter_type: str, network_args: NetworkArgs, rank_alphas: Mapping[str, RankAlpha]
) -> Iterator[PeftConfig]:
    targets = _build_alternation(rank_alphas)
    if adapter_type == "boft":
        (size,) = {size.rank for size in rank_alphas.values()}
        yield BOFTConfig(boft_block_size=size, target_modules=targets)
        return
    if adapter_type == "oft":
        for blocks, names in _group_by_value(
            {name: _choose_oft_block_count(model, name, size.rank) for name, size in rank_alphas.items()}
        ):
            yield OFTConfig(r=blocks, oft_block_size=0, target_modules=_build_alternation(names))
        return
    ranks, alphas = ({name: getattr(size, value) for name, size in rank_alphas.items()} for value in ("rank", "alpha"))
    patterns: Any = {
        "rank_pattern": _build_pattern_map(ranks),
        "alpha_pattern": _build_pattern_map(alphas),
        "target_modules": targets,
    }
    if adapter_type == "loha":
        yield LoHaConfig(**patterns)
    elif adapter_type == "lokr":
        yield LoKrConfig(decompose_factor=network_args.factor, decompose_both=network_args.decompose_both, **patterns)
    else:
        is_root = network_args.use_rslora or network_args.rs_lora
        yield LoraConfig(use_dora=adapter_type == "dora", use_rslora=is_root, **patterns)


def _group_by_value(values: Mapping[str, Any]) -> list[tuple[Any, list[str]]]:
    names = defaultdict(list)
    for name, value in values.items():
        names[value].append(name)
    return list(names.items())


def _build_pattern_map(values: Mapping[str, Any]) -> dict[str, Any]:
    """One pattern for all modules that have the same value: peft looks through all patterns for each module."""
    return {f"^{_build_alternation(names)}": value for value, names in _group_by_value(values)}


def _build_alternation(names: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"


def _count_input_features(layer: nn.Module) -> int:
    weight: Any = layer.weight
    return int(weight[0].numel())


def _choose_oft_block_count(model: nn.Module, name: str, max_blocks: int) -> int:
    """Blocks are alike in size: as many as wanted, or the next smaller number that divides the inputs."""
    inputs = _count_input_features(model.get_submodule(name))
    return max(count for count in range(1, min(max_blocks, inputs) + 1) if inputs % count == 0)


def validate_boft_ranks(model: nn.Module, adapter_type: str, rank_alphas: Mapping[str, RankAlpha]) -> list[str]:
    """Why adapters of these sizes cannot be put into a model: BOFT has one size of blocks for all its layers."""
    if adapter_type != "boft" or not rank_alphas:
        return []
    found = sorted({size.rank for size in rank_alphas.values()})
    if len(found) > 1:
        return [f"--network_args: boft has one size for all layers, and here there are {', '.join(map(str, found))}"]
    if found[0] % 2:
        return [f"--network_dim: boft needs an even number, and {found[0]} is none"]
    inputs = {name: _count_input_features(model.get_submodule(name)) for name in rank_alphas}
    odd = [name for name, count in inputs.items() if count % found[0]]
    return (
        [f"--network_dim: {found[0]} does not divide the {inputs[odd[0]]} inputs of {odd[0]}, as boft needs it"]
        if odd
        else []
    )


def _init_adapter_weights(layer: Any, name: str, seed: int) -> None:
    """Make the weights of one adapter, which does nothing yet."""
    place = layer.get_base_layer().weight.device
    for kind in layer.adapter_layer_names:
        holder = getattr(layer, kind, None)
        if holder is None or "default" not in holder:
            continue
        empty = holder["default"]
        weight = empty if isinstance(empty, nn.Parameter) else empty.weight
        fresh = nn.Parameter(_init_weight(layer, kind, weight.shape, name, seed).to(place))
        if weight is empty:
            holder["default"] = fresh
        else:
            empty.weight = fresh
    for child in layer.modules():
        if child is not layer.get_base_layer():
            for key, buffer in child.named_buffers(recurse=False):
                child.register_buffer(key, buffer.to(place), persistent=False)


def _init_weight(layer: Any, weight_name: str, shape: torch.Size, name: str, seed: int) -> torch.Tensor:
    if weight_name == "lora_magnitude_vector":
        rows: torch.Tensor = layer.get_base_layer().weight.detach().float().flatten(1)
        norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.reshape(shape)
    if weight_name == "boft_s":
        return torch.ones(shape)
    if weight_name not in RANDOM_INIT_WEIGHTS:
        return torch.zeros(shape)
    # As nn.Linear makes its own.
    purpose = "lora" if weight_name == "lora_A" else weight_name
    generator = derive_generator(seed, f"{purpose}/{name}")
    drawn: torch.Tensor = nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)
    return drawn


def _read_rank_alpha(layer: Any, adapter_type: str, requested: RankAlpha) -> RankAlpha:
    """Rank and alpha of which the scale is made: one over the other, whatever it was computed from."""
    if adapter_type not in TYPES_WITH_ALPHA:
        return RankAlpha(layer.r["default"] if adapter_type == "oft" else requested.rank, 1.0)
    if adapter_type == "lokr" and "default" in layer.lokr_w1 and "default" in layer.lokr_w2:
        # Two whole matrices have no rank; other programs do not scale them either.
        layer.scaling["default"] = 1.0
        return RankAlpha(1, 1.0)
    return RankAlpha(requested.rank, float(layer.scaling["default"] * requested.rank))
