"""What becomes of each option of sd-scripts that is not one of ours: an alias, not yet there, or refused for good.

Options of the same name and meaning stand in ``schema.py``; a test holds both against the full list.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OptionAlias:
    """Another way to write one of our options; or, with a value, a switch that gives an option this value."""

    option: str
    value: Any = None


@dataclass(frozen=True)
class UnsupportedOption:
    """Not taken, with what to do instead; ``harmless`` values ask for what happens anyway."""

    reason: str
    accepted_values: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` asks for what is done anyway; a switch that is off does, unless it is always on."""
        is_always_on = any(one is True for one in self.accepted_values)  # not ``in``: a 1 is equal to True
        harmless = self.accepted_values if is_always_on else (False, *self.accepted_values)
        return value in ([], ()) or any(
            isinstance(value, bool) == isinstance(one, bool) and value == one for one in harmless
        )


class NotYetSupported(UnsupportedOption):
    """Not taken by this version; a coming one will."""


def _define_not_yet_supported(feature: str, *accepted_values: Any) -> NotYetSupported:
    return NotYetSupported(f"not yet: {feature}", accepted_values)


_HUB_STATE = _define_not_yet_supported(
    "states of runs on the hub; --save_state keeps them in output_dir, --resume reads them there"
)


_TEXT_MASK = _define_not_yet_supported("masking the padding of texts; as in diffusers' pipelines, it is read like text")


_TEXT_DROPOUT = _define_not_yet_supported(
    "leaving out single text encoders; caption_dropout_rate leaves out captions", 0, 0.0
)


_POSITION_CROP = _define_not_yet_supported(
    "other places of pictures in SD3's grid; they are in its middle, as when it draws", 0, 0.0
)


_OTHER_FAMILY = UnsupportedOption("belongs to a model family that is not supported")


_FULL_TRAINING = UnsupportedOption("trains whole models or embeddings; this program trains LoRA adapters")


_BROKEN_IN_KOHYA = UnsupportedOption("does not work in sd-scripts either")


RENAMED_OPTIONS = {
    "base_storage": "quantize_base",
    "resume_anyway": "force_resume",
    "max_bad_steps": "max_nan_steps",
    "on_bad_data": "on_invalid_images",
    "max_bad_samples": "max_invalid_images",
    "bucket_min_pictures": "bucket_min_images",
    "gradient_checkpointing_budget": "activation_memory_budget",
    "compile_shapes": "compile_dynamic",
}
"""Options of ours by their names of the last release, which are accepted with a notice for one release."""


RENAMED_VALUES: dict[str, dict[Any, str]] = {
    "quantize_base": {"float": "none"},
    "on_oom": {"ladder": "recover"},
    "compile_dynamic": {"static": "false", "dynamic": "true"},
}
"""Values of the last release, by the option's name of today."""


def format_rename_notice(location: str, name: str) -> str:
    return f"{location}: renamed to {name}; the old name will be removed in the next release"


