"""Which learning rate every trained weight has."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..adapters import lora
from ..adapters.key_names import ComponentKeys
from ..adapters.peft_types import RankAlpha
from ..adapters.regularization import LoraDropout
from ..adapters.targets import TargetComponent, TargetLayer, matches_pattern
from ..config.network_args import (
    UNET_FAMILIES,
    NetworkArgs,
    compute_block_lr_weights,
    get_network_args,
    get_unet_block_index,
)
from ..config.schema import AdapterConfig, OptimConfig, RunConfig
from ..config.validate_adapter import validate_adapter_for_model
from ..errors import ConfigError
from ..models.base import Family
from ..models.detect import DetectedModel
from ..models.facts import FamilyFacts
from ..models.loading import load_components_on_meta
from ..optim.optimizers import ParamGroup
from .activation_checkpointing import enable_activation_checkpointing


def build_param_groups(
    model: nn.Module, adapter: lora.Adapter, config: RunConfig, facts: FamilyFacts
) -> list[ParamGroup]:
    """The trained weights by learning rate; a weight that modules share is in one group, once."""
    arguments = get_network_args(config.adapter)
    sites = {site.name: site for site in adapter.target_layers}
    found: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in _iter_unique_parameters(model):
        site = sites[lora.parse_module_name(name)]
        label, rate = _get_layer_lr(site, config.optim, arguments, facts)
        plus = _get_loraplus_ratio(site, arguments)
        if plus is not None and ".lora_B." in name:
            label, rate = f"{label}_plus", rate * plus
        found.setdefault((label, rate), []).append(parameter)
    return [ParamGroup(label, parameters, rate) for (label, rate), parameters in found.items()]


def _get_layer_lr(
    target_layer: TargetLayer, config: OptimConfig, network_args: NetworkArgs, facts: FamilyFacts
) -> tuple[str, float]:
    """What figures call the group of a site, and its rate."""
    label, rate = (
        target_layer.component if target_layer.is_text_encoder else "unet",
        get_component_lr(target_layer.component, config, facts),
    )
    for number, (pattern, own) in enumerate(network_args.network_reg_lrs):
        if matches_pattern(pattern, target_layer):
            return f"{label}_reg{number}", own
    if (
        facts.name in UNET_FAMILIES
        and not target_layer.is_text_encoder
        and (weights := compute_block_lr_weights(network_args, facts.name)) is not None
    ):
        block = get_unet_block_index(target_layer.kohya_name, facts.name)
        if block is not None:
            return f"{label}_block{block}", rate * weights[block]
    return label, rate


def _get_loraplus_ratio(target_layer: TargetLayer, network_args: NetworkArgs) -> float | None:
    """LoRA+: how much faster than the down matrices the up matrices learn."""
    own = (
        network_args.loraplus_text_encoder_lr_ratio
        if target_layer.is_text_encoder
        else network_args.loraplus_unet_lr_ratio
    )
    return network_args.loraplus_lr_ratio if own is None else own


def get_component_lr(component: str, config: OptimConfig, facts: FamilyFacts) -> float:
    """The peak learning rate of a part of the pipeline."""
    if component not in facts.text_encoders:
        return config.learning_rate if config.unet_lr is None else config.unet_lr
    rates = config.text_encoder_lr or (config.learning_rate,)
    return rates[0] if len(rates) == 1 else rates[facts.text_encoders.index(component)]


def _iter_unique_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    met = set()
    for name, parameter in lora.iter_adapter_parameters(model):
        if id(parameter) not in met:
            met.add(id(parameter))
            yield name, parameter


def collect_component_keys(family: Family | type[Family], pipe: Any) -> list[ComponentKeys]:
    """Those parts of a pipeline that are loaded and may be trained."""
    found = [(name, getattr(pipe, name, None)) for name in _list_adaptable_components(family)]
    return [build_component_keys(family, name, module) for name, module in found if isinstance(module, nn.Module)]


def _list_adaptable_components(family: Family | type[Family]) -> tuple[str, ...]:
    return (family.denoiser_name, *family.text_lora_prefixes)


def build_component_keys(family: Family | type[Family], component: str, model: nn.Module) -> ComponentKeys:
    """Those of one part."""
    if component == family.denoiser_name:
        return ComponentKeys.from_model(
            model, component, family.lora_prefix, family.lora_key_style, family.lora_other_key_styles
        )
    return ComponentKeys.from_model(
        model, component, family.text_lora_prefixes[component], family.get_text_key_style(component)
    )


logger = logging.getLogger(__name__)


class TrainableModules(nn.Module):
    """The denoiser with the text encoders that are trained beside it.

    To call it is to call the denoiser.  Text encoders are called through the pipeline, before it: their gradients
    are known to DDP because their parameters are in here, wherever their forward happens.
    """

    def __init__(self, denoiser_name: str, components: Mapping[str, nn.Module]):
        super().__init__()
        self._denoiser_name = denoiser_name
        for name, part in components.items():
            self.add_module(name, part)

    @property
    def denoiser(self) -> nn.Module:
        return self.get_submodule(self._denoiser_name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(self._denoiser_name)(*args, **kwargs)


def select_trained_text_encoders(config: RunConfig, facts: FamilyFacts) -> tuple[str, ...]:
    """The text encoders that get an adapter; a rate of 0 leaves one out."""
    if not config.adapter.trains_text_encoders:
        return ()
    with_t5 = get_network_args(config.adapter).train_t5xxl
    parts = [part for part in facts.text_encoders if with_t5 or part != facts.t5_encoder]
    return tuple(
        part for part in parts if not config.optim.text_encoder_lr or get_component_lr(part, config.optim, facts)
    )


def select_target_components(
    config: RunConfig, family: Family, pipe: Any, *, all_layers: bool = False
) -> list[TargetComponent]:
    """The parts of the pipeline that get an adapter, with the layers that are asked for, or all that could be."""
    parts = []
    if config.adapter.trains_denoiser:
        denoiser, arguments = getattr(pipe, family.denoiser_name), get_network_args(config.adapter)
        has_wide = all_layers or arguments.conv_dim is not None
        has_outside = all_layers or (arguments.in_dims or arguments.emb_dims) is not None
        targets = (
            *family.lora_target_modules,
            *(family.conv_lora_target_modules if has_wide else ()),
            *(family.get_non_block_lora_target_modules(denoiser) if has_outside else ()),
        )
        parts.append(
            TargetComponent(
                family.denoiser_name,
                denoiser,
                targets,
                family.lora_key_style,
                family.lora_prefix,
                family.get_unused_layers(denoiser),
            )
        )
    for name in select_trained_text_encoders(config, family.facts):
        encoder = getattr(pipe, name)
        parts.append(
            TargetComponent(
                name,
                encoder,
                family.text_lora_target_modules[name],
                family.get_text_key_style(name),
                family.text_lora_prefixes[name],
                family.get_unused_text_layers(encoder, name),
            )
        )
    return parts


def check_adapter_targets(config: RunConfig, family: Family, detected: DetectedModel) -> None:
    """Choose what gets an adapter for nothing, so that a mistake in it shows before anything is loaded."""
    _check_adapter_options(config, family.facts)
    if config.adapter.network_args:
        parts = select_target_components(
            config,
            family,
            load_components_on_meta(
                detected, (family.denoiser_name, *select_trained_text_encoders(config, family.facts))
            ),
        )
        lora.select_target_layers(parts, config.adapter, family.facts.name)


def _check_adapter_options(config: RunConfig, facts: FamilyFacts) -> None:
    problems = validate_adapter_for_model(
        config.adapter, config.optim, facts.name, facts.title, facts.text_encoders, facts.t5_encoder
    )
    if found := [f"--{names[0]}: {problem}" for names, problem in problems]:
        raise ConfigError(found)


def build_trainable_modules(
    config: RunConfig, family: Family, pipe: Any, rank_alphas: Mapping[str, RankAlpha] | None = None
) -> tuple[TrainableModules, lora.Adapter]:
    """Give the pipeline its adapters, or those of ``given`` sizes, and make it ready to be trained."""
    _check_adapter_options(config, family.facts)
    parts = select_target_components(config, family, pipe, all_layers=rank_alphas is not None)
    denoiser = getattr(pipe, family.denoiser_name)
    denoiser.requires_grad_(False)
    adapter = lora.inject_adapters(parts, config.adapter, config.train.seed, family.facts.name, rank_alphas)
    trained = TrainableModules(
        family.denoiser_name, {family.denoiser_name: denoiser, **{part.name: part.model for part in parts}}
    )
    for part in parts:
        if part.is_text_encoder:
            _disable_dropout(part.model)
    if config.train.gradient_checkpointing:
        enable_activation_checkpointing(trained.children(), trained.denoiser, config.train)
    trained.train()
    return trained, adapter


def build_lora_dropout(config: AdapterConfig, trainable: TrainableModules, adapter: lora.Adapter) -> LoraDropout | None:
    """What leaves out parts of the adapter, if anything is to be left out."""
    arguments = get_network_args(config)
    rates = config.network_dropout, arguments.rank_dropout, arguments.module_dropout
    if not any(rates):
        return None
    dropout = LoraDropout(*rates)
    layers: list[Any] = [trainable.get_submodule(name) for name in adapter.modules]
    dropout.attach(layer.lora_A["default"] for layer in layers)
    return dropout


def _disable_dropout(encoder: nn.Module) -> None:
    """Checkpointing needs a model in training; T5 would then leave out a tenth of what it computes, at random."""
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]


def format_trainable_summary(trainable: TrainableModules, adapter: lora.Adapter) -> list[str]:
    """What is trained, in words: modules by kind, parameters, share of the model."""
    lines = []
    for name, part in trainable.named_children():
        kinds = Counter(_classify_layer(part, site) for site in adapter.target_layers if site.component == name)
        if not kinds:
            continue
        ranks = sorted(
            {adapter.rank_alphas[site.name].rank for site in adapter.target_layers if site.component == name}
        )
        own = [parameter for parameter in part.parameters() if parameter.requires_grad]
        modules = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        whole = sum(parameter.numel() for parameter in part.parameters())
        learnt = sum(parameter.numel() for parameter in own)
        lines.append(
            f"training {name} ({type(part).__name__}): {modules}, rank {_format_range(ranks)}; {learnt:,} numbers, "
            f"{100 * learnt / whole:.2f} % of it"
        )
    return lines


def _classify_layer(component: nn.Module, target_layer: TargetLayer) -> str:
    layer: Any = component.get_submodule(target_layer.module)
    if not isinstance(layer.get_base_layer(), nn.Conv2d):
        return "linear layers"
    return "convolutions" if target_layer.is_spatial_conv else "1x1 convolutions"


def _format_range(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def get_trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
