"""The keys of an ai-toolkit file: what becomes of each."""

from collections.abc import Mapping

from ..equivalents import KnownOptimizer
from ..imported import (
    Rule,
    Take,
    Unsupported,
    define_harmless,
    define_unsupported,
    to_integer,
    to_number,
    to_switch,
    to_text,
)

MODEL_SWITCHES = ("is_v2", "is_v3", "is_xl", "is_pixart_sigma", "is_auraflow", "is_flux", "is_lumina2")
"""Switches of files without ``arch``, in the order in which ai-toolkit asks for them."""
OTHER_SWITCHES = ("is_pixart", "is_ssd", "is_vega")
ORIGINAL_NAMES = ("chroma", "flux2_dev", "flux2_klein", "krea2", "ideogram4")
"""Families whose layers have the original names there."""
MORE_LAYERS: Mapping[str, str] = {
    "qwen_image": "img_mod.1 and txt_mod.1",
    "qwen_image_edit": "img_mod.1 and txt_mod.1",
    "qwen_image_edit_plus": "img_mod.1 and txt_mod.1",
    "aura_flow": "the feed-forward and modulation layers, and those outside of the blocks",
    "cogview4": "the feed-forward and modulation layers",
    "z_image": "adaLN_modulation.0",
    "ideogram4": "adaln_modulation",
    "pixart_sigma": "the feed-forward layers, and those outside of the blocks",
    "nucleus_image": "encoder_proj and img_mod.1",
    "hidream": "the feed-forward, expert and modulation layers, and those outside of the blocks",
}
"""Layers that it trains, too, and that get no adapter here."""
PROCESS_TYPES = ("sd_trainer", "diffusion_trainer", "ui_trainer")
BUCKET_STEPS: Mapping[str, int] = {
    **{"sd1": 16, "sd2": 16, "sdxl": 16, "z_image": 16, "aura_flow": 16, "lumina2": 16, "krea2": 16},
    **{"flux_kontext": 16, "flux2_dev": 16, "flux2_klein": 16, "cogview4": 8, "pixart_sigma": 16, "hidream": 16},
    "ideogram4": 16,
}
"""The multiple of bucket sides that ai-toolkit uses for each family; it is 32 for the others."""

_EPS = {"eps": 1e-6}
OPTIMIZERS: Mapping[str, KnownOptimizer] = {
    "adamw": KnownOptimizer("AdamW", _EPS),
    "adam": KnownOptimizer("Adam", _EPS),
    "adamw8bit": KnownOptimizer("AdamW8bit", _EPS),
    "adam8bit": KnownOptimizer("Adam8bit", _EPS),
    "adamw8": KnownOptimizer("AdamW8bit", _EPS, "ai-toolkit's own 8-bit AdamW; that of bitsandbytes is used"),
    "adam8": KnownOptimizer("Adam8bit", _EPS, "ai-toolkit's own 8-bit Adam; that of bitsandbytes is used"),
    "ademamix8bit": KnownOptimizer("bitsandbytes.optim.AdEMAMix8bit", _EPS),
    "lion": KnownOptimizer("Lion"),
    "lion8bit": KnownOptimizer("Lion8bit"),
    "adagrad": KnownOptimizer("Adagrad"),
    "adafactor": KnownOptimizer("Adafactor", {"relative_step": False, "scale_parameter": False, "warmup_init": False}),
    "prodigy": KnownOptimizer("Prodigy", _EPS),
    "prodigy8bit": KnownOptimizer("Prodigy", _EPS, "8-bit Prodigy is not available; Prodigy is used"),
    "dadaptation": KnownOptimizer("DAdaptAdam", _EPS),
    "dadaptationadam": KnownOptimizer("DAdaptLion"),  # as ai-toolkit's code does
    "dadaptationlion": KnownOptimizer("DAdaptLion"),
    **dict.fromkeys(
        ("automagic", "automagic2", "automagic3"),
        KnownOptimizer("AdamW", {}, "sets a learning rate for each weight; AdamW is used, choose its learning_rate"),
    ),
}
LR_FREE_OPTIMIZERS = ("prodigy", "dadaptation")
"""Names that begin so: a learning rate below 0.1 means 1."""

