"""Facts of the families with a UNet: Stable Diffusion 1, 2 and XL."""

from .facts import Facts, Look
from .reading import Json, Problem, Reader, needed


def _looked(read: Reader) -> Look:
    """The checks that all three share."""
    unet, vae, scheduler = (needed(read, file) for file in (
        "unet/config.json", "vae/config.json", "scheduler/scheduler_config.json"))  # fmt: skip
    if unet.get("in_channels", 4) != 4:
        raise Problem(f"its UNet takes {unet['in_channels']} channels and not 4; inpainting and editing models "
                      "cannot be trained")  # fmt: skip
    predicts, steps = scheduler.get("prediction_type", "epsilon"), scheduler.get("num_train_timesteps", 1000)
    if predicts not in ("epsilon", "v_prediction"):
        raise Problem(f"its scheduler says prediction_type {predicts!r}; only epsilon and v_prediction can be trained")
    if steps != 1000:
        raise Problem(f"its scheduler says num_train_timesteps {steps}; only 1000 is supported")
    return Look(f"the UNet reads text of width {unet.get('cross_attention_dim')}", _shrinks(vae) * _shrinks(unet),
                "v" if predicts == "v_prediction" else "epsilon")  # fmt: skip


def look_at_sd1(read: Reader) -> Look | None:
    """Everything with this pipeline class that is not Stable Diffusion 2."""
    return None if _is_sd2(read) else _looked(read)


def look_at_sd2(read: Reader) -> Look | None:
    return _looked(read) if _is_sd2(read) else None


def look_at_sdxl(read: Reader) -> Look | None:
    unet = needed(read, "unet/config.json")
    if unet.get("addition_embed_type") != "text_time":
        raise Problem("its UNet takes no sizes (addition_embed_type is not text_time), so it is no Stable Diffusion XL")
    if unet.get("projection_class_embeddings_input_dim") == 2560:
        raise Problem("it is the refiner of Stable Diffusion XL; LoRAs are trained on the base model")
    return _looked(read)


def _is_sd2(read: Reader) -> bool:
    unet = needed(read, "unet/config.json")
    return unet.get("cross_attention_dim") == 1024 or bool(unet.get("use_linear_projection"))


def _shrinks(config: Json) -> int:
    """By what a VAE's or UNet's sizes are divided: every block but the last halves them."""
    blocks = config.get("block_out_channels")
    if not isinstance(blocks, list) or not blocks:
        raise Problem("the config.json of its UNet or VAE names no block_out_channels; the file is damaged")
    return int(2 ** (len(blocks) - 1))


_UNET, _VAE = ("model.diffusion_model.",), ("first_stage_model.",)

SD1 = Facts(
    name="sd1",
    title="Stable Diffusion 1",
    pipeline="StableDiffusionPipeline",
    denoiser="unet",
    parts=("unet", "vae", "text_encoder", "tokenizer"),
    look=look_at_sd1,
    files={"vae": "vae", "clip_l": "text_encoder"},
    text_encoders=("text_encoder",),
    options=("clip_skip", "max_token_length"),
    prefixes={"unet": _UNET, "vae": _VAE, "text_encoder": ("cond_stage_model.transformer.",)},
    keys=("input_blocks.0.0.weight", "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"),
    sizes={
        ("input_blocks.0.0.weight", 0): ("unet", "block_out_channels", 0),
        ("input_blocks.0.0.weight", 1): ("unet", "in_channels"),
        ("input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", 1): ("unet", "cross_attention_dim"),
    },
)

SD2 = Facts(
    name="sd2",
    title="Stable Diffusion 2",
    pipeline="StableDiffusionPipeline",
    denoiser="unet",
    parts=("unet", "vae", "text_encoder", "tokenizer"),
    look=look_at_sd2,
    files={"vae": "vae"},
    text_encoders=("text_encoder",),
    options=("clip_skip", "max_token_length"),
    prefixes={"unet": _UNET, "vae": _VAE, "text_encoder": ("cond_stage_model.model.",)},
    keys=SD1.keys,
    sizes=SD1.sizes,
)

SDXL = Facts(
    name="sdxl",
    title="Stable Diffusion XL",
    pipeline="StableDiffusionXLPipeline",
    denoiser="unet",
    parts=("unet", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    look=look_at_sdxl,
    files={"vae": "vae", "clip_l": "text_encoder", "clip_g": "text_encoder_2"},
    text_encoders=("text_encoder", "text_encoder_2"),
    options=("max_token_length",),
    prefixes={
        "unet": _UNET,
        "vae": _VAE,
        "text_encoder": ("conditioner.embedders.0.transformer.",),
        "text_encoder_2": ("conditioner.embedders.1.model.",),
    },
    keys=("input_blocks.0.0.weight", "label_emb.0.0.weight"),
    sizes={
        ("input_blocks.0.0.weight", 0): ("unet", "block_out_channels", 0),
        ("input_blocks.0.0.weight", 1): ("unet", "in_channels"),
        ("label_emb.0.0.weight", 1): ("unet", "projection_class_embeddings_input_dim"),
    },
)
