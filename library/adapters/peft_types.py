"""Adapter types of peft (LoRA, DoRA, LoHa, LoKr, OFT, BOFT): injected, initialized from a seed; peft factors LoKr."""

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
from ..randomness import Purpose, derive_generator

ADAPTER_WEIGHT_PATTERN = (
    r"\.(?:lora_[AB]|lora_magnitude_vector|hada_[wt]\d|lokr_[wt]\d|oft_R|boft_[Rs])(?:_[ab])?(?:\.|$)"
)
"""Separates the name of a module from the name of a weight of its adapter."""

RANDOM_INIT_WEIGHTS = (
    *("lora_A", "hada_w1_a", "hada_w1_b", "hada_w2_a"),
    *("lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "hada_t1", "hada_t2", "lokr_t2"),
)
"""Weights with random initialization; another weight of the adapter is zero, so that the update is zero."""

TYPES_WITH_ALPHA = ("lora", "dora", "loha", "lokr")


@dataclass(frozen=True)
class RankAlpha:
    """LoRA rank and alpha of one module's adapter, which is scaled by ``alpha / rank``."""

    rank: int
    alpha: float
    is_tucker: bool = False
    """Whether a LoHa or LoKr of a convolution is decomposed into three, with a core."""


def inject_peft_layers(
    model: nn.Module,
    adapter_type: str,
    network_args: NetworkArgs,
    rank_alphas: Mapping[str, RankAlpha],
    seed_names: Mapping[str, str],
    seed: int,
) -> dict[str, RankAlpha]:
    """Give each listed module an adapter in float32, and return the effective ranks and alphas.

    ``seed_names`` are the names that the modules' initial weights are derived from, so that every rank has the same.
    """
    if not rank_alphas:
        return {}
    # low_cpu_mem_usage: peft creates the weights on the meta device without random numbers; they are initialized below.
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
    if len({size.is_tucker for size in rank_alphas.values()}) > 1:
        for is_tucker in (False, True):
            some = {name: size for name, size in rank_alphas.items() if size.is_tucker == is_tucker}
            yield from _build_peft_configs(model, adapter_type, network_args, some)
        return
    ranks, alphas = ({name: getattr(size, value) for name, size in rank_alphas.items()} for value in ("rank", "alpha"))
    is_tucker = next(iter(rank_alphas.values())).is_tucker
    patterns: Any = {
        "rank_pattern": _build_pattern_map(ranks),
        "alpha_pattern": _build_pattern_map(alphas),
        "target_modules": targets,
    }
    if adapter_type == "loha":
        yield LoHaConfig(use_effective_conv2d=is_tucker, **patterns)
    elif adapter_type == "lokr":
        yield LoKrConfig(
            decompose_factor=network_args.factor,
            decompose_both=network_args.decompose_both,
            use_effective_conv2d=is_tucker,
            **patterns,
        )
    else:
        is_root = network_args.use_rslora or network_args.rs_lora
        yield LoraConfig(use_dora=adapter_type == "dora", use_rslora=is_root, **patterns)


def _group_by_value(values: Mapping[str, Any]) -> list[tuple[Any, list[str]]]:
    names = defaultdict(list)
    for name, value in values.items():
        names[value].append(name)
    return list(names.items())


def _build_pattern_map(values: Mapping[str, Any]) -> dict[str, Any]:
    """One pattern per value: peft searches all patterns for each module."""
    return {f"^{_build_alternation(names)}": value for value, names in _group_by_value(values)}


def _build_alternation(names: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"


def count_input_features(layer: nn.Module) -> int:
    weight: Any = layer.weight
    return int(weight[0].numel())


def _choose_oft_block_count(model: nn.Module, name: str, max_blocks: int) -> int:
    """The largest number of blocks up to ``max_blocks`` that divides the input features."""
    inputs = count_input_features(model.get_submodule(name))
    return max(count for count in range(1, min(max_blocks, inputs) + 1) if inputs % count == 0)


def _init_adapter_weights(layer: Any, name: str, seed: int) -> None:
    """Replace the meta weights of one adapter by initialized ones on the base layer's device."""
    device = layer.get_base_layer().weight.device
    for weight_name in layer.adapter_layer_names:
        container = getattr(layer, weight_name, None)
        if container is None or "default" not in container:
            continue
        empty = container["default"]
        weight = empty if isinstance(empty, nn.Parameter) else empty.weight
        parameter = nn.Parameter(_init_weight(layer, weight_name, weight.shape, name, seed).to(device))
        if weight is empty:
            container["default"] = parameter
        else:
            empty.weight = parameter
    for child in layer.modules():
        if child is not layer.get_base_layer():
            for key, buffer in child.named_buffers(recurse=False):
                child.register_buffer(key, buffer.to(device), persistent=False)


def _init_weight(layer: Any, weight_name: str, shape: torch.Size, name: str, seed: int) -> torch.Tensor:
    if weight_name == "lora_magnitude_vector":
        rows: torch.Tensor = layer.get_base_layer().weight.detach().float().flatten(1)
        norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.reshape(shape)
    if weight_name == "boft_s":
        return torch.ones(shape)
    if weight_name not in RANDOM_INIT_WEIGHTS:
        return torch.zeros(shape)
    purpose = Purpose.LORA_INIT if weight_name == "lora_A" else weight_name
    generator = derive_generator(seed, f"{purpose}/{name}")
    # As nn.Linear initializes its weight.
    weight: torch.Tensor = nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)
    return weight


def _read_rank_alpha(layer: Any, adapter_type: str, requested: RankAlpha) -> RankAlpha:
    """Rank and alpha that give the layer's actual scale as ``alpha / rank``, also for rsLoRA."""
    if adapter_type not in TYPES_WITH_ALPHA:
        return RankAlpha(layer.r["default"] if adapter_type == "oft" else requested.rank, 1.0)
    if adapter_type == "lokr" and "default" in layer.lokr_w1 and "default" in layer.lokr_w2:
        # Two full matrices have no rank, and no loader scales them.
        layer.scaling["default"] = 1.0
        return RankAlpha(1, 1.0)
    return RankAlpha(requested.rank, float(layer.scaling["default"] * requested.rank), requested.is_tucker)
