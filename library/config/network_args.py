"""``network_module`` and ``network_args``: adapter type and arguments, by the names of sd-scripts and LyCORIS."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..name_suggestions import suggest_name
from ..problems import Problem
from . import network_arg_types as types
from .schema import AdapterConfig
from .types import split_keyword_args

LORA_TYPES = ("lora", "dora")
RANKED_TYPES = ("lora", "dora", "loha", "lokr")
ROTATION_TYPES = ("oft", "boft")
ADAPTER_TYPES = (*RANKED_TYPES, *ROTATION_TYPES)
TUCKER_ARGS, TUCKER_TYPES = ("use_tucker", "use_cp", "use_conv_cp"), ("loha", "lokr")

LYCORIS_ALGORITHMS = {
    "lora": "lora",
    "locon": "lora",
    "dora": "dora",
    "loha": "loha",
    "lokr": "lokr",
    "diag-oft": "oft",
    "boft": "boft",
}
"""Values of LyCORIS' ``algo``, and their adapter types."""

NETWORK_MODULES = {
    "networks.lora": "lora",
    "networks.lora_flux": "lora",
    "networks.lora_sd3": "lora",
    "networks.lora_lumina": "lora",
    "networks.lora_anima": "lora",
    "networks.lora_hunyuan_image": "lora",
    "networks.lora_flux_2": "lora",
    "networks.lora_framepack": "lora",
    "networks.lora_hv_1_5": "lora",
    "networks.lora_krea2": "lora",
    "networks.lora_qwen_image": "lora",
    "networks.lora_wan": "lora",
    "networks.lora_zimage": "lora",
    "networks.loha": "loha",
    "networks.lokr": "lokr",
    "networks.oft": "oft",
    "networks.oft_flux": "oft",
    "lycoris.kohya": "lora",
}
"""Network modules and their adapter types; for lycoris.kohya, the type without ``algo``."""

OFT_MODULES = ("networks.oft", "networks.oft_flux")
"""sd-scripts' OFT, which trains no text encoder, and the layers of attention only without ``enable_all_linear``."""

MUSUBI_MODULES = (
    "networks.lora_flux_2",
    "networks.lora_framepack",
    "networks.lora_hv_1_5",
    "networks.lora_krea2",
    "networks.lora_qwen_image",
    "networks.lora_wan",
    "networks.lora_zimage",
)
"""The network modules that musubi-tuner has and sd-scripts has not; networks.lora_flux is in both."""

SHARED_TYPES = ("networks.loha", "networks.lokr")
"""The modules that musubi-tuner and sd-scripts have for all their models."""

PATTERN_ARGS = ("exclude_patterns", "include_patterns", "network_reg_dims", "network_reg_lrs")
"""The arguments that choose layers by patterns of their names."""

SPECIAL_MODULES = tuple(name for name in NETWORK_MODULES if "_" in name)
"""The network modules of few model families, which list them in their ``NetworkFacts``."""


@dataclass(frozen=True)
class NetworkFacts:
    """Which network modules and arguments a model family has of its own, and the layers that these mean."""

    modules: tuple[str, ...] = ()
    """The modules among ``SPECIAL_MODULES`` that support the family."""
    musubi_args: tuple[str, ...] = ()
    """The ``network_args`` that musubi-tuner's module implies where none of the same name is given."""
    args: tuple[str, ...] = ()
    """The family's arguments among those that are for some families only; those for ranks are in the next two."""
    layer_type_ranks: tuple[tuple[str, str], ...] = ()
    """Argument with the rank of a type of layer, and the pattern of their kohya names."""
    outer_layer_ranks: tuple[str, tuple[str, ...]] | None = None
    """Argument with the ranks of the layers outside of the blocks, and these layers in order."""
    unet_blocks: tuple[int, int, int] | None = None
    """Down, mid and up blocks of a UNet, as sd-scripts counts them."""
    unet_outer_blocks: tuple[int, int] = (0, 0)
    """Blocks before and after them in which nothing is trained."""

    @property
    def is_unet(self) -> bool:
        return self.unet_blocks is not None

    @property
    def known_args(self) -> set[str]:
        """All arguments of this family among those that are for some families only."""
        outer = () if self.outer_layer_ranks is None else self.outer_layer_ranks[:1]
        return {*self.args, *(name for name, _ in self.layer_type_ranks), *outer}


