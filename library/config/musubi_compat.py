"""Commands and run files of musubi-tuner: how they are told from others, and what becomes of options it alone has.

Its training scripts are ``flux_2_train_network.py``, ``qwen_image_train_network.py`` and others; ``train_lora.py``
takes what stands behind the script's name. An option of ours that musubi-tuner calls otherwise has its name as an
alias, and a default of musubi-tuner that differs is a fact of the option (``musubi_default``).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..problems import Place, Problem
from .kohya_compat import (
    FULL_TRAINING,
    KOHYA_OPTIONS,
    TEXT_PRECISION,
    NoEffectOption,
    OptionAlias,
    OptionVerdict,
    OtherScriptOption,
    RawSetting,
    UnsupportedOption,
    list_aliases,
)
from .network_args import MUSUBI_MODULES, get_adapter_type
from .options import ExplicitOptions, iter_options
from .schema import AdapterConfig, RunConfig, TrainConfig
from .schema_objective import NoiseConfig
from .types import split_keyword_args
from .validate_adapter import validate_save_format

PROGRAM = "musubi-tuner"
KONTEXT_MODULE, KONTEXT_VERSION = "networks.lora_flux", "kontext"
"""FLUX.1 Kontext, the one model of musubi-tuner whose module sd-scripts has for another model."""

EXPERT_BOUNDARIES = {"t2v-A14B": 875, "i2v-A14B": 900}
"""The timestep from which on the transformer for high noise predicts, by the tasks of Wan 2.2 A14B."""

REX_ARGS, REX_MIN_RATIO = ("rex_alpha=0.1", "rex_beta=0.9"), 0.01
"""The defaults of ``lr_scheduler rex``, whose curve falls later than that of its authors."""

_MISSING = "which is not supported"
_FOLDER_ONLY = (
    "which is trained from a folder in diffusers' format, with --pretrained_model_name_or_path in place of --dit"
)
MISSING_MODELS = {
    "networks.lora_kandinsky": f"Kandinsky 5, {_FOLDER_ONLY}",
    "networks.lora_hidream_o1": f"HiDream-O1, {_MISSING}",
}
"""The models of musubi-tuner that cannot be trained here, by their network modules."""

FIRST_FRAME_TASK = "i2v-14B-FC"
"""The task of Wan 2.1 Fun-Control whose clips begin with a given frame."""

_SUPPORTED = (
    "the models of musubi-tuner that can be trained are FLUX.1 Kontext, FLUX.2, Qwen-Image, Wan 2.1 and 2.2 A14B,"
    " HunyuanVideo, HunyuanVideo 1.5, FramePack, Z-Image, Krea 2 and Ideogram 4"
)


class CachingOption(UnsupportedOption):
    """An option of the scripts that cache latents and text encoder outputs before training."""


_CACHING = CachingOption("of musubi-tuner's caching scripts, which are not needed: a run caches by itself")
_OTHER_MODEL = OtherScriptOption("for a model of musubi-tuner that is not supported")
_SWAP = NoEffectOption("frozen weights are only ever copied to the device, from pinned memory")
_TURBO = NoEffectOption("previews are sampled with the model that is trained", is_explained=True)

_CACHING_OPTIONS = """
    batch_size clip_max_length console_back console_num_images console_width debug_mode device disable_cudnn_backend i2v
    keep_cache nabla_resize num_workers quantized_qwen qwen_max_length skip_existing
    text_cache_dtype
""".split()
_OTHER_MODEL_OPTIONS = """
    dino_loss_backend dino_loss_every_n_steps dino_loss_feature_mode dino_loss_layer
    dino_loss_model_type dino_loss_no_norm dino_loss_resize dino_loss_use_gram dino_loss_weight
    force_nabla_attention i2v_mode model_type nabla_P
    nabla_add_sta nabla_method nabla_wH nabla_wT nabla_wW no_nabla_add_sta no_vae_load noise_clip_std noise_scale_end
    noise_scale_start offload_dit_during_sampling override_dit
    scheduler_scale skip_t2i_visual_dummy text_encoder_clip text_encoder_qwen
