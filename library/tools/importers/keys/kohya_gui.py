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

FLOW_KEYS_BY_FAMILY: Mapping[str, Mapping[str, GuiKey]] = {
    "flux": {
        "ae": GuiKey("ae", None, to_text),
        "clip_l": GuiKey("clip_l", None, to_text),
        "t5xxl": GuiKey("t5xxl", None, to_text),
        "t5xxl_max_token_length": GuiKey("t5xxl_max_token_length", 512, to_integer),
        "guidance_scale": GuiKey("guidance_scale", 3.5, to_number, 3.5),
        "timestep_sampling": GuiKey("timestep_sampling", "sigma", to_text, "sigma"),
        "discrete_flow_shift": GuiKey("discrete_flow_shift", 3.0, to_number, 3.0),
        "cpu_offload_checkpointing": GuiKey("cpu_offload_checkpointing", False, to_switch),
        "blocks_to_swap": GuiKey("blocks_to_swap", 0, to_integer, 0),
    },
    "chroma": {
        "ae": GuiKey("ae", None, to_text),
        "t5xxl": GuiKey("t5xxl", None, to_text),
        "t5xxl_max_token_length": GuiKey("t5xxl_max_token_length", 512, to_integer),
        "timestep_sampling": GuiKey("timestep_sampling", "sigma", to_text, "sigma"),
        "discrete_flow_shift": GuiKey("discrete_flow_shift", 3.0, to_number, 3.0),
        "cpu_offload_checkpointing": GuiKey("cpu_offload_checkpointing", False, to_switch),
        "blocks_to_swap": GuiKey("blocks_to_swap", 0, to_integer, 0),
    },
    "lumina2": {
        "lumina_ae": GuiKey("ae", None, to_text),
        "lumina_gemma2": GuiKey("text_encoder", None, to_text),
        "lumina_gemma2_max_token_length": GuiKey("gemma2_max_token_length", 256, to_positive_integer),
        "lumina_timestep_sampling": GuiKey("timestep_sampling", "shift", to_text, "shift"),
        "lumina_discrete_flow_shift": GuiKey("discrete_flow_shift", 6.0, to_number, 6.0),
        "lumina_sigmoid_scale": GuiKey("sigmoid_scale", 1.0, to_number, 1.0),
        "blocks_to_swap": GuiKey("blocks_to_swap", 0, to_integer, 0),
    },
    "sd3": {
        "sd3_clip_l": GuiKey("clip_l", None, to_text),
        "clip_g": GuiKey("clip_g", None, to_text),
        "sd3_clip_l_dropout_rate": GuiKey("clip_l_dropout_rate", 0.0, to_number),
        "clip_g_dropout_rate": GuiKey("clip_g_dropout_rate", 0.0, to_number),
        "sd3_t5_dropout_rate": GuiKey("t5_dropout_rate", 0.0, to_number),
        "pos_emb_random_crop_rate": GuiKey("pos_emb_random_crop_rate", 0.0, to_number),
        "sd3_enable_scaled_pos_embed": GuiKey("enable_scaled_pos_embed", False, to_switch),
        "sd3_t5xxl": GuiKey("t5xxl", None, to_text),
        "weighting_scheme": GuiKey("weighting_scheme", "logit_normal", to_text, "uniform"),
        "logit_mean": GuiKey("logit_mean", 0.0, to_number, 0.0),
        "logit_std": GuiKey("logit_std", 1.0, to_number, 1.0),
        "mode_scale": GuiKey("mode_scale", 1.29, to_number, 1.29),
        "sd3_text_encoder_batch_size": GuiKey("text_encoder_batch_size", 1, to_integer, 1),
        "blocks_to_swap": GuiKey("blocks_to_swap", 0, to_integer, 0),
    },
}
"""Options of flow-matching models."""

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
    **define_unsupported("padding tokens of T5 are attended to, as in diffusers' pipelines", "apply_t5_attn_mask"),
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
    "Kohya LoHa": ("networks.loha", ""),
    "Kohya LoKr": ("networks.lokr", ""),
    "LoCon": ("lycoris.kohya", "locon"),
    "LyCORIS/LoCon": ("lycoris.kohya", "locon"),
    "LyCORIS/LoHa": ("lycoris.kohya", "loha"),
    "LyCORIS/LoKr": ("lycoris.kohya", "lokr"),
    "LyCORIS/Diag-OFT": ("lycoris.kohya", "diag-oft"),
    "LyCORIS/BOFT": ("lycoris.kohya", "boft"),
}
"""The network module and the LyCORIS algorithm of each LoRA type of the GUI that can be trained here."""

NATIVE_ARGS = (
    "down_lr_weight mid_lr_weight up_lr_weight block_lr_zero_threshold block_dims block_alphas conv_block_dims"
    " conv_block_alphas rank_dropout module_dropout"
).split()
"""Arguments that the GUI passes to networks.lora."""

DROPOUTS = ("rank_dropout", "module_dropout")
"""Arguments that the GUI passes to networks.lora_lumina."""

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

MODEL_KEYS = (
    *FLOW_KEYS_BY_FAMILY["flux"],
    *FLOW_KEYS_BY_FAMILY["sd3"],
    *("flux1_cache_text_encoder_outputs", "flux1_cache_text_encoder_outputs_to_disk", "fp8_base_unet", "model_type"),
    *("sd3_cache_text_encoder_outputs", "sd3_cache_text_encoder_outputs_to_disk", "flux1_clip_l", "flux1_t5xxl"),
    *("sdxl_cache_text_encoder_outputs", "sigmoid_scale", "model_prediction_type"),
)
"""Keys that apply to some models; what a file's model does not use is not listed."""

OTHER_MODEL_PREFIXES = ("hunyuan_", "anima_", "lumina_")
"""Keys of models, of which a file uses those of its own."""
