"""The trainable modules: which components get adapters, their adapters and LoRA dropout, and a summary of them.

They are one ``nn.Module``, with the denoiser and the trained text encoders as children named after the pipeline's
attributes, so that engines wrap one model and checkpoints have one list of names.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from torch import nn

from ..adapters import injection
from ..adapters.lora_dropout import LoraDropout
from ..adapters.peft_types import RankAlpha
from ..adapters.targets_rank_alpha import TargetComponent, TargetLayer
from ..adapters.token_layout import PLAIN_LAYOUT, ShardedTokens, TokenLayout
from ..config.network_args import (
    get_lycoris_preset,
    get_network_args,
)
from ..config.schema import AdapterConfig, RunConfig, TrainConfig
from ..config.schema_distributed import DistributedConfig
from ..config.schema_optim import OptimConfig
from ..distributed.devices import MIXED_PRECISION_DTYPES
from ..models.base import Family
from ..models.half_precision_norms import write_norms_in_half_precision
from ..models.recomputed_activations import recompute_activations
from ..models.trained_components import select_trained_text_encoders
from ..parallel.activation_checkpointing import enable_activation_checkpointing
from ..parallel.fuse_lora import fuse_lora_layers

logger = logging.getLogger(__name__)


class TrainableModules(nn.Module):
    """The denoiser and the text encoders that are trained with it, as one module for DDP.

    Calling it calls the denoiser. Text encoders are called through the pipeline before; DDP reduces their gradients
    because their parameters are registered here.
    """

    def __init__(self, denoiser_name: str, components: Mapping[str, nn.Module]):
        super().__init__()
        self._denoiser_name = denoiser_name
        for name, part in components.items():
            self.add_module(name, part)

    @property
    def denoiser_name(self) -> str:
        return self._denoiser_name

    @property
    def is_partly_idle(self) -> bool:
        """Whether a step trains a part of the modules only; which one, is the same on all ranks."""
        return any(getattr(self.denoiser, name, False) for name in ("is_partly_idle", "has_silent_steps"))

    @property
    def denoiser(self) -> nn.Module:
        return self.get_submodule(self._denoiser_name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(self._denoiser_name)(*args, **kwargs)


def select_target_components(
    config: AdapterConfig, optim: OptimConfig, family: Family, pipe: Any, *, modules: Iterable[str] | None = None
) -> list[TargetComponent]:
    """Select the components that get an adapter, with the target modules of the settings, or with ``modules``."""
    parts = []
    lora, denoiser_name = family.facts.lora, family.facts.denoiser_name
    all_layers = modules is not None
    own: dict[str, list[str]] = {}
    for name in modules or ():
        own.setdefault(name.partition(".")[0], []).append(name.partition(".")[2])
    if config.trains_denoiser:
        denoiser, arguments = getattr(pipe, denoiser_name), get_network_args(config)
        has_preset = get_lycoris_preset(config) is not None
        has_wide = all_layers or has_preset or arguments.conv_dim is not None
        has_outside = all_layers or (arguments.in_dims or arguments.emb_dims) is not None
        targets = (
            *lora.targets,
            *(lora.conv_targets if has_wide else ()),
            *(family.get_non_block_lora_targets(denoiser) if has_outside else ()),
            *(lora.preset_targets if has_preset else ()),
            *own.get(denoiser_name, ()),
        )
        parts.append(
            TargetComponent(
                name=denoiser_name,
                model=denoiser,
                target_modules=targets,
                optional_targets=lora.optional_targets,
                key_style=lora.key_style,
                key_prefix=lora.prefix,
                unused_layers=family.get_unused_layers(denoiser),
            )
        )
    for name in select_trained_text_encoders(config, optim, family.facts):
        encoder = getattr(pipe, name)
        parts.append(
            TargetComponent(
                name=name,
                model=encoder,
                target_modules=(*lora.text_encoders[name].targets, *own.get(name, ())),
                key_style=lora.text_encoders[name].key_style,
                key_prefix=lora.text_encoders[name].prefix,
                unused_layers=family.get_unused_text_layers(encoder, name),
            )
        )
    return parts


def build_trainable_modules(
    config: RunConfig,
    family: Family,
    pipe: Any,
    rank_alphas: Mapping[str, RankAlpha] | None = None,
    independent_modules: AbstractSet[str] = frozenset(),
) -> tuple[TrainableModules, injection.Adapter]:
    """Inject the adapters, with the ranks of a file if given, freeze the rest, and switch to training mode."""
    parts = select_target_components(config.adapter, config.optim, family, pipe, modules=rank_alphas)
    denoiser_name = family.facts.denoiser_name
    denoiser = getattr(pipe, denoiser_name)
    denoiser.requires_grad_(False)
    adapter = injection.inject_adapters(
        parts,
        config.adapter,
        config.train.seed,
        network=family.facts.options.network,
        rank_alphas=rank_alphas,
        independent_modules=independent_modules,
    )
    if family.shares_adapters:
        high, low = denoiser.iter_experts()
        injection.share_adapters(high[1], low[1])
    trained = TrainableModules(denoiser_name, {denoiser_name: denoiser, **{part.name: part.model for part in parts}})
    prepare_for_training(trained, [part.name for part in parts if part.is_text_encoder], config.train)
    return trained, adapter


def prepare_for_training(trained: TrainableModules, encoders: Iterable[str], train: TrainConfig) -> None:
    """Switch to training mode, without the dropout of text encoders, and with checkpointing if asked for."""
    for name in encoders:
        _disable_dropout(trained.get_submodule(name))
    if train.gradient_checkpointing:
        enable_activation_checkpointing(trained.children(), trained.denoiser, train)
    trained.train()


def fuse_layers(trained: TrainableModules, distributed: DistributedConfig, train: TrainConfig, precision: str) -> None:
    """Fuse LoRA layers and norms for training under autocast (``--fused_layers``); torch.compile does so by itself."""
    if not distributed.fused_layers or precision not in ("fp16", "bf16"):  # for fp8 accelerate replaces the layers
        return
    dtype = MIXED_PRECISION_DTYPES[precision]
    norms = write_norms_in_half_precision(trained.denoiser, dtype)
    activations = recompute_activations(trained.denoiser)
    adds_in_place = not train.activation_memory_budget
    layers = sum(fuse_lora_layers(each, dtype, adds_in_place=adds_in_place) for each in trained.children())
    logger.info(
        "fused layers: %d LoRA layers in fewer kernels, %d norms that write %s, %d activations recomputed",
        *(layers, norms, precision, activations),
    )


def build_lora_dropout(
    config: AdapterConfig,
    family: Family,
    trainable: TrainableModules,
    adapter: injection.Adapter,
    get_sharded_tokens: Callable[[nn.Module], ShardedTokens | None] | None = None,
) -> LoraDropout | None:
    """Build the dropout of the adapter; None if all rates are 0."""
    arguments = get_network_args(config)
    rates = config.network_dropout, arguments.rank_dropout, arguments.module_dropout
    if not any(rates):
        return None
    dropout = LoraDropout(*rates, get_sharded_tokens)
    layers: list[Any] = [trainable.get_submodule(name) for name in adapter.modules]
    layouts = [_find_token_layout(family, name) for name in adapter.modules]
    dropout.attach((layer.lora_A["default"] for layer in layers), layouts)
    if text_arguments := sorted({name for layout in layouts for name in layout.text_arguments}):
        dropout.record_text_lengths(trainable.denoiser, text_arguments)
    return dropout


def _find_token_layout(family: Family, name: str) -> TokenLayout:
    """Find the layout of the activations of a layer, which is named with its component."""
    component, _, layer = name.partition(".")
    if component != family.facts.denoiser_name:
        return PLAIN_LAYOUT
    found = (layout for pattern, layout in family.facts.blocks.token_layouts.items() if re.search(pattern, layer))
    return next(found, PLAIN_LAYOUT)


def _disable_dropout(encoder: nn.Module) -> None:
    """Disable the encoder's own dropout, as T5's of 0.1, which training mode would enable."""
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]


def format_trainable_summary(trainable: TrainableModules, adapter: injection.Adapter) -> list[str]:
    """Describe what is trained: layers by type, rank, number of parameters."""
    lines = []
    for name, part in trainable.named_children():
        kinds = Counter(_classify_layer(part, site) for site in adapter.target_layers if site.component == name)
        if not kinds:
            continue
        ranks = sorted(
            {adapter.rank_alphas[site.name].rank for site in adapter.target_layers if site.component == name}
        )
        modules = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        total = sum(parameter.numel() for parameter in part.parameters())
        trainable_count = sum(parameter.numel() for parameter in get_trainable_parameters(part))
        lines.append(
            f"training {name} ({type(part).__name__}): {modules}, rank {_format_range(ranks)},"
            f" {trainable_count:,} trainable parameters ({100 * trainable_count / total:.2f} % of the model)"
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
    """List the trainable parameters in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