GENERAL_NETWORK = NetworkFacts()
"""The facts of a family without arguments of its own."""


@dataclass(frozen=True)
class LycorisPreset:
    """The layers that a preset of LyCORIS trains, in models with a UNet; in other models, those of the blocks."""

    unet_pattern: str
    """Pattern of the names of the UNet's layers."""
    has_convolutions: bool = False
    """Whether convolutions larger than 1x1 are among them."""
    text_pattern: str | None = ""
    """Pattern of the names of layers of text encoders; None: text encoders are not trained."""


_TRANSFORMERS, _ATTENTION = r"attentions\.", r"\.attn[12]\."
_RESNETS, _OUTSIDE = r"resnets\.|samplers\.", r"^conv_(in|out)$"
_TIME_EMBEDDING = r"^time_embedding\."
_EVERYTHING = f"{_TRANSFORMERS}|{_RESNETS}|{_OUTSIDE}|{_TIME_EMBEDDING}"
LYCORIS_PRESETS = {
    "full": LycorisPreset(_EVERYTHING, has_convolutions=True),
    "full-lin": LycorisPreset(f"{_TRANSFORMERS}|resnets\\.|{_TIME_EMBEDDING}"),
    "attn-mlp": LycorisPreset(_TRANSFORMERS),
    "attn-only": LycorisPreset(_ATTENTION, text_pattern=r"self_attn\."),
    "unet-only": LycorisPreset(_EVERYTHING, has_convolutions=True, text_pattern=None),
    "unet-transformer-only": LycorisPreset(_TRANSFORMERS, text_pattern=None),
    "unet-convblock-only": LycorisPreset(f"{_RESNETS}|{_OUTSIDE}", has_convolutions=True, text_pattern=None),
}
"""LyCORIS' presets; without one, it trains ``full``."""


def _define_arg(
    parse: Callable[[str], Any], default: Any = None, adapter_types: Sequence[str] = (), scope: str = "all"
) -> Any:
    """``scope``: whether it is for ``all`` models, those with a ``unet``, or ``some`` that list it."""
    return field(default=default, metadata={"parse": parse, "adapter_types": tuple(adapter_types), "scope": scope})


def _define_lycoris_switch(effective_types: Sequence[str], reason: str = "") -> Any:
    """An argument of LyCORIS that changes the result of these adapter types only; refused there, if it is on."""
    item = _define_arg(types.parse_switch, False)
    return field(default=False, metadata={**item.metadata, "effective_types": tuple(effective_types), "reason": reason})


def _define_unet_arg(parse: Callable[[str], Any], default: Any = None, adapter_types: Sequence[str] = ()) -> Any:
    return _define_arg(parse, default, adapter_types, "unet")


def _define_rate_arg(parse: Callable[[str], Any], default: Any = None, adapter_types: Sequence[str] = ()) -> Any:
    """Declare an argument that gives some modules a learning rate of their own."""
    item = _define_arg(parse, default, adapter_types)
    return field(default=default, metadata={**item.metadata, "sets_rate": True})


def _define_special_arg(parse: Callable[[str], Any], default: Any = None) -> Any:
    return _define_arg(parse, default, scope="some")