PRECISIONS: Mapping[str, str] = {
    **{"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"},
    **{"fp32": "no", "float32": "no", "float": "no"},
}
SAVE_PRECISIONS: Mapping[str, str] = {**PRECISIONS, **dict.fromkeys(("fp32", "float32", "float"), "float")}
QUANTIZATIONS: Mapping[str, str] = {
    **{"qfloat8": "fp8", "float8": "fp8", "fp8": "fp8", "qint8": "int8", "int8": "int8", "uint8": "int8"},
}
TIMESTEP_SAMPLINGS: Mapping[str, tuple[str, str]] = {
    "sigmoid": ("sigmoid", ""),
    "linear": ("uniform", ""),
    "flux_shift": ("sigma", ""),
    "lumina2_shift": ("sigma", ""),
    "shift": ("sigma", ""),
    "weighted": ("uniform", "uniform timesteps are used, without its weights of the loss"),
}
"""The ``timestep_sampling`` for each ``timestep_type`` of ai-toolkit, and the difference between the two."""

SCHEDULER_SHIFTS: Mapping[str, Mapping[str, str | float]] = {
    **{family: {"discrete_flow_shift": 3.0} for family in ("sd3", "z_image", "anima", "ernie_image")},
    "chroma": {"timestep_sampling": "nextdit_shift"},
}
"""The shift of ai-toolkit's scheduler as our options, of families that are trained with another one here."""

_CHANGES = "no equal here; remove it, or expect another result"
_MEMORY = "only memory or speed; see docs/memory.md"

TRAIN_RULES: Mapping[str, Rule] = {
    "gradient_checkpointing": Take("gradient_checkpointing", True, to_switch),
    "max_grad_norm": Take("max_grad_norm", 1.0, to_number),
    "reg_weight": Take("prior_loss_weight", 1.0, to_number),
    **define_harmless(_MEMORY, "xformers sdp attention_backend", False, "native"),
    **define_harmless("previews have no effect on training", "free_u force_first_sample show_turbo_outputs", False),
    **define_harmless("for models that have it", "train_refiner refiner_lr embedding_lr adapter_lr"),
    **define_harmless("of two transformers, each step draws the one that it trains", "switch_boundary_every", 1),
    **define_harmless("for diff_output_preservation", "diff_output_preservation_class", "", "person"),
    **define_harmless("for diff_output_preservation", "diff_output_preservation_multiplier", 1),
    **define_harmless("for blank_prompt_preservation", "blank_prompt_preservation_multiplier", 1),
    **define_harmless("for do_differential_guidance", "differential_guidance_scale", 3),
    **define_harmless("debugging", "max_loss_debug", False),
    **define_harmless("validation is set with validation_split; see docs/datasets.md", "validation_config"),
    **define_unsupported(
        _CHANGES,
        "snr_gamma learnable_snr_gos weight_jitter merge_network_on_save adapter_assist_name_or_path"
        " random_noise_multiplier do_signal_correction_noise do_batch_noise_correction do_signal_amplification"
        " random_noise_shift negative_prompt adaptive_scaling_factor match_noise_norm short_and_long_captions"
        " short_and_long_captions_encoder_split single_item_batching match_adapter_assist match_adapter_chance"
        " inverted_mask_prior standardize_images"
        " standardize_latents dynamic_noise_offset do_cfg do_random_cfg correct_pred_norm t0_loss_target do_fft_loss"
        " prompt_saturation_chance do_prior_divergence target_norm_std do_paramiter_swapping"
        " diffusion_feature_extractor_path latent_feature_extractor_path force_consistent_noise blended_blur_noise"
        " do_guidance_loss do_differential_guidance do_blank_stabilization max_loss train_turbo start_step"
        " unload_text_encoder linear_timesteps linear_timesteps2",
    ),
    "diff_output_preservation": Unsupported(
        "set diff_output_preservation_trigger, diff_output_preservation_class and network_train_unet_only",
        (False, None),
    ),
    "blank_prompt_preservation": Unsupported(
        "set blank_prompt_preservation_multiplier and network_train_unet_only", (False, None)
    ),
    "prompt_dropout_prob": Unsupported("use caption_dropout_rate in the dataset file", (0, None)),
    "min_denoising_steps": Unsupported("min_timestep and max_timestep are nearest", (0, None)),
    "max_denoising_steps": Unsupported("min_timestep and max_timestep are nearest", (999, 1000, None)),
    "num_train_timesteps": Unsupported(_CHANGES, (1000, None)),
    "loss_target": Unsupported(_CHANGES, ("noise", None)),
    "content_or_style": Unsupported("timesteps are not weighted towards noise or detail here", ("balanced", None)),
    "audio_loss_multiplier": Take("audio_loss_weight", 1.0, to_number),
    **{
        name: Unsupported(_CHANGES, (1, None))
        for name in (
            "noise_multiplier target_noise_multiplier img_multiplier noisy_latent_multiplier latent_multiplier"
            " pred_scaler cfg_scale max_cfg_scale cfg_rescale optimal_noise_pairing_samples"
        ).split()
    },
}

