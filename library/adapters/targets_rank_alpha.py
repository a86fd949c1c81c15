"""The layers that get an adapter, and the LoRA rank and alpha of each, from targets and ``network_args``.

The targets of a family are in ``FamilyLora`` of models/facts.py.
peft applies the scale alpha / rank (``peft_types``); alphas in files are in ``alpha_folding``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..config.network_args import (
    OFT_MODULES,
    TUCKER_TYPES,
    LycorisPreset,
    NetworkArgs,
    NetworkFacts,
    compute_block_lr_weights,
    get_adapter_type,
    get_lycoris_preset,
    get_network_args,
    get_unet_block_index,
)
from ..config.schema import AdapterConfig
from ..errors import UserError
from .component_key_names import build_key_map, build_kohya_name
from .original_module_names import DIFFUSERS_KEYS, KeyStyle
from .peft_types import RankAlpha


@dataclass(frozen=True)
class TargetComponent:
    """A component of the pipeline, and which of its modules get an adapter."""

    name: str
    """Name in the pipeline, such as ``unet`` or ``text_encoder_2``; the prefix of keys in a state dict."""
    model: nn.Module
    target_modules: Sequence[str]
    key_style: KeyStyle = DIFFUSERS_KEYS
    """``FamilyLora.key_style`` of the denoiser or ``TextEncoderLora.key_style`` of a text encoder."""
    key_prefix: str = "lora_unet"
    """The prefix of the component's keys in kohya files."""
    unused_layers: Sequence[str] = ()
    """Layers without gradient, which get no adapter."""
    optional_targets: Sequence[str] = ()
    """Target modules that get an adapter only where ``include_patterns`` or ``train_modulation`` says so."""

    @property
    def is_text_encoder(self) -> bool:
        return self.key_style.is_text_encoder


@dataclass(frozen=True)
class TargetLayer:
    """One layer that may get an adapter."""

    component: str
    module: str
    kohya_name: str
    """Name in kohya files, which several fused layers may share."""
    original_name: str
    """Name in the original model, with dots, which several fused layers may share."""
    is_spatial_conv: bool
    """A convolution with a kernel larger than 1x1, for which ``conv_dim`` applies."""
    is_text_encoder: bool
    is_optional: bool = False
    """Whether it gets an adapter only where ``include_patterns`` or ``train_modulation`` says so."""

    @property
    def name(self) -> str:
        """Name in a state dict."""
        return f"{self.component}.{self.module}"


def find_target_layers(component: TargetComponent) -> list[TargetLayer]:
    """All target layers of a component, in the model's order."""
    model, unused = component.model, set(component.unused_layers)
    targets = (*component.target_modules, *component.optional_targets)
    modules = [name for name in match_target_modules(model, targets) if name not in unused]
    usual = {*match_target_modules(model, component.target_modules)}
    key_map = build_key_map((name for name, _ in model.named_modules()), component.key_style)
    originals = {
        module: group.name for group in key_map.group_modules(modules) for module in group.modules if module is not None
    }
    layers = {name: model.get_submodule(name) for name in modules}
    spatial_convs = {
        name for name, layer in layers.items() if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1)
    }
    return [
        TargetLayer(
            component=component.name,
            module=name,
            kohya_name=build_kohya_name(originals[name], component.key_prefix),
            original_name=originals[name],
            is_spatial_conv=name in spatial_convs,
            is_text_encoder=component.is_text_encoder,
            is_optional=name not in usual,
        )
        for name in modules
    ]


