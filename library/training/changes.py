"""What is different from when a state was saved, and what of it the result depends on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..config import RunConfig
from ..config.options import flatten_config, iter_options

RESULT_NEUTRAL_GROUPS = {
    "distributed",
    "sharding",
    "parallel",
    "deepspeed",
    "save",
    "state",
    "preview",
    "validate",
    "log",
    "cache",
}
"""Where and how the work is done, what is written and told."""
RESULT_NEUTRAL_OPTIONS = {
    *("max_train_steps", "max_train_epochs", "gradient_checkpointing", "max_bad_steps", "on_oom", "dry_run"),
    *(
        "gradient_checkpointing_every",
        "gradient_checkpointing_budget",
        "cpu_offload_checkpointing",
        "blocks_to_swap",
        "profile_steps",
    ),
    *("max_data_loader_n_workers", "prefetch_factor", "on_bad_data", "max_bad_samples"),
    # batch and pictures are compared themselves, wherever they come from
    *("gradient_accumulation_steps", "train_batch_size", "dataset_config"),
    # so is the model, wherever its files lie
    *("pretrained_model_name_or_path", "family", "v2", "vae", "clip_l", "clip_g", "t5xxl", "text_encoder", "ae"),
    "tokenizer_cache_dir",
}
"""Settings of the other groups that change nothing in the result, or are seen in another way."""
COMPARED_METADATA = {"model": "the model", "data": "the pictures, captions or their settings", "batch": "pictures in a step"}
"""Facts of a state beside the settings."""


@dataclass(frozen=True)
class SettingChange:
    """Something that is another one now."""

    name: str
    old: Any
    new: Any
    changes_result: bool  # to the result

    def __str__(self) -> str:
        if self.name in ("model", "data"):
            return f"{COMPARED_METADATA[self.name]} changed"
        return f"{COMPARED_METADATA.get(self.name, self.name)}: {_format_value(self.old)} -> {_format_value(self.new)}"


def serialize_settings(config: RunConfig) -> dict[str, Any]:
    """Every option as JSON can hold it."""
    return {name: value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
            for name, value in flatten_config(config).items()}  # fmt: skip


def find_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[SettingChange]:
    """From the facts of a state to those of the run that is to go on."""
    for what in COMPARED_METADATA:
        if saved[what] != current[what]:
            yield SettingChange(what, saved[what], current[what], changes_result=True)
    groups = {option.name: option.group for option in iter_options(RunConfig)}
    defaults = {option.name: option.default for option in iter_options(RunConfig)}
    for name, new in current["settings"].items():
        old = saved["settings"].get(name, defaults[name])  # an option that is younger than the state
        if old != new and groups[name] != "state":
            yield SettingChange(name, old, new, changes_result=groups[name] not in RESULT_NEUTRAL_GROUPS and name not in RESULT_NEUTRAL_OPTIONS)


def _format_value(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