""".split()

MUSUBI_OPTIONS: Mapping[str, OptionVerdict] = {
    **KOHYA_OPTIONS,
    **list_aliases(PROGRAM),
    # no effect on the result
    **dict.fromkeys(("fp8_llm", "fp8_t5", "fp8_text_encoder"), TEXT_PRECISION),
    **dict.fromkeys(
        ("use_pinned_memory_for_block_swap", "block_swap_h2d_only"),
        _SWAP,
    ),
    **dict.fromkeys(("turbo_dit", "turbo_dit_cache"), _TURBO),
    "vae_cache_cpu": NoEffectOption("only where the VAE keeps values between the parts of a clip"),
    "vae_dtype": NoEffectOption("the VAE always runs in fp32"),
    **dict.fromkeys(
        ("vae_tiling", "vae_spatial_tile_sample_min_size", "vae_sample_size", "vae_enable_patch_conv"),
        NoEffectOption("the VAE encodes frames whole, without the seams of tiles"),
    ),
    "dit_dtype": NoEffectOption("the model computes in the dtype of mixed_precision"),
    "text_encoder_dtype": TEXT_PRECISION,
    "unconditional_dit": _TURBO,
    **dict.fromkeys(
        ("one_frame_no_2x", "one_frame_no_4x"),
        CachingOption("of musubi-tuner's caching script: no_2x and no_4x in --one_frame_settings have this meaning"),
    ),
    "bulk_decode": NoEffectOption("previews only: those of FramePack are decoded two sections at a time"),
    **dict.fromkeys(
        ("initial_sigma", "sampler_preset", "use_unconditional_dit_for_lora_sampling"),
        NoEffectOption("previews only: --s and --l of a prompt set steps and guidance", is_explained=True),
    ),
    **dict.fromkeys(("ideogram4_timestep_mu", "ideogram4_timestep_std"), NoEffectOption("musubi-tuner reads neither")),
    **dict.fromkeys(
        ("log_loss_stats", "validate_caption_structure", "warn_on_caption_issues"),
        NoEffectOption("only what a run prints of losses and captions"),
    ),
    "offload_inactive_dit": NoEffectOption(
        "memory only: with --blocks_to_swap 80 --block_swap_ring_size 40 the idle transformer waits in CPU memory"
    ),
    "force_v2_1_time_embedding": NoEffectOption("all tokens have one time, which is embedded once"),
    "img_in_txt_in_offloading": NoEffectOption("only blocks are kept in CPU memory: blocks_to_swap"),
    "disable_numpy_memmap": NoEffectOption("only how a file is read"),
    "compile_cache_size_limit": NoEffectOption("equal blocks share their graphs, so that torch's limit is not reached"),
    "cuda_allow_tf32": NoEffectOption("rounding only; the model computes in the dtype of mixed_precision"),
    "cuda_cudnn_benchmark": NoEffectOption("transformers have no convolutions to choose a kernel for"),
    "use_32bit_attention": NoEffectOption("rounding only; attention computes in the dtype of mixed_precision", True),
    "metadata_reso": NoEffectOption("modelspec.resolution is that of the dataset", is_explained=True),
    "metadata_arch": NoEffectOption("modelspec.architecture is that of the model", is_explained=True),
    # not supported
    "fused_backward_pass": replace(FULL_TRAINING, in_full=OptionAlias("fused_backward_pass")),  # of zimage_train.py
    "block_swap_optimizer_patch_params": FULL_TRAINING,
    "sage_attn": UnsupportedOption("SageAttention has no backward pass; use --attn_mode flash"),
    "show_timesteps": UnsupportedOption("use python -m library plan, which trains nothing"),
    "dit_in_channels": UnsupportedOption("not supported: the model has the channels of its files", (16,)),
    "num_layers": UnsupportedOption("not supported: the model has the blocks of its files", (60,)),
    "remove_first_image_from_target": UnsupportedOption(
        "not supported: the picture itself is the first image that Qwen-Image-Layered is trained to make"
    ),
    **dict.fromkeys(_CACHING_OPTIONS, _CACHING),
    **dict.fromkeys(_OTHER_MODEL_OPTIONS, _OTHER_MODEL),
}
"""What becomes of each option that is none of ours, in commands and run files of musubi-tuner."""


def is_from_musubi(settings: Collection[RawSetting]) -> bool:
    """Whether the model is named by musubi-tuner's option, or the network module is one that it alone has.

    Files that this program writes have the latter and ``objective_defaults``, and are its own.
    """
    names = {each.name for each in settings}
    only_there = (*MUSUBI_MODULES, *MISSING_MODELS)
    has_module = _find_text(settings, "network_module") in only_there
    return "dit" in names or (has_module and "objective_defaults" not in names)


def find_missing_model(settings: Collection[RawSetting]) -> Problem | None:
    """Return the problem of a command for a model that cannot be trained here, beside which no other matters."""
    module = _find_text(settings, "network_module")
    if module in MISSING_MODELS:
        place = _find_place(settings, "network_module")
        text = f"{module} is musubi-tuner's module of {MISSING_MODELS[module]}"
        return Problem("network_module", text, _SUPPORTED, place=place)
    task = _find_text(settings, "task")
    if task.startswith("k5"):
        is_missing = any(part in task for part in ("-10s-", "-5s-hd", "-i2i-"))  # sparse attention, and editing
        text = f"{task} is Kandinsky 5, {_MISSING if is_missing else _FOLDER_ONLY}"
        return Problem("task", text, _SUPPORTED, place=_find_place(settings, "task"))
    return None


def find_unset_model(settings: Collection[RawSetting], values: Mapping[str, Any]) -> Problem | None:
    """Return the problem of a command without a model, which would otherwise train the built-in demo model."""
    if "pretrained_model_name_or_path" in values:
        return None
    fix = "give the file of the transformer, or a folder or hub id of the whole model"
    return Problem("dit", "names no model", fix, place=_find_place(settings, "dit"))


def list_musubi_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of musubi-tuner for the options that are not in ``values`` and have another default here.

    Where ``objective_defaults`` is given, it chooses those of noise and timesteps.
    """
    taken = {
        option.name: option.musubi_default
        for option in iter_options(RunConfig)
        if option.musubi_default is not None
        and option.name not in values
        and not (option.group == "noise" and "objective_defaults" in values)
    }
    if values.get("lr_scheduler") == "rex":
        taken |= _list_rex_values(values)
    adapter = AdapterConfig(**{name: values[name] for name in ("network_module", "network_args") if name in values})
    if validate_save_format([get_adapter_type(adapter)], taken.get("save_format", "auto")):
        del taken["save_format"]
    if "dit_high_noise" not in values and values.get("model_version") not in EXPERT_BOUNDARIES:
        taken.pop("expert_adapters", None)  # one transformer
    if expert := _find_only_expert(values):
        taken["noise_experts"] = expert
    if adapter.network_module == KONTEXT_MODULE and not values.keys() & {"model_version", "family"}:
        taken["model_version"] = KONTEXT_VERSION
    if values.get("model_version") == FIRST_FRAME_TASK and "image_to_video" not in values:
        taken["image_to_video"] = True
    return taken


