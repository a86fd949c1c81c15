"""The keys of OneTrainer's files: what becomes of each."""

from collections.abc import Mapping
from typing import Any

from ..equivalents import KnownOptimizer
from ..imported import Rule, Take, Unsupported, define_harmless, define_unsupported, to_integer, to_switch, to_text

FIXED_SHIFTS = ("sd3", "chroma", "sana")
"""Families for which it does not use ``dynamic_timestep_shifting``."""
OWN_SHIFTS = ("flux", "qwen_image", "krea2")
"""Families whose own shift by image size is that of their scheduler, for any density of the noise levels."""
PARTS = (
    "unet prior transformer unconditional_transformer text_encoder text_encoder_2 text_encoder_3 text_encoder_4".split()
)
OTHER_PARTS = "effnet_encoder decoder decoder_text_encoder decoder_vqgan embedding quantization cloud secrets".split()

DTYPES: Mapping[str, str] = {"FLOAT_16": "fp16", "BFLOAT_16": "bf16", "FLOAT_32": "no", "TFLOAT_32": "no"}
SAVE_DTYPES: Mapping[str, str] = {"FLOAT_16": "fp16", "BFLOAT_16": "bf16", "FLOAT_32": "float"}
QUANTIZATIONS: Mapping[str, str] = {
    "nfloat_4": "nf4",
    "int_8": "int8",
    "float_8": "fp8",
    "int": "int8",
    "float_w": "fp8",
}
PLAIN_DTYPES = ("FLOAT_16", "BFLOAT_16", "FLOAT_32", "TFLOAT_32", "NONE")
FILE_FORMATS: Mapping[str, str] = {"DIFFUSERS_LORA": "diffusers", "KOHYA_LORA": "kohya", "COMFY_LORA": "comfy"}

_BETAS = {"betas": (0.9, 0.999), "eps": 1e-8}
_DADAPT = {"d0": 1e-6, "weight_decay": 0.0}
OPTIMIZERS: Mapping[str, KnownOptimizer] = {
    "adam": KnownOptimizer("Adam", {"weight_decay": 0.0}),
    "adamw": KnownOptimizer("AdamW"),
    "adam_8bit": KnownOptimizer("Adam8bit", {"weight_decay": 0.0}),
    "adamw_8bit": KnownOptimizer("AdamW8bit", {"weight_decay": 0.01}),
    "ademamix_8bit": KnownOptimizer("bitsandbytes.optim.AdEMAMix8bit"),
    "ademamix": KnownOptimizer("bitsandbytes.optim.AdEMAMix"),
    "lion": KnownOptimizer("Lion", {"weight_decay": 0.0}),
    "lion_8bit": KnownOptimizer("Lion8bit", {"betas": (0.9, 0.999), "weight_decay": 0.0}),
    "sgd": KnownOptimizer("SGD"),
    "adafactor": KnownOptimizer("Adafactor", {"relative_step": False, "scale_parameter": False, "warmup_init": False}),
    "prodigy": KnownOptimizer("Prodigy", {**_BETAS, **_DADAPT}),
    "dadapt_adam": KnownOptimizer("DAdaptAdam", {**_BETAS, **_DADAPT, "decouple": False}),
    "dadapt_adan": KnownOptimizer("DAdaptAdan", {"weight_decay": 0.02}),
    "dadapt_ada_grad": KnownOptimizer("DAdaptAdaGrad", _DADAPT),
    "dadapt_sgd": KnownOptimizer("DAdaptSGD", {"momentum": 0.0, **_DADAPT}),
    "dadapt_lion": KnownOptimizer("DAdaptLion", _DADAPT),
    "schedule_free_adamw": KnownOptimizer("AdamWScheduleFree", {"weight_decay": 0.01}),
    "schedule_free_sgd": KnownOptimizer("SGDScheduleFree", {"momentum": 0.0, "weight_decay": 0.0}),
    "came": KnownOptimizer("CAME", {"weight_decay": 0.01}),
}
_FREE = "eps weight_decay d0 growth_rate"
OPTIMIZER_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("adam", "adamw"), "eps weight_decay amsgrad"),
    **dict.fromkeys(("ademamix", "ademamix_8bit"), "eps weight_decay alpha"),
    **dict.fromkeys(("lion", "lion_8bit", "came"), "weight_decay"),
    "sgd": "momentum dampening nesterov weight_decay",
    "adafactor": "beta1 clip_threshold decay_rate weight_decay scale_parameter relative_step warmup_init",
    "prodigy": f"{_FREE} beta3 d_coef decouple use_bias_correction safeguard_warmup",
    "dadapt_adam": f"{_FREE} decouple use_bias_correction",
    "dadapt_adan": _FREE,
    "dadapt_ada_grad": f"{_FREE} momentum",
    "dadapt_sgd": "momentum weight_decay d0 growth_rate",
    "dadapt_lion": "weight_decay d0",
    "schedule_free_adamw": "eps weight_decay r weight_lr_power",
    "schedule_free_sgd": "momentum weight_decay r weight_lr_power",
}
"""Arguments of its optimizers that ours have, too, besides betas and pairs of eps; eps and weight_decay of others."""
OPTIMIZER_BETAS: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("sgd", "adafactor", "dadapt_ada_grad", "dadapt_sgd", "schedule_free_sgd"), ()),
    **dict.fromkeys(("ademamix", "ademamix_8bit", "came"), (0.9, 0.999, 0.9999)),
    "dadapt_adan": (0.98, 0.92, 0.99),
    "lion": (0.9, 0.99),
}
"""The default betas of OneTrainer's optimizers, where they are not (0.9, 0.999)."""
OPTIMIZER_SPEED = (
    "foreach fused fused_back_pass stochastic_rounding fsdp_in_use capturable differentiable compile block_wise"
    " min_8bit_size optim_bits is_paged log_every use_triton"
).split()
NEUTRAL_ARGUMENTS: Mapping[str, Any] = {
    **{"fused": True, "block_wise": True, "min_8bit_size": 4096, "optim_bits": 32, "percentile_clipping": 100},
    **{"slice_p": 1, "eps": 1e-8},
}
"""Values of arguments that change nothing."""

