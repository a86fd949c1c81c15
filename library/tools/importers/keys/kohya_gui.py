"""The keys of a kohya_ss GUI file: what becomes of each, by the model and LoRA type that it applies to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..imported import (
    Rule,
    define_harmless,
    define_unsupported,
    to_integer,
    to_number,
    to_positive_integer,
    to_positive_number,
    to_switch,
    to_text,
)


@dataclass(frozen=True)
class GuiKey:
    """A key that the GUI passes on to sd-scripts.

    The GUI drops 0, false and empty values, so that sd-scripts' default applies.
    """

    option: str
    gui_default: Any
    convert: Callable[[Any], Any]
    script_default: Any = None


def _define_keys(convert: Callable[[Any], Any], names: str, gui_default: Any = None) -> dict[str, GuiKey]:
    return {name: GuiKey(name, gui_default, convert) for name in names.split()}


RUN_KEYS: Mapping[str, GuiKey] = {
    **_define_keys(
        to_text,
        "pretrained_model_name_or_path vae output_dir output_name logging_dir log_with training_comment network_weights"
        " metadata_author metadata_description metadata_license metadata_tags metadata_title save_precision"
        " huggingface_repo_id",
    ),
    **_define_keys(
        to_switch,
        "cache_latents_to_disk dim_from_weights full_bf16 gradient_checkpointing masked_loss save_state"
        " save_state_on_train_end",
        False,
    ),
    **_define_keys(
        to_positive_integer,
        "save_every_n_steps save_last_n_steps save_last_n_epochs save_last_n_steps_state save_last_n_epochs_state"
        " vae_batch_size",
    ),
    "save_every_n_epochs": GuiKey("save_every_n_epochs", 1, to_positive_integer),
    "cache_latents": GuiKey("cache_latents", True, to_switch),
    "mixed_precision": GuiKey("mixed_precision", "fp16", to_text),
    "gradient_accumulation_steps": GuiKey("gradient_accumulation_steps", 1, to_integer, 1),
    "learning_rate": GuiKey("learning_rate", 1e-4, to_number, 2e-6),
    "max_data_loader_n_workers": GuiKey("max_data_loader_n_workers", 0, to_integer, 0),
    "max_grad_norm": GuiKey("max_grad_norm", 1.0, to_number, 1.0),
    "network_alpha": GuiKey("network_alpha", 1.0, to_number, 1.0),
    "network_dim": GuiKey("network_dim", 8, to_integer, 4),
    "prior_loss_weight": GuiKey("prior_loss_weight", 1.0, to_number, 1.0),
    "seed": GuiKey("seed", 0, to_positive_integer),
    "loss_type": GuiKey("loss_type", "l2", to_text, "l2"),
}
"""Options of the run that do not depend on the model."""

DATASET_KEYS: Mapping[str, GuiKey] = {
    **_define_keys(to_switch, "color_aug flip_aug random_crop shuffle_caption", False),
    "enable_bucket": GuiKey("enable_bucket", True, to_switch, False),
    "bucket_no_upscale": GuiKey("bucket_no_upscale", True, to_switch, False),
    "bucket_reso_steps": GuiKey("bucket_reso_steps", 64, to_integer, 64),
    "min_bucket_reso": GuiKey("min_bucket_reso", 256, to_integer, 256),
    "max_bucket_reso": GuiKey("max_bucket_reso", 2048, to_integer, 1024),
    "caption_extension": GuiKey("caption_extension", ".txt", to_text, ".caption"),
    "caption_dropout_rate": GuiKey("caption_dropout_rate", 0.0, to_number, 0.0),
    "caption_dropout_every_n_epochs": GuiKey("caption_dropout_every_n_epochs", 0, to_integer, 0),
    "keep_tokens": GuiKey("keep_tokens", 0, to_integer, 0),
    "max_resolution": GuiKey("resolution", "512,512", to_text),
    "train_batch_size": GuiKey("batch_size", 1, to_integer, 1),
}
"""Keys of the dataset file."""

DIFFUSION_KEYS: Mapping[str, GuiKey] = {
    **_define_keys(to_switch, "debiased_estimation_loss scale_v_pred_loss_like_noise_pred v_parameterization", False),
    **_define_keys(to_switch, "weighted_captions", False),
    **_define_keys(to_positive_number, "min_snr_gamma v_pred_like_loss"),
}
"""Options of models that predict the noise or v."""

_FLUX_KEYS: Mapping[str, Any] = {
    **dict.fromkeys(("ae", "clip_l", "t5xxl"), ""),
    **{"t5xxl_max_token_length": 512, "guidance_scale": 3.5, "apply_t5_attn_mask": False},
    **{"timestep_sampling": "sigma", "discrete_flow_shift": 3.0, "model_prediction_type": "sigma_scaled"},
    **{"cpu_offload_checkpointing": False, "blocks_to_swap": 0},
}
MODEL_KEYS: Mapping[str, Mapping[str, Any]] = {
    "flux": _FLUX_KEYS,
    "chroma": {
        key: value
        for key, value in _FLUX_KEYS.items()
        if key not in ("clip_l", "guidance_scale", "apply_t5_attn_mask")  # sd-scripts requires a mask and no guidance
    },
    "sd3": {
        **dict.fromkeys(("sd3_clip_l", "clip_g", "sd3_t5xxl"), ""),
        **{"weighting_scheme": "logit_normal", "logit_mean": 0.0, "logit_std": 1.0, "mode_scale": 1.29},
        **dict.fromkeys(("sd3_clip_l_dropout_rate", "clip_g_dropout_rate", "sd3_t5_dropout_rate"), 0.0),
        **{"pos_emb_random_crop_rate": 0.0, "sd3_enable_scaled_pos_embed": False, "blocks_to_swap": 0},
        "sd3_text_encoder_batch_size": 1,
    },
    "lumina2": {
        **dict.fromkeys(("lumina_ae", "lumina_gemma2", "lumina_system_prompt"), ""),
        **{"lumina_timestep_sampling": "shift", "lumina_discrete_flow_shift": 6.0, "lumina_sigmoid_scale": 1.0},
        **{"lumina_model_prediction_type": "raw", "lumina_gemma2_max_token_length": 256, "blocks_to_swap": 0},
    },
    "anima": {
        **dict.fromkeys(("anima_qwen3", "anima_vae", "anima_llm_adapter_path", "anima_t5_tokenizer_path"), ""),
        **{"anima_timestep_sampling": "sigmoid", "anima_discrete_flow_shift": 1.0, "anima_sigmoid_scale": 1.0},
        **{"anima_qwen3_max_token_length": 512, "anima_t5_max_token_length": 512, "anima_torch_compile": False},
        **{"anima_vae_chunk_size": 0, "anima_vae_disable_cache": False, "anima_split_attn": False},
        **{"anima_unsloth_offload_checkpointing": False, "anima_compile": False, "blocks_to_swap": 0},
    },
    "hunyuan_image": {
        **dict.fromkeys(("hunyuan_text_encoder", "hunyuan_byt5", "hunyuan_vae"), ""),
        **{"hunyuan_timestep_sampling": "sigma", "hunyuan_discrete_flow_shift": 5.0, "hunyuan_sigmoid_scale": 1.0},
        **{"hunyuan_model_prediction_type": "raw", "hunyuan_fp8_scaled": False, "hunyuan_fp8_vl": False},
        **{"hunyuan_text_encoder_cpu": False, "hunyuan_vae_chunk_size": 0, "hunyuan_split_attn": False},
        "blocks_to_swap": 0,
    },
}
"""The keys that the GUI passes on for one model, as the option of sd-scripts that follows the prefix of the model.

