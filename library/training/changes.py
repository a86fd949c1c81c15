"""What is different from when a state was saved, and what of it the result depends on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..config import RunConfig
from ..config.options import flat, options_of

FREE_GROUPS = {
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
FREE = {
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
COMPARED = {"model": "the model", "data": "the pictures, captions or their settings", "batch": "pictures in a step"}
"""Facts of a state beside the settings."""


@dataclass(frozen=True)
class Change:
    """Something that is another one now."""

    what: str
    old: Any
    new: Any
    matters: bool  # to the result

    def __str__(self) -> str:
        if self.what in ("model", "data"):
            return f"{COMPARED[self.what]} changed"
        return f"{COMPARED.get(self.what, self.what)}: {_shown(self.old)} -> {_shown(self.new)}"


def plain_settings(config: RunConfig) -> dict[str, Any]:
    """Every option as JSON can hold it."""
    return {name: value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
            for name, value in flat(config).items()}  # fmt: skip


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """From the facts of a state to those of the run that is to go on."""
    for what in COMPARED:
        if saved[what] != now[what]:
            yield Change(what, saved[what], now[what], matters=True)
    groups = {option.name: option.group for option in options_of(RunConfig)}
    defaults = {option.name: option.default for option in options_of(RunConfig)}
    for name, new in now["settings"].items():
        old = saved["settings"].get(name, defaults[name])  # an option that is younger than the state
        if old != new and groups[name] != "state":
            yield Change(name, old, new, matters=groups[name] not in FREE_GROUPS and name not in FREE)


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
