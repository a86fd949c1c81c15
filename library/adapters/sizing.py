"""Which site gets an adapter, and of which rank and alpha: sd-scripts' network_args, as a pure function of names."""

import re
from collections.abc import Iterator, Mapping, Sequence

from ..config.argument_forms import EVERY_BLOCK
from ..config.block_args import block_of, block_weights
from ..config.network_args import UNETS, NetworkArguments, arguments_of, kind_of
from ..config.schema import AdapterConfig
from ..errors import ConfigError
from .kinds import Size
from .sites import Site

TYPES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "flux": (
        ("img_attn_dim", r"double_blocks_\d+_img_attn"), ("txt_attn_dim", r"double_blocks_\d+_txt_attn"),
        ("img_mlp_dim", r"double_blocks_\d+_img_mlp"), ("txt_mlp_dim", r"double_blocks_\d+_txt_mlp"),
        ("img_mod_dim", r"double_blocks_\d+_img_mod"), ("txt_mod_dim", r"double_blocks_\d+_txt_mod"),
        ("single_dim", r"single_blocks_\d+_linear"), ("single_mod_dim", r"single_blocks_\d+_modulation"),
    ),
    "sd3": (
        ("context_attn_dim", "context_block_attn"), ("context_mlp_dim", "context_block_mlp"),
        ("context_mod_dim", "context_block_adaLN"), ("x_attn_dim", "x_block_attn"), ("x_mlp_dim", "x_block_mlp"),
        ("x_mod_dim", "x_block_adaLN"),
    ),
}  # fmt: skip
"""Family -> arguments that name the rank of a type of layers, and a pattern for their original names."""
OUTER: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "flux": ("in_dims", ("img_in", "time_in", "vector_in", "guidance_in", "txt_in")),
    "sd3": ("emb_dims", ("context_embedder", "t_embedder", "x_embedder", "y_embedder", "final_layer_adaLN_modulation",
                         "final_layer_linear")),
}  # fmt: skip
"""Family -> the argument with ranks for layers outside of the blocks, and the layers in its order."""
BLOCKS = (
    ("train_double_block_indices", r"double_blocks_(\d+)_"), ("train_single_block_indices", r"single_blocks_(\d+)_"),
    ("train_block_indices", r"joint_blocks_(\d+)_"),
)  # fmt: skip


def sizes_of(sites: Sequence[Site], config: AdapterConfig, family: str) -> dict[str, Size]:
    """Of each site that gets an adapter, by its name in a state, in the order of the sites."""
    arguments = arguments_of(config)
    problems = [*_idle_patterns(sites, arguments), *_missing_blocks(sites, arguments)]
    found = {}
    for site in sites:
        size = _size(site, config, arguments, family)
        if size.rank:
            found[site.name] = size
    problems += _torn(sites, found)
    if not found and not problems:
        problems = ["network_args leave nothing that is trained"]
    if problems:
        raise ConfigError([f"--network_args: {problem}" for problem in problems])
    return found


def _size(site: Site, config: AdapterConfig, arguments: NetworkArguments, family: str) -> Size:
    rank, alpha = config.network_dim, config.network_alpha
    if kind_of(config) in ("oft", "boft"):
        alpha = 1.0
    if site.is_wide and arguments.conv_dim is not None:
        rank, alpha = arguments.conv_dim, arguments.conv_alpha
    if not site.is_text:
        if family in UNETS:
            rank, alpha = _of_block(site, arguments, family, rank, alpha)
        rank = _of_type(site, arguments, family, rank)
        rank = rank if _is_chosen_block(site, arguments) else 0
    for pattern, value in arguments.network_reg_dims:
        if matches(pattern, site):
            rank = value
            break
    if any(_is(pattern, site) for pattern in arguments.exclude_patterns):
        rank = rank if any(_is(pattern, site) for pattern in arguments.include_patterns) else 0
    return Size(rank, float(alpha or rank))  # sd-scripts: an alpha of 0 stands for the rank