The values are the GUI's defaults, which are those of sd-scripts' script for the model but for ``SCRIPT_DEFAULTS``."""
SCRIPT_DEFAULTS: Mapping[str, Any] = {"weighting_scheme": "uniform"}
"""Defaults of the script for SD3 where the GUI has another, which hold for values that its files leave empty."""
COMPILE_KEYS: Mapping[str, Any] = {
    **{"anima_compile_backend": "inductor", "anima_compile_mode": "default"},
    **{"anima_compile_dynamic": "auto", "anima_compile_fullgraph": False},
}
"""Keys of ``MODEL_KEYS`` that the GUI passes on with ``anima_compile`` only."""
SCRIPT_NAMES: Mapping[str, str] = {
    "compile": "torch_compile",
    "compile_backend": "dynamo_backend",
    "compile_mode": "dynamo_mode",
    "compile_fullgraph": "dynamo_fullgraph",
}
"""Options that have another name here."""
OTHER_MODEL_PREFIXES = ("hunyuan_", "anima_", "lumina_", "sd3_", "flux1_")
"""How keys of models begin, of which a file uses those of its own."""

NOT_PASSED_ON = "the GUI passes it on for another model or LoRA type only, so it has no effect there either"

_ACCELERATE = "a setting of accelerate launch; give it to accelerate launch again"
_ALWAYS_SO = "not needed here"

KEY_RULES: Mapping[str, Rule] = {
    **define_harmless(
        _ACCELERATE,
        "num_processes num_machines num_cpu_threads_per_process multi_gpu gpu_ids main_process_port"
        " extra_accelerate_launch_args",
        0,
        1,
        2,
        "",
        False,
    ),
    **define_harmless("the choice in the GUI's list of models", "model_list", "custom", ""),
    **define_harmless("the VAE always runs in float32", "sdxl_no_half_vae", False),
    **define_harmless(_ALWAYS_SO, "save_as_bool training_preset async_upload", False, ""),
    **define_harmless(
        _ALWAYS_SO, "highvram lowvram mem_eff_attn persistent_data_loader_workers mem_eff_save", False, ""
    ),
    **define_harmless("not needed here: stale cache entries cannot occur", "skip_cache_check", False),
    **define_harmless("sd-scripts does not use it for LoRA", "no_token_padding fused_backward_pass", False),
    **define_harmless(
        "sd-scripts does not use it for LoRA",
        "flux_fused_backward_pass sd3_fused_backward_pass blockwise_fused_optimizers fused_optimizer_groups save_clip"
        " save_t5xxl t5xxl_device",
        False,
        0,
        "",
    ),
    **define_harmless("the precision of T5 is mixed_precision's", "t5xxl_dtype", "", "bf16"),
    **define_harmless("the GUI ignores it; text encoders are trained to the end", "stop_text_encoder_training", 0),
    **define_harmless("the GUI ignores it", "stop_text_encoder_training_pct", 0),
    **define_harmless("replaced by blocks_to_swap", "single_blocks_to_swap double_blocks_to_swap split_mode", 0, False),
    **define_harmless(
        "a debugging aid; python -m library plan shows the data", "show_timesteps show_timesteps_resolution", "", "1024"
    ),
    **define_harmless("copy the model from a slow disk first", "disable_mmap_load_safetensors", False),
    **define_harmless("copy the model from a slow disk first", "sd3_disable_mmap_load_safetensors", False),
    **define_harmless("training states are not uploaded", "save_state_to_huggingface", False, ""),
    **define_harmless("upload settings are set with huggingface_repo_id only", "huggingface_repo_type", "", "model"),
    **define_unsupported(
        "fp16 gradients and Adam moments underflow; use full_bf16, or remove it for float32", "full_fp16"
    ),
    **define_unsupported("states on the hub cannot be read; resume from a folder", "resume_from_huggingface", "False"),
    **define_unsupported(
        "training states of sd-scripts cannot be read; start from its LoRA file with network_weights", "resume"
    ),
    **define_unsupported("inpainting models cannot be trained here; train the plain model", "train_inpainting"),
    **define_harmless("only speed; see attn_mode", "lumina_use_flash_attn lumina_use_sage_attn", False),
    **define_harmless("only speed; see attn_mode", "anima_attn_mode hunyuan_attn_mode", "torch", ""),
    **define_harmless("only speed; images are encoded once", "anima_qwen_image_vae_2d", False),
    **define_harmless("torch's limit applies", "anima_compile_cache_size_limit", 0),
}
"""Keys that are listed unless they are at their neutral values."""

LYCORIS_SWITCHES = "use_tucker use_scalar rank_dropout_scale bypass_mode train_norm use_cp rescaled constrain".split()
"""LyCORIS' arguments that have no equal."""

