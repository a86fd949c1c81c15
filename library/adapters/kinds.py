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

from ..config.network_args import NetworkArguments
from ..randomness import seed_for

MARKS = r"\.(?:lora_[AB]|lora_magnitude_vector|hada_[wt]\d|lokr_[wt]\d|oft_R|boft_[Rs])(?:_[ab])?(?:\.|$)"
"""What stands between the name of a module and that of a weight of its adapter."""
DRAWN = ("lora_A", "hada_w1_a", "hada_w1_b", "hada_w2_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
"""Weights that start at random; another one of their adapter starts at zero, so that it does nothing."""
HAS_ALPHA = ("lora", "dora", "loha", "lokr")


@dataclass(frozen=True)
class Size:
    """How large the adapter of one module is: its update is scaled by ``alpha / rank``."""

    rank: int
    alpha: float


def put_in(
    model: nn.Module, kind: str, arguments: NetworkArguments, sizes: Mapping[str, Size], seeds: Mapping[str, str],
    seed: int,
) -> dict[str, Size]:  # fmt: skip
    """Give each named module an adapter, in float32, and return what they became.

    ``seeds`` are the names by which the modules draw their start, so that it is the same on every process.
    """
    if not sizes:
        return {}
    # On the meta device peft draws no random numbers; the weights are made below.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to load the CUDA extension|Setting boft_n_butterfly_factor")
        for settings in _settings(model, kind, arguments, sizes):
            inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    for name in sizes:
        _start(model.get_submodule(name), seeds[name], seed)
    return {name: _as_built(model.get_submodule(name), kind, size) for name, size in sizes.items()}


def _settings(
    model: nn.Module, kind: str, arguments: NetworkArguments, sizes: Mapping[str, Size]
) -> Iterator[PeftConfig]:
    targets = _any_of(sizes)
    if kind == "boft":
        (size,) = {size.rank for size in sizes.values()}
        yield BOFTConfig(boft_block_size=size, target_modules=targets)
        return
    if kind == "oft":
        for blocks, names in _by_value({name: _blocks(model, name, size.rank) for name, size in sizes.items()}):
            yield OFTConfig(r=blocks, oft_block_size=0, target_modules=_any_of(names))
        return
    ranks, alphas = ({name: getattr(size, value) for name, size in sizes.items()} for value in ("rank", "alpha"))
    patterns: Any = {"rank_pattern": _patterns(ranks), "alpha_pattern": _patterns(alphas), "target_modules": targets}
    if kind == "loha":
        yield LoHaConfig(**patterns)
    elif kind == "lokr":
        yield LoKrConfig(decompose_factor=arguments.factor, decompose_both=arguments.decompose_both, **patterns)
    else:
        is_root = arguments.use_rslora or arguments.rs_lora
        yield LoraConfig(use_dora=kind == "dora", use_rslora=is_root, **patterns)


def _by_value(values: Mapping[str, Any]) -> list[tuple[Any, list[str]]]:
    names = defaultdict(list)
    for name, value in values.items():
        names[value].append(name)
    return list(names.items())


def _patterns(values: Mapping[str, Any]) -> dict[str, Any]:
    """One pattern for all modules that have the same value: peft looks through all patterns for each module."""
    return {f"^{_any_of(names)}": value for value, names in _by_value(values)}


def _any_of(names: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"


def _inputs(layer: nn.Module) -> int:
    weight: Any = layer.weight
    return int(weight[0].numel())


def _blocks(model: nn.Module, name: str, wanted: int) -> int:
    """Blocks are alike in size: as many as wanted, or the next smaller number that divides the inputs."""
    inputs = _inputs(model.get_submodule(name))
    return max(count for count in range(1, min(wanted, inputs) + 1) if inputs % count == 0)


def unfit(model: nn.Module, kind: str, sizes: Mapping[str, Size]) -> list[str]:
    """Why adapters of these sizes cannot be put into a model: BOFT has one size of blocks for all its layers."""
    if kind != "boft" or not sizes:
        return []
    found = sorted({size.rank for size in sizes.values()})
    if len(found) > 1:
        return [f"--network_args: boft has one size for all layers, and here there are {', '.join(map(str, found))}"]
    if found[0] % 2:
        return [f"--network_dim: boft needs an even number, and {found[0]} is none"]
    inputs = {name: _inputs(model.get_submodule(name)) for name in sizes}
    odd = [name for name, count in inputs.items() if count % found[0]]
    return [f"--network_dim: {found[0]} does not divide the {inputs[odd[0]]} inputs of {odd[0]}, as boft needs it"
            ] if odd else []  # fmt: skip


def _start(layer: Any, name: str, seed: int) -> None:
    """Make the weights of one adapter, which does nothing yet."""
    place = layer.get_base_layer().weight.device
    for kind in layer.adapter_layer_names:
        holder = getattr(layer, kind, None)
        if holder is None or "default" not in holder:
            continue
        empty = holder["default"]
        weight = empty if isinstance(empty, nn.Parameter) else empty.weight
        fresh = nn.Parameter(_value(layer, kind, weight.shape, name, seed).to(place))
        if weight is empty:
            holder["default"] = fresh
        else:
            empty.weight = fresh
    for child in layer.modules():
        if child is not layer.get_base_layer():
            for key, buffer in child.named_buffers(recurse=False):
                child.register_buffer(key, buffer.to(place), persistent=False)


def _value(layer: Any, kind: str, shape: torch.Size, name: str, seed: int) -> torch.Tensor:
    if kind == "lora_magnitude_vector":
        rows: torch.Tensor = layer.get_base_layer().weight.detach().float().flatten(1)
        norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.reshape(shape)
    if kind == "boft_s":
        return torch.ones(shape)
    if kind not in DRAWN:
        return torch.zeros(shape)
    # As nn.Linear makes its own.
    purpose = "lora" if kind == "lora_A" else kind
    generator = torch.Generator().manual_seed(seed_for(seed, f"{purpose}/{name}"))
    drawn: torch.Tensor = nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)
    return drawn


def _as_built(layer: Any, kind: str, size: Size) -> Size:
    """Rank and alpha of which the scale is made: one over the other, whatever it was computed from."""
    if kind not in HAS_ALPHA:
        return Size(layer.r["default"] if kind == "oft" else size.rank, 1.0)
    if kind == "lokr" and "default" in layer.lokr_w1 and "default" in layer.lokr_w2:
        # Two whole matrices have no rank; other programs do not scale them either.
        layer.scaling["default"] = 1.0
        return Size(1, 1.0)
    return Size(size.rank, float(layer.scaling["default"] * size.rank))
