"""Facts of the flow-matching transformers (DiT): Stable Diffusion 3, FLUX.1, Z-Image and Qwen-Image."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..config.schema import ModelConfig
from .facts import FamilyFacts, FamilyMatch
from .model_configs import ConfigReader, ModelError, get_downscale_factor, read_required, read_scheduler_config

JOINT_ATTENTION_LORA_TARGET_MODULES = (
    *("to_q", "to_k", "to_v", "to_out.0"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
)
"""The linear layers of an attention over image and text tokens."""

JOINT_BLOCK_LORA_TARGET_MODULES = (
    *JOINT_ATTENTION_LORA_TARGET_MODULES,
    *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    *("norm1.linear", "norm1_context.linear"),
)
"""Every linear layer of the double-stream blocks of Stable Diffusion 3 and FLUX.1."""

_CHECKPOINT_PREFIXES = ("model.diffusion_model.",)
"""Prefix of the transformer in full checkpoints; files with only the transformer have none."""


def _match_flow_model(read: ConfigReader, channels_per_latent: int, reason: str) -> FamilyMatch:
    """The checks of all these families; the transformer's input has ``channels_per_latent`` per latent channel."""
    transformer, vae = read_required(read, "transformer/config.json"), read_required(read, "vae/config.json")
    channels, latent_channels = transformer.get("in_channels"), vae.get("latent_channels", vae.get("z_dim"))
    if isinstance(channels, int) and isinstance(latent_channels, int):
        expected = latent_channels * channels_per_latent
        if channels != expected:
            raise ModelError(
                f"its transformer has {channels} input channels instead of {expected}; inpainting, editing and control "
                "models cannot be trained"
            )
    name = read_scheduler_config(read).get("_class_name", "")
    if "FlowMatch" not in name:
        raise ModelError(f"its scheduler is {name}; only flow matching is supported for this model")
    return FamilyMatch(reason, get_downscale_factor(vae) * 2, "flow")  # patches of 2 x 2 latents


def _match_sd3(read: ConfigReader) -> FamilyMatch:
    depth = read_required(read, "transformer/config.json").get("num_layers")
    return _match_flow_model(read, 1, f"the transformer has {depth} joint blocks")


def _match_flux(read: ConfigReader) -> FamilyMatch:
    has_guidance = bool(read_required(read, "transformer/config.json").get("guidance_embeds", False))
    variant = "has a guidance embedding (dev)" if has_guidance else "has no guidance embedding (schnell)"
    return replace(_match_flow_model(read, 4, f"the transformer {variant}"), has_guidance_embeds=has_guidance)


