"""Options under other names: options of sd-scripts that are not in ``schema*.py``, and options that were renamed.

An option of sd-scripts is an alias of one of ours, as the field of that one says, changes nothing here, or is refused
with a reason.  The parser applies this table; dataset files are read by dataset/dataset_config.py.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from ..name_suggestions import suggest_name
from ..problems import Place
from .options import iter_options
from .schema import RunConfig


@dataclass(frozen=True)
class OptionAlias:
    """Another name of an option; with a value, a switch that sets the option to this value, unless it is set."""

    option: str
    value: Any = None
    is_number: bool = False
    """Whether the switch takes a number, of which any but 0 turns it on."""


@dataclass(frozen=True)
class NoEffectOption:
    """An option that cannot change the result; accepted with any value, and named in one notice with all others."""

    reason: str
    is_explained: bool = False
    """Whether the notice gives the reason."""


@dataclass(frozen=True)
class UnsupportedOption:
    """An option that is refused with a reason, except for values that ask for what happens anyway."""

    reason: str
    accepted_values: tuple[Any, ...] = ()
    in_full: "NoEffectOption | UnsupportedOption | OptionAlias | None" = None
    """What becomes of it with ``train full``, where that is not the same."""

    def accepts(self, value: Any) -> bool:
        """Whether a TOML value changes nothing; what Python takes for false leaves the option off, as in sd-scripts."""
        is_off = value in (False, 0, "", []) or str(value).lower() == "false"
        return is_off or any(
            isinstance(value, bool) == isinstance(item, bool) and value == item for item in self.accepted_values
        )


class OtherScriptOption(UnsupportedOption):
    """An option of other training scripts: refused as a flag, ignored in a run file, both as in sd-scripts."""


@dataclass(frozen=True)
class SecretOption:
    """A key or token; it becomes an environment variable of this process, and is written nowhere."""

    variable: str


OptionVerdict = OptionAlias | NoEffectOption | UnsupportedOption | SecretOption
"""What becomes of an option of another program."""

RENAMED_OPTIONS: dict[str, str] = {
    option.former_name: option.name for option in iter_options(RunConfig) if option.former_name
}
"""The current names of options by their former ones, which are accepted with a notice for one release."""

RENAMED_VALUES: dict[str, dict[Any, str]] = {
    option.name: dict(option.former_values) for option in iter_options(RunConfig) if option.former_values
}
"""The current values by the former ones, of each option by its current name."""


FORMER_DEFAULTS = {
    option.name: option.former_default for option in iter_options(RunConfig) if option.former_default is not None
}
"""Defaults of the last release that checkpoints recorded; today's defaults do the same."""


def format_rename_notice(location: Place | str, name: str) -> str:
    return f"{location}: renamed to {name}; the old name will be removed in the next release"


def upgrade_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Give the settings of an older checkpoint their current names and values."""
    renamed = {
        RENAMED_OPTIONS.get(name, name): value
        for name, value in settings.items()
        if name not in FORMER_DEFAULTS or value != FORMER_DEFAULTS[name]
    }
    return {
        name: RENAMED_VALUES[name].get(value, value) if name in RENAMED_VALUES else value
        for name, value in renamed.items()
    }


def list_aliases(program: str) -> dict[str, OptionAlias]:
    """List the names that options have in a program."""
    return {
        alias.name: OptionAlias(option.name, alias.value)
        for option in iter_options(RunConfig)
        for alias in option.aliases
        if alias.program == program
    }


TEXT_PRECISION = NoEffectOption(
    "text encoders are not quantized; when their outputs are cached, they leave the device before training",
    is_explained=True,
)

_USE_DATASET_TOML = "use a dataset TOML (--dataset_config)"
FULL_TRAINING = OtherScriptOption(
    "for full fine-tuning (--train full), not for a LoRA",
    in_full=UnsupportedOption("not supported with train full; remove it"),
)
"""Options of other scripts of sd-scripts and musubi-tuner than those for LoRA."""

_BROKEN_IN_KOHYA = NoEffectOption("no effect in sd-scripts either")

_FULL_TRAINING_OPTIONS = """
    no_token_padding num_last_block_to_freeze learning_rate_te3
    skip_latents_validity_check double_blocks_to_swap single_blocks_to_swap use_t5xxl_cache_only
