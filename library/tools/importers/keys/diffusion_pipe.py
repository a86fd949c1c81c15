"""The keys of diffusion-pipe's files: what becomes of each."""

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

DTYPES: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
SAVE_DTYPES: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "float"}
QUANTIZATIONS: Mapping[str, str] = {"float8": "fp8", "float8_e4m3fn": "fp8"}

_OPTIMI = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}
OPTIMIZERS: Mapping[str, KnownOptimizer] = {
    "adamw": KnownOptimizer("AdamW"),
    "adamw8bit": KnownOptimizer("AdamW8bit"),
    "adamw_optimi": KnownOptimizer("AdamW", _OPTIMI),
    "stableadamw": KnownOptimizer(
        "pytorch_optimizer.StableAdamW", _OPTIMI, "of optimi there; that of pytorch_optimizer is used"
    ),
    "sgd": KnownOptimizer("SGD"),
    "offload": KnownOptimizer("AdamW"),
    "adamw8bitkahan": KnownOptimizer("AdamW8bit", {}, "without Kahan summation, as weights are float32 here"),
    "automagic": KnownOptimizer(
        "AdamW", {}, "sets a learning rate for each weight; AdamW is used, choose its learning_rate"
    ),
    "genericoptim": KnownOptimizer("AdamW", {}, "no such optimizer here; AdamW is used, set optimizer_type by hand"),
}
"""The optimizers that diffusion-pipe names itself; other names are classes of pytorch_optimizer."""
OWN_ARGUMENTS = "type lr gradient_release beta2_half_life stabilize fused".split()
"""Keys of [optimizer] that are no arguments of the class used here."""

_VALIDATION = "validation is set with validation_split; see docs/datasets.md"

RUN_RULES: Mapping[str, Rule] = {
    "output_dir": Take("output_dir", None, to_text),
    "gradient_accumulation_steps": Take("gradient_accumulation_steps", 1, to_integer),
    "pipeline_stages": Take("pp_size", 1, to_integer),
    "save_every_n_epochs": Take("save_every_n_epochs", None, to_positive_integer),
    "save_every_n_steps": Take("save_every_n_steps", None, to_positive_integer),
    "blocks_to_swap": Take("blocks_to_swap", 0, to_integer),
    "compile": Take("torch_compile", None, lambda value: to_switch(value) or None),
    "caching_batch_size": Take("vae_batch_size", 1, to_integer),
    "uncond_fraction": Take("caption_dropout_rate", 0.0, to_number),
    **define_harmless(
        _VALIDATION,
        "eval_datasets eval_every_n_epochs eval_every_n_steps eval_every_n_examples eval_before_first_step"
        " eval_micro_batch_size_per_gpu image_eval_micro_batch_size_per_gpu eval_gradient_accumulation_steps"
        " eval_image_micro_batch_size_per_gpu disable_block_swap_for_eval",
    ),
    **define_harmless("set save_state to resume a run", "checkpoint_every_n_epochs checkpoint_every_n_minutes"),
    **define_harmless("stages of a pipeline are balanced by weights", "partition_method partition_split", "parameters"),
    **define_harmless("not needed here: checkpointing does not reenter", "reentrant_activation_checkpointing", False),
    **define_harmless("only logging", "steps_per_print logging_steps x_axis_examples", 1, False),
    **define_harmless("only speed", "map_num_proc"),
    "video_clip_mode": Unsupported(
        "windows are cut from the beginning of a clip; frame_extraction of the dataset cuts others",
        (None, "none", "single_beginning"),
    ),
    **define_harmless("diffusion-pipe does not read it", "pseudo_huber_c"),
    **define_harmless("caches are never stale here", "regenerate_cache", False),
    **define_unsupported(
        "training states of DeepSpeed cannot be read; start from its LoRA file with network_weights",
        "resume_from_checkpoint",
    ),
    "save_every_n_examples": Unsupported("use save_every_n_steps: examples / global batch size", (None,)),
}

MODEL_RULES: Mapping[str, Rule] = {
    **define_harmless(
        "text encoder outputs are cached as set by cache_text_encoder_outputs", "cache_text_embeddings", True
    ),
    **define_unsupported("the guidance embedding is used, with guidance_scale", "bypass_guidance_embedding"),
    **define_unsupported("give Anima's file that contains the adapter", "llm_adapter_path"),
    **{
        name: Unsupported("one learning rate for all layers of the transformer here", (None,))
        for name in ("self_attn_lr", "cross_attn_lr", "mlp_lr", "mod_lr")
    },
    **define_unsupported("every image has the same weight in the loss here", "multiscale_loss_weight"),
    **define_unsupported("text encoders are not quantized here: more exact, more memory", "text_encoder_nf4"),
    **define_unsupported("text encoders are not quantized here: more exact, more memory", "text_encoder_fp8"),
    "max_sequence_length": Unsupported("the length of captions is fixed; longer ones are cut", (256, None)),
}

ADAPTER_RULES: Mapping[str, Rule] = {
    "dropout": Unsupported(
        "drops inputs of the down matrices there; network_dropout drops their outputs; choose it by hand", (0, None)
    ),
    "rank_dropout": Unsupported("only LoRA has it here, not LoKr; remove it", (0, None)),
}

DIRECTORY_KEYS = (
    "resolutions enable_ar_bucket min_ar max_ar num_ar_buckets ar_buckets frame_buckets size_buckets num_repeats"
    " shuffle_tags caption_prefix cache_shuffle_num cache_shuffle_delimiter skip_empty_caption online_captions"
    " shuffle_metadata"
).split()
"""Keys that each [[directory]] takes from the top of the file."""

DIRECTORY_RULES: Mapping[str, Rule] = {
    "num_repeats": Take("num_repeats", 1, to_integer),
    **define_harmless("images without a caption are reported before training", "skip_empty_caption", True),
    **define_harmless("images are shuffled in every epoch", "shuffle_metadata", True),
    **define_unsupported("each image needs a mask here; make white ones", "default_mask_file"),
    **define_unsupported("captions are read from files; see caption_extension and metadata_file", "online_captions"),
}

DATASET_RULES: Mapping[str, Rule] = {
    **define_unsupported("use exclude patterns, or a smaller folder", "subsample_ratio"),
}
