"""The keys of SimpleTuner's files: what becomes of each."""

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
    to_positive_integer,
    to_switch,
    to_text,
)

ASSISTED_FLAVOURS = ("schnell", "turbo-ostris-v2", "ostris-de-turbo")
"""Flavours with an assistant LoRA, which is merged into the model while training."""

QUANTIZATIONS: Mapping[str, str] = {
    **dict.fromkeys(("int8-quanto", "int8-torchao", "int8"), "int8"),
    **dict.fromkeys(("fp8-quanto", "fp8-torchao", "fp8uz-quanto", "fp8"), "fp8"),
    **dict.fromkeys(("nf4-bnb", "nf4"), "nf4"),
}
_BF16 = "its weights are bf16 there, with stochastic rounding; float32 here, which is more exact"
_ADAMW = {"eps": 1e-6}
_OPTIMI = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}
OPTIMIZERS: Mapping[str, KnownOptimizer] = {
    "adamw_bf16": KnownOptimizer("AdamW", _ADAMW, _BF16),
    "torch-adam": KnownOptimizer("Adam"),
    "torch-adamw": KnownOptimizer("AdamW"),
    "torch-sgd": KnownOptimizer("SGD"),
    "torch-radam": KnownOptimizer("RAdam"),
    "torch-nadam": KnownOptimizer("NAdam"),
    "torch-adamax": KnownOptimizer("Adamax"),
    "torch-adagrad": KnownOptimizer("Adagrad"),
    "torch-rmsprop": KnownOptimizer("RMSprop"),
    "bnb-adam": KnownOptimizer("Adam", _ADAMW),
    "bnb-adam8bit": KnownOptimizer("Adam8bit", _ADAMW),
    "bnb-adamw": KnownOptimizer("AdamW", _ADAMW),
    "bnb-adamw-paged": KnownOptimizer("PagedAdamW", _ADAMW),
    "bnb-adamw8bit": KnownOptimizer("AdamW8bit", _ADAMW),
    "bnb-adamw8bit-paged": KnownOptimizer("PagedAdamW8bit", _ADAMW),
    "bnb-lion": KnownOptimizer("Lion", {"weight_decay": 0.0}),
    "bnb-lion8bit": KnownOptimizer("Lion8bit", {"betas": (0.9, 0.99), "weight_decay": 0.0}),
    "bnb-lion8bit-paged": KnownOptimizer("PagedLion8bit", {"betas": (0.9, 0.99), "weight_decay": 0.0}),
    "bnb-ademamix8bit": KnownOptimizer("bitsandbytes.optim.AdEMAMix8bit"),
    "ao-adamw8bit": KnownOptimizer("AdamW8bit", _ADAMW, "that of torchao there; that of bitsandbytes is used"),
    "optimi-adam": KnownOptimizer("Adam", _OPTIMI, _BF16),
    "optimi-adamw": KnownOptimizer("AdamW", _OPTIMI, _BF16),
    "optimi-lion": KnownOptimizer("Lion", {"betas": (0.9, 0.99), "weight_decay": 0.0}, _BF16),
    "optimi-radam": KnownOptimizer("RAdam", _OPTIMI, _BF16),
    "optimi-stableadamw": KnownOptimizer("pytorch_optimizer.StableAdamW", {**_OPTIMI, "weight_decay": 0.01}, _BF16),
    "prodigy": KnownOptimizer(
        "Prodigy", {"betas": (0.9, 0.99)}, "ProdigyPlusScheduleFree there; plain Prodigy is used"
    ),
    "adamw_schedulefree": KnownOptimizer("AdamWScheduleFree", {"weight_decay": 0.01}),
    "soap": KnownOptimizer("pytorch_optimizer.SOAP", {"betas": (0.95, 0.95), "weight_decay": 0.01}),
}

ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
FLUX_TARGETS: Mapping[str, tuple[str, ...]] = {
    "all": (*ATTENTION, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"),
    "context": ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"),
    "context+ffs": (
        *("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"),
        *("ff_context.net.0.proj", "ff_context.net.2"),
    ),
    "all+ffs": (
        *(*ATTENTION, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "ff.net.0.proj", "ff.net.2"),
        *("ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out"),
    ),
    "ai-toolkit": (),
}
"""The layers that each ``flux_lora_target`` trains; an empty tuple stands for all layers of the blocks."""
_FLUX2 = (*(f"attn.{name}" for name in ATTENTION), "attn.to_qkv_mlp_proj")
DEFAULT_TARGETS: Mapping[str, tuple[str, ...]] = {
    "aura_flow": FLUX_TARGETS["all"],
    **dict.fromkeys(("flux2_dev", "flux2_klein"), _FLUX2),
    **dict.fromkeys(("kandinsky5_image", "kandinsky5_video", "kandinsky5_i2v"), ("to_key", "to_query", "to_value")),
}
"""The layers that are trained by default, where these are not those of ``ATTENTION``."""
MODULE_CLASSES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Attention": {"": ("attn", "attention")},
    "FeedForward": {"": (".ff.", ".ff_context.", "feed_forward"), "qwen_image": ("img_mlp", "txt_mlp")},
}
"""Parts of the names of the layers of each ``target_module`` of LyCORIS, by family."""