MODEL_RULES: Mapping[str, Rule] = {
    "vae_path": Take("vae", None, to_text),
    **define_harmless(_MEMORY, "low_vram layer_offloading auto_memory cache_size_limit", False),
    **define_harmless(_MEMORY, "layer_offloading_transformer_percent layer_offloading_text_encoder_percent", 1),
    **define_harmless(
        "device_map distributes a model over GPUs; see docs/multi_gpu.md", "split_model_over_gpus", False
    ),
    **define_unsupported("text encoders are not quantized here: more exact, more memory", "quantize_te"),
    **define_harmless("text encoders are not quantized here", "qtype_te text_encoder_bits", 16),
    **define_harmless("mixed_precision sets it", "dtype vae_dtype te_dtype"),
    **define_harmless("accelerate launch chooses the device", "vae_device te_device"),
    **define_harmless("for previews only", "inference_lora_path unconditional_lora_path refiner_name_or_path"),
    **define_harmless("for previews only", "refiner_start_at", 0.5),
    **define_unsupported(
        _CHANGES,
        "use_flux_cfg attn_masking unet_path lora_path accuracy_recovery_adapter in_context experimental_xl"
        " latent_space_version unet_sample_size ignore_if_contains only_if_contains quantize_kwargs"
        " model_paths",
    ),
    "use_text_encoder_1": Unsupported("both text encoders are used", (True, None)),
    "use_text_encoder_2": Unsupported("both text encoders are used", (True, None)),
}

NETWORK_RULES: Mapping[str, Rule] = {
    "pretrained_lora_path": Take("network_weights", None, to_text),
    **define_harmless(_MEMORY, "layer_offloading", False),
    **define_harmless("for models with several stages", "split_multistage_loras", True),
    **define_harmless("the file format of LoKr; see docs/files.md", "old_lokr_format", False),
    **define_unsupported(_CHANGES, "lorm all_layers"),
}

DATASET_RULES: Mapping[str, Rule] = {
    "num_repeats": Take("num_repeats", 1, to_integer),
    "caption_dropout_rate": Take("caption_dropout_rate", 0.0, to_number),
    "token_dropout_rate": Take("caption_tag_dropout_rate", 0.0, to_number),
    "shuffle_tokens": Take("shuffle_caption", False, to_switch),
    "keep_tokens": Take("keep_tokens", 0, to_integer),
    "flip_x": Take("flip_aug", False, to_switch),
    "random_crop": Take("random_crop", False, to_switch),
    "alpha_mask": Take("alpha_mask", False, to_switch),
    **define_harmless("only memory or speed; see docs/memory.md", "num_workers prefetch_factor", 2),
    **define_harmless("only memory or speed", "cache_latents_num_workers load_image_when_caching_latents", 6, False),
    **define_harmless(
        "only memory or speed", "cache_clip_vision_to_disk cache_tensors_to_disk debug fast_image_size", False
    ),
    **define_harmless("for videos", "auto_frame_count trim_auto_frame_count_tail do_i2v do_audio", True, False),
    **define_harmless("for videos", "fps audio_preserve_pitch audio_normalize", 24, 16, False),
    **define_harmless(
        "for control images", "full_size_control_images replay_transforms control_transparent_color", True, [0, 0, 0]
    ),
    **define_harmless("buckets are multiples of what the model needs, there too", "bucket_tolerance", 64),
    **define_unsupported(
        _CHANGES,
        "random_triggers prior_reg flip_y augments augmentations shuffle_augmentations random_scale invert_mask"
        " mask_min_value unconditional_path use_short_captions standardize_images clip_image_path"
        " clip_image_from_same_folder clip_image_augmentations clip_image_shuffle_augmentations replacements"
        " extra_values controls inpaint_path",
    ),
    **define_unsupported("control images are in a folder of their own here", "control_from_same_folder"),
    **{name: Unsupported(_CHANGES, (1, None)) for name in ("scale", "network_weight", "loss_multiplier")},
    "random_triggers_max": Unsupported("for random_triggers", (1, None)),
    "guidance_type": Unsupported(_CHANGES, ("targeted", None)),
    "type": Unsupported("only images with captions are trained here", ("image", None)),
}

PROCESS_RULES: Mapping[str, Rule] = {
    **define_harmless("accelerate launch chooses the device", "device"),
    **define_harmless("for the user interface", "performance_log_every sqlite_db_path torch_profiler", 0, False),
    **define_unsupported(
        "only LoRA is trained here", "embedding decorator adapter do_lorm guidance slider first_sample"
    ),
}