""".split()

GUI_KEYS = frozenset(
    """
    additional_parameters epoch noise_offset_type model_train_type model_list max_resolution lr_warmup optimizer
    LoRA_type LyCORIS_preset sdxl flux1_checkbox sd3_checkbox lumina_checkbox anima_checkbox hunyuan_image_checkbox
    train_inpainting num_cpu_threads_per_process num_processes num_machines multi_gpu gpu_ids main_process_port
    extra_accelerate_launch_args lowvram sdxl_cache_text_encoder_outputs sdxl_no_half_vae show_timesteps
    show_timesteps_resolution qwen_image_vae_2d compile_cache_size_limit enable_preview enable_base_weight
    enable_block_weights lycoris_algo lokr_factor dylora_unit network_args_custom optimizer_args_custom ui_custom_params
    positive_prompts negative_prompts prompt_file randomly_choice_prompt sample_cfg sample_seed sample_steps
    sample_width sample_height prodigy_d0 prodigy_d_coef folder_names train_text_encoder_1 train_text_encoder_2
    """.split()
)
"""Keys that GUIs of sd-scripts write for themselves; sd-scripts does not read them."""

SHARED_MODULES = ("networks.loha", "networks.lokr", "networks.oft", "lycoris.kohya")
"""Values of ``network_module`` that run files of this program need as well, since they choose the adapter type."""

KEYS_OF_OTHER_FILES = {
    "batch_size": "the option is train_batch_size",
    **dict.fromkeys(("num_repeats", "image_dir", "class_tokens", "is_reg"), "it belongs in a dataset file"),
}
"""Keys that are often in run files, where sd-scripts does not read them."""

KOHYA_VALUES: dict[str, dict[Any, str]] = {
    option.name: dict(option.value_aliases) for option in iter_options(RunConfig) if option.value_aliases
}
"""Values that sd-scripts spells in another way."""

KOHYA_OPTIONS: dict[str, OptionVerdict] = {
    **list_aliases("sd-scripts"),
    # no effect on the result
    "sdpa": NoEffectOption("PyTorch's attention is the default; attn_mode chooses another"),
    "persistent_data_loader_workers": NoEffectOption("workers live as long as the run"),
    "no_half_vae": NoEffectOption("the VAE always runs in fp32"),
    "cache_info": NoEffectOption("image metadata is always cached"),
    "lowram": NoEffectOption("models are loaded without a second copy in memory"),
    "highvram": NoEffectOption("the cache of the GPU's memory is always kept"),
    "mem_eff_attn": NoEffectOption("attention is always memory-efficient"),
    "split_attn": NoEffectOption("texts of different lengths are masked in one attention call"),
    "zero3_init_flag": NoEffectOption("with zero_stage 3, parameters are sharded while loading"),
    "zero3_save_16bit_model": NoEffectOption("LoRA files are always complete; save_precision sets their dtype"),
    "skip_until_initial_step": NoEffectOption("the steps before initial_step are always skipped"),
    "blockwise_fused_optimizers": replace(FULL_TRAINING, in_full=OptionAlias("fused_backward_pass", True)),
    "fused_optimizer_groups": replace(FULL_TRAINING, in_full=OptionAlias("fused_backward_pass", True, is_number=True)),
    **dict.fromkeys(
        ("mem_eff_save", "use_safetensors"),
        replace(FULL_TRAINING, in_full=NoEffectOption("files are safetensors, written tensor by tensor")),
    ),
    "stop_text_encoder_training": replace(
        FULL_TRAINING,
        in_full=UnsupportedOption("not supported: train in two runs, the second without train_text_encoder"),
    ),
    "disable_mmap_load_safetensors": NoEffectOption("only how a file is read"),
    **dict.fromkeys(("vae_chunk_size", "vae_disable_cache"), NoEffectOption("the VAE encodes images whole")),
    "model_type": NoEffectOption("detected from the model files"),
    **dict.fromkeys(
        ("llm_adapter_lr", "self_attn_lr", "cross_attn_lr", "mlp_lr", "mod_lr"),
        NoEffectOption(
            "read in full fine-tuning only, there too; network_reg_lrs in network_args sets rates of a LoRA's layers",
            is_explained=True,
        ),
    ),
    "sample_batch_size": NoEffectOption("previews are sampled one at a time"),
    "text_encoder_cpu": NoEffectOption("text encoders run on the training device"),
    # secrets
    "wandb_api_key": SecretOption("WANDB_API_KEY"),
    "huggingface_token": SecretOption("HF_TOKEN"),
    # dataset
    "conditioning_data_dir": NoEffectOption(
        "not read in sd-scripts either; set it in a subset of a dataset TOML", is_explained=True
    ),
    "dataset_class": UnsupportedOption(f"dataset classes of sd-scripts cannot run here; {_USE_DATASET_TOML}"),
    "debug_dataset": UnsupportedOption("use --dry_run, or python -m library plan --preview"),
    # training
    "full_fp16": UnsupportedOption("not supported: fp16 gradients and Adam moments underflow; use full_bf16"),
    "fp16_master_weights_and_gradients": UnsupportedOption(
        "not supported: adapter weights and optimizer state stay in fp32"
    ),
    "use_sage_attn": UnsupportedOption("SageAttention has no backward pass; use --attn_mode flash"),
    "fp8_vl": TEXT_PRECISION,
    # saving
    # model families
    "controlnet_model_name_or_path": NoEffectOption("for ControlNets only; sd-scripts does not read it for a LoRA"),
    **dict.fromkeys(("save_clip", "save_t5xxl", "t5xxl_device", "t5xxl_dtype"), _BROKEN_IN_KOHYA),
    **dict.fromkeys(_FULL_TRAINING_OPTIONS, FULL_TRAINING),
    "train_t5xxl": OtherScriptOption(
        "for full fine-tuning; a LoRA of T5 needs train_t5xxl=True in network_args",
        in_full=UnsupportedOption("T5 is not trained in full"),
    ),
    # options of this program that were removed
    "replay": UnsupportedOption(
        "removed; OUTPUT_NAME.nan-step*.json lists the images, timesteps and losses of a skipped step"
    ),
    "pp_cut": UnsupportedOption("removed: stages are always balanced by weights"),
}


def select_full_verdicts(verdicts: Mapping[str, OptionVerdict]) -> dict[str, OptionVerdict]:
    """Say what becomes of each option with ``train full``; in files, too, those of full fine-tuning are not ignored."""
    return {
        name: verdict.in_full if isinstance(verdict, UnsupportedOption) and verdict.in_full is not None else verdict
        for name, verdict in verdicts.items()
    }


@dataclass(frozen=True)
class RawSetting:
    """An option as it was written, before its value is converted."""

    name: str
    value: Any  # the words after a flag, or a TOML value
    place: Place
    is_flag: bool
    replaced_line: int | None = None
    """Line of the same key with another value, in an earlier section of the run TOML."""


@dataclass(frozen=True)
class Spelling:
    """An option as it was set under one of its names."""

    name: str
    place: Place
    value: Any

    def contradicts(self, other: "Spelling") -> bool:
        """Whether another name of the same option has another value; names of optimizers may be in any case."""
        values = [value.lower() if isinstance(value, str) else value for value in (self.value, other.value)]
        return self.name != other.name and values[0] != values[1]

    def describe_conflict(self, other: "Spelling") -> str:
        """Describe another value of the same option, whose place stands before the message."""
        where = self.place.flag or f"{self.name} in line {self.place.line}"
        ours, theirs = (
            " ".join(map(str, each)) if isinstance(each, tuple) else each for each in (self.value, other.value)
        )
        return f"{theirs} contradicts {where}, another name of this option, which is {ours}"


def is_from_kohya(settings: Collection[RawSetting]) -> bool:
    """Whether there are options that only sd-scripts or its GUIs have, or the one that it always needs."""
    return any(
        each.name == "network_module" or each.name in KOHYA_OPTIONS or each.name in GUI_KEYS for each in settings
    )


def has_kohya_objective(settings: Collection[RawSetting]) -> bool:
    """Whether options of the objective that are not set get sd-scripts' defaults.

    The network modules of adapter types that this program has under the same names tell nothing.  Flags such as
    ``--sdpa`` and ``--fp8_base`` tell something beside a network module only, which commands of sd-scripts need.
    """
    has_module = any(each.name == "network_module" for each in settings)
    others = [each for each in settings if each.name != "network_module" or get_toml_value(each) not in SHARED_MODULES]
    return is_from_kohya([each for each in others if has_module or not each.is_flag])


def explain_ignored_key(name: str, known_names: Collection[str]) -> str | None:
    """Say that sd-scripts does not know a key of its run file either; None for what looks like a typing error."""
    near = get_close_matches(name.lower(), known_names, n=1, cutoff=0.88)
    if near and abs(len(near[0]) - len(name)) <= 2:
        return None
    hint = KEYS_OF_OTHER_FILES.get(name) or suggest_name(name, known_names, cutoff=0.8).removeprefix("; ")
    return f"unknown key; {hint}" if hint else "unknown key"


def take_unchecked_value(setting: RawSetting, samplers: Collection[str]) -> tuple[Any, str]:
    """Return a value of a run file as sd-scripts takes it, which checks none, and what there is to say about it.

    None leaves the option unset.
    """
    name, value = setting.name, setting.value
    if name == "max_token_length" and str(value).isdecimal() and int(value) > 75 and int(value) % 75:
        length = int(value) // 75 * 75
        return length, f"{value} means {length}, as in sd-scripts: captions are encoded in chunks of 75 tokens"
    if name == "max_train_epochs" and value == 0 and not isinstance(value, bool):
        return None, "0 is not set; max_train_steps counts"
    if name == "sample_sampler" and isinstance(value, str) and value and value not in samplers:
        return None, f"no sampler {value!r}; previews use ddim"
    return value, ""


def find_no_effect(setting: RawSetting, verdicts: Mapping[str, OptionVerdict] = KOHYA_OPTIONS) -> str | None:
    """Return why an option that is not ours cannot change the result; an empty string where that needs no words."""
    verdict = verdicts.get(setting.name)
    if isinstance(verdict, NoEffectOption):
        return verdict.reason if verdict.is_explained else ""
    if isinstance(verdict, OtherScriptOption) and not setting.is_flag and not verdict.accepts(setting.value):
        return verdict.reason
    if setting.name == "dynamo_backend":
        backend = str(setting.value[0] if setting.is_flag else setting.value).lower()
        if backend == "no" and not setting.is_flag:
            return "nothing is compiled"
        if backend == "ipex":
            return "accelerate has no such backend; torch_compile uses inductor"
    if setting.name in GUI_KEYS and not setting.is_flag:
        value = setting.value if setting.name == "additional_parameters" else None
        return f"the GUI adds it to the command line: {_mask_secrets(str(value))}" if value else ""
    return None


def _mask_secrets(command: str) -> str:
    names = "|".join(name for name, verdict in KOHYA_OPTIONS.items() if isinstance(verdict, SecretOption))
    return re.sub(rf"(--(?:{names})[= ]\s*)\S+", r"\1...", command)


def read_secret(setting: RawSetting, variable: str, notices: list[str]) -> dict[str, str]:
    """Return the environment variable of a key or token; its value is in no message."""
    value = setting.value if not setting.is_flag else setting.value[0] if len(setting.value) == 1 else None
    if value in ("", False):
        return {}
    if not isinstance(value, str):
        raise ValueError("expects one value" if setting.is_flag else "expected text in quotes")
    if setting.is_flag:
        notices.append(
            f"{setting.place}: flags appear in process lists and shell histories; set {variable}, or write it in the"
            " run file"
        )
    return {variable: value.strip()}


def rename_kohya_value(setting: RawSetting, names: Mapping[Any, str]) -> RawSetting:
    """Replace a value that sd-scripts spells in another way, or in capitals."""
    words = setting.value if setting.is_flag else [setting.value]
    words = [names.get(word.lower(), word.lower()) if isinstance(word, str) else word for word in words]
    return replace(setting, value=words if setting.is_flag else words[0])


def get_toml_value(setting: RawSetting) -> Any:
    """Return the value as TOML would have it: a flag without a value is true, a number in a flag is a number."""
    if not setting.is_flag:
        return setting.value
    if not setting.value:
        return True
    try:
        return float(setting.value[0])
    except ValueError:
        return setting.value[0]
