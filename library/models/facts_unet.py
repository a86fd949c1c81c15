"""Facts of the UNet families (Stable Diffusion 1, 2 and XL), and the UNet layers that get a LoRA."""

from collections.abc import Iterator
from dataclasses import replace

from ..config.schema import ModelConfig
from .facts import FamilyFacts, FamilyMatch
from .model_configs import ConfigReader, ModelError, get_downscale_factor, read_required, read_scheduler_config

UNET_LORA_TARGET_MODULES = ("proj_in", "proj_out", "to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
"""Every linear layer and 1x1 convolution inside the UNet's Transformer2DModel blocks."""

UNET_CONV_LORA_TARGET_MODULES = (
    "resnets.*.conv1",
    "resnets.*.conv2",
    "resnets.*.conv_shortcut",
    "resnets.*.time_emb_proj",
    "downsamplers.*.conv",
    "upsamplers.*.conv",
)
"""The remaining layers, trained when convolutions get a LoRA, too: resnets and samplers."""


def _match_unet_model(read: ConfigReader) -> FamilyMatch:
    """The checks of all UNet families."""
    unet, vae = read_required(read, "unet/config.json"), read_required(read, "vae/config.json")
    if unet.get("in_channels", 4) != 4:
        raise ModelError(
            f"its UNet has {unet['in_channels']} input channels instead of 4; inpainting and editing models cannot be "
            "trained"
        )
    prediction = read_scheduler_config(read).get("prediction_type", "epsilon")
    if prediction not in ("epsilon", "v_prediction"):
        raise ModelError(
            f"its scheduler has prediction_type {prediction!r}; only epsilon and v_prediction are supported"
        )
    reason = f"the UNet has cross_attention_dim {unet.get('cross_attention_dim')}"
    size_multiple = get_downscale_factor(vae) * get_downscale_factor(unet)
    return FamilyMatch(reason, size_multiple, "v" if prediction == "v_prediction" else "epsilon")


def match_sd1(read: ConfigReader) -> FamilyMatch | None:
    return None if _is_sd2(read) else _match_unet_model(read)


def match_sd2(read: ConfigReader) -> FamilyMatch | None:
    return _match_unet_model(read) if _is_sd2(read) else None


def match_sdxl(read: ConfigReader) -> FamilyMatch | None:
    unet = read_required(read, "unet/config.json")
    if unet.get("addition_embed_type") != "text_time":
        raise ModelError(
            "its UNet has no size conditioning (addition_embed_type text_time), as Stable Diffusion XL has"
        )
    if unet.get("projection_class_embeddings_input_dim") == 2560:
        raise ModelError("it is the refiner of Stable Diffusion XL; train a LoRA on the base model")
    return _match_unet_model(read)


def _is_sd2(read: ConfigReader) -> bool:
    unet = read_required(read, "unet/config.json")
    return unet.get("cross_attention_dim") == 1024 or bool(unet.get("use_linear_projection"))


def _validate_clip_skip(read: ConfigReader, options: ModelConfig) -> Iterator[str]:
    layers = (read("text_encoder/config.json") or {}).get("num_hidden_layers", 12)
    if (options.clip_skip or 1) > layers:
        yield f"clip_skip: {options.clip_skip}; the text encoder has {layers} layers, and 1 or 2 are usual"


_UNET_PREFIXES, _VAE_PREFIXES = ("model.diffusion_model.",), ("first_stage_model.",)

SD1_FACTS = FamilyFacts(
    name="sd1",
    title="Stable Diffusion 1",
    pipeline_class="StableDiffusionPipeline",
    denoiser_name="unet",
    components=("unet", "vae", "text_encoder", "tokenizer"),
    match_configs=match_sd1,
    component_options={"vae": "vae", "clip_l": "text_encoder"},
    text_encoders=("text_encoder",),
    extra_options=("clip_skip", "max_token_length"),
    validate_options=_validate_clip_skip,
    single_file_prefixes={
        "unet": _UNET_PREFIXES,
        "vae": _VAE_PREFIXES,
        "text_encoder": ("cond_stage_model.transformer.",),
    },
    single_file_keys=("input_blocks.0.0.weight", "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"),
    shape_checks={
        ("input_blocks.0.0.weight", 0): ("unet", "block_out_channels", 0),
        ("input_blocks.0.0.weight", 1): ("unet", "in_channels"),
        ("input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", 1): ("unet", "cross_attention_dim"),
    },
)

SD2_FACTS = replace(
    SD1_FACTS,
    name="sd2",
    title="Stable Diffusion 2",
    match_configs=match_sd2,
    component_options={"vae": "vae"},
    single_file_prefixes={"unet": _UNET_PREFIXES, "vae": _VAE_PREFIXES, "text_encoder": ("cond_stage_model.model.",)},
)

SDXL_FACTS = FamilyFacts(
    name="sdxl",
    title="Stable Diffusion XL",
    pipeline_class="StableDiffusionXLPipeline",
    denoiser_name="unet",
    components=("unet", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    match_configs=match_sdxl,
    component_options={"vae": "vae", "clip_l": "text_encoder", "clip_g": "text_encoder_2"},
    text_encoders=("text_encoder", "text_encoder_2"),
    extra_options=("max_token_length",),
    single_file_prefixes={
        "unet": _UNET_PREFIXES,
        "vae": _VAE_PREFIXES,
        "text_encoder": ("conditioner.embedders.0.transformer.",),
        "text_encoder_2": ("conditioner.embedders.1.model.",),
    },
    single_file_keys=("input_blocks.0.0.weight", "label_emb.0.0.weight"),
    shape_checks={
        ("input_blocks.0.0.weight", 0): ("unet", "block_out_channels", 0),
        ("input_blocks.0.0.weight", 1): ("unet", "in_channels"),
        ("label_emb.0.0.weight", 1): ("unet", "projection_class_embeddings_input_dim"),
    },
)