LAYER_PRESETS: Mapping[str, Mapping[str, tuple[tuple[str, ...], str]]] = {
    "unet": {"attn-mlp": ((), ""), "attn-only": (("attn",), "")},
    "sd3": {
        "attn-only": (("attn",), ""),
        "blocks": ((), ""),
        "full": ((), "layers outside of the blocks get no adapter here; see emb_dims in docs/adapters.md"),
    },
    "flux": {
        "attn-mlp": (("attn", "ff.net", "proj_mlp"), ""),
        "attn-only": (("attn",), ""),
        "blocks": ((), ""),
        "full": ((), "layers outside of the blocks get no adapter here; see in_dims in docs/adapters.md"),
    },
    "qwen_image": {
        "attn-mlp": ((), ""),
        "attn-only": (("attn",), ""),
        "blocks": ((), "the modulation layers of the blocks get no adapter here"),
        "full": ((), "the modulation layers and those outside of the blocks get no adapter here"),
    },
    "z_image": {
        "attn-mlp": ((), ""),
        "attn-only": (("attention",), ""),
        "blocks": ((), "the modulation layers of the blocks get no adapter here"),
        "full": ((), "refiners, modulation layers and those outside of the blocks get no adapter here"),
    },
    "chroma": {
        "attn-mlp": (("attn", "ff.net", "proj_mlp"), ""),
        "attn-only": (("attn",), ""),
        "blocks": ((), ""),
        "full": ((), "layers outside of the blocks get no adapter here"),
    },
    "hunyuan_video": {
        "attn-mlp": (("attn", "ff.net"), ""),
        "attn-only": (("attn",), ""),
        "blocks": ((), "the modulation layers of the blocks get no adapter here"),
        "full": ((), "the modulation layers and those outside of the blocks get no adapter here"),
    },
    "flux2_dev": {"blocks": ((), ""), "full": ((), "layers outside of the blocks get no adapter here")},
    "flux2_klein": {"blocks": ((), ""), "full": ((), "layers outside of the blocks get no adapter here")},
    "anima": {
        "attn-mlp": ((), ""),
        "attn-only": (("attn1", "attn2"), ""),
        "blocks": ((), "the modulation layers of the blocks get no adapter here"),
        "full": ((), "the modulation layers and those outside of the blocks get no adapter here"),
    },
    "sana": {
        "attn-mlp": ((), "the convolutions of the feed-forward layers get no adapter here"),
        "attn-only": ((), ""),
        "blocks": ((), "the convolutions of the feed-forward layers get no adapter here"),
        "full": ((), "layers outside of the attention get no adapter here"),
    },
    "pixart_sigma": {
        "attn-mlp": ((), "the feed-forward layers get no adapter here"),
        "attn-only": ((), ""),
        "blocks": ((), "the feed-forward layers get no adapter here"),
        "full": ((), "layers outside of the attention get no adapter here"),
    },
    "hidream": {
        "attn-mlp": ((), "the feed-forward layers get no adapter here"),
        "attn-only": ((), ""),
        "blocks": ((), "the feed-forward and modulation layers get no adapter here"),
        "full": ((), "layers outside of the attention get no adapter here"),
    },
    "krea2": {
        "attn-mlp": (("attn", "ff"), ""),
        "attn-only": (("attn",), ""),
        "blocks": (("transformer_blocks",), ""),
        "full": ((), "the projector of the text fusion gets no adapter here"),
    },
    "ernie_image": {
        "attn-mlp": ((), ""),
        "attn-only": (("self_attention",), ""),
        "blocks": ((), ""),
        "full": ((), "layers outside of the blocks get no adapter here"),
    },
}
"""Texts that layer names contain for each preset (none: all layers trained by default), and the difference here."""

_CHANGES = "no equal here; remove it, or expect another result"
_LOCAL = "of its user interface or machine"

