"""Where adapters can be put: the layers of each part of a pipeline that may be trained, and what files call them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..config.network_arg_types import LAST_BLOCK
from ..config.network_args import (
    UNET_FAMILIES,
    NetworkArgs,
    compute_block_lr_weights,
    get_adapter_type,
    get_network_args,
    get_unet_block_index,
)
from ..config.schema import AdapterConfig
from ..errors import ConfigError
from .key_names import build_key_map, build_kohya_name
from .peft_types import RankAlpha


@dataclass(frozen=True)
class TargetComponent:
    """A model of the pipeline, and what in it gets an adapter."""

    name: str
    """The pipeline's attribute, such as ``unet`` or ``text_encoder_2``; it stands before the names in a state."""
    model: nn.Module
    target_modules: Sequence[str]
    key_style: str = "diffusers"
    """``Family.lora_names``, or ``Family.text_style``."""
    key_prefix: str = "lora_unet"
    """What stands before the names of its modules in sd-scripts' files."""
    unused_layers: Sequence[str] = ()
    """Layers that no gradient reaches; they get no adapter."""

    @property
    def is_text_encoder(self) -> bool:
        return self.key_style in ("clip", "t5")


@dataclass(frozen=True)
class TargetLayer:
    """One layer that may get an adapter."""

    component: str
    module: str
    kohya_name: str
    """Its name in sd-scripts' files; there, several sites may be one."""
    is_spatial_conv: bool
    """A convolution over more than one pixel, which has a rank of its own."""
    is_text_encoder: bool

    @property
    def name(self) -> str:
        """As a state names it."""
        return f"{self.component}.{self.module}"


def find_target_layers(component: TargetComponent) -> list[TargetLayer]:
    """All layers of a part that its targets name, in the model's own order."""
    modules = [
        name
        for name in match_target_modules(component.model, component.target_modules)
        if name not in set(component.unused_layers)
    ]
    files = build_key_map((name for name, _ in component.model.named_modules()), component.key_style)
    original = {
        module: build_kohya_name(group.name, component.key_prefix)
        for group in files.group_modules(modules)
        for module in group.modules
        if module is not None
    }
    return [
        TargetLayer(
            component.name,
            module,
            original[module],
            _is_spatial_conv(component.model.get_submodule(module)),
            component.is_text_encoder,
        )
        for module in modules
    ]