@dataclass(frozen=True)
class NetworkArgs:
    """A field for each argument; the metadata says which models and adapter types it applies to."""

    algo: str = _define_arg(lambda text: types.make_choice_parser(*LYCORIS_ALGORITHMS)(text.lower() or "lora"), "lora")
    use_dora: bool = _define_arg(types.parse_bool, False, adapter_types=LORA_TYPES)
    dora_wd: bool = _define_arg(types.parse_bool, False, adapter_types=LORA_TYPES)
    use_rslora: bool = _define_arg(types.parse_bool, False, adapter_types=LORA_TYPES)
    rs_lora: bool = _define_arg(types.parse_bool, False, adapter_types=LORA_TYPES)
    factor: int = _define_arg(types.parse_lokr_factor, -1, adapter_types=("lokr",))
    decompose_both: bool = _define_arg(types.parse_bool, False, adapter_types=("lokr",))
    conv_dim: int | None = _define_unet_arg(types.parse_rank, adapter_types=RANKED_TYPES)
    conv_alpha: float = _define_unet_arg(types.parse_alpha, 1.0, RANKED_TYPES)
    rank_dropout: float = _define_arg(types.parse_dropout_rate, 0.0, adapter_types=("lora",))
    module_dropout: float = _define_arg(types.parse_dropout_rate, 0.0, adapter_types=("lora",))
    preset: str | None = _define_arg(types.make_choice_parser(*LYCORIS_PRESETS))
    use_tucker: bool = _define_lycoris_switch(RANKED_TYPES)
    use_cp: bool = _define_lycoris_switch(RANKED_TYPES)
    use_conv_cp: bool = _define_lycoris_switch(RANKED_TYPES)
    use_scalar: bool = _define_lycoris_switch(RANKED_TYPES, "there is no trained scalar")
    train_norm: bool = _define_lycoris_switch(ADAPTER_TYPES, "norms are not trained")
    full_matrix: bool = _define_lycoris_switch(("lokr",), "network_dim=100000 has the same effect")
    bypass_mode: bool = _define_lycoris_switch(("dora",), "DoRA needs the merged weight")
    rescaled: bool = _define_lycoris_switch(ROTATION_TYPES, "rotations are not rescaled")
    constraint: bool = _define_lycoris_switch(ROTATION_TYPES, "rotations are not constrained")
    constrain: bool = _define_lycoris_switch(ROTATION_TYPES, "rotations are not constrained")
    unbalanced_factorization: bool = _define_lycoris_switch(("lokr",), "factors are balanced")
    wd_on_output: bool = _define_arg(types.parse_switch, True)
    rank_dropout_scale: bool = _define_lycoris_switch(())
    train_on_input: bool = _define_lycoris_switch(())
    block_size: bool = _define_lycoris_switch(())
    unit: bool = _define_lycoris_switch(())
    verbose: bool = _define_arg(types.parse_switch, False)
    enable_all_linear: bool = _define_arg(types.parse_bool, False, adapter_types=("oft",))
    dropout: float | None = _define_arg(types.parse_dropout_rate)
    block_dims: tuple[int, ...] | None = _define_unet_arg(types.parse_ranks)
    block_alphas: tuple[float, ...] | None = _define_unet_arg(types.parse_alphas, adapter_types=RANKED_TYPES)
    conv_block_dims: tuple[int, ...] | None = _define_unet_arg(types.parse_ranks, adapter_types=RANKED_TYPES)
    conv_block_alphas: tuple[float, ...] | None = _define_unet_arg(types.parse_alphas, adapter_types=RANKED_TYPES)
    down_lr_weight: tuple[float, ...] | str | None = _define_unet_arg(types.parse_block_lr_weights)
    mid_lr_weight: tuple[float, ...] | str | None = _define_unet_arg(types.parse_block_lr_weights)
    up_lr_weight: tuple[float, ...] | str | None = _define_unet_arg(types.parse_block_lr_weights)
    block_lr_zero_threshold: float = _define_unet_arg(types.parse_alpha, 0.0)
    loraplus_lr_ratio: float | None = _define_rate_arg(types.parse_positive, adapter_types=LORA_TYPES)
    loraplus_unet_lr_ratio: float | None = _define_rate_arg(types.parse_positive, adapter_types=LORA_TYPES)
    loraplus_text_encoder_lr_ratio: float | None = _define_rate_arg(types.parse_positive, adapter_types=LORA_TYPES)
    network_reg_dims: tuple[tuple[str, int], ...] = _define_arg(types.make_pattern_parser(types.parse_rank), ())
    network_reg_lrs: tuple[tuple[str, float], ...] = _define_rate_arg(types.make_pattern_parser(types.parse_alpha), ())
    exclude_patterns: tuple[str, ...] = _define_arg(types.parse_patterns, ())
    include_patterns: tuple[str, ...] = _define_arg(types.parse_patterns, ())
    pattern_names: str = _define_arg(types.make_choice_parser("any", "original"), "any")
    train_modulation: bool = _define_special_arg(types.parse_bool, False)
    train_t5xxl: bool = _define_special_arg(types.parse_bool, False)
    train_blocks: str = _define_special_arg(types.make_choice_parser("all", "double", "single"), "all")
    train_double_block_indices: tuple[tuple[int, int], ...] | None = _define_special_arg(types.parse_block_indices)
    train_single_block_indices: tuple[tuple[int, int], ...] | None = _define_special_arg(types.parse_block_indices)
    train_block_indices: tuple[tuple[int, int], ...] | None = _define_special_arg(types.parse_block_indices)
    img_attn_dim: int | None = _define_special_arg(types.parse_rank)
    txt_attn_dim: int | None = _define_special_arg(types.parse_rank)
    img_mlp_dim: int | None = _define_special_arg(types.parse_rank)
    txt_mlp_dim: int | None = _define_special_arg(types.parse_rank)
    img_mod_dim: int | None = _define_special_arg(types.parse_rank)
    txt_mod_dim: int | None = _define_special_arg(types.parse_rank)
    single_dim: int | None = _define_special_arg(types.parse_rank)
    single_mod_dim: int | None = _define_special_arg(types.parse_rank)
    in_dims: tuple[int, ...] | None = _define_special_arg(types.make_list_parser(types.parse_rank, 5))
    context_attn_dim: int | None = _define_special_arg(types.parse_rank)
    context_mlp_dim: int | None = _define_special_arg(types.parse_rank)
    context_mod_dim: int | None = _define_special_arg(types.parse_rank)
    x_attn_dim: int | None = _define_special_arg(types.parse_rank)
    x_mlp_dim: int | None = _define_special_arg(types.parse_rank)
    x_mod_dim: int | None = _define_special_arg(types.parse_rank)
    emb_dims: tuple[int, ...] | None = _define_special_arg(types.make_list_parser(types.parse_rank, 6))
    attn_dim: int | None = _define_special_arg(types.parse_rank)
    mlp_dim: int | None = _define_special_arg(types.parse_rank)
    mod_dim: int | None = _define_special_arg(types.parse_rank)
    refiner_dim: int | None = _define_special_arg(types.parse_rank)

    @property
    def uses_tucker(self) -> bool:
        """Whether LoHa and LoKr decompose convolutions into three."""
        return self.use_tucker or self.use_cp or self.use_conv_cp