RUN_RULES: Mapping[str, Rule] = {
    "batch_size": Take("train_batch_size", 1, to_integer),
    "gradient_accumulation_steps": Take("gradient_accumulation_steps", 1, to_integer),
    "epochs": Take("max_train_epochs", 100, to_integer),
    "base_model_name": Take("pretrained_model_name_or_path", "stable-diffusion-v1-5/stable-diffusion-v1-5", to_text),
    "lora_model_name": Take("network_weights", None, to_text),
    "masked_training": Take("masked_loss", False, to_switch),
    "normalize_masked_area_loss": Take("masked_loss_normalize", False, to_switch),
    "compile": Take("torch_compile", None, lambda value: to_switch(value) or None),
    **define_harmless(
        _LOCAL,
        "debug_mode debug_dir cache_dir huggingface_cache_dir offline_mode tensorboard_expose tensorboard_always_on"
        " tensorboard_port prevent_overwrites include_train_config train_device temp_device only_cache"
        " samples_to_tensorboard",
        *("debug", "workspace-cache/run", "", False, 6006, "NONE", True, *"cuda cpu cuda:0".split()),
    ),
    **define_harmless(
        "accelerate launch distributes training here",
        "multi_gpu device_indexes gradient_reduce_precision fused_gradient_reduce async_gradient_reduce"
        " async_gradient_reduce_buffer",
        *(False, "", "FLOAT_32_STOCHASTIC", True, 100),
    ),
    **define_harmless(
        "validation is set with validation_split", "validation validate_after validate_after_unit", False, 1, "EPOCH"
    ),
    **define_harmless("use auto_resume", "continue_last_backup", False),
    **define_harmless(
        "set save_state to resume a run",
        "backup_after backup_after_unit rolling_backup rolling_backup_count backup_before_save",
        *(30, "MINUTE", False, 3, True),
    ),
    **define_harmless(
        "memory or speed only",
        "async_offloading dataloader_threads enable_autocast_cache attention_mechanism",
        True,
        2,
        "SDP",
    ),
    **define_harmless("caches are never stale here", "clear_cache_before_training", True, False),
    **define_harmless(
        "not needed here", "fallback_train_dtype frames embedding_weight_dtype", "BFLOAT_16", "25", "FLOAT_32"
    ),
    **define_harmless(
        "for embeddings", "embedding_learning_rate preserve_embedding_norm bundle_additional_embeddings", False, True
    ),
    **define_harmless(
        "previews have no effect on training",
        "sample_skip_first sample_image_format sample_video_format sample_audio_format non_ema_sampling",
        0,
        "JPG",
        "MP4",
        "MP3",
        True,
        False,
    ),
    **define_harmless("every file is saved", "save_skip_first save_filename_prefix", 0, ""),
    **define_harmless("a list of its user interface", "optimizer_defaults __version"),
    **define_harmless("only for masked training", "unmasked_probability unmasked_weight", 0.1),
    **define_unsupported(
        _CHANGES,
        "force_circular_padding custom_conditioning_image masked_prior_preservation_weight"
        " perturbation_noise_weight generalized_offset_noise additional_embeddings log_cosh_strength embeddings",
    ),
    "vb_loss_strength": Unsupported(_CHANGES, (1, 0, None)),
    "loss_scaler": Unsupported(
        "the loss is not scaled here; with Adam this only changes gradient clipping", ("NONE", None)
    ),
}

CONCEPT_RULES: Mapping[str, Rule] = {
    **define_harmless("of its user interface", "name seed concept_stats __version", ""),
    "loss_weight": Unsupported("no weight of one folder's loss here; use num_repeats", (1, None)),
}
TEXT_RULES: Mapping[str, Rule] = {
    **define_unsupported(_CHANGES, "caps_randomize_enable tag_dropout_special_tags tag_dropout_special_tags_regex", ""),
    **define_harmless(
        "for caps_randomize_enable",
        "caps_randomize_mode caps_randomize_probability caps_randomize_lowercase",
        "capslock, title, first, random",
        0,
        False,
    ),
    **define_harmless("for tag_dropout_special_tags", "tag_dropout_special_tags_mode", "NONE", ""),
}
IMAGE_RULES: Mapping[str, Rule] = {
    "enable_random_flip": Take("flip_aug", False, to_switch),
    **define_unsupported(
        "no such augmentation here; flip_aug and color_aug are there",
        "enable_fixed_flip enable_random_rotate enable_fixed_rotate enable_random_brightness enable_fixed_brightness"
        " enable_random_contrast enable_fixed_contrast enable_random_saturation enable_fixed_saturation"
        " enable_random_hue enable_fixed_hue enable_random_circular_mask_shrink enable_random_mask_rotate_crop",
    ),
    **define_harmless(
        "for an augmentation that is off",
        "random_rotate_max_angle random_brightness_max_strength random_contrast_max_strength"
        " random_saturation_max_strength random_hue_max_strength",
        0,
    ),
}
"""Keys of the tables ``image`` and ``text`` of a concept."""