FEATURES: Mapping[str, str] = {
    "xm": "xm_enabled",
    "nextlat": "nextlat_enabled",
    "irepa": "irepa_enabled",
    "crepa": "crepa_enabled",
    "twinflow": "twinflow_enabled",
    "internal_guidance": "internal_guidance_enabled",
    "layersync": "layersync_enabled",
    "urepa": "urepa_enabled",
    "scheduled_sampling": "scheduled_sampling_max_step_offset",
    "diff2flow": "diff2flow_enabled",
    "mixflow": "mixflow_enabled",
    "refiner_training": "refiner_training",
    "distillation": "distillation_method",
    "sdnq": "sdnq_weights_dtype",
}
"""The key that switches a training method on, by the prefix of the method's keys."""
MEMORY_PREFIXES = (
    "ramtorch",
    "group_offload",
    "enable_group_offload",
    "fsdp_",
    "gradient_checkpointing_",
    "vae_enable_",
)
LOCAL_PREFIXES = (
    "aspect_bucket_",
    "webhook_",
    "tracker_",
    "eval_",
    "num_eval",
    "validation_",
    "validate_",
    "evaluation_",
    "nsfw_",
    "disk_low_",
    "aws_",
    "debug_",
    "print_",
    "audio_",
    "accelerate_",
    "main_process",
    "post_",
    "checkpoint_",
    "checkpointing_",
    "checkpoints_",
    "text_cache_",
    "text_embed_",
    "vae_cache_",
    "cache_dir",
)
"""Prefixes of keys that have no effect on the trained LoRA."""

_CHANGES = "no equal here; remove it, or expect another result"
_MEMORY = "memory or speed only; see docs/memory.md"
_LOCAL = "of its files, logs or machine"

