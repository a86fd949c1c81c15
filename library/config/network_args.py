"""The blocks of a UNet as sd-scripts counts them: how many values an argument needs, and which weight each gets."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..registry import suggest_name
from . import network_arg_types as forms
from .schema import AdapterConfig

UNET_BLOCK_COUNTS = {"sd1": (12, 1, 12), "sd2": (12, 1, 12), "sdxl": (9, 3, 9)}
"""Family -> blocks on the way down, in the middle, and on the way up."""


UNET_OUTER_BLOCK_COUNTS = {"sdxl": (1, 1)}
"""Family -> blocks before and after them, in which nothing is trained."""


def count_unet_blocks(family: str) -> int:
    return sum(UNET_BLOCK_COUNTS[family]) + sum(UNET_OUTER_BLOCK_COUNTS.get(family, (0, 0)))


LORA_TYPES = ("lora", "dora")


LYCORIS_ALGORITHMS = {
    "lora": "lora",
    "locon": "lora",
    "dora": "dora",
    "loha": "loha",
    "lokr": "lokr",
    "diag-oft": "oft",
    "boft": "boft",
}
"""lycoris' names of what is trained."""


RANKED_TYPES = ("lora", "dora", "loha", "lokr")


UNET_FAMILIES = ("sd1", "sd2", "sdxl")


def _define_arg(
    parse: Callable[[str], Any], default: Any = None, families: Sequence[str] = (), adapter_types: Sequence[str] = ()
) -> Any:
    return field(default=default, metadata={"read": parse, "families": tuple(families), "kinds": tuple(adapter_types)})


@dataclass(frozen=True)
class NetworkArgs:
    """One field for each name; what belongs to some families or kinds only says so."""

    algo: str = _define_arg(forms.make_choice_parser(*LYCORIS_ALGORITHMS), "lora")
    use_dora: bool = _define_arg(forms.parse_bool, False, adapter_types=LORA_TYPES)
    dora_wd: bool = _define_arg(forms.parse_bool, False, adapter_types=LORA_TYPES)
    use_rslora: bool = _define_arg(forms.parse_bool, False, adapter_types=LORA_TYPES)
    rs_lora: bool = _define_arg(forms.parse_bool, False, adapter_types=LORA_TYPES)
    factor: int = _define_arg(forms.parse_lokr_factor, -1, adapter_types=("lokr",))
    decompose_both: bool = _define_arg(forms.parse_bool, False, adapter_types=("lokr",))
    conv_dim: int | None = _define_arg(
        forms.make_number_parser(1, number_type=int), families=UNET_FAMILIES, adapter_types=RANKED_TYPES
    )
    conv_alpha: float = _define_arg(
        forms.make_number_parser(0), 1.0, families=UNET_FAMILIES, adapter_types=RANKED_TYPES
    )
    rank_dropout: float = _define_arg(forms.parse_dropout_rate, 0.0, adapter_types=("lora",))
    module_dropout: float = _define_arg(forms.parse_dropout_rate, 0.0, adapter_types=("lora",))
    block_dims: tuple[int, ...] | None = _define_arg(forms.make_list_parser(forms.parse_rank), families=UNET_FAMILIES)
    block_alphas: tuple[float, ...] | None = _define_arg(
        forms.make_list_parser(forms.make_number_parser(0)), families=UNET_FAMILIES, adapter_types=RANKED_TYPES
    )
    conv_block_dims: tuple[int, ...] | None = _define_arg(
        forms.make_list_parser(forms.parse_rank), families=UNET_FAMILIES, adapter_types=RANKED_TYPES
    )
    conv_block_alphas: tuple[float, ...] | None = _define_arg(
        forms.make_list_parser(forms.make_number_parser(0)), families=UNET_FAMILIES, adapter_types=RANKED_TYPES
    )
    down_lr_weight: tuple[float, ...] | str | None = _define_arg(forms.parse_block_lr_weights, families=UNET_FAMILIES)
    mid_lr_weight: tuple[float, ...] | str | None = _define_arg(forms.parse_block_lr_weights, families=UNET_FAMILIES)
    up_lr_weight: tuple[float, ...] | str | None = _define_arg(forms.parse_block_lr_weights, families=UNET_FAMILIES)
    block_lr_zero_threshold: float = _define_arg(forms.make_number_parser(0), 0.0, families=UNET_FAMILIES)
    loraplus_lr_ratio: float | None = _define_arg(forms.parse_positive, adapter_types=LORA_TYPES)
    loraplus_unet_lr_ratio: float | None = _define_arg(forms.parse_positive, adapter_types=LORA_TYPES)
    loraplus_text_encoder_lr_ratio: float | None = _define_arg(forms.parse_positive, adapter_types=LORA_TYPES)
    network_reg_dims: tuple[tuple[str, int], ...] = _define_arg(forms.make_pattern_parser(forms.parse_rank), ())
    network_reg_lrs: tuple[tuple[str, float], ...] = _define_arg(
        forms.make_pattern_parser(forms.make_number_parser(0)), ()
    )
    exclude_patterns: tuple[str, ...] = _define_arg(forms.parse_patterns, ())
    include_patterns: tuple[str, ...] = _define_arg(forms.parse_patterns, ())
    train_t5xxl: bool = _define_arg(forms.parse_bool, False, families=("flux", "sd3"))
    train_blocks: str = _define_arg(forms.make_choice_parser("all", "double", "single"), "all", families=("flux",))
    train_double_block_indices: tuple[tuple[int, int], ...] | None = _define_arg(
        forms.parse_block_indices, families=("flux",)
    )
    train_single_block_indices: tuple[tuple[int, int], ...] | None = _define_arg(
        forms.parse_block_indices, families=("flux",)
    )
    train_block_indices: tuple[tuple[int, int], ...] | None = _define_arg(forms.parse_block_indices, families=("sd3",))
    img_attn_dim: int | None = _define_arg(forms.parse_rank, families=("flux",))
    txt_attn_dim: int | None = _define_arg(forms.parse_rank, families=("flux",))
    img_mlp_dim: int | None = _define_arg(forms.parse_rank, families=("flux",))
    txt_mlp_dim: int | None = _define_arg(forms.parse_rank, families=("flux",))
    img_mod_dim: int | None = _define_arg(forms.parse_rank, families=("flux",))
    txt_mod_dim: int | None = _define_arg(forms.parse_rank, families=("flux",))
    single_dim: int | None = _define_arg(forms.parse_rank, families=("flux",))
    single_mod_dim: int | None = _define_arg(forms.parse_rank, families=("flux",))
    in_dims: tuple[int, ...] | None = _define_arg(forms.make_list_parser(forms.parse_rank, 5), families=("flux",))
    context_attn_dim: int | None = _define_arg(forms.parse_rank, families=("sd3",))
    context_mlp_dim: int | None = _define_arg(forms.parse_rank, families=("sd3",))
    context_mod_dim: int | None = _define_arg(forms.parse_rank, families=("sd3",))
    x_attn_dim: int | None = _define_arg(forms.parse_rank, families=("sd3",))
    x_mlp_dim: int | None = _define_arg(forms.parse_rank, families=("sd3",))
    x_mod_dim: int | None = _define_arg(forms.parse_rank, families=("sd3",))
    emb_dims: tuple[int, ...] | None = _define_arg(forms.make_list_parser(forms.parse_rank, 6), families=("sd3",))