def upgrade_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the options and values that another name had when ``settings`` were saved."""
    renamed = {RENAMED_OPTIONS.get(name, name): value for name, value in settings.items()}
    return {
        name: RENAMED_VALUES[name].get(value, value) if name in RENAMED_VALUES else value
        for name, value in renamed.items()
    }


KOHYA_OPTIONS: dict[str, OptionAlias | UnsupportedOption] = {
    # aliases
    "caption_extention": OptionAlias("caption_extension"),
    "sdpa": UnsupportedOption("cannot be switched off alone: choose another attn_mode", (True,)),
    "persistent_data_loader_workers": UnsupportedOption(
        "cannot be switched off: workers live as long as the run", (True,)
    ),
    # secrets
    "wandb_api_key": UnsupportedOption("a key in a flag ends in logs; run `wandb login` or set WANDB_API_KEY"),
    "huggingface_token": UnsupportedOption("a token in a flag ends in logs; run `hf auth login` or set HF_TOKEN"),
    # model
    "no_half_vae": UnsupportedOption("cannot be switched off: the VAE always runs in fp32", (True,)),
    # where pictures come from
    "train_data_dir": UnsupportedOption(
        "write a dataset file and name it with --dataset_config; image_dir = 'FOLDER' is enough"
    ),
    "reg_data_dir": UnsupportedOption(
        "write a dataset file: is_reg = true in a subset, and name it with --dataset_config"
    ),
    "in_json": UnsupportedOption(
        "write a dataset file: metadata_file = 'FILE' in a subset, and name it with --dataset_config"
    ),
    "dataset_class": UnsupportedOption("classes of sd-scripts cannot run here; describe the data in --dataset_config"),
    "conditioning_data_dir": UnsupportedOption("sd-scripts does not read it either; it belongs into the dataset file"),
    "cache_info": UnsupportedOption("cannot be switched off: what was found out about pictures is kept", (True, False)),
    "debug_dataset": UnsupportedOption("use --dry_run to see what would be trained"),
    # pictures
    "weighted_captions": UnsupportedOption(
        "captions are text; (tag:1.3) is read as it is written, as the encoders were trained"
    ),
    "face_crop_aug_range": UnsupportedOption("cut faces out beforehand; the file names of face_crop are not read"),
    # loop
    "initial_epoch": UnsupportedOption("a resumed run knows where it was"),
    "initial_step": UnsupportedOption("a resumed run knows where it was"),
    "skip_until_initial_step": UnsupportedOption("a resumed run knows where it was"),
    "full_fp16": UnsupportedOption(
        "torch scales no gradients in fp16, and Adam's squares of them vanish; use full_bf16"
    ),
    "fp8_base": OptionAlias("quantize_base", "fp8"),
    "fp8_base_unet": OptionAlias("quantize_base", "fp8"),
    "lowram": UnsupportedOption("models are always loaded without a second copy"),
    "highvram": UnsupportedOption("memory is never given back during a run, so there is nothing to switch"),
    "mem_eff_attn": UnsupportedOption("attention is always computed by PyTorch's memory-saving kernels"),
    "xformers": OptionAlias("attn_mode", "xformers"),
    "fused_backward_pass": UnsupportedOption(
        "sd-scripts does not use it for LoRA either; optimizer_args can hold fused=True"
    ),
    # several processes
    "zero3_init_flag": UnsupportedOption(
        "models are always divided parameter by parameter at zero_stage 3", (True, False)
    ),
    "zero3_save_16bit_model": UnsupportedOption(
        "a LoRA file is always whole; save_precision says how exact", (True, False)
    ),
    "offload_optimizer_nvme_path": UnsupportedOption(
        "what is remembered of an adapter is small, and never moved into files; set --offload_optimizer_device cpu"
    ),
    "fp16_master_weights_and_gradients": UnsupportedOption("adapters and what optimizers remember stay in fp32"),
    # optimizer and schedule
    "use_8bit_adam": UnsupportedOption("an old name; write optimizer_type AdamW8bit"),
    "use_lion_optimizer": UnsupportedOption("an old name; write optimizer_type Lion"),
    # network
    # files
    "save_model_as": UnsupportedOption(
        "LoRA files are safetensors; ckpt and pt files can run code when they are opened", ("safetensors",)
    ),
    "save_n_epoch_ratio": UnsupportedOption("use save_every_n_epochs"),
    "resume_from_huggingface": _HUB_STATE,
    "save_state_to_huggingface": _HUB_STATE,
    "metadata_is_negative_embedding": UnsupportedOption("a LoRA is no embedding"),
    # transformer families and SDXL
    "disable_mmap_load_safetensors": UnsupportedOption(
        "safetensors maps files into memory; copy a file from a slow disk first"
    ),
    "split_mode": UnsupportedOption("an old name; blocks_to_swap moves blocks between host and device"),
    "controlnet_model_name_or_path": UnsupportedOption(
        "trains beside a ControlNet; this program trains LoRA adapters alone"
    ),
    "apply_t5_attn_mask": _TEXT_MASK,
    "apply_lg_attn_mask": _TEXT_MASK,
    "model_type": UnsupportedOption("the model is found by its files; Chroma is not supported", ("flux",)),
    "clip_l_dropout_rate": _TEXT_DROPOUT,
    "clip_g_dropout_rate": _TEXT_DROPOUT,
    "t5_dropout_rate": _TEXT_DROPOUT,
    "pos_emb_random_crop_rate": _POSITION_CROP,
    "enable_scaled_pos_embed": _POSITION_CROP,
    "model_prediction_type": UnsupportedOption(
        "the model's answer is compared as it is, in the form it was made with", ("raw",)
    ),
    "training_shift": OptionAlias("discrete_flow_shift"),
    "save_clip": _BROKEN_IN_KOHYA,
    "save_t5xxl": _BROKEN_IN_KOHYA,
    "t5xxl_device": _BROKEN_IN_KOHYA,
    "t5xxl_dtype": _BROKEN_IN_KOHYA,
    "fp8_scaled": OptionAlias("quantize_base", "fp8"),
    "fp8_vl": _define_not_yet_supported("text encoders in fp8"),
    "split_attn": UnsupportedOption(
        "attention is computed piece by piece anyway, with masks where texts differ in length"
    ),
    "use_flash_attn": OptionAlias("attn_mode", "flash"),
    "use_sage_attn": UnsupportedOption(
        "SageAttention has no backward pass, so nothing is trained with it; use attn_mode flash"
    ),
    "text_encoder_cpu": UnsupportedOption("text encoders run on the device that trains"),
    "unsloth_offload_checkpointing": OptionAlias("cpu_offload_checkpointing", True),
    **dict.fromkeys(
        [
            "gemma2",
            "gemma2_max_token_length",
            "system_prompt",
            "sample_batch_size",
            "byt5",
            "vae_chunk_size",
            "qwen3",
            "llm_adapter_path",
            "llm_adapter_lr",
            "self_attn_lr",
            "cross_attn_lr",
            "mlp_lr",
            "mod_lr",
            "t5_tokenizer_path",
            "qwen3_max_token_length",
            "t5_max_token_length",
            "vae_disable_cache",
        ],
        _OTHER_FAMILY,
    ),
    # options of this program that are gone
    "replay": UnsupportedOption(
        "removed; OUTPUT_NAME.nan-step*.json lists the images, timesteps and losses of a skipped step"
    ),
    "pp_cut": UnsupportedOption("removed: stages are always balanced by weights"),
    # other programs of sd-scripts
    **dict.fromkeys(
        [
            "block_lr",
            "learning_rate_te",
            "learning_rate_te1",
            "learning_rate_te2",
            "learning_rate_te3",
            "train_text_encoder",
            "train_t5xxl",
            "stop_text_encoder_training",
            "no_token_padding",
            "fused_optimizer_groups",
            "blockwise_fused_optimizers",
            "mem_eff_save",
            "num_last_block_to_freeze",
            "diffusers_xformers",
            "use_safetensors",
            "token_string",
            "init_word",
            "num_vectors_per_token",
            "weights",
            "use_object_template",
            "use_style_template",
        ],
        _FULL_TRAINING,
    ),
}
