"""Adapters put into the parts of a pipeline, found again in them, read out and back in.

A state is a dict of tensors named by peft, without the adapter's own name, behind the part of the pipeline:
``<part>.<module>.lora_A.weight`` (rank, in) and ``<part>.<module>.lora_B.weight`` (out, rank), with two more
dimensions where the module is a convolution; other kinds have other tensors.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, equal, nn

from ..config.network_args import LORA_TYPES, get_adapter_type, get_network_args
from ..config.schema import AdapterConfig
from ..errors import ConfigError
from .key_names import clean_parameter_name
from .original_layouts import ORIGINAL_LAYOUTS, ModuleGroup, group_by_original_module
from .peft_types import ADAPTER_WEIGHT_PATTERN, RankAlpha, inject_peft_layers, validate_boft_ranks
from .targets import TargetComponent, TargetLayer, assign_ranks, find_target_layers

AdapterStateDict = dict[str, Tensor]


@dataclass(frozen=True)
class Adapter:
    """What was put into the parts of a pipeline."""

    adapter_type: str
    """lora, dora, loha, lokr, oft or boft."""
    rank: int
    alpha: float
    """These two hold where nothing else was asked for."""
    rank_alphas: Mapping[str, RankAlpha]
    """Of each module, named as in a state, in the models' own order."""
    target_layers: tuple[TargetLayer, ...]
    """The modules of ``sizes``, and what they are."""

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.rank_alphas)

    @property
    def alphas(self) -> dict[str, float]:
        """Of each module, named as in a state."""
        return {name: size.alpha for name, size in self.rank_alphas.items()}


def inject_adapters(
    components: Sequence[TargetComponent],
    config: AdapterConfig,
    seed: int,
    family: str = "",
    rank_alphas: Mapping[str, RankAlpha] | None = None,
) -> Adapter:
    """Freeze all parts and give an adapter to those of their sites that are to have one, or that are ``given``.

    Modules that are one in the original model share their down matrix, as when sd-scripts trains them.  The start is
    a function of the seed and the module's name, so that every process makes the same one; the update is zero.  The
    new weights are float32 whatever the model is.
    """
    kind = get_adapter_type(config)
    if rank_alphas is None:
        sites, wanted = select_target_layers(components, config, family)
    else:
        sites = [site for part in components for site in find_target_layers(part)]
        if strangers := sorted(rank_alphas.keys() - {site.name for site in sites}):
            raise ConfigError([f"--network_weights: it trains {strangers[0]}, and this run would not"])
        wanted = dict(rank_alphas)
    built: dict[str, RankAlpha] = {}
    for part in components:
        part.model.requires_grad_(False)
        names = {site.module: site.name for site in sites if site.component == part.name and site.name in wanted}
        # Text encoders have the same names inside, and must not start alike.
        seeds = {module: name if part.is_text_encoder else module for module, name in names.items()}
        sizes = {module: wanted[name] for module, name in names.items()}
        found = inject_peft_layers(part.model, kind, get_network_args(config), sizes, seeds, seed)
        built |= {names[module]: size for module, size in found.items()}
        if kind in LORA_TYPES and part.key_style in ORIGINAL_LAYOUTS:
            _share_lora_a(part.model, group_by_original_module(names, ORIGINAL_LAYOUTS[part.key_style]))
    alpha = float(config.network_alpha or config.network_dim)
    return Adapter(kind, config.network_dim, alpha, built, tuple(site for site in sites if site.name in built))


def select_target_layers(
    components: Sequence[TargetComponent], config: AdapterConfig, family: str
) -> tuple[list[TargetLayer], dict[str, RankAlpha]]:
    """All sites, and the sizes of those that are to have an adapter; mistakes in ``network_args`` are told."""
    sites = [site for part in components for site in find_target_layers(part)]
    sizes = assign_ranks(sites, config, family)
    for part in components:
        own = {site.module: sizes[site.name] for site in sites if site.component == part.name and site.name in sizes}
        if problems := validate_boft_ranks(part.model, get_adapter_type(config), own):
            raise ConfigError(problems)
    return sites, sizes


def inject_into_model(
    model: nn.Module,
    config: AdapterConfig,
    target_modules: Sequence[str],
    seed: int,
    key_style: str = "diffusers",
    unused_layers: Sequence[str] = (),
) -> Adapter:
    """The same for one model alone, whose modules then have no part before their names."""
    found = inject_adapters(
        [TargetComponent("", model, target_modules, key_style, unused_layers=unused_layers)], config, seed
    )
    return Adapter(
        found.adapter_type,
        found.rank,
        found.alpha,
        {name.removeprefix("."): size for name, size in found.rank_alphas.items()},
        found.target_layers,
    )


def _share_lora_a(model: nn.Module, groups: Sequence[ModuleGroup]) -> None:
    """One down matrix for all modules of a group."""
    for group in groups:
        first, *others = (model.get_submodule(name) for name in group.modules if name is not None)
        for layer in others:
            layer.lora_A["default"] = first.lora_A["default"]  # type: ignore[index, operator]


def parse_module_name(name: str) -> str:
    """The module that a weight of a state belongs to."""
    return re.split(ADAPTER_WEIGHT_PATTERN, name)[0]


def iter_adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapters' weights of a model, wrapped or not, with their names in a state; a shared one under each name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if re.search(ADAPTER_WEIGHT_PATTERN, name):
            yield clean_parameter_name(name), parameter


def get_adapter_state_dict(model: nn.Module) -> AdapterStateDict:
    """The adapters' weights as they are now; they share memory with the model, and shared ones are one tensor."""
    found = dict(iter_adapter_parameters(model))
    once = {id(parameter): parameter.detach() for parameter in found.values()}
    return {name: once[id(parameter)] for name, parameter in found.items()}


def load_adapter_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Put weights into a model that has its adapters; names and shapes must be the same."""
    own = get_adapter_state_dict(model)
    wrong = [name for name in own.keys() & state_dict.keys() if own[name].shape != state_dict[name].shape]
    if own.keys() != state_dict.keys() or wrong:
        examples = sorted({*(own.keys() ^ state_dict.keys()), *wrong})[:3]
        raise ValueError(f"the LoRA weights do not fit the model, for example {', '.join(examples)}")
    for name, tensor in own.items():
        tensor.copy_(state_dict[name])
    torn = [name for name, tensor in own.items() if not equal(tensor, state_dict[name].to(tensor))]
    if torn:
        raise ValueError(f"modules that share a matrix were given different ones, for example {torn[0]}")


def cast_trainable_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Have what is learnt in another precision; call it before an optimizer knows the weights."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the one that was there before."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    learning = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, learns in learning.items():
            parameter.requires_grad_(learns)