RUN_RULES: Mapping[str, Rule] = {
    "train_batch_size": Take("train_batch_size", 4, to_integer),
    "gradient_accumulation_steps": Take("gradient_accumulation_steps", 1, to_integer),
    "mixed_precision": Take("mixed_precision", "bf16", to_text),
    "gradient_checkpointing": Take("gradient_checkpointing", True, to_switch),
    "gradient_checkpointing_interval": Take("gradient_checkpointing_every", None, to_positive_integer),
    "musubi_blocks_to_swap": Take("blocks_to_swap", 0, to_integer),
    "vae_batch_size": Take("vae_batch_size", 4, to_integer),
    "text_encoder_batch_size": Take("text_encoder_batch_size", 1, to_integer),
    "output_dir": Take("output_dir", "simpletuner-results", to_text),
    "init_lora": Take("network_weights", None, to_text),
    "checkpoint_epoch_interval": Take("save_every_n_epochs", None, to_positive_integer),
    "loss_type": Take("loss_type", "l2", to_text),
    "modelspec_comment": Take("training_comment", None, lambda value: value if isinstance(value, str) else None),
    **define_harmless("set save_state and auto_resume to resume a run", "resume_from_checkpoint"),
    **define_harmless(
        "accelerate launch chooses processes and devices",
        "num_processes num_machines machine_rank same_network local_rank",
        1,
        0,
        -1,
        True,
    ),
    **define_harmless(
        "wandb_run_name and metadata_* name the run",
        "model_card_safe_for_work model_card_note model_card_private"
        " push_checkpoints_to_hub publishing_config push_to_hub_background",
        False,
        True,
    ),
    **define_harmless("upload starts with huggingface_repo_id", "hub_model_id"),
    **define_harmless(
        _MEMORY,
        "quantize_via offload_during_startup offload_during_save delete_model_after_load attention_mechanism"
        " sageattention_usage disable_tf32 set_grads_to_none fully_unload_text_encoder unet_attention_slice"
        " enable_chunked_feed_forward feed_forward_chunk_size fuse_qkv_projections fused_qkv_projections"
        " fuse_optimizer optimizer_cpu_offload_method optimizer_offload_gradients optimizer_release_gradients"
        " keep_vae_loaded accelerator_cache_clear_interval enable_multiprocessing max_workers torch_num_threads"
        " dataloader_prefetch dataloader_prefetch_qlen image_processing_batch_size write_batch_size read_batch_size"
        " compress_disk_cache musubi_block_swap_device find_unused_parameters vae_dtype base_model_default_dtype"
        " enable_xformers_memory_efficient_attention allow_tf32 gradient_precision preserve_data_backend_cache"
        " quantize_activations ema_device ema_cpu_only ema_foreach_disable",
        *(False, True, *"no_change bf16 accelerator diffusers cpu".split()),
    ),
    **define_harmless(
        _LOCAL,
        "metadata_update_interval disable_benchmark override_dataset_config skip_file_discovery ignore_missing_files"
        " delete_unwanted_images delete_problematic_images delete_invalid_checkpoints data_aesthetic_score"
        " enable_watermark custom_tracker report_to logging_dir i_know_what_i_am_doing merge_environment_config"
        " configs_dir revision variant trust_remote_code user_prompt_library num_validation_images lora_format"
        " strict_epoch_limit ignore_final_epochs save_text_encoder freeze_encoder inference_scheduler_timestep_spacing"
        " training_scheduler_timestep_spacing model_flavour conditioning_multidataset_sampling framerate"
        " disable_bucket_pruning allow_dataset_oversubscription max_grounding_entities override_dataset_config",
        *(False, "", "none", "trailing", 1, "diffusers"),
    ),
    **define_harmless("images are read and encoded once here", "data_backend_sampling", "auto-weighting"),
    **define_harmless("every image is weighted alike", "snr_weight", 1),
    **define_harmless("the same noise on any number of devices here", "seed_for_each_device", True, False),
    **define_harmless(
        "uniform timesteps are drawn for each image, not in segments", "disable_segmented_timestep_sampling"
    ),
    **define_unsupported(
        _CHANGES,
        "tread_config diffusion_blocks_config slider_lora_target layer_freeze_strategy use_soft_min_snr"
        " soft_min_snr_sigma_data timestep_bias_strategy flow_custom_timesteps flow_cubic_schedule_weights"
        " flux_fast_schedule flux_attention_masked_training sla_config init_lokr_norm assistant_lora_path"
        " quantization_config masked_grad pretrained_unet_model_name_or_path custom_text_encoder_intermediary_layers"
        " pretrained_t5_model_name_or_path freeze_encoder_before_training lr_scale_per_dataset deepspeed_config",
        "None",
    ),
    **define_unsupported(
        "text encoders are not quantized here: more exact, more memory",
        "text_encoder_1_precision text_encoder_2_precision text_encoder_3_precision text_encoder_4_precision",
        "no_change",
    ),
    "lora_init_type": Unsupported("the down matrix is initialized as in peft's default", ("default", None)),
    "peft_lora_mode": Unsupported(_CHANGES, ("standard", None)),
    "t5_padding": Unsupported("padding tokens of T5 are attended to", ("unmodified", None)),
    "sd3_clip_uncond_behaviour": Unsupported("dropped captions are empty texts here", ("empty_string", None)),
    "sd3_t5_uncond_behaviour": Unsupported("dropped captions are empty texts here", ("empty_string", None)),
    "lora_dropout": Unsupported(
        "drops inputs of the down matrices there; network_dropout drops their outputs; choose it by hand",
        (0, None),
        0.1,
    ),
    "context_parallel_size": Take("cp_size", 1, to_integer),
}

BACKEND_RULES: Mapping[str, Rule] = {
    "train_batch_size": Take("batch_size", None, to_integer),
    "caption_dropout_probability": Take("caption_dropout_rate", None, to_number),
    "start_step": Take("from_step", 0, to_integer),
    "end_step": Take("to_step", None, to_positive_integer),
    **define_harmless(
        _LOCAL,
        "id type dataset_type metadata_backend text_embeds image_embeds cache_dir_vae cache_dir"
        " skip_file_discovery preserve_data_backend_cache hash_filenames shorten_filenames compress_cache default"
        " vae_cache_ondemand vae_cache_disable vae_cache_clear_each_epoch write_batch_size delete_problematic_images"
        " delete_unwanted_images metadata_update_interval disable_validation ignore_epochs metadata_file_list parquet"
        " dataset_name split image_column caption_filter_list_ huggingface",
        True,
        False,
        "",
        "local",
        "image",
        "discovery",
        "json",
    ),
    **define_unsupported(
        _CHANGES,
        "caption_filter_list is_regularisation_data is_regularization_data slider_strength"
        " timestep_sampling_offset conditioning conditioning_data conditioning_type conditioning_config"
        " max_upscale_threshold max_num_samples video start_epoch_ end_epoch instance_prompt_",
    ),
    "start_epoch": Unsupported("use start_step", (0, 1, None)),
    "probability": Unsupported("folders are not drawn by chance here; set weight or num_repeats", (1, None)),
    "minimum_aspect_ratio": Unsupported("no image is left out for its shape; use exclude", (0, None)),
    "maximum_aspect_ratio": Unsupported("no image is left out for its shape; use exclude", (0, None)),
}