def validate_block_arg_lengths(network_args: NetworkArgs, family: str) -> Iterator[str]:
    """Lists that do not have a value for each block."""
    for name in ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"):
        values = getattr(network_args, name)
        if values is not None and len(values) != count_unet_blocks(family):
            yield f"{name}: {len(values)} values for {count_unet_blocks(family)} blocks"
    for name, count in zip(("down_lr_weight", "mid_lr_weight", "up_lr_weight"), UNET_BLOCK_COUNTS[family], strict=True):
        values = getattr(network_args, name)
        if isinstance(values, tuple) and len(values) != count:
            yield f"{name}: {len(values)} values for {count} blocks"


def compute_block_lr_weights(network_args: NetworkArgs, family: str) -> list[float] | None:
    """What the learning rate is multiplied by in each block; nothing where nobody asked."""
    given = (network_args.down_lr_weight, network_args.mid_lr_weight, network_args.up_lr_weight)
    if all(values is None for values in given):
        return None
    weights: list[float] = []
    for values, count in zip(given, UNET_BLOCK_COUNTS[family], strict=True):
        weights += (
            [1.0] * count
            if values is None
            else _expand_lr_weight_preset(values, count)
            if isinstance(values, str)
            else values
        )
    weights = [0.0 if weight <= network_args.block_lr_zero_threshold else weight for weight in weights]
    before, after = UNET_OUTER_BLOCK_COUNTS.get(family, (0, 0))
    return [1.0] * before + weights + [1.0] * after


def _expand_lr_weight_preset(text: str, count: int) -> list[float]:
    name, _, base = text.partition("+")
    steps = [place / max(count - 1, 1) for place in range(count)]
    shapes = {
        "sine": [math.sin(math.pi / 2 * step) for step in steps],
        "cosine": [math.sin(math.pi / 2 * step) for step in reversed(steps)],
        "linear": steps,
        "reverse_linear": list(reversed(steps)),
        "zeros": [0.0] * count,
    }
    return [value + float(base or 0) for value in shapes[name]]


