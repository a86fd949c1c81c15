"""Rules for what is trained: among the options, and against what the model has."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from .network_args import (
    FAMILY_OF_MODULE,
    UNET_FAMILIES,
    find_args_of_other_families,
    find_args_of_other_types,
    get_adapter_type,
    get_network_args,
    list_arg_names,
    parse_network_args,
    validate_block_arg_lengths,
    validate_network_module,
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
                + (
                    f"leave network_train_unet_only on, or take {name} out"
                    if switch == "network_train_unet_only"
                    else f"take {switch} or {name} out"
                ),
            )
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


def validate_adapter_for_model(
    config: RunConfig, family: str, title: str, text_encoders: Sequence[str], t5: str | None
) -> Iterator[OptionConflict]:
    """Options of the adapter that this model cannot honour; ``text_encoders`` are those that can be trained."""
    arguments, problems = parse_network_args(config.adapter.network_args)
    if not problems:
        yield from (
            (("network_args",), problem) for problem in find_args_of_other_families(config.adapter, family, title)
        )
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


THUMBNAIL_TYPES: Mapping[str, str] = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
}
"""What a thumbnail may be."""


_REPO_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


_RANK_ARG_SUFFIXES = ("_dim", "_dims", "_alpha", "_alphas", "_patterns", "_indices", "train_blocks")


_UPLOAD_OPTIONS = ("huggingface_repo_type", "huggingface_path_in_repo", "huggingface_repo_visibility", "async_upload")


MAX_THUMBNAIL_BYTES = 2**22


METADATA_OPTIONS = (
    "title",
    "author",
    "description",
    "license",
    "tags",
    "usage_hint",
    "thumbnail",
    "merged_from",
    "trigger_phrase",
    "preprocessor",
)


def validate_save_format(adapter_types: Iterable[str], file_format: str) -> list[str]:
    """Why adapters of these kinds cannot be written so."""
    found = []
    for kind in sorted(set(adapter_types)):
        if kind in ("oft", "boft") and file_format in ("kohya", "comfy"):
            found.append(
                f"{kind} turns what goes into a layer, and the files of sd-scripts and ComfyUI what comes out "
                "of it; take save_format auto, which peft reads"
            )
        if kind in ("loha", "lokr") and file_format == "diffusers":
            found.append(f"diffusers does not load {kind}; take save_format auto or comfy")
    return found


def validate_save_options(config: RunConfig, explicit: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What cannot be honoured together."""
    save = config.save
    for what in ("epochs", "steps"):
        last, every = f"save_last_n_{what}", f"save_every_n_{what}"
        if getattr(save, last) is not None and getattr(save, every) is None:
            yield (last, every), f"nothing is saved that could be too old; set {every}"
    if save.save_format != "auto" and not parse_network_args(config.adapter.network_args)[1]:
        for problem in validate_save_format([get_adapter_type(config.adapter)], save.save_format):
            yield ("save_format", "network_module"), problem
    for name in METADATA_OPTIONS:
        if getattr(save, f"metadata_{name}") is not None and save.no_metadata:
            yield (f"metadata_{name}", "no_metadata"), "no_metadata leaves it out; take one of the two out"
    if save.metadata_thumbnail is not None:
        for problem in _validate_thumbnail(Path(save.metadata_thumbnail).expanduser()):
            yield ("metadata_thumbnail",), problem


def validate_upload_options(config: RunConfig, explicit: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Where files are sent."""
    save = config.save
    if save.huggingface_repo_id is None:
        for name in (
            "huggingface_repo_type",
            "huggingface_path_in_repo",
            "huggingface_repo_visibility",
            "async_upload",
        ):
            if name in explicit and getattr(save, name):
                yield (name, "huggingface_repo_id"), "nothing is sent anywhere; name a repository"
    elif not _REPO_ID_PATTERN.fullmatch(save.huggingface_repo_id):
        yield ("huggingface_repo_id",), f"{save.huggingface_repo_id!r} is no repository of the hub; write OWNER/NAME"
    if ".." in (save.huggingface_path_in_repo or "").split("/"):
        yield ("huggingface_path_in_repo",), f"{save.huggingface_path_in_repo}: leads out of the repository"


def validate_initial_weights(config: RunConfig, explicit: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """LoRA files that a run starts from."""
    adapter = config.adapter
    for name in ("network_weights", "base_weights"):
        places = getattr(adapter, name)
        for place in [places] if isinstance(places, str) else places or ():
            if not Path(place).expanduser().is_file():
                yield (name,), f"{place}: no such file (looked in {Path(place).expanduser().absolute().parent})"
    if adapter.dim_from_weights and adapter.network_weights is None:
        yield ("dim_from_weights", "network_weights"), "there is no file that could say; name it with network_weights"
    sizes = [word for word in list_arg_names(adapter.network_args) if word.endswith(_RANK_ARG_SUFFIXES)]
    if adapter.dim_from_weights and sizes:
        yield ("network_args", "dim_from_weights"), f"{sizes[0]}: dim_from_weights takes it from the file; leave it out"
    given_sizes = [name for name in ("network_dim", "network_alpha") if name in explicit]
    if adapter.dim_from_weights and given_sizes:
        yield (given_sizes[0], "dim_from_weights"), "dim_from_weights takes it from the file; give one of the two"
    if len(adapter.base_weights_multiplier) > len(adapter.base_weights):
        yield (
            ("base_weights_multiplier", "base_weights"),
            f"{len(adapter.base_weights_multiplier)} strengths for {len(adapter.base_weights)} files",
        )


def _validate_thumbnail(path: Path) -> Iterator[str]:
    if not path.is_file():
        yield f"{path}: no such file"
    elif path.suffix.lower() not in THUMBNAIL_TYPES:
        yield f"{path}: expected a picture, {', '.join(THUMBNAIL_TYPES)}"
    elif path.stat().st_size > MAX_THUMBNAIL_BYTES:
        yield f"{path}: larger than 4 MiB, and it would stand in every file; make it smaller"
