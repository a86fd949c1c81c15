"""What becomes of each option of sd-scripts that is not one of ours: an alias, not yet there, or refused for good.

Options of the same name and meaning stand in ``schema.py``; a test holds both against the full list.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Alias:
    """Another way to write one of our options; or, with a value, a switch that gives an option this value."""

    option: str
    value: Any = None


@dataclass(frozen=True)
class Refused:
    """Not taken, with what to do instead; ``harmless`` values ask for what happens anyway."""

    why: str
    harmless: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        """Whether ``value`` asks for what is done anyway; a switch that is off does, unless it is always on."""
        is_always_on = any(one is True for one in self.harmless)  # not ``in``: a 1 is equal to True
        harmless = self.harmless if is_always_on else (False, *self.harmless)
        return value in ([], ()) or any(isinstance(value, bool) == isinstance(one, bool) and value == one
                                        for one in harmless)  # fmt: skip


class NotYet(Refused):
    """Not taken by this version; a coming one will."""


def _later(what: str, *harmless: Any) -> NotYet:
    return NotYet(f"not yet: {what}", harmless)


_STATE = _later("states of runs on the hub; --save_state keeps them in output_dir, --resume reads them there")
_TEXT_MASK = _later("masking the padding of texts; as in diffusers' pipelines, it is read like text")
_TEXT_DROPOUT = _later("leaving out single text encoders; caption_dropout_rate leaves out captions", 0, 0.0)
_POSITIONS = _later("other places of pictures in SD3's grid; they are in its middle, as when it draws", 0, 0.0)
_OTHER_FAMILY = Refused("belongs to a model family that is not supported")
_FULL = Refused("trains whole models or embeddings; this program trains LoRA adapters")
_BROKEN = Refused("does not work in sd-scripts either")

VERDICTS: dict[str, Alias | Refused] = {
    # aliases
    "caption_extention": Alias("caption_extension"),
    "sdpa": Refused("cannot be switched off alone: choose another attn_mode", (True,)),
    "persistent_data_loader_workers": Refused("cannot be switched off: workers live as long as the run", (True,)),
    # secrets
    "wandb_api_key": Refused("a key in a flag ends in logs; run `wandb login` or set WANDB_API_KEY"),
    "huggingface_token": Refused("a token in a flag ends in logs; run `hf auth login` or set HF_TOKEN"),
    # model
    "no_half_vae": Refused("cannot be switched off: the VAE always runs in fp32", (True,)),
    # where pictures come from
    "train_data_dir": Refused("write a dataset file and name it with --dataset_config; image_dir = 'FOLDER' is enough"),
    "reg_data_dir": Refused("write a dataset file: is_reg = true in a subset, and name it with --dataset_config"),
    "in_json": Refused("write a dataset file: metadata_file = 'FILE' in a subset, and name it with --dataset_config"),
    "dataset_class": Refused("classes of sd-scripts cannot run here; describe the data in --dataset_config"),
    "conditioning_data_dir": Refused("sd-scripts does not read it either; it belongs into the dataset file"),
    "cache_info": Refused("cannot be switched off: what was found out about pictures is kept", (True, False)),
    "debug_dataset": Refused("use --dry_run to see what would be trained"),
    # pictures
    "weighted_captions": Refused("captions are text; (tag:1.3) is read as it is written, as the encoders were trained"),
    "face_crop_aug_range": Refused("cut faces out beforehand; the file names of face_crop are not read"),
    # loop
    "initial_epoch": Refused("a resumed run knows where it was"),
    "initial_step": Refused("a resumed run knows where it was"),
    "skip_until_initial_step": Refused("a resumed run knows where it was"),
    "full_fp16": Refused("torch scales no gradients in fp16, and Adam's squares of them vanish; use full_bf16"),
    "fp8_base": Alias("base_storage", "fp8"),
    "fp8_base_unet": Alias("base_storage", "fp8"),
    "lowram": Refused("models are always loaded without a second copy"),
    "highvram": Refused("memory is never given back during a run, so there is nothing to switch"),
    "mem_eff_attn": Refused("attention is always computed by PyTorch's memory-saving kernels"),
    "xformers": Alias("attn_mode", "xformers"),
    "fused_backward_pass": Refused("sd-scripts does not use it for LoRA either; optimizer_args can hold fused=True"),
    # several processes
    "zero3_init_flag": Refused("models are always divided parameter by parameter at zero_stage 3", (True, False)),
    "zero3_save_16bit_model": Refused("a LoRA file is always whole; save_precision says how exact", (True, False)),
    "offload_optimizer_nvme_path": Refused("what is remembered of an adapter is small, and never moved into files; set"
                                           " --offload_optimizer_device cpu"),
    "fp16_master_weights_and_gradients": Refused("adapters and what optimizers remember stay in fp32"),
    # optimizer and schedule
    "use_8bit_adam": Refused("an old name; write optimizer_type AdamW8bit"),
    "use_lion_optimizer": Refused("an old name; write optimizer_type Lion"),
    # network
    # files
    "save_model_as": Refused("LoRA files are safetensors; ckpt and pt files can run code when they are opened",
                             ("safetensors",)),
    "save_n_epoch_ratio": Refused("use save_every_n_epochs"),
    "resume_from_huggingface": _STATE,
    "save_state_to_huggingface": _STATE,
    "metadata_is_negative_embedding": Refused("a LoRA is no embedding"),
    # transformer families and SDXL
    "disable_mmap_load_safetensors": Refused("safetensors maps files into memory; copy a file from a slow disk first"),
    "split_mode": Refused("an old name; blocks_to_swap moves blocks between host and device"),
    "controlnet_model_name_or_path": Refused("trains beside a ControlNet; this program trains LoRA adapters alone"),
    "apply_t5_attn_mask": _TEXT_MASK,
    "apply_lg_attn_mask": _TEXT_MASK,
    "model_type": Refused("the model is found by its files; Chroma is not supported", ("flux",)),
    "clip_l_dropout_rate": _TEXT_DROPOUT,
    "clip_g_dropout_rate": _TEXT_DROPOUT,
    "t5_dropout_rate": _TEXT_DROPOUT,
    "pos_emb_random_crop_rate": _POSITIONS,
    "enable_scaled_pos_embed": _POSITIONS,
    "model_prediction_type": Refused("the model's answer is compared as it is, in the form it was made with", ("raw",)),
    "training_shift": Alias("discrete_flow_shift"),
    "save_clip": _BROKEN,
    "save_t5xxl": _BROKEN,
    "t5xxl_device": _BROKEN,
    "t5xxl_dtype": _BROKEN,
    "fp8_scaled": Alias("base_storage", "fp8"),
    "fp8_vl": _later("text encoders in fp8"),
    "split_attn": Refused("attention is computed piece by piece anyway, with masks where texts differ in length"),
    "use_flash_attn": Alias("attn_mode", "flash"),
    "use_sage_attn": Refused("SageAttention has no backward pass, so nothing is trained with it; use attn_mode flash"),
    "text_encoder_cpu": Refused("text encoders run on the device that trains"),
    "unsloth_offload_checkpointing": Alias("cpu_offload_checkpointing", True),
    **dict.fromkeys(
        ["gemma2", "gemma2_max_token_length", "system_prompt", "sample_batch_size", "byt5",
         "vae_chunk_size", "qwen3", "llm_adapter_path", "llm_adapter_lr", "self_attn_lr", "cross_attn_lr", "mlp_lr",
         "mod_lr", "t5_tokenizer_path", "qwen3_max_token_length", "t5_max_token_length", "vae_disable_cache"],
        _OTHER_FAMILY,
    ),
    # options of this program that are gone
    "replay": Refused("removed; OUTPUT_NAME.nan-step*.json lists the images, timesteps and losses of a skipped step"),
    "pp_cut": Refused("removed: stages are always balanced by weights"),
    # other programs of sd-scripts
    **dict.fromkeys(
        ["block_lr", "learning_rate_te", "learning_rate_te1", "learning_rate_te2", "learning_rate_te3",
         "train_text_encoder", "train_t5xxl", "stop_text_encoder_training", "no_token_padding",
         "fused_optimizer_groups", "blockwise_fused_optimizers", "mem_eff_save", "num_last_block_to_freeze",
         "diffusers_xformers", "use_safetensors", "token_string", "init_word", "num_vectors_per_token", "weights",
         "use_object_template", "use_style_template"],
        _FULL,
    ),
}  # fmt: skip