def parse_network_args(args: Sequence[str]) -> tuple[NetworkArgs, list[Problem]]:
    """Parse ``name=value`` arguments; return them and all problems."""
    known = {item.name: item for item in fields(NetworkArgs)}
    values, texts, problems = dict[str, Any](), dict[str, str](), list[Problem]()
    for name, text in split_keyword_args(args):
        if text is None:
            problems.append(Problem("network_args", f"{name!r}: expected name=value"))
        elif name in types.UNSUPPORTED_ARGS:
            if types.parse_switch(text):
                problems.append(Problem("network_args", f"{name}: {types.UNSUPPORTED_ARGS[name]}"))
        elif name not in known:
            problems.append(Problem("network_args", f"{name}: unknown argument{suggest_name(name, known)}"))
        elif name in texts:
            if text != texts[name]:
                problems.append(Problem("network_args", f"{name}: duplicate argument"))
        elif (value := (name, "*.toml" if text.endswith(".toml") else text.lower())) in types.UNSUPPORTED_VALUES:
            problems.append(Problem("network_args", types.UNSUPPORTED_VALUES[value]))
        else:
            texts[name] = text
            try:
                values[name] = known[name].metadata["parse"](text)
            except ValueError as error:
                problems.append(Problem("network_args", f"{name}: {error}, got {text!r}"))
    return NetworkArgs(**values), problems