LORA_TYPES: Mapping[str, tuple[str, str]] = {
    "Standard": ("networks.lora", ""),
    "Kohya LoCon": ("networks.lora", ""),
    "Flux1": ("networks.lora_flux", ""),
    "Flux1 OFT": ("networks.oft_flux", ""),
    "Lumina": ("networks.lora_lumina", ""),
    "Anima": ("networks.lora_anima", ""),
    "HunyuanImage-2.1": ("networks.lora_hunyuan_image", ""),
    "Kohya LoHa": ("networks.loha", ""),
    "Kohya LoKr": ("networks.lokr", ""),
    "LoCon": ("lycoris.kohya", "locon"),
    "LyCORIS/LoCon": ("lycoris.kohya", "locon"),
    "LyCORIS/LoHa": ("lycoris.kohya", "loha"),
    "LyCORIS/LoKr": ("lycoris.kohya", "lokr"),
    "LyCORIS/Diag-OFT": ("lycoris.kohya", "diag-oft"),
    "LyCORIS/BOFT": ("lycoris.kohya", "boft"),
    "LoRA-FA": ("networks.lora_fa", ""),
    "Kohya DyLoRA": ("networks.dylora", ""),
    "LyCORIS/DyLoRA": ("lycoris.kohya", "dylora"),
    "LyCORIS/GLoRA": ("lycoris.kohya", "glora"),
    "LyCORIS/iA3": ("lycoris.kohya", "ia3"),
    "LyCORIS/Native Fine-Tuning": ("lycoris.kohya", "full"),
}
"""The network module and the LyCORIS algorithm of each LoRA type of the GUI."""

