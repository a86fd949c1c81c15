"""Rules for what is trained: among the options, and against what the model has."""

from collections.abc import Iterator, Sequence

from .block_args import validate_block_arg_lengths
from .network_args import (
    FAMILY_OF_MODULE,
    UNET_FAMILIES,
    get_network_args,
    find_args_of_other_families,
    list_arg_names,
    get_adapter_type,
    find_args_of_other_types,
    validate_network_module,
    parse_network_args,
)
from .schema import RunConfig

OptionConflict = tuple[tuple[str, ...], str]
"""The options concerned, the one to change first, and what is wrong."""

TEXT_CACHE_OPTIONS = ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")


def validate_adapter_options(config: RunConfig, explicit: frozenset[str]) -> Iterator[OptionConflict]:
    """Options of the adapter that cannot be honoured together, whatever the model."""
    adapter, optim = config.adapter, config.optim
    if (wrong := validate_network_module(adapter.network_module)) is not None:
        yield ("network_module",), wrong
        return
    _, problems = parse_network_args(adapter.network_args)
    if problems:
        yield from ((("network_args",), problem) for problem in problems)
        return
    yield from ((("network_args", "network_module"), problem) for problem in find_args_of_other_types(adapter))
    yield from _validate_adapter_type(config, explicit)
    both = ("network_train_text_encoder_only", "network_train_unet_only")
    if adapter.network_train_text_encoder_only and both[1] in explicit and adapter.network_train_unet_only:
        yield both, "together with network_train_unet_only nothing would be trained; leave one out"
    switch = "network_train_text_encoder_only" if adapter.network_train_text_encoder_only else "network_train_unet_only"
    for name in TEXT_CACHE_OPTIONS:
        if getattr(config.cache, name) and adapter.trains_text_encoders:
            yield (
                (name, switch),
                "captions that are encoded once cannot follow a text encoder that is trained; "
                + (f"leave network_train_unet_only on, or take {name} out"
                   if switch == "network_train_unet_only" else f"take {switch} or {name} out"),
            )  # fmt: skip
    if optim.text_encoder_lr and not adapter.trains_text_encoders:
        yield (
            ("text_encoder_lr", "network_train_unet_only"),
            "text encoders are not trained; write network_train_unet_only = false (--no-network_train_unet_only)",
        )
    elif optim.text_encoder_lr and not any(optim.text_encoder_lr):
        yield ("text_encoder_lr",), "0 trains no text encoder; leave it out, and network_train_unet_only on"
    if optim.unet_lr is not None and not adapter.trains_denoiser:
        yield ("unet_lr", "network_train_text_encoder_only"), "the denoiser is not trained; leave one out"
    elif optim.unet_lr == 0:
        yield ("unet_lr",), "0 trains no denoiser; set network_train_text_encoder_only"


def _validate_adapter_type(config: RunConfig, explicit: frozenset[str]) -> Iterator[OptionConflict]:
    """Options that only some kinds of adapters have."""
    adapter, kind = config.adapter, get_adapter_type(config.adapter)
    for name in ("network_dropout", "scale_weight_norms"):
        if getattr(adapter, name) and kind != "lora":
            yield (name, "network_module"), f"{kind} does not have it, only lora; leave it out"
    if "network_alpha" in explicit and kind in ("oft", "boft"):
        yield ("network_alpha", "network_module"), f"{kind} has no alpha; leave it out"
    if adapter.scale_weight_norms and "schedulefree" in config.optim.optimizer_type.lower():
        yield (
            ("scale_weight_norms", "optimizer_type"),
            f"{config.optim.optimizer_type} keeps weights of its own that it would not reach; leave it out",
        )
    arguments = get_network_args(adapter)
    if arguments.train_t5xxl and not adapter.trains_text_encoders:
        yield (
            ("network_args", "network_train_unet_only"),
            "train_t5xxl: text encoders are not trained; write network_train_unet_only = false",
        )
    if "conv_alpha" in list_arg_names(adapter.network_args) and arguments.conv_dim is None:
        yield ("network_args",), "conv_alpha: no convolutions are trained; add conv_dim"
    if (arguments.conv_block_dims or arguments.conv_block_alphas) and arguments.conv_dim is None:
        yield ("network_args",), "conv_block_dims: no convolutions are trained; add conv_dim"


def validate_adapter_for_model(config: RunConfig, family: str, title: str, text_encoders: Sequence[str],
            t5: str | None) -> Iterator[OptionConflict]:  # fmt: skip
    """Options of the adapter that this model cannot honour; ``text_encoders`` are those that can be trained."""
    arguments, problems = parse_network_args(config.adapter.network_args)
    if not problems:
        yield from ((("network_args",), problem) for problem in find_args_of_other_families(config.adapter, family, title))
        if family in UNET_FAMILIES:
            yield from ((("network_args",), problem) for problem in validate_block_arg_lengths(arguments, family))
    wanted = FAMILY_OF_MODULE.get(config.adapter.network_module, family)
    if wanted != family:
        yield ("network_module",), f"{config.adapter.network_module} is not for {title}; write networks.lora"
    if not config.adapter.trains_text_encoders:
        return
    if not text_encoders:
        name = "network_train_text_encoder_only"
        name = name if getattr(config.adapter, name) else "network_train_unet_only"
        yield (name,), f"the text encoders of {title} cannot be trained; leave this option out"
        return
    needed = len(text_encoders) if arguments.train_t5xxl else sum(part != t5 for part in text_encoders)
    rates = len(config.optim.text_encoder_lr)
    if rates > 1 and not needed <= rates <= len(text_encoders):
        yield ("text_encoder_lr",), f"{rates} rates; give one for all, or one for each of {', '.join(text_encoders)}"