def get_network_args(adapter: AdapterConfig) -> NetworkArgs:
    """Return the arguments of options that were validated, with those that a preset of LyCORIS implies."""
    arguments = parse_network_args(adapter.network_args)[0]
    preset = get_lycoris_preset(adapter)
    if preset is None or not preset.has_convolutions or get_adapter_type(adapter) not in RANKED_TYPES:
        return arguments
    given = list_arg_names(adapter.network_args)
    alpha = arguments.conv_alpha if "conv_alpha" in given else adapter.network_alpha
    conv_dim = adapter.network_dim if arguments.conv_dim is None else arguments.conv_dim
    return replace(arguments, conv_dim=conv_dim, conv_alpha=alpha)


def get_lycoris_preset(adapter: AdapterConfig) -> LycorisPreset | None:
    """Return the preset of ``network_module = "lycoris.kohya"``; None for other modules."""
    if adapter.network_module != "lycoris.kohya":
        return None
    return LYCORIS_PRESETS[parse_network_args(adapter.network_args)[0].preset or "full"]


def get_adapter_type(adapter: AdapterConfig) -> str:
    """Return lora, dora, loha, lokr, oft or boft."""
    arguments = parse_network_args(adapter.network_args)[0]
    adapter_type = NETWORK_MODULES.get(adapter.network_module, "lora")
    if adapter.network_module == "lycoris.kohya":
        adapter_type = LYCORIS_ALGORITHMS[arguments.algo]
    return "dora" if adapter_type == "lora" and (arguments.use_dora or arguments.dora_wd) else adapter_type


def add_exclude_patterns(args: Sequence[str], implied: Sequence[str]) -> tuple[str, ...]:
    """Add the patterns of an implied ``exclude_patterns`` to one that is given; others stay as they are."""
    patterns = parse_network_args(implied)[0].exclude_patterns
    found = parse_network_args(args)[0].exclude_patterns
    if not patterns or "exclude_patterns" not in list_arg_names(args):
        return tuple(args)
    return (
        *(arg for arg in args if list_arg_names([arg]) != ["exclude_patterns"]),
        f"exclude_patterns={[*found, *patterns]!r}",
    )


def list_arg_names(args: Sequence[str]) -> list[str]:
    return [name for name, _ in split_keyword_args(args)]


def validate_network_module(name: str) -> Problem | None:
    if name in NETWORK_MODULES:
        return None
    if re.fullmatch(r"networks\.\w+_(lumina|anima|hunyuan_image|flux|sd3)", name):
        text, fix = f"{name} is not supported", "use networks.lora, which takes its layers from the model"
        return Problem("network_module", text, fix)
    hint = suggest_name(name, NETWORK_MODULES) or f"; expected one of {', '.join(NETWORK_MODULES)}"
    return Problem("network_module", types.UNSUPPORTED_MODULES.get(name, f"unknown network module {name!r}{hint}"))


