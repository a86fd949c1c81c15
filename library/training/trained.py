"""What is trained: the denoiser, and the text encoders where they are trained, in one module with their adapters."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..adapters import lora
from ..adapters.dropout import Dropout
from ..config import RunConfig
from ..config.adapter_rules import misfits
from ..config.network_args import arguments_of
from ..config.schema import AdapterConfig
from ..errors import ConfigError
from ..families.base import Family
from ..families.detect import Detected
from ..families.facts import Facts
from ..families.unloaded import unloaded
from .activation_checkpointing import enable_activation_checkpointing
from .groups import rate_of

logger = logging.getLogger(__name__)


class Trained(nn.Module):
    """The denoiser with the text encoders that are trained beside it.

    To call it is to call the denoiser.  Text encoders are called through the pipeline, before it: their gradients
    are known to DDP because their parameters are in here, wherever their forward happens.
    """

    def __init__(self, denoiser: str, parts: Mapping[str, nn.Module]):
        super().__init__()
        self._denoiser = denoiser
        for name, part in parts.items():
            self.add_module(name, part)

    @property
    def denoiser(self) -> nn.Module:
        return self.get_submodule(self._denoiser)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.get_submodule(self._denoiser)(*arguments, **named)


def trained_text_parts(config: RunConfig, facts: Facts) -> tuple[str, ...]:
    """The text encoders that get an adapter; a rate of 0 leaves one out."""
    if not config.adapter.trains_texts:
        return ()
    with_t5 = arguments_of(config.adapter).train_t5xxl
    parts = [part for part in facts.text_encoders if with_t5 or part != facts.t5]
    return tuple(part for part in parts if not config.optim.text_encoder_lr or rate_of(part, config.optim, facts))


def parts_of(config: RunConfig, family: Family, pipe: Any, *, every_layer: bool = False) -> list[lora.Part]:
    """The parts of the pipeline that get an adapter, with the layers that are asked for, or all that could be."""
    parts = []
    if config.adapter.trains_denoiser:
        denoiser, arguments = getattr(pipe, family.denoiser), arguments_of(config.adapter)
        has_wide = every_layer or arguments.conv_dim is not None
        has_outside = every_layer or (arguments.in_dims or arguments.emb_dims) is not None
        targets = (*family.lora_targets, *(family.conv_lora_targets if has_wide else ()),
                   *(family.outer_lora_targets(denoiser) if has_outside else ()))  # fmt: skip
        parts.append(lora.Part(family.denoiser, denoiser, targets, family.lora_names, family.lora_prefix,
                               family.idle_layers(denoiser)))  # fmt: skip
    for name in trained_text_parts(config, family.facts):
        encoder = getattr(pipe, name)
        parts.append(lora.Part(name, encoder, family.text_lora_targets[name], family.text_style(name),
                               family.text_lora_prefixes[name], family.idle_text_layers(encoder, name)))  # fmt: skip
    return parts


def rehearse(config: RunConfig, family: Family, model: Detected) -> None:
    """Choose what gets an adapter for nothing, so that a mistake in it shows before anything is loaded."""
    _refuse_misfits(config, family.facts)
    if config.adapter.network_args:
        parts = parts_of(config, family, unloaded(model, (family.denoiser, *trained_text_parts(config, family.facts))))
        lora.chosen(parts, config.adapter, family.facts.name)


def _refuse_misfits(config: RunConfig, facts: Facts) -> None:
    problems = misfits(config, facts.name, facts.title, facts.text_encoders, facts.t5)
    if found := [f"--{names[0]}: {problem}" for names, problem in problems]:
        raise ConfigError(found)


def put_adapters(config: RunConfig, family: Family, pipe: Any,
                 given: Mapping[str, lora.Size] | None = None) -> tuple[Trained, lora.Adapter]:  # fmt: skip
    """Give the pipeline its adapters, or those of ``given`` sizes, and make it ready to be trained."""
    _refuse_misfits(config, family.facts)
    parts = parts_of(config, family, pipe, every_layer=given is not None)
    denoiser = getattr(pipe, family.denoiser)
    denoiser.requires_grad_(False)
    adapter = lora.put(parts, config.adapter, config.train.seed, family.facts.name, given)
    trained = Trained(family.denoiser, {family.denoiser: denoiser, **{part.name: part.model for part in parts}})
    for part in parts:
        if part.is_text:
            _without_dropout(part.model)
    if config.train.gradient_checkpointing:
        enable_activation_checkpointing(trained.children(), trained.denoiser, config.train)
    trained.train()
    return trained, adapter


def dropout_of(config: AdapterConfig, trained: Trained, adapter: lora.Adapter) -> Dropout | None:
    """What leaves out parts of the adapter, if anything is to be left out."""
    arguments = arguments_of(config)
    rates = config.network_dropout, arguments.rank_dropout, arguments.module_dropout
    if not any(rates):
        return None
    dropout = Dropout(*rates)
    layers: list[Any] = [trained.get_submodule(name) for name in adapter.modules]
    dropout.attach(layer.lora_A["default"] for layer in layers)
    return dropout


def _without_dropout(encoder: nn.Module) -> None:
    """Checkpointing needs a model in training; T5 would then leave out a tenth of what it computes, at random."""
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]


def described(trained: Trained, adapter: lora.Adapter) -> list[str]:
    """What is trained, in words: modules by kind, parameters, share of the model."""
    lines = []
    for name, part in trained.named_children():
        kinds = Counter(_kind(part, site) for site in adapter.sites if site.part == name)
        if not kinds:
            continue
        ranks = sorted({adapter.sizes[site.name].rank for site in adapter.sites if site.part == name})
        own = [parameter for parameter in part.parameters() if parameter.requires_grad]
        modules = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        whole = sum(parameter.numel() for parameter in part.parameters())
        learnt = sum(parameter.numel() for parameter in own)
        lines.append(f"training {name} ({type(part).__name__}): {modules}, rank {_from_to(ranks)}; {learnt:,} numbers, "
                     f"{100 * learnt / whole:.2f} % of it")  # fmt: skip
    return lines


def _kind(part: nn.Module, site: lora.Site) -> str:
    layer: Any = part.get_submodule(site.module)
    if not isinstance(layer.get_base_layer(), nn.Conv2d):
        return "linear layers"
    return "convolutions" if site.is_wide else "1x1 convolutions"


def _from_to(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