def get_unet_block_index(kohya_name: str, family: str) -> int | None:
    """The number of the block that a module of a UNet is in, by its name in sd-scripts' files."""
    down, middle, _ = UNET_BLOCK_COUNTS[family]
    pieces = kohya_name.removeprefix("lora_unet_").split("_")
    if family == "sdxl":
        starts = {"input": 1, "middle": 1 + down, "output": 1 + down + middle}
        return starts[pieces[0]] + int(pieces[2]) if pieces[0] in starts else None
    if pieces[0] == "mid":
        return down
    if pieces[0] not in ("down", "up") or pieces[1] != "blocks":
        return None
    layer = 2 if pieces[3].endswith("samplers") else int(pieces[4])
    return (1 if pieces[0] == "down" else down + middle) + 3 * int(pieces[2]) + layer


NETWORK_MODULES = {
    "networks.lora": "lora",
    "networks.lora_flux": "lora",
    "networks.lora_sd3": "lora",
    "networks.loha": "loha",
    "networks.lokr": "lokr",
    "networks.oft": "oft",
    "networks.oft_flux": "oft",
    "lycoris.kohya": "lora",
}
"""sd-scripts' modules -> what they train; for lycoris.kohya, without ``algo``."""


UNSUPPORTED_MODULES = {
    "networks.dylora": "ranks that are trained in turns (DyLoRA) are not supported; write networks.lora",
    "networks.lora_fa": "down matrices that stay as they start (LoRA-FA) are not supported; write networks.lora",
}


FAMILY_OF_MODULE = {"networks.lora_flux": "flux", "networks.oft_flux": "flux", "networks.lora_sd3": "sd3"}


UNSUPPORTED_ARGS = {
    "split_qkv": "queries, keys and values always share one down matrix; it crashes in sd-scripts",
    "ggpo_sigma": "not yet: perturbed weights (GGPO)",
    "ggpo_beta": "not yet: perturbed weights (GGPO)",
    "unit": "belongs to networks.dylora, which is not supported",
    "preset": "the layers are those that sd-scripts trains; choose with exclude_patterns and include_patterns",
    "verbose": "the log counts the modules, and a pattern that matches none is an error",
}
"""Names that network modules of sd-scripts or lycoris take and that are not taken here."""


def parse_network_args(args: Sequence[str]) -> tuple[NetworkArgs, list[str]]:
    """What the words say, and everything that is wrong with them."""
    known = {each.name: each for each in fields(NetworkArgs)}
    values, problems = dict[str, Any](), []
    for word in args:
        name, equals, text = (piece.strip() for piece in word.partition("="))
        if not equals:
            problems.append(f"{word!r} is not name=value")
        elif name in UNSUPPORTED_ARGS:
            problems.append(f"{name}: {UNSUPPORTED_ARGS[name]}")
        elif name not in known:
            problems.append(f"no argument {name!r}{suggest_name(name, known)}")
        elif name in values:
            problems.append(f"{name} is given twice")
        else:
            try:
                values[name] = known[name].metadata["read"](text)
            except ValueError as error:
                problems.append(f"{name}: {error}, got {text!r}")
    return NetworkArgs(**values), problems


def get_network_args(config: AdapterConfig) -> NetworkArgs:
    """The same for settings that were checked."""
    return parse_network_args(config.network_args)[0]


def get_adapter_type(config: AdapterConfig) -> str:
    """What is trained: lora, dora, loha, lokr, oft or boft."""
    arguments = get_network_args(config)
    kind = NETWORK_MODULES.get(config.network_module, "lora")
    if config.network_module == "lycoris.kohya":
        kind = LYCORIS_ALGORITHMS[arguments.algo]
    return "dora" if kind == "lora" and (arguments.use_dora or arguments.dora_wd) else kind


def validate_network_module(name: str) -> str | None:
    """What is wrong with ``network_module``."""
    if name in NETWORK_MODULES:
        return None
    if name in UNSUPPORTED_MODULES:
        return UNSUPPORTED_MODULES[name]
    return f"no adapter {name!r}" + (suggest_name(name, NETWORK_MODULES) or f"; there are {', '.join(NETWORK_MODULES)}")


def list_arg_names(args: Sequence[str]) -> list[str]:
    return [word.partition("=")[0].strip() for word in args]


def find_args_of_other_types(config: AdapterConfig) -> list[str]:
    """Arguments that this kind of adapter does not have."""
    kind, known = get_adapter_type(config), {each.name: each.metadata for each in fields(NetworkArgs)}
    found = [
        f"{name}: {kind} does not have it, only {', '.join(known[name]['kinds'])}"
        for name in list_arg_names(config.network_args)
        if name in known and known[name]["kinds"] and kind not in known[name]["kinds"]
    ]
    if "algo" in list_arg_names(config.network_args) and config.network_module != "lycoris.kohya":
        found.append("algo belongs to network_module lycoris.kohya")
    return found


def find_args_of_other_families(config: AdapterConfig, family: str, title: str) -> list[str]:
    """Arguments that mean nothing for this family."""
    known = {each.name: each.metadata["families"] for each in fields(NetworkArgs)}
    return [
        f"{name} means nothing for {title}; leave it out"
        for name in list_arg_names(config.network_args)
        if known.get(name) and family not in known[name]
    ]