def find_args_of_other_types(adapter: AdapterConfig) -> list[Problem]:
    """Return a problem for each argument that this adapter type does not have."""
    adapter_type, names = get_adapter_type(adapter), list_arg_names(adapter.network_args)
    supported = {item.name: item.metadata["adapter_types"] for item in fields(NetworkArgs)}
    arguments, defaults = parse_network_args(adapter.network_args)[0], NetworkArgs()
    is_rotation = adapter_type in ROTATION_TYPES
    problems = [
        Problem(
            "network_args", f"{name}: {adapter_type} is for linear layers only", "remove it and write preset=full-lin"
        )
        if is_rotation and name == "conv_dim"
        else Problem("network_args", f"{name}: not supported for {adapter_type}, only for {', '.join(supported[name])}")
        for name in names
        if supported.get(name)
        and adapter_type not in supported[name]
        and getattr(arguments, name) != getattr(defaults, name)
    ]
    if adapter.network_module != "lycoris.kohya":
        problems += [
            Problem("network_args", f"{name}: only for network_module lycoris.kohya")
            for name in ("algo", "preset")
            if name in names
        ]
    if drops_in_bypass_mode(adapter):
        problems.append(
            Problem(
                "network_args",
                "bypass_mode: drops other values than here",
                "remove it or the dropout, or use networks.lora",
            )
        )
    return [*problems, *_find_unsupported_switches(arguments, names, adapter_type)]


def drops_in_bypass_mode(adapter: AdapterConfig) -> bool:
    """Whether LyCORIS applies dropout, which it does in its bypass mode only."""
    arguments = parse_network_args(adapter.network_args)[0]
    has_dropout = bool(adapter.network_dropout or arguments.dropout)
    return has_dropout and arguments.bypass_mode and adapter.network_module == "lycoris.kohya"


def _find_unsupported_switches(arguments: NetworkArgs, names: Sequence[str], adapter_type: str) -> Iterator[Problem]:
    """Say which arguments of LyCORIS are on and would change the result."""
    for item in fields(NetworkArgs):
        is_effective = adapter_type in item.metadata.get("effective_types", ())
        if not is_effective or not getattr(arguments, item.name) or item.name not in names:
            continue
        if item.name not in TUCKER_ARGS:
            yield Problem("network_args", f"{item.name}: not supported: {item.metadata['reason']}", "leave it out")
        elif adapter_type not in TUCKER_TYPES:
            text = f"{item.name}: only for algo loha and lokr; convolutions of {adapter_type} are not decomposed"
            yield Problem("network_args", text)
    if not arguments.wd_on_output and adapter_type == "dora":
        text = "wd_on_output: not supported: DoRA has a magnitude for each output"
        yield Problem("network_args", text, "leave it out")


def find_args_of_other_families(adapter: AdapterConfig, network: NetworkFacts, title: str) -> list[Problem]:
    """Return a problem for each argument that does not apply to this model family."""
    scopes = {item.name: item.metadata["scope"] for item in fields(NetworkArgs)}
    return [
        Problem("network_args", f"{name}: not applicable to {title}", "remove it")
        for name in list_arg_names(adapter.network_args)
        if (scopes.get(name) == "unet" and not network.is_unet)
        or (scopes.get(name) == "some" and name not in network.known_args)
    ]


def validate_block_arg_lengths(network_args: NetworkArgs, network: NetworkFacts) -> Iterator[Problem]:
    """Check that lists have a value for each block of a UNet."""
    if network.unet_blocks is None:
        return
    names = ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas")
    counts = dict.fromkeys(names, sum(network.unet_blocks) + sum(network.unet_outer_blocks))
    for name, count in counts.items():
        values = getattr(network_args, name)
        if isinstance(values, tuple) and len(values) != count:
            yield Problem("network_args", f"{name}: {len(values)} values, expected {count} (one per block)")