def match_target_modules(model: nn.Module, target_modules: Sequence[str]) -> tuple[str, ...]:
    """Names of the linear layers and convolutions that match a target; every target has to match."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    unmatched = [target for target in target_modules if not any(_matches_suffix(name, target) for name in names)]
    if not target_modules:
        raise UserError(f"LoRA targets: none are given for {type(model).__name__}")
    if unmatched:
        targets = ", ".join(map(repr, unmatched))
        raise UserError(f"LoRA targets: no layer of {type(model).__name__} matches {targets}")
    return tuple(name for name in names if any(_matches_suffix(name, target) for target in target_modules))


def _matches_suffix(name: str, target: str) -> bool:
    """Whether the last dotted parts of a name equal the target, in which ``*`` is any one part."""
    parts, expected = name.split(".")[::-1], target.split(".")[::-1]
    return len(parts) >= len(expected) and all(
        pattern in ("*", part) for part, pattern in zip(parts, expected, strict=False)
    )


BLOCK_INDEX_ARGS = (
    ("train_double_block_indices", r"double_blocks_(\d+)_"),
    ("train_single_block_indices", r"single_blocks_(\d+)_"),
    ("train_block_indices", r"joint_blocks_(\d+)_"),
)


def assign_ranks(layers: Sequence[TargetLayer], config: AdapterConfig, network: NetworkFacts) -> dict[str, RankAlpha]:
    """Rank and alpha of each layer that gets an adapter, by its name in a state dict."""
    arguments = get_network_args(config)
    resolved = ((layer.name, _resolve_rank_alpha(layer, config, arguments, network)) for layer in layers)
    return {name: rank_alpha for name, rank_alpha in resolved if rank_alpha.rank}


def _resolve_rank_alpha(
    layer: TargetLayer, config: AdapterConfig, network_args: NetworkArgs, network: NetworkFacts
) -> RankAlpha:
    rank, alpha = config.network_dim, config.network_alpha
    if get_adapter_type(config) in ("oft", "boft"):
        alpha = 1.0
    if layer.is_spatial_conv and network_args.conv_dim is not None:
        rank, alpha = network_args.conv_dim, network_args.conv_alpha
    if not layer.is_text_encoder:
        if network.is_unet:
            rank, alpha = _resolve_block_rank_alpha(layer, network_args, network, rank, alpha)
        rank = _resolve_layer_type_rank(layer, network_args, network, rank)
        rank = rank if _is_selected_block(layer, network_args) else 0
    if (preset := get_lycoris_preset(config)) is not None and not _is_in_preset(layer, preset, network):
        rank = 0
    is_of_flux, is_attention = config.network_module == "networks.oft_flux", re.search(r"\.attn\d?\.", layer.name)
    if config.network_module in OFT_MODULES and (network.is_unet or is_of_flux) and not network_args.enable_all_linear:
        rank = rank if is_attention and "_single_blocks_" not in layer.kohya_name else 0
    for pattern, value in network_args.network_reg_dims:
        if matches_pattern(pattern, layer, network_args):
            rank = value
            break
    if _is_excluded(layer, network_args):
        rank = 0
    is_tucker = layer.is_spatial_conv and network_args.uses_tucker and get_adapter_type(config) in TUCKER_TYPES
    return RankAlpha(rank, float(alpha or rank), is_tucker)  # as in sd-scripts, alpha 0 means the rank


def _resolve_block_rank_alpha(
    layer: TargetLayer, network_args: NetworkArgs, network: NetworkFacts, rank: int, alpha: float
) -> tuple[int, float]:
    block = get_unet_block_index(layer.kohya_name, network)
    if block is None:
        return rank, alpha
    dims, alphas = network_args.block_dims, network_args.block_alphas
    if layer.is_spatial_conv:
        dims, alphas = network_args.conv_block_dims, network_args.conv_block_alphas
    weights = compute_block_lr_weights(network_args, network)
    if weights is not None and weights[block] == 0:
        return 0, alpha
    return rank if dims is None else dims[block], alpha if alphas is None else alphas[block]


def _resolve_layer_type_rank(
    target_layer: TargetLayer, network_args: NetworkArgs, network: NetworkFacts, rank: int
) -> int:
    if network.outer_layer_ranks and not re.search(r"(double|single|joint)_blocks_", target_layer.kohya_name):
        argument, layers = network.outer_layer_ranks
        for layer, value in zip(layers, getattr(network_args, argument) or (), strict=False):
            if target_layer.kohya_name.startswith(f"lora_unet_{layer}"):
                return int(value)
        return 0
    for argument, pattern in network.layer_type_ranks:
        value = getattr(network_args, argument)
        if value is not None and re.search(pattern, target_layer.kohya_name):
            return int(value)
    return rank


def _is_in_preset(layer: TargetLayer, preset: LycorisPreset, network: NetworkFacts) -> bool:
    """Whether a preset of LyCORIS trains the layer; in models without a UNet, it trains all layers of the blocks."""
    if layer.is_text_encoder:
        return preset.text_pattern is not None and re.search(preset.text_pattern, layer.module) is not None
    if not network.is_unet:
        return True
    if layer.is_spatial_conv and not preset.has_convolutions:
        return False
    return re.search(preset.unet_pattern, layer.module) is not None


def _is_selected_block(layer: TargetLayer, network_args: NetworkArgs) -> bool:
    if network_args.train_blocks != "all" and re.search(r"(double|single)_blocks_", layer.kohya_name):
        if f"{network_args.train_blocks}_blocks_" not in layer.kohya_name:
            return False
    for argument, pattern in BLOCK_INDEX_ARGS:
        ranges, match = getattr(network_args, argument), re.search(pattern, layer.kohya_name)
        if ranges is not None and match is not None:
            return any(first <= int(match[1]) <= last for first, last in ranges)
    return True


def _is_excluded(layer: TargetLayer, network_args: NetworkArgs) -> bool:
    is_default = not layer.is_optional or network_args.train_modulation
    excludes, includes = network_args.exclude_patterns, network_args.include_patterns
    if is_default and not any(matches_full_name(pattern, layer, network_args) for pattern in excludes):
        return False
    return not any(matches_full_name(pattern, layer, network_args) for pattern in includes)


def matches_pattern(pattern: str, layer: TargetLayer, network_args: NetworkArgs) -> bool:
    """Whether a pattern occurs in a name of the layer."""
    return any(re.search(pattern, name) for name in list_pattern_names(layer, network_args))


def matches_full_name(pattern: str, layer: TargetLayer, network_args: NetworkArgs) -> bool:
    """Whether a pattern matches one of the layer's names completely."""
    return any(re.fullmatch(pattern, name) for name in list_pattern_names(layer, network_args))


def list_pattern_names(layer: TargetLayer, network_args: NetworkArgs) -> tuple[str, ...]:
    """List the names that patterns match: all, or with ``pattern_names=original`` that in the original model."""
    if network_args.pattern_names == "original":
        return (layer.original_name,)
    return layer.name, layer.kohya_name, layer.original_name, layer.module