NATIVE_ARGS = (
    "down_lr_weight mid_lr_weight up_lr_weight block_lr_zero_threshold block_dims block_alphas conv_block_dims"
    " conv_block_alphas rank_dropout module_dropout"
).split()
"""Arguments that the GUI passes to networks.lora."""

DROPOUTS = ("rank_dropout", "module_dropout")
"""Arguments that the GUI passes to the LoRA modules of single models, such as networks.lora_lumina."""

FLUX_ARGS = (
    "img_attn_dim img_mlp_dim img_mod_dim single_dim txt_attn_dim txt_mlp_dim txt_mod_dim single_mod_dim in_dims"
    " train_double_block_indices train_single_block_indices rank_dropout module_dropout"
).split()
"""Arguments that the GUI passes to networks.lora_flux."""

TYPE_KEYS = (
    *NATIVE_ARGS,
    *FLUX_ARGS,
    *LYCORIS_SWITCHES,
    *("conv_dim", "conv_alpha", "conv_dims", "conv_alphas", "dora_wd", "factor", "decompose_both", "unit"),
    *("train_on_input", "LyCORIS_preset", "train_lora_ggpo", "ggpo_beta", "ggpo_sigma", "enable_all_linear"),
    *("split_qkv", "train_t5xxl", "train_blocks", "t5xxl_lr"),
)
"""Keys that apply to some LoRA types; what a file's type does not use is not listed."""

UNUSED_MODEL_KEYS = (
    *(key for keys in MODEL_KEYS.values() for key in keys),
    *("flux1_cache_text_encoder_outputs", "flux1_cache_text_encoder_outputs_to_disk", "fp8_base_unet", "model_type"),
    *("sd3_cache_text_encoder_outputs", "sd3_cache_text_encoder_outputs_to_disk", "flux1_clip_l", "flux1_t5xxl"),
    *("sdxl_cache_text_encoder_outputs", "sigmoid_scale"),
)
"""Keys that apply to some models; what a file's model does not use is not listed."""