def compute_block_lr_weights(network_args: NetworkArgs, network: NetworkFacts) -> list[float] | None:
    """Compute the factor of the learning rate in each block; None if no weights are set."""
    sections = (network_args.down_lr_weight, network_args.mid_lr_weight, network_args.up_lr_weight)
    if network.unet_blocks is None or all(values is None for values in sections):
        return None
    weights: list[float] = []
    for values, count in zip(sections, network.unet_blocks, strict=True):
        if values is None:
            values = (1.0,) * count
        weights += _expand_lr_weight_preset(values, count) if isinstance(values, str) else values[:count]
        weights += [1.0] * (count - len(values) if isinstance(values, tuple) else 0)
    weights = [0.0 if weight <= network_args.block_lr_zero_threshold else weight for weight in weights]
    before, after = network.unet_outer_blocks
    return [1.0] * before + weights + [1.0] * after


def find_block_lr_weight_lengths(network_args: NetworkArgs, network: NetworkFacts) -> Iterator[str]:
    """Say which weights a UNet with fewer or more blocks leaves out or fills up, as sd-scripts does."""
    names = ("down_lr_weight", "mid_lr_weight", "up_lr_weight")
    for name, count in zip(names, network.unet_blocks or (), strict=False):
        values = getattr(network_args, name)
        if isinstance(values, tuple) and len(values) != count:
            rest = f"the first {count} are used" if len(values) > count else "the others are 1"
            given, blocks = (f"{n} {word}{'s' * (n != 1)}" for n, word in ((len(values), "value"), (count, "block")))
            yield f"{name}: {given} for {blocks}; {rest}"


def _expand_lr_weight_preset(text: str, count: int) -> list[float]:
    name, _, offset = text.partition("+")
    positions = [index / max(count - 1, 1) for index in range(count)]
    presets = {
        "sine": [math.sin(math.pi / 2 * position) for position in positions],
        "cosine": [math.sin(math.pi / 2 * position) for position in reversed(positions)],
        "linear": positions,
        "reverse_linear": list(reversed(positions)),
        "zeros": [0.0] * count,
    }
    return [value + float(offset or 0) for value in presets[name]]


def count_unet_blocks(network: NetworkFacts) -> int:
    """Count the blocks of a UNet of which each weight is in one, as ``block_lr`` needs; 0 if there are none."""
    if network.unet_blocks is None or not all(network.unet_outer_blocks):
        return 0
    return sum(network.unet_blocks) + sum(network.unet_outer_blocks)


def get_weight_block_index(name: str, network: NetworkFacts) -> int:
    """Return the index of the UNet block of a weight of diffusers; those before and after all blocks count as blocks.

    The first block has the embeddings of time and size, the last one the output; the middle has three.
    """
    pieces = name.split(".")
    (down, _, _), (first, _) = network.unet_blocks or (0, 0, 0), network.unet_outer_blocks
    if pieces[0] in ("time_embedding", "add_embedding", "encoder_hid_proj"):
        return 0
    if pieces[0] == "conv_in":
        return first
    if pieces[0] == "mid_block":
        return first + down + (1 if pieces[1] == "attentions" else 2 * int(pieces[2]))
    if pieces[0] in ("conv_norm_out", "conv_out"):
        return count_unet_blocks(network) - 1
    index = get_unet_block_index("_".join(pieces), network)
    if index is None:
        raise AssertionError(f"{name} is in no block of the UNet")
    return index


def get_unet_block_index(kohya_name: str, network: NetworkFacts) -> int | None:
    """Return the index of the UNet block of a module, from its name in sd-scripts' files; None outside of blocks."""
    if network.unet_blocks is None:
        return None
    down, middle, _ = network.unet_blocks
    first = network.unet_outer_blocks[0]
    pieces = kohya_name.removeprefix("lora_unet_").split("_")
    starts = {"input": first, "middle": first + down, "output": first + down + middle}  # of the original code
    if pieces[0] in starts:
        return starts[pieces[0]] + int(pieces[2])
    if pieces[0] == "mid":
        return first + down
    if pieces[0] not in ("down", "up") or pieces[1] != "blocks":
        return None
    layer = 2 if pieces[3].endswith("samplers") else int(pieces[4])
    return first + (1 if pieces[0] == "down" else down + middle) + 3 * int(pieces[2]) + layer