def match_target_modules(model: nn.Module, target_modules: Sequence[str]) -> tuple[str, ...]:
    """Names of the linear layers and convolutions that a target names; a target without any is an error."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    idle = [target for target in target_modules if not any(_matches_suffix(name, target) for name in names)]
    if idle or not target_modules:
        found = ", ".join(map(repr, idle)) or "no target"
        raise ConfigError([f"LoRA targets: {found} matches no layer of {type(model).__name__}"])
    return tuple(name for name in names if any(_matches_suffix(name, target) for target in target_modules))


def _matches_suffix(name: str, target: str) -> bool:
    """Whether the last parts of a name are those of a target, in which ``*`` is any one part."""
    parts, wanted = name.split("."), target.split(".")
    return len(parts) >= len(wanted) and all(
        want in ("*", part) for part, want in zip(parts[::-1], wanted[::-1], strict=False)
    )


def _is_spatial_conv(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)


LAYER_TYPE_RANK_ARGS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "flux": (
        ("img_attn_dim", r"double_blocks_\d+_img_attn"),
        ("txt_attn_dim", r"double_blocks_\d+_txt_attn"),
        ("img_mlp_dim", r"double_blocks_\d+_img_mlp"),
        ("txt_mlp_dim", r"double_blocks_\d+_txt_mlp"),
        ("img_mod_dim", r"double_blocks_\d+_img_mod"),
        ("txt_mod_dim", r"double_blocks_\d+_txt_mod"),
        ("single_dim", r"single_blocks_\d+_linear"),
        ("single_mod_dim", r"single_blocks_\d+_modulation"),
    ),
    "sd3": (
        ("context_attn_dim", "context_block_attn"),
        ("context_mlp_dim", "context_block_mlp"),
        ("context_mod_dim", "context_block_adaLN"),
        ("x_attn_dim", "x_block_attn"),
        ("x_mlp_dim", "x_block_mlp"),
        ("x_mod_dim", "x_block_adaLN"),
    ),
}
"""Family -> arguments that name the rank of a type of layers, and a pattern for their original names."""


OUTER_LAYER_RANK_ARGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "flux": ("in_dims", ("img_in", "time_in", "vector_in", "guidance_in", "txt_in")),
    "sd3": (
        "emb_dims",
        (
            "context_embedder",
            "t_embedder",
            "x_embedder",
            "y_embedder",
            "final_layer_adaLN_modulation",
            "final_layer_linear",
        ),
    ),
}
"""Family -> the argument with ranks for layers outside of the blocks, and the layers in its order."""


BLOCK_INDEX_ARGS = (
    ("train_double_block_indices", r"double_blocks_(\d+)_"),
    ("train_single_block_indices", r"single_blocks_(\d+)_"),
    ("train_block_indices", r"joint_blocks_(\d+)_"),
)


def assign_ranks(layers: Sequence[TargetLayer], config: AdapterConfig, family: str) -> dict[str, RankAlpha]:
    """Of each site that gets an adapter, by its name in a state, in the order of the sites."""
    arguments = get_network_args(config)
    problems = [*_find_unmatched_patterns(layers, arguments), *_find_missing_blocks(layers, arguments)]
    found = {}
    for site in layers:
        size = _resolve_rank_alpha(site, config, arguments, family)
        if size.rank:
            found[site.name] = size
    problems += _find_unequal_fused_ranks(layers, found)
    if not found and not problems:
        problems = ["network_args leave nothing that is trained"]
    if problems:
        raise ConfigError([f"--network_args: {problem}" for problem in problems])
    return found


def _resolve_rank_alpha(layer: TargetLayer, config: AdapterConfig, network_args: NetworkArgs, family: str) -> RankAlpha:
    rank, alpha = config.network_dim, config.network_alpha
    if get_adapter_type(config) in ("oft", "boft"):
        alpha = 1.0
    if layer.is_spatial_conv and network_args.conv_dim is not None:
        rank, alpha = network_args.conv_dim, network_args.conv_alpha
    if not layer.is_text_encoder:
        if family in UNET_FAMILIES:
            rank, alpha = _resolve_block_rank_alpha(layer, network_args, family, rank, alpha)
        rank = _resolve_layer_type_rank(layer, network_args, family, rank)
        rank = rank if _is_selected_block(layer, network_args) else 0
    for pattern, value in network_args.network_reg_dims:
        if matches_pattern(pattern, layer):
            rank = value
            break
    if any(_matches_full_name(pattern, layer) for pattern in network_args.exclude_patterns):
        rank = rank if any(_matches_full_name(pattern, layer) for pattern in network_args.include_patterns) else 0
    return RankAlpha(rank, float(alpha or rank))  # sd-scripts: an alpha of 0 stands for the rank


def _resolve_block_rank_alpha(
    layer: TargetLayer, network_args: NetworkArgs, family: str, rank: int, alpha: float
) -> tuple[int, float]:
    block = get_unet_block_index(layer.kohya_name, family)
    if block is None:
        return rank, alpha
    dims, alphas = network_args.block_dims, network_args.block_alphas
    if layer.is_spatial_conv:
        dims, alphas = network_args.conv_block_dims, network_args.conv_block_alphas
    weights = compute_block_lr_weights(network_args, family)
    if weights is not None and weights[block] == 0:
        return 0, alpha
    return rank if dims is None else dims[block], alpha if alphas is None else alphas[block]


def _resolve_layer_type_rank(target_layer: TargetLayer, network_args: NetworkArgs, family: str, rank: int) -> int:
    if family in OUTER_LAYER_RANK_ARGS and not re.search(r"(double|single|joint)_blocks_", target_layer.kohya_name):
        argument, layers = OUTER_LAYER_RANK_ARGS[family]
        ranks = getattr(network_args, argument)
        return next(
            (
                value
                for layer, value in zip(layers, ranks or (), strict=False)
                if target_layer.kohya_name.startswith(f"lora_unet_{layer}")
            ),
            0,
        )
    for argument, pattern in LAYER_TYPE_RANK_ARGS.get(family, ()):
        value = getattr(network_args, argument)
        if value is not None and re.search(pattern, target_layer.kohya_name):
            return int(value)
    return rank


def _find_missing_blocks(layers: Sequence[TargetLayer], network_args: NetworkArgs) -> Iterator[str]:
    """Blocks that were asked for and that this model does not have."""
    for argument, pattern in BLOCK_INDEX_ARGS:
        matches_of = [re.search(pattern, site.kohya_name) for site in layers]
        last = max((int(found[1]) for found in matches_of if found is not None), default=-1)
        asked = [end for pair in getattr(network_args, argument) or () for end in pair if end != LAST_BLOCK]
        if asked and max(asked) > last:
            yield f"{argument}: there is no block {max(asked)}; the last one is {last}"


def _is_selected_block(layer: TargetLayer, network_args: NetworkArgs) -> bool:
    if network_args.train_blocks != "all" and re.search(r"(double|single)_blocks_", layer.kohya_name):
        if f"{network_args.train_blocks}_blocks_" not in layer.kohya_name:
            return False
    for argument, pattern in BLOCK_INDEX_ARGS:
        chosen, found = getattr(network_args, argument), re.search(pattern, layer.kohya_name)
        if chosen is not None and found is not None:
            return any(first <= int(found[1]) <= last for first, last in chosen)
    return True


def matches_pattern(pattern: str, layer: TargetLayer) -> bool:
    """Whether a pattern is somewhere in a site's name, as files have it or as the model has it."""
    return any(re.search(pattern, name) for name in (layer.kohya_name, layer.name))