def _find_only_expert(values: Mapping[str, Any]) -> str | None:
    """The expert of Wan 2.2 A14B that ``dit`` alone is, as the range of timesteps says."""
    boundary = EXPERT_BOUNDARIES.get(values.get("model_version", ""))
    if boundary is None or values.keys() & {"dit_high_noise", "noise_experts"}:
        return None
    if values.get("timestep_sampling", "sigma") == "sigma":  # which counts timesteps from noise
        return None
    low, high = values.get("min_timestep") or 0, values.get("max_timestep") or 1000
    return "low_noise" if high <= boundary else "high_noise" if low >= boundary else None


def _list_rex_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The curve and the end of musubi-tuner's ``rex``, for what is not given of them."""
    arguments = tuple(values.get("lr_scheduler_args", ()))
    names = {name for name, _ in split_keyword_args(arguments)}
    missing = tuple(word for word in REX_ARGS if word.partition("=")[0] not in names)
    found = dict[str, Any]()
    if missing:
        found["lr_scheduler_args"] = arguments + missing
    if "lr_scheduler_min_lr_ratio" not in values:
        found["lr_scheduler_min_lr_ratio"] = REX_MIN_RATIO
    return found


def find_yielding_options(train: TrainConfig, noise: NoiseConfig, explicit: ExplicitOptions) -> dict[str, str]:
    """Find the options without effect in musubi-tuner, and switches of speed without effect beside others here."""
    unused = {}
    if noise.timestep_sampling == "sigma":
        unused["discrete_flow_shift"] = "timestep_sampling sigma has no shift in musubi-tuner"
    if train.blocks_to_swap:
        unused["torch_compile"] = "blocks_to_swap is set, and swapped blocks are not compiled"
    return {name: reason for name, reason in unused.items() if name in explicit}