def _match_z_image(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("siglip_feat_dim") is not None:
        raise ModelError("it is Z-Image-Omni, which takes images as input; use Z-Image or Z-Image-Turbo")
    return _match_flow_model(read, 1, f"the transformer has {config.get('n_layers')} blocks")


def _match_qwen_image(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("zero_cond_t") or config.get("use_layer3d_rope") or config.get("use_additional_t_cond"):
        raise ModelError("it is Qwen-Image-Edit or Qwen-Image-Layered; use Qwen-Image")
    return _match_flow_model(read, 4, f"the transformer has {config.get('num_layers')} blocks")


def _validate_flux_guidance(read: ConfigReader, options: ModelConfig) -> Iterator[str]:
    has_guidance = (read("transformer/config.json") or {}).get("guidance_embeds", False)
    if not has_guidance and options.guidance_scale != ModelConfig.guidance_scale:
        yield "guidance_scale: FLUX.1 schnell has no guidance embedding; leave this option out"


_CLIP_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "text_encoder": ("text_encoders.clip_l.transformer.",),
    "text_encoder_2": ("text_encoders.clip_g.transformer.",),
}

_SD3_TEXT_COMPONENTS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")

SD3_FACTS = FamilyFacts(
    name="sd3",
    title="Stable Diffusion 3",
    pipeline_class="StableDiffusion3Pipeline",
    denoiser_name="transformer",
    components=("transformer", "vae", *_SD3_TEXT_COMPONENTS),
    match_configs=_match_sd3,
    component_options={"vae": "vae", "clip_l": "text_encoder", "clip_g": "text_encoder_2", "t5xxl": "text_encoder_3"},
    text_encoders=("text_encoder", "text_encoder_2", "text_encoder_3"),
    t5_encoder="text_encoder_3",
    extra_options=("t5xxl_max_token_length", "apply_t5_attn_mask"),
    single_file_prefixes={
        "transformer": _CHECKPOINT_PREFIXES,
        "vae": ("first_stage_model.",),
        **_CLIP_PREFIXES,
        "text_encoder_3": ("text_encoders.t5xxl.transformer.",),
    },
    single_file_keys=("joint_blocks.0.x_block.attn.qkv.weight", "context_embedder.weight", "x_embedder.proj.weight"),
    diffusers_keys={
        "joint_blocks.0.x_block.attn.qkv.weight": "transformer_blocks.0.attn.to_q.weight",
        "joint_blocks.0.x_block.attn.ln_q.weight": "transformer_blocks.0.attn.norm_q.weight",
        "joint_blocks.0.x_block.attn2.qkv.weight": "transformer_blocks.0.attn2.to_q.weight",
        "x_embedder.proj.weight": "pos_embed.proj.weight",
    },
    shape_checks={
        ("context_embedder.weight", 0): ("transformer", "caption_projection_dim"),
        ("context_embedder.weight", 1): ("transformer", "joint_attention_dim"),
        ("x_embedder.proj.weight", 1): ("transformer", "in_channels"),
        ("joint_blocks.0.x_block.attn.ln_q.weight", None): ("transformer", "qk_norm"),
        ("joint_blocks.0.x_block.attn2.qkv.weight", None): ("transformer", "dual_attention_layers"),
    },
)

_MASKED_ATTENTION_MODES = ("xformers", "efficient", "cudnn", "math")
"""Attention backends that support masks, as padded texts need."""

FLUX_FACTS = FamilyFacts(
    name="flux",
    title="FLUX.1",
    pipeline_class="FluxPipeline",
    denoiser_name="transformer",
    components=("transformer", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    match_configs=_match_flux,
    component_options={"ae": "vae", "vae": "vae", "clip_l": "text_encoder", "t5xxl": "text_encoder_2"},
    text_encoders=("text_encoder", "text_encoder_2"),
    t5_encoder="text_encoder_2",
    extra_options=("t5xxl_max_token_length", "guidance_scale", "apply_t5_attn_mask"),
    attention_modes=(*_MASKED_ATTENTION_MODES, "flash", "flash3"),
    validate_options=_validate_flux_guidance,
    single_file_prefixes={
        "transformer": _CHECKPOINT_PREFIXES,
        "vae": ("vae.",),
        "text_encoder": _CLIP_PREFIXES["text_encoder"],
        "text_encoder_2": ("text_encoders.t5xxl.transformer.",),
    },
    single_file_keys=("double_blocks.0.img_attn.qkv.weight", "vector_in.in_layer.weight", "img_in.weight"),
    diffusers_keys={
        "double_blocks.0.img_attn.qkv.weight": "single_transformer_blocks.0.proj_mlp.weight",
        "vector_in.in_layer.weight": "time_text_embed.text_embedder.linear_1.weight",
        "guidance_in.in_layer.weight": "time_text_embed.guidance_embedder.linear_1.weight",
        "img_in.weight": "x_embedder.weight",
        "txt_in.weight": "context_embedder.weight",
    },
    shape_checks={
        ("img_in.weight", 1): ("transformer", "in_channels"),
        ("txt_in.weight", 1): ("transformer", "joint_attention_dim"),
        ("vector_in.in_layer.weight", 1): ("transformer", "pooled_projection_dim"),
        ("guidance_in.in_layer.weight", None): ("transformer", "guidance_embeds"),
    },
)

Z_IMAGE_FACTS = FamilyFacts(
    name="z_image",
    title="Z-Image",
    pipeline_class="ZImagePipeline",
    denoiser_name="transformer",
    components=("transformer", "vae", "text_encoder", "tokenizer"),
    match_configs=_match_z_image,
    component_options={"ae": "vae", "vae": "vae", "text_encoder": "text_encoder"},
    attention_modes=_MASKED_ATTENTION_MODES,
    single_file_prefixes={
        "transformer": _CHECKPOINT_PREFIXES,
        "vae": ("vae.",),
        "text_encoder": ("text_encoders.qwen3_4b.transformer.",),
    },
    single_file_keys=(
        "noise_refiner.0.attention.qkv.weight",
        "cap_embedder.1.weight",
        "layers.0.adaLN_modulation.0.weight",
    ),
    diffusers_keys={"noise_refiner.0.attention.qkv.weight": "noise_refiner.0.attention.to_q.weight"},
    shape_checks={
        ("cap_embedder.1.weight", 0): ("transformer", "dim"),
        ("cap_embedder.1.weight", 1): ("transformer", "cap_feat_dim"),
    },
)

QWEN_IMAGE_FACTS = FamilyFacts(
    name="qwen_image",
    title="Qwen-Image",
    pipeline_class="QwenImagePipeline",
    denoiser_name="transformer",
    components=("transformer", "vae", "text_encoder", "tokenizer"),
    match_configs=_match_qwen_image,
    component_options={"vae": "vae", "text_encoder": "text_encoder"},
    attention_modes=_MASKED_ATTENTION_MODES,
    single_file_prefixes={
        "transformer": _CHECKPOINT_PREFIXES,
        "vae": ("vae.",),
        "text_encoder": ("text_encoders.qwen25_7b.transformer.",),
    },
    single_file_keys=("transformer_blocks.0.img_mlp.net.0.proj.weight", "transformer_blocks.0.attn.add_q_proj.weight"),
    shape_checks={
        ("img_in.weight", 1): ("transformer", "in_channels"),
        ("txt_in.weight", 1): ("transformer", "joint_attention_dim"),
    },
)