def _matches_full_name(pattern: str, layer: TargetLayer) -> bool:
    """Whether a pattern is the whole of such a name."""
    return any(re.fullmatch(pattern, name) for name in (layer.kohya_name, layer.name, layer.module))


def _find_unmatched_patterns(layers: Sequence[TargetLayer], network_args: NetworkArgs) -> Iterator[str]:
    for argument in ("network_reg_dims", "network_reg_lrs"):
        for pattern, _ in getattr(network_args, argument):
            if not any(matches_pattern(pattern, site) for site in layers):
                yield f"{argument}: {pattern!r} matches no module, of which {_format_example(layers)} is one"
    for argument in ("exclude_patterns", "include_patterns"):
        for pattern in getattr(network_args, argument):
            if not any(_matches_full_name(pattern, site) for site in layers):
                yield (
                    f"{argument}: {pattern!r} is the whole name of no module, of which {_format_example(layers)} is one; "
                    ".* stands for anything"
                )


def _format_example(layers: Sequence[TargetLayer]) -> str:
    return f"{layers[0].name} ({layers[0].kohya_name})"


def _find_unequal_fused_ranks(layers: Sequence[TargetLayer], rank_alphas: Mapping[str, RankAlpha]) -> Iterator[str]:
    """Modules that are one in the original model share a matrix, and cannot have different ranks."""
    ranks: dict[str, set[RankAlpha]] = {}
    for site in layers:
        if site.name in rank_alphas:
            ranks.setdefault(site.kohya_name, set()).add(rank_alphas[site.name])
    for original, found in ranks.items():
        if len(found) > 1:
            several = " and ".join(str(rank) for rank in sorted({size.rank for size in found}))
            yield f"{original} is one module in sd-scripts, and its parts would have ranks {several}"