def _of_block(site: Site, arguments: NetworkArguments, family: str, rank: int, alpha: float) -> tuple[int, float]:
    block = block_of(site.original, family)
    if block is None:
        return rank, alpha
    dims, alphas = arguments.block_dims, arguments.block_alphas
    if site.is_wide:
        dims, alphas = arguments.conv_block_dims, arguments.conv_block_alphas
    weights = block_weights(arguments, family)
    if weights is not None and weights[block] == 0:
        return 0, alpha
    return rank if dims is None else dims[block], alpha if alphas is None else alphas[block]


def _of_type(site: Site, arguments: NetworkArguments, family: str, rank: int) -> int:
    if family in OUTER and not re.search(r"(double|single|joint)_blocks_", site.original):
        argument, layers = OUTER[family]
        ranks = getattr(arguments, argument)
        return next((value for layer, value in zip(layers, ranks or (), strict=False)
                     if site.original.startswith(f"lora_unet_{layer}")), 0)  # fmt: skip
    for argument, pattern in TYPES.get(family, ()):
        value = getattr(arguments, argument)
        if value is not None and re.search(pattern, site.original):
            return int(value)
    return rank


def _missing_blocks(sites: Sequence[Site], arguments: NetworkArguments) -> Iterator[str]:
    """Blocks that were asked for and that this model does not have."""
    for argument, pattern in BLOCKS:
        matches_of = [re.search(pattern, site.original) for site in sites]
        last = max((int(found[1]) for found in matches_of if found is not None), default=-1)
        asked = [end for pair in getattr(arguments, argument) or () for end in pair if end != EVERY_BLOCK]
        if asked and max(asked) > last:
            yield f"{argument}: there is no block {max(asked)}; the last one is {last}"


def _is_chosen_block(site: Site, arguments: NetworkArguments) -> bool:
    if arguments.train_blocks != "all" and re.search(r"(double|single)_blocks_", site.original):
        if f"{arguments.train_blocks}_blocks_" not in site.original:
            return False
    for argument, pattern in BLOCKS:
        chosen, found = getattr(arguments, argument), re.search(pattern, site.original)
        if chosen is not None and found is not None:
            return any(first <= int(found[1]) <= last for first, last in chosen)
    return True


def matches(pattern: str, site: Site) -> bool:
    """Whether a pattern is somewhere in a site's name, as files have it or as the model has it."""
    return any(re.search(pattern, name) for name in (site.original, site.name))


def _is(pattern: str, site: Site) -> bool:
    """Whether a pattern is the whole of such a name."""
    return any(re.fullmatch(pattern, name) for name in (site.original, site.name, site.module))


def _idle_patterns(sites: Sequence[Site], arguments: NetworkArguments) -> Iterator[str]:
    for argument in ("network_reg_dims", "network_reg_lrs"):
        for pattern, _ in getattr(arguments, argument):
            if not any(matches(pattern, site) for site in sites):
                yield f"{argument}: {pattern!r} matches no module, of which {_example(sites)} is one"
    for argument in ("exclude_patterns", "include_patterns"):
        for pattern in getattr(arguments, argument):
            if not any(_is(pattern, site) for site in sites):
                yield (f"{argument}: {pattern!r} is the whole name of no module, of which {_example(sites)} is one; "
                       ".* stands for anything")  # fmt: skip


def _example(sites: Sequence[Site]) -> str:
    return f"{sites[0].name} ({sites[0].original})"


def _torn(sites: Sequence[Site], sizes: Mapping[str, Size]) -> Iterator[str]:
    """Modules that are one in the original model share a matrix, and cannot have different ranks."""
    ranks: dict[str, set[Size]] = {}
    for site in sites:
        if site.name in sizes:
            ranks.setdefault(site.original, set()).add(sizes[site.name])
    for original, found in ranks.items():
        if len(found) > 1:
            several = " and ".join(str(rank) for rank in sorted({size.rank for size in found}))
            yield f"{original} is one module in sd-scripts, and its parts would have ranks {several}"