def resolve_noise_options(noise: NoiseConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that mean here what the options mean in musubi-tuner, and what there is to say of options.

    Its ``timestep_sampling`` sigma counts timesteps from noise to image, so a higher ``logit_mean`` means less noise,
    ``min_timestep`` is the end of noise, and it has no shift.
    """
    values, notes = dict[str, Any](), dict[str, str]()
    if noise.timestep_sampling != "sigma":
        return values, notes
    values["discrete_flow_shift"] = 1.0
    if noise.weighting_scheme == "logit_normal" and noise.logit_mean:
        values["logit_mean"] = -noise.logit_mean
        notes["logit_mean"] = f"above 0 means less noise in musubi-tuner; {values['logit_mean']:g} is the same here"
    for name, other, default in (("min_timestep", "max_timestep", 0), ("max_timestep", "min_timestep", 1000)):
        end = getattr(noise, name)
        is_set = end not in (None, default)
        values[other] = 1000 - end if is_set else None
        if is_set:
            notes[name] = f"counts from noise in musubi-tuner; {other} {values[other]} is the same here"
    return values, notes


def explain_caching_command(argv: Sequence[str]) -> str | None:
    """Answer a command of the scripts that cache latents or text encoder outputs, which train nothing."""
    names = {word[2:].partition("=")[0] for word in argv if word.startswith("--")}
    if not _has_caching_options_only(names):
        return None
    return (
        "not needed: a training command of musubi-tuner caches latents and text encoder outputs by itself; to do so "
        "beforehand, run python -m library cache build with the options of the training command"
    )


def _has_caching_options_only(names: Collection[str]) -> bool:
    inputs = {"dataset_config", "model_version", *_list_component_names()}
    caching = {name for name, verdict in MUSUBI_OPTIONS.items() if isinstance(verdict, CachingOption)}
    ignored = {name for name, verdict in MUSUBI_OPTIONS.items() if verdict in (TEXT_PRECISION, _OTHER_MODEL)}
    is_known = set(names) <= inputs | caching | ignored | {
        "vae_cache_cpu",
        "vae_dtype",
        *("edit", "edit_plus", "f1", "one_frame"),
        *(
            "vae_chunk_size",
            "vae_tiling",
            "vae_spatial_tile_sample_min_size",
            "vae_sample_size",
            "vae_enable_patch_conv",
        ),
    }
    return is_known and bool({*names} & (caching | {*_list_component_names()}))


def _list_component_names() -> Iterator[str]:
    """List the options that name files of a model besides the transformer, under all their names."""
    for option in iter_options(RunConfig):
        if option.group == "model" and option.is_path and option.name != "pretrained_model_name_or_path":
            yield option.name
            yield from (alias.name for alias in option.aliases)


def _find_text(settings: Iterable[RawSetting], name: str) -> str:
    """The last value of an option, before it is converted; flags come after the file."""
    values = [each.value for each in settings if each.name == name]
    last = values[-1] if values else ""
    return str(last[0]) if isinstance(last, Sequence) and not isinstance(last, str) and last else str(last)


def _find_place(settings: Iterable[RawSetting], name: str) -> Place | None:
    return next((each.place for each in settings if each.name == name), None)
