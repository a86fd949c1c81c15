"""LoRA through peft: put into the parts of a pipeline, found again in them, read out and back in.

A state is a dict of tensors named by peft, without the adapter's own name, behind the part of the pipeline:
``<part>.<module>.lora_A.weight`` (rank, in) and ``<part>.<module>.lora_B.weight`` (out, rank), with two more
dimensions where the module is a convolution.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from ..config.schema import AdapterConfig
from ..randomness import seed_for
from .keys import clean
from .layouts import LAYOUTS, Group, groups
from .sites import Part, Site, matching, sites_of

__all__ = ["Adapter", "Part", "Site", "Size", "State", "inject", "load_state", "matching", "parameters", "put", "state"]

State = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """How large the adapter of one module is: its update is ``alpha / rank * up @ down``."""

    rank: int
    alpha: float


@dataclass(frozen=True)
class Adapter:
    """What was put into the parts of a pipeline."""

    rank: int
    alpha: float
    """These two hold where nothing else was asked for."""
    sizes: Mapping[str, Size]
    """Of each module, named as in a state, in the models' own order."""
    sites: tuple[Site, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def alphas(self) -> dict[str, float]:
        """Of each module, named as in a state."""
        return {name: size.alpha for name, size in self.sizes.items()}


def put(parts: Sequence[Part], config: AdapterConfig, seed: int) -> Adapter:
    """Freeze all parts and give a LoRA to their sites.

    Modules that are one in the original model share their down matrix, as when sd-scripts trains them.  The start is
    a function of the seed and the module's name, so that every process makes the same one; the update is zero.  The
    new weights are float32 whatever the model is.
    """
    alpha = float(config.network_alpha or config.network_dim)  # sd-scripts: 0 stands for the rank
    sites = [site for part in parts for site in sites_of(part)]
    sizes = {site.name: Size(config.network_dim, alpha) for site in sites}
    for part in parts:
        own = {site.module: sizes[site.name] for site in sites if site.part == part.name}
        _put_into(part, own, seed)
    return Adapter(config.network_dim, alpha, sizes, tuple(sites))


def inject(
    model: nn.Module,
    config: AdapterConfig,
    targets: Sequence[str],
    seed: int,
    style: str = "diffusers",
    idle: Sequence[str] = (),
) -> Adapter:
    """The same for one model alone, whose modules then have no part before their names."""
    found = put([Part("", model, targets, style, idle=idle)], config, seed)
    sizes = {name.removeprefix("."): size for name, size in found.sizes.items()}
    return Adapter(found.rank, found.alpha, sizes, found.sites)


def _put_into(part: Part, sizes: Mapping[str, Size], seed: int) -> None:
    part.model.requires_grad_(False)
    ranks = {name: size.rank for name, size in sizes.items()}
    alphas = {name: size.alpha for name, size in sizes.items()}
    # On the meta device peft draws no random numbers; the weights are made below.
    settings = LoraConfig(target_modules=_any_of(sizes), rank_pattern=_patterns(ranks), alpha_pattern=_patterns(alphas))
    inject_adapter_in_model(settings, part.model, low_cpu_mem_usage=True)
    for name in sizes:
        # Text encoders have the same names inside, and must not start alike.
        _start(part.model.get_submodule(name), f"{part.name}.{name}" if part.is_text else name, seed)
    _share(part.model, groups(sizes, LAYOUTS[part.style]) if part.style in LAYOUTS else ())


def _patterns(values: Mapping[str, Any]) -> dict[str, Any]:
    """One pattern for all modules that have the same value: peft looks through all patterns for each module."""
    names = defaultdict(list)
    for name, value in values.items():
        names[value].append(name)
    return {f"^{_any_of(each)}": value for value, each in names.items()}


def _any_of(names: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"


def _start(layer: Any, name: str, seed: int) -> None:
    """Make the weights of one LoRA: down as nn.Linear makes its own, up zero."""
    down, up = layer.lora_A["default"], layer.lora_B["default"]
    for half in (down, up):
        half.float().to_empty(device=layer.base_layer.weight.device).requires_grad_(True)
    weight = torch.empty(down.weight.shape)
    generator = torch.Generator().manual_seed(seed_for(seed, f"lora/{name}"))
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    with torch.no_grad():
        down.weight.copy_(weight)
        up.weight.zero_()


def _share(model: nn.Module, found: Sequence[Group]) -> None:
    """One down matrix for all modules of a group."""
    for group in found:
        first, *others = (model.get_submodule(name) for name in group.modules if name is not None)
        for layer in others:
            layer.lora_A["default"] = first.lora_A["default"]  # type: ignore[index, operator]


def module_of(name: str) -> str:
    """The module that a weight of a state belongs to."""
    return re.split(r"\.lora_[AB]\.", name)[0]


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The LoRA weights of a model, wrapped or not, with their names in a state; a shared one under each name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_A." in name or ".lora_B." in name:
            yield clean(name), parameter


def state(model: nn.Module) -> State:
    """The LoRA weights as they are now; they share memory with the model, and shared ones are one tensor."""
    found = dict(parameters(model))
    once = {id(parameter): parameter.detach() for parameter in found.values()}
    return {name: once[id(parameter)] for name, parameter in found.items()}


def load_state(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Put weights into a model that has its LoRA; names and shapes must be the same."""
    own = state(model)
    wrong = [name for name in own.keys() & given.keys() if own[name].shape != given[name].shape]
    if own.keys() != given.keys() or wrong:
        examples = sorted({*(own.keys() ^ given.keys()), *wrong})[:3]
        raise ValueError(f"the LoRA weights do not fit the model, for example {', '.join(examples)}")
    for name, tensor in own.items():
        tensor.copy_(given[name])
    torn = [name for name, tensor in own.items() if not torch.equal(tensor, given[name].to(tensor))]
    if torn:
        raise ValueError(f"modules that share a matrix were given different ones, for example {torn[0]}")
