"""Inject LoRA and other adapters into the components of a pipeline, and get and load their state dict.

Rank and alpha of each layer come from ``adapters.targets_rank_alpha``; the layers themselves are built in
``adapters.peft_types``, LoRA dropout in ``adapters.lora_dropout``.
The keys of a state dict are peft's without the adapter name: ``<component>.<module>.lora_A.weight`` (rank, in) and
``<component>.<module>.lora_B.weight`` (out, rank), with two more dimensions for convolutions; other adapter types have
other tensors.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, equal, nn

from ..config.network_args import (
    GENERAL_NETWORK,
    LORA_TYPES,
    NetworkFacts,
    get_adapter_type,
    get_network_args,
)
from ..config.schema import AdapterConfig
from ..errors import ConfigError, FileError
from ..problems import Problem
from .component_key_names import clean_parameter_name
from .module_adapter import DOWN, PEFT_SUFFIXES
from .original_module_names import DIFFUSERS_KEYS, KeyStyle, group_by_original_module
from .peft_types import ADAPTER_WEIGHT_PATTERN, RankAlpha, inject_peft_layers
from .targets_rank_alpha import TargetComponent, TargetLayer, assign_ranks, find_target_layers
from .validate_targets import validate_boft_ranks, validate_ranks

ADAPTER_NAME = "default"
"""peft's name of the adapter that is trained."""
AdapterStateDict = dict[str, Tensor]


@dataclass(frozen=True)
class KeptTensors:
    """The tensors that files contain besides the trained layers, most of them since ``network_weights`` had them."""

    state_dict: Mapping[str, Tensor] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Alphas, by layer, of the layers in ``state_dict``, which cannot change the image."""
    siblings: Mapping[str, str] = field(default_factory=dict)
    """A trained layer that shares its lora_A with a layer that cannot change the image, by the name of the latter."""
    embeddings: Mapping[str, Tensor] = field(default_factory=dict)
    """Embeddings that OneTrainer adds to a file, by key."""
    only_fused: AbstractSet[str] = frozenset()
    """Layers that files have only as parts of fused ones."""

    def add_to(
        self, state_dict: AdapterStateDict, alphas: Mapping[str, float], *, fuses_layers: bool = True
    ) -> tuple[AdapterStateDict, dict[str, float]]:
        """The state dict and the alphas of a file."""
        end = PEFT_SUFFIXES[DOWN]
        shared = {f"{name}.{end}": state_dict[f"{trained}.{end}"] for name, trained in self.siblings.items()}
        state, own = {**state_dict, **self.state_dict, **shared}, {**alphas, **self.alphas}
        if fuses_layers or not self.only_fused:
            return state, own
        prefixes = tuple(f"{name}." for name in self.only_fused)
        state = {key: tensor for key, tensor in state.items() if not key.startswith(prefixes)}
        return state, {name: alpha for name, alpha in own.items() if name not in self.only_fused}


@dataclass(frozen=True)
class Adapter:
    """The adapters that were injected into a pipeline."""

    adapter_type: str
    """lora, dora, loha, lokr, oft or boft."""
    rank: int
    """The rank of modules without a rank of their own."""
    alpha: float
    """The alpha of modules without an alpha of their own."""
    rank_alphas: Mapping[str, RankAlpha]
    """Rank and alpha of each module, named as in a state dict, in the models' order."""
    target_layers: tuple[TargetLayer, ...]
    """The layers of ``rank_alphas``."""
    kept: KeptTensors = field(default_factory=KeptTensors)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.rank_alphas)

    @property
    def alphas(self) -> dict[str, float]:
        return {name: size.alpha for name, size in self.rank_alphas.items()}


def inject_adapters(
    components: Sequence[TargetComponent],
    config: AdapterConfig,
    seed: int,
    network: NetworkFacts = GENERAL_NETWORK,
    rank_alphas: Mapping[str, RankAlpha] | None = None,
    independent_modules: AbstractSet[str] = frozenset(),
) -> Adapter:
    """Freeze all components and inject adapters into their target layers, or into the layers of ``rank_alphas``.

    Modules that are fused in the original model share their lora_A, as in sd-scripts, except ``independent_modules``,
    named as in a state dict.  The initial weights are a function of the seed and the module's name, so that every rank
    has the same; the update is zero.  The adapter's weights are float32 whatever the model's dtype.
    """
    adapter_type = get_adapter_type(config)
    if rank_alphas is None:
        layers, assigned = select_target_layers(components, config, network)
    else:
        layers = [layer for component in components for layer in find_target_layers(component)]
        if unexpected := sorted(rank_alphas.keys() - {layer.name for layer in layers}):
            raise FileError([Problem("network_weights", f"it trains {unexpected[0]}, which is no target of this run")])
        assigned = dict(rank_alphas)
    injected: dict[str, RankAlpha] = {}
    for part in components:
        part.model.requires_grad_(False)
        names = {each.module: each.name for each in layers if each.component == part.name and each.name in assigned}
        # Two text encoders have the same module names, but must not get the same initial weights.
        seed_names = {module: name if part.is_text_encoder else module for module, name in names.items()}
        sizes = {module: assigned[name] for module, name in names.items()}
        effective = inject_peft_layers(
            part.model,
            adapter_type,
            network_args=get_network_args(config),
            rank_alphas=sizes,
            seed_names=seed_names,
            seed=seed,
        )
        injected |= {names[module]: size for module, size in effective.items()}
        if adapter_type in LORA_TYPES and part.key_style.layout:
            for group in group_by_original_module(names, part.key_style.layout):
                if any(names[module] in independent_modules for module in group.modules if module is not None):
                    continue
                first, *others = (part.model.get_submodule(name) for name in group.modules if name is not None)
                for layer in others:
                    layer.lora_A["default"] = first.lora_A["default"]  # type: ignore[index, operator]
    alpha = float(config.network_alpha or config.network_dim)
    target_layers = tuple(layer for layer in layers if layer.name in injected)
    return Adapter(adapter_type, config.network_dim, alpha, injected, target_layers)


