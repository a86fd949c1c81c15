"""Facts shared by model families: checks of their JSON files, layers that get a LoRA, key prefixes; no torch."""

import re
from importlib.metadata import version

from .facts import FamilyMatch, KohyaObjective
from .model_configs import ConfigReader, ModelError, get_downscale_factor, read_required, read_scheduler_config

CLIP_LORA_TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
"""Every linear layer in the attention and MLP of CLIP's layers."""

T5_LORA_TARGET_MODULES = (
    *(f"SelfAttention.{name}" for name in "qkvo"),
    *(f"DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo")),
)
"""Every linear layer in the attention and MLP of T5's layers."""

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
"""Every linear layer of double-stream blocks with a modulation of their own."""

MASKED_ATTENTION_MODES = ("xformers", "efficient", "cudnn", "math")
"""Attention backends that support masks, as padded texts need."""

DENOISER_PREFIXES, UNET_VAE_PREFIXES = ("model.diffusion_model.",), ("first_stage_model.",)
"""Prefixes of full checkpoints; files with only the denoiser have none."""

UNET_UNSUPPORTED_SHAPES = {
    ("input_blocks.0.0.weight", 1, channels): f"{kind} model; its UNet has {channels} input channels instead of 4"
    for channels, kind in ((5, "a depth"),)
}

CLIP_L_PREFIXES, CLIP_G_PREFIXES = ("text_encoders.clip_l.transformer.",), ("text_encoders.clip_g.transformer.",)
GEMMA2_PREFIXES = ("text_encoders.gemma2_2b.transformer.",)
T5_PREFIXES = ("text_encoders.t5xxl.transformer.",)

CLIP_L_TOKENIZER, CLIP_G_TOKENIZER = "openai/clip-vit-large-patch14", "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k"
T5_TOKENIZER = "google/t5-v1_1-xxl"

KOHYA_UNET_OBJECTIVE = KohyaObjective()
"""sd-scripts' objective for models that predict noise or v: its defaults are ours."""

KOHYA_FLOW_OBJECTIVE = KohyaObjective(
    weighted_prediction_types=("sigma_scaled",),
    ignored=("min_timestep", "max_timestep"),
    is_logit_mean_reversed=True,
)
"""What the objectives of sd-scripts' scripts for FLUX.1 and its siblings have in common, without their defaults."""


def require_newer_diffusers(needed: tuple[int, int] = (0, 42)) -> None:
    """Raise an error for a model that the installed diffusers, such as the newest for Python 3.10, does not have."""
    installed = version("diffusers")
    if tuple(int(part) for part in re.findall(r"\d+", installed)[:2]) < needed:
        least = ".".join(map(str, needed))
        raise ModelError(f"it needs diffusers {least}, which needs Python 3.11; {installed} is installed")


def match_flow_model(
    read: ConfigReader, channels_per_latent: int, reason: str, patch_size: int = 2, *, more_channels: int = 0
) -> FamilyMatch:
    """Check a flow-matching transformer, whose input has ``channels_per_latent`` for each latent channel, and more."""
    transformer, vae = read_required(read, "transformer/config.json"), read_required(read, "vae/config.json")
    channels, latent_channels = transformer.get("in_channels"), vae.get("latent_channels", vae.get("z_dim"))
    if isinstance(channels, int) and isinstance(latent_channels, int):
        expected = latent_channels * channels_per_latent + more_channels
        if channels != expected:
            raise ModelError(
                f"its transformer has {channels} input channels instead of {expected}; inpainting, editing and control "
                "models cannot be trained"
            )
    scheduler = read_scheduler_config(read)
    name = scheduler.get("_class_name", "")
    if "FlowMatch" not in name and not scheduler.get("use_flow_sigmas"):
        raise ModelError(f"its scheduler is {name}; only flow matching is supported for this model")
    return FamilyMatch(reason, get_downscale_factor(vae) * patch_size, "flow")


def match_unet_model(read: ConfigReader, num_timesteps: int = 1000, in_channels: int = 4) -> FamilyMatch:
    """Check a UNet that predicts epsilon or v, with a noise schedule of this length."""
    unet, vae = read_required(read, "unet/config.json"), read_required(read, "vae/config.json")
    if unet.get("in_channels", 4) != in_channels:
        raise ModelError(
            f"its UNet has {unet.get('in_channels', 4)} input channels instead of {in_channels}; its pipeline class "
            "belongs to another kind of model"
        )
    reason = f"the UNet has cross_attention_dim {unet.get('cross_attention_dim')}"
    size_multiple = get_downscale_factor(vae) * get_downscale_factor(unet)
    return FamilyMatch(reason, size_multiple, read_prediction_type(read, num_timesteps))


def read_prediction_type(read: ConfigReader, num_timesteps: int = 1000) -> str:
    """Read from its scheduler whether a model without flow matching predicts ``epsilon`` or ``v``."""
    prediction = read_scheduler_config(read, num_timesteps).get("prediction_type", "epsilon")
    if prediction not in ("epsilon", "v_prediction"):
        raise ModelError(
            f"its scheduler has prediction_type {prediction!r}; only epsilon and v_prediction are supported"
        )
    return "v" if prediction == "v_prediction" else "epsilon"
