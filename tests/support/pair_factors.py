"""The factors of the covering array over settings, and their values as command-line flags.

Values come from the registries and from the choices of options, so that a new family, adapter type or choice joins by
itself; what is listed by hand is which options are combined.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from library.config.network_args import (
    ADAPTER_TYPES,
    LYCORIS_ALGORITHMS,
    NETWORK_MODULES,
    RANKED_TYPES,
    SPECIAL_MODULES,
)
from library.config.options import iter_options
from library.config.schema import RunConfig
from library.models.families import CONTROL_FAMILIES, FAMILIES, ONE_FRAME_FAMILIES

GLOBAL_BATCH = 8
"""Samples of an optimizer step in every row."""
MAX_RANKS = 4
STEPS = 3


@dataclass(frozen=True)
class Value:
    """One value of a factor."""

    name: str
    flags: tuple[str, ...] = ()
    ranks: int = 1
    """The factor by which it multiplies the number of processes."""
    splits_batch: bool = False
    """Whether each of its ranks or micro-batches has other samples."""
    data: str = ""
    """What the dataset has for it: ``masks``, ``alpha``, ``validation``, ``prompts``, ``clips``, ``control_clips``."""


@dataclass(frozen=True)
class Factor:
    """Values of which every row has one; the first is the default."""

    name: str
    values: tuple[Value, ...]
    changes_result: bool = False
    """Whether the reference has the same value; other factors have their default there."""
    changes_rounding: bool = False
    """Whether images are encoded in batches of another size, say."""


def list_factors() -> list[Factor]:
    """List the factors."""
    return [
        Factor("family", tuple(_list_families()), changes_result=True),
        Factor("adapter", tuple(_list_adapters()), changes_result=True),
        Factor("layers", _from_words(LAYERS), changes_result=True),
        Factor("trained", _from_words(TRAINED), changes_result=True),
        Factor("dropout", _from_words(DROPOUT), changes_result=True),
        Factor("weights", _from_words(WEIGHTS), changes_result=True),
        Factor("optimizer", _from_words(OPTIMIZERS), changes_result=True),
        Factor("loss", tuple(_list_choices("loss_type")), changes_result=True),
        Factor("mask", MASKS, changes_result=True),
        Factor("captions", _from_words(CAPTIONS), changes_result=True),
        Factor("augmentation", _from_words(AUGMENTATIONS), changes_result=True),
        Factor("quantized base", tuple(_list_choices("quantize_base")), changes_result=True),
        Factor("validation", VALIDATION, changes_result=True),
        Factor("previews", PREVIEWS, changes_result=True),
        Factor("data parallel", DATA_PARALLEL),
        Factor("sharding", _from_words(SHARDING)),
        Factor("model parallel", (Value("none"), *_list_model_parallel())),
        Factor("checkpointing", _from_words(CHECKPOINTING)),
        Factor("block swap", _from_words(BLOCK_SWAP)),
        Factor("latents", _from_words(LATENTS), changes_rounding=True),
        Factor("texts", _from_words(TEXTS), changes_rounding=True),
        Factor("accumulation", ACCUMULATION),
        Factor("workers", _from_words(WORKERS)),
        Factor("resume", _from_words(RESUME)),
    ]


ALPHA = ("--network_alpha", "3")
TRAINED = {
    "denoiser": "--network_train_unet_only",
    "denoiser and text encoders": "--no-network_train_unet_only",
    "text encoders": "--no-network_train_unet_only --network_train_text_encoder_only",
}
LAYERS = {
    "plain": "",
    "convolutions": "--network_args conv_dim=2 conv_alpha=1",
    "rank-stabilized": "--network_args use_rslora=True loraplus_lr_ratio=2",
}
DROPOUT = {
    "none": "",
    "network": "--network_dropout 0.3",
    "rank": "--network_args rank_dropout=0.3",
    "module": "--network_args module_dropout=0.3",
}
WEIGHTS = {"plain": "", "ema": "--ema_decay 0.5", "max norm": "--scale_weight_norms 0.01"}
OPTIMIZERS = {"SGD": "--optimizer_type SGD", "momentum": "--optimizer_type SGD --optimizer_args momentum=0.9"}
CAPTIONS = {
    "plain": "",
    "shuffled": "--shuffle_caption",
    "dropped": "--caption_dropout_rate 0.5",
    "tags dropped": "--caption_tag_dropout_rate 0.5",
}
AUGMENTATIONS = {"none": "", "flip": "--flip_aug", "crop": "--random_crop", "color": "--color_aug"}
CHECKPOINTING = {
    "none": "",
    "all": "--gradient_checkpointing",
    "every second": "--gradient_checkpointing --gradient_checkpointing_every 2",
    "budget": "--gradient_checkpointing --activation_memory_budget 0.5",
    "offloaded": "--gradient_checkpointing --cpu_offload_checkpointing",
}
BLOCK_SWAP = {"none": "", "one block": "--blocks_to_swap 1"}
LATENTS = {"encoded": "", "cached": "--cache_latents", "on disk": "--cache_latents_to_disk --vae_batch_size 3"}
TEXTS = {
    "encoded": "",
    "cached": "--cache_text_encoder_outputs",
    "on disk": "--cache_text_encoder_outputs_to_disk --text_encoder_batch_size 3",
}
WORKERS = {"none": "--max_data_loader_n_workers 0", "one": "--max_data_loader_n_workers 1"}
RESUME = {"none": "", "same layout": "", "of one process": ""}


def _from_words(flags: Mapping[str, str]) -> tuple[Value, ...]:
    return tuple(Value(name, tuple(words.split())) for name, words in flags.items())


MASKS = (
    Value("none"),
    Value("masks", ("--masked_loss",), data="masks"),
    Value("masks, by area", ("--masked_loss", "--masked_loss_normalize"), data="masks"),
    Value("alpha", ("--alpha_mask",), data="alpha"),
)
VALIDATION = (Value("none"), Value("each second step", ("--validate_every_n_steps", "2"), data="validation"))
PREVIEWS = (Value("none"), Value("each second step", ("--sample_every_n_steps", "2"), data="prompts"))
ACCUMULATION = (Value("none"), Value("two", ("--gradient_accumulation_steps", "2"), splits_batch=True))


def _split(name: str, flags: str, ranks: int = 2) -> Value:
    return Value(name, tuple(flags.split()), ranks, splits_batch=True)


DATA_PARALLEL = (
    Value("none"),
    _split("DDP", ""),
    _split("FSDP", "--fsdp"),
    _split("HSDP", "--fsdp --dp_replicate_size 2", ranks=4),
    _split("ZeRO 1", "--deepspeed --zero_stage 1"),
    _split("ZeRO 2", "--deepspeed --zero_stage 2"),
    _split("ZeRO 3", "--deepspeed --zero_stage 3"),
)
SHARDING = {
    "plain": "",
    "FSDP, offloaded": "--fsdp_offload_params",
    "FSDP, no reshard": "--no-fsdp_reshard_after_forward",
    "ZeRO, optimizer offloaded": "--offload_optimizer_device cpu",
    "ZeRO, all offloaded": "--offload_optimizer_device cpu --offload_param_device cpu",
}


def _list_model_parallel() -> Iterator[Value]:
    for name in ("tp", "cp"):
        yield Value(name, (f"--{name}_size", "2"), ranks=2)
    for schedule in _get_choices("pp_schedule"):
        yield Value(f"pp, {schedule}", ("--pp_size", "2", "--pp_schedule", schedule), ranks=2)
    yield Value("tp x pp", ("--tp_size", "2", "--pp_size", "2"), ranks=4)
    yield Value("cp x pp", ("--cp_size", "2", "--pp_size", "2"), ranks=4)


def _get_choices(option: str) -> Sequence[str]:
    """The values of an option with choices, in the order of its declaration."""
    (found,) = (each for each in iter_options(RunConfig) if each.name == option)
    return tuple(found.value_type)


def _list_choices(option: str) -> Iterator[Value]:
    return (
        Value(choice, (f"--{option}", choice) if number else ()) for number, choice in enumerate(_get_choices(option))
    )


CLIP_FAMILIES = {
    "hunyuan_video_i2v": ("clips",),
    "framepack": ("clips", "--latent_window_size", "4"),  # sections of 16 frames
    "wan_animate": ("control_clips",),
}
"""The families that are trained on clips alone: what their dataset has, and more flags."""


def _list_families() -> Iterator[Value]:
    """Every family as a tiny model, the one with most options first, and those that ``--control`` and ``--one_frame``
    make."""
    for name in sorted(FAMILIES.list_names(), key=lambda name: name != "flux"):
        data, *flags = CLIP_FAMILIES.get(name, ("",))
        yield Value(name, ("--pretrained_model_name_or_path", f"random:{name}:tiny", *flags), data=data)
    for name, kinds in CONTROL_FAMILIES.items():
        for kind in kinds:
            model = f"random:{name}:tiny"
            yield Value(f"{name}, {kind}", ("--pretrained_model_name_or_path", model, "--control", kind))
    for name in ONE_FRAME_FAMILIES:
        yield Value(f"{name}, one frame", ("--pretrained_model_name_or_path", f"random:{name}:tiny", "--one_frame"))


def _list_adapters() -> Iterator[Value]:
    for name in ADAPTER_TYPES:
        alpha = ALPHA if name in RANKED_TYPES else ()
        yield Value(name, (*alpha, *_choose_network_module(name)))


def _choose_network_module(adapter_type: str) -> list[str]:
    if adapter_type == ADAPTER_TYPES[0]:
        return []
    modules = (name for name, kind in NETWORK_MODULES.items() if kind == adapter_type and name not in SPECIAL_MODULES)
    if (module := next(modules, None)) is not None:
        return ["--network_module", module]
    algorithm = next(name for name, kind in LYCORIS_ALGORITHMS.items() if kind == adapter_type)
    return ["--network_module", "lycoris.kohya", "--network_args", f"algo={algorithm}"]