def share_adapters(model: nn.Module, other: nn.Module) -> None:
    """Let the layers of another model use the adapters of the layers with their names in this one."""
    for name, layer in other.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        source = model.get_submodule(name)
        for kind in layer.adapter_layer_names:
            own: Any = getattr(layer, kind)
            if ADAPTER_NAME in own:
                own[ADAPTER_NAME] = getattr(source, kind)[ADAPTER_NAME]


def select_target_layers(
    components: Sequence[TargetComponent], config: AdapterConfig, network: NetworkFacts
) -> tuple[list[TargetLayer], dict[str, RankAlpha]]:
    """All target layers, and the ranks of those that get an adapter; mistakes in ``network_args`` are raised."""
    layers = [layer for component in components for layer in find_target_layers(component)]
    ranks = assign_ranks(layers, config, network)
    problems = [*validate_ranks(layers, ranks, config)]
    for part in components:
        own = {each.module: ranks[each.name] for each in layers if each.component == part.name and each.name in ranks}
        problems += validate_boft_ranks(part.model, get_adapter_type(config), own)
    if problems:
        raise ConfigError(problems)
    return layers, ranks


def inject_into_model(
    model: nn.Module,
    config: AdapterConfig,
    target_modules: Sequence[str],
    seed: int,
    key_style: KeyStyle = DIFFUSERS_KEYS,
    unused_layers: Sequence[str] = (),
) -> Adapter:
    """Inject adapters into a single model, whose modules then have no component in their names."""
    component = TargetComponent("", model, target_modules, key_style, unused_layers=unused_layers)
    adapter = inject_adapters([component], config, seed)
    rank_alphas = {name.removeprefix("."): size for name, size in adapter.rank_alphas.items()}
    return replace(adapter, rank_alphas=rank_alphas)


def parse_module_name(name: str) -> str:
    """The module of a key in a state dict."""
    return re.split(ADAPTER_WEIGHT_PATTERN, name)[0]


def iter_adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapter weights of a model, wrapped or not, by their keys in a state dict; shared ones under each key."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if re.search(ADAPTER_WEIGHT_PATTERN, name):
            yield clean_parameter_name(name), parameter


def get_adapter_state_dict(model: nn.Module) -> AdapterStateDict:
    """The adapter weights; they share memory with the model, and shared weights are one tensor."""
    parameters = dict(iter_adapter_parameters(model))
    tensors = {id(parameter): parameter.detach() for parameter in parameters.values()}
    return {name: tensors[id(parameter)] for name, parameter in parameters.items()}


def load_adapter_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Copy weights into a model with adapters; keys and shapes must be equal."""
    own = get_adapter_state_dict(model)
    mismatched = [name for name in own.keys() & state_dict.keys() if own[name].shape != state_dict[name].shape]
    if own.keys() != state_dict.keys() or mismatched:
        examples = sorted({*(own.keys() ^ state_dict.keys()), *mismatched})[:3]
        raise ValueError(f"the LoRA weights do not fit the model, for example {', '.join(examples)}")
    for name, tensor in own.items():
        tensor.copy_(state_dict[name])
    different = [name for name, tensor in own.items() if not equal(tensor, state_dict[name].to(tensor))]
    if different:
        raise ValueError(f"modules that share lora_A have different ones in the state dict, for example {different[0]}")


def find_linear_lora_layers(model: nn.Module) -> Iterator[LoraLinear]:
    """Yield peft's layers that add a LoRA without variants (DoRA) or bias to a linear layer."""
    for module in model.modules():
        if type(module) is LoraLinear and not module.lora_variant and not module.fan_in_fan_out:
            if not module.lora_bias[ADAPTER_NAME] and isinstance(module.lora_dropout[ADAPTER_NAME], nn.Identity):
                yield module


@contextmanager
def cast_lora_inputs(layer: Any) -> Iterator[None]:
    """Let a layer cast its inputs as peft does within the context, for use without autocast."""
    before, layer.cast_input_dtype_enabled = getattr(layer, "cast_input_dtype_enabled", True), True
    try:
        yield
    finally:
        layer.cast_input_dtype_enabled = before


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Let the model compute without its adapters within the context."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    requires_grad = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, value in requires_grad.items():
            parameter.requires_grad_(value)


@contextmanager
def bypass_lora(*layers: nn.Module) -> Iterator[None]:
    """Let these layers compute with their base weights within the context."""
    adapted = [layer for layer in layers if isinstance(layer, BaseTunerLayer)]
    before = [layer._disable_adapters for layer in adapted]
    for layer in adapted:  # not peft's enable_adapters(False), which also clears requires_grad of the adapter
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, is_disabled in zip(adapted, before, strict=True):
            layer._disable_adapters = is_disabled


@contextmanager
def scale_adapters(model: nn.Module, factor: float) -> Iterator[None]:
    """Multiply the strength of the adapter by a factor within the context, which has to cover the backward pass."""
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)] if factor != 1 else []
    scalings: list[dict[str, float]] = [layer.scaling for layer in layers]  # type: ignore[misc]
    before = [scaling[ADAPTER_NAME] for scaling in scalings]
    for scaling in scalings:
        scaling[ADAPTER_NAME] *= factor
    try:
        yield
    finally:
        for scaling, value in zip(scalings, before, strict=True):
            scaling[ADAPTER_NAME] = value
