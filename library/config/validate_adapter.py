"""Checks of the adapter options: against each other, and against what the model supports."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..problems import Problem
from .network_args import (
    SPECIAL_MODULES,
    NetworkFacts,
    find_args_of_other_families,
    find_args_of_other_types,
    get_adapter_type,
    get_network_args,
    list_arg_names,
    parse_network_args,
    validate_block_arg_lengths,
    validate_network_module,
)
from .options import ExplicitOptions
from .schema import AdapterConfig
from .schema_data import CacheConfig
from .schema_optim import OptimConfig

UNET_ONLY, TEXT_ENCODER_ONLY = "network_train_unet_only", "network_train_text_encoder_only"
MAX_RANK = 16_384
_RANK_ARG_SUFFIXES = ("_dim", "_dims", "_alpha", "_alphas", "_patterns", "_indices", "train_blocks")


def validate_adapter_options(
    adapter: AdapterConfig, optim: OptimConfig, explicit: ExplicitOptions
) -> Iterator[Problem]:
    """Check the adapter options, whatever the model."""
    if (problem := validate_network_module(adapter.network_module)) is not None:
        yield problem
        return
    _, problems = parse_network_args(adapter.network_args)
    if problems:
        yield from problems
        return
    yield from (replace(problem, others=("network_module",)) for problem in find_args_of_other_types(adapter))
    yield from _validate_adapter_type(adapter, optim, explicit)
    yield from _validate_rank(adapter)
    if adapter.network_train_text_encoder_only and adapter.network_train_unet_only:
        yield Problem(
            TEXT_ENCODER_ONLY, f"cannot be combined with {UNET_ONLY}", "remove one of them", others=(UNET_ONLY,)
        )


def _validate_rank(adapter: AdapterConfig) -> Iterator[Problem]:
    """A rank above the size of every layer is a typo; for LoKr, it asks for whole matrices."""
    if get_adapter_type(adapter) not in ("lora", "dora", "loha"):
        return
    for name, prefix, rank in (
        ("network_dim", "", adapter.network_dim),
        ("network_args", "conv_dim: ", get_network_args(adapter).conv_dim or 0),
    ):
        if rank > MAX_RANK:
            yield Problem(name, f"{prefix}rank {rank} is above the size of every layer", "ranks of 4 to 128 are usual")


def _validate_adapter_type(adapter: AdapterConfig, optim: OptimConfig, explicit: ExplicitOptions) -> Iterator[Problem]:
    """Check options that only some adapter types have."""
    adapter_type = get_adapter_type(adapter)
    for name, types in (("network_dropout", ("lora",)), ("scale_weight_norms", ("lora", "dora", "loha", "lokr"))):
        if getattr(adapter, name) and adapter_type not in types:
            text = f"not supported for {adapter_type}, only for {', '.join(types)}"
            yield Problem(name, text, "remove it", others=("network_module",))
    if adapter.training_adapter and adapter_type == "boft":
        yield Problem(
            "training_adapter",
            "not supported for boft, which computes with the base weights alone",
            "train another type",
            others=("network_module",),
        )
    if "network_alpha" in explicit and adapter_type in ("oft", "boft"):
        yield Problem(
            "network_alpha",
            "is the constraint of OFT in sd-scripts; constrained OFT is not supported",
            "remove it",
            others=("network_module",),
        )
    if adapter.scale_weight_norms and "schedulefree" in optim.optimizer_type.lower():
        yield Problem(
            "scale_weight_norms",
            f"not supported with {optim.optimizer_type}, whose averaged weights it would not scale",
            "remove it",
            others=("optimizer_type",),
        )
    arguments = get_network_args(adapter)
    if arguments.train_t5xxl and not adapter.trains_text_encoders:
        yield Problem(
            "network_args", "train_t5xxl: text encoders are not trained", f"remove {UNET_ONLY}", others=(UNET_ONLY,)
        )
    if arguments.conv_dim is None and (arguments.conv_block_dims or arguments.conv_block_alphas):
        yield Problem("network_args", "conv_block_dims: convolutions are not trained", "add conv_dim")


def validate_initial_weights(adapter: AdapterConfig) -> Iterator[Problem]:
    """Check the LoRA files that are loaded or merged before training."""
    names = "network_weights", "training_adapter"
    weights = [(name, file) for name in names if (file := getattr(adapter, name))]
    for name, file in (*weights, *(("base_weights", file) for file in adapter.base_weights)):
        path = Path(file).expanduser()
        if not path.is_file():
            yield Problem(name, f"{file}: no such file (looked in {path.absolute().parent})")
    if len(adapter.base_weights_multiplier) > len(adapter.base_weights):
        yield Problem(
            "base_weights_multiplier",
            f"{len(adapter.base_weights_multiplier)} multipliers for {len(adapter.base_weights)} base_weights",
            others=("base_weights",),
        )
    if not adapter.dim_from_weights:
        return
    arguments = [name for name in list_arg_names(adapter.network_args) if name.endswith(_RANK_ARG_SUFFIXES)]
    if arguments:
        yield Problem(
            "network_args",
            f"{arguments[0]}: dim_from_weights reads it from the file",
            "remove it",
            others=("dim_from_weights",),
        )


def validate_save_format(adapter_types: Iterable[str], file_format: str) -> list[Problem]:
    """Return why adapters of these types cannot be saved in this format."""
    problems = []
    for adapter_type in sorted(set(adapter_types)):
        if adapter_type in ("oft", "boft") and file_format in ("kohya", "comfy"):
            problems.append(
                Problem(
                    "",
                    f"{adapter_type} rotates a layer's input, and the {file_format} format rotates its output",
                    "use diffusers, which peft loads",
                )
            )
        if adapter_type in ("glora", "diag-oft", "norm", "full") and file_format == "diffusers":
            problems.append(Problem("", f"diffusers does not load LyCORIS' type {adapter_type}", "use comfy or kohya"))
        if adapter_type == "diff_b" and file_format == "diffusers":
            problems.append(Problem("", "diffusers does not load changes of biases (diff_b)", "use comfy or kohya"))
        if adapter_type == "input-dora" and file_format == "diffusers":
            text = "diffusers and peft have no DoRA with a dora_scale per input"
            problems.append(Problem("", text, "use comfy or kohya"))
        if adapter_type in ("loha", "lokr") and file_format == "diffusers":
            problems.append(Problem("", f"diffusers does not load {adapter_type}", "use comfy"))
    return problems


def validate_adapter_for_model(
    adapter: AdapterConfig,
    optim: OptimConfig,
    network: NetworkFacts,
    title: str,
    text_encoders: Sequence[str],
    t5: str | None,
) -> Iterator[Problem]:
    """Check the adapter options against a model; ``text_encoders`` are those that can be trained."""
    arguments, problems = parse_network_args(adapter.network_args)
    if not problems:
        problems = find_args_of_other_families(adapter, network, title)
        problems += validate_block_arg_lengths(arguments, network)
        yield from problems
    if adapter.network_module in SPECIAL_MODULES and adapter.network_module not in network.modules:
        yield Problem("network_module", f"{adapter.network_module} does not support {title}", "use networks.lora")
    if not text_encoders and adapter.network_train_text_encoder_only:
        yield Problem(TEXT_ENCODER_ONLY, f"the text encoders of {title} cannot be trained", "remove this option")
    if not text_encoders or not adapter.trains_text_encoders:
        return
    needed = len(text_encoders) if arguments.train_t5xxl else sum(name != t5 for name in text_encoders)
    count = len(optim.text_encoder_lr)
    if count > 1 and not needed <= count <= len(text_encoders):
        yield Problem(
            "text_encoder_lr",
            f"{count} learning rates",
            f"give one for all, or one for each of {', '.join(text_encoders)}",
        )


def validate_text_caching(
    adapter: AdapterConfig, cache: CacheConfig, trained_encoders: Sequence[str], t5: str | None
) -> Iterator[Problem]:
    """Outputs of text encoders that are trained change with each step; those of a T5 that is not are cached."""
    if not trained_encoders or (t5 is not None and t5 not in trained_encoders):
        return
    what, name, fix = "text encoders are trained, so their", UNET_ONLY, f"set {UNET_ONLY} to train the denoiser only"
    if t5 is not None:
        what, name, fix = "T5 is trained, so its", "network_args", "remove train_t5xxl from network_args"
    elif adapter.network_train_text_encoder_only:
        name, fix = TEXT_ENCODER_ONLY, f"remove {TEXT_ENCODER_ONLY}"
    for option in ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"):
        if getattr(cache, option):
            yield Problem(option, f"{what} outputs change", f"{fix}, or remove {option}", others=(name,))
            return
