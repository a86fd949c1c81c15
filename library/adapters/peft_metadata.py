"""Ranks and alphas that diffusers and peft store beside the weights.

diffusers writes the settings of peft's ``LoraConfig`` to the metadata key ``lora_adapter_metadata``, with the
component in front of each name (``unet.lora_alpha``); peft writes them to ``adapter_config.json`` beside its file.
Without them alpha would be taken for the rank.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from .alpha_folding import ALPHAS_KEY, fold_alpha
from .module_adapter import ModuleAdapter
from .validate_file import join_messages

PEFT_METADATA_KEY = "lora_adapter_metadata"
PEFT_CONFIG_NAME = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
"""Prefix of the keys in files that peft itself writes."""


def read_peft_config(path: Path, keys: Iterable[str]) -> str | None:
    """The text of the settings beside a file that peft wrote; None for files of others."""
    config = path.with_name(PEFT_CONFIG_NAME)
    if not any(key.startswith(PEFT_PREFIX) for key in keys) or not config.is_file():
        return None
    try:
        return config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{config}: cannot be read: {error}") from None


BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights``, or their beginnings, with which peft changes the weights of the base model."""

UNREAD_SETTINGS: Mapping[str, object] = {
    **dict.fromkeys(("lora_bias", "fan_in_fan_out", "use_qalora", "coft", "block_share"), False),
    **dict.fromkeys(("modules_to_save", "layer_replication", "trainable_token_indices", "target_parameters"), None),
    **dict.fromkeys(
        ("alora_invocation_tokens", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"), None
    ),
    "bias": "none",
    "use_cayley_neumann": True,
    "num_cayley_neumann_terms": 5,
}
"""Settings that change what a file does, with the only value that is read: peft's default."""

_READ_TYPES = ("LORA", "LOHA", "LOKR", "OFT", "BOFT")


def find_unread_settings(values: Mapping[str, Any]) -> Iterator[str]:
    """Settings of peft with which the weights have another effect than they have alone."""
    kind, init = str(values.get("peft_type") or "LORA").rpartition(".")[2], values.get("init_lora_weights")
    if kind not in _READ_TYPES:
        yield f"peft_type {kind} is not supported"
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        yield (
            f"init_lora_weights {init} changed the base model, which the file does not have; convert it with peft's"
            " save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    for name, default in UNREAD_SETTINGS.items():
        value = values.get(name)
        if value is not None and value != default and (value or default):
            yield f"{name} = {str(value)[:60]} is not supported"


@dataclass(frozen=True)
class PeftSettings:
    """The settings of one component."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool = False

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "PeftSettings":
        rank = int(values["r"])
        alpha = values.get("lora_alpha", values.get("alpha"))
        settings = cls(
            rank=rank,
            alpha=float(rank if alpha is None else alpha),
            rank_pattern={str(key): int(value) for key, value in (values.get("rank_pattern") or {}).items()},
            alpha_pattern={str(key): float(value) for key, value in (values.get("alpha_pattern") or {}).items()},
            use_rslora=bool(values.get("use_rslora")),
            use_dora=bool(values.get("use_dora")),
        )
        for pattern in (*settings.rank_pattern, *settings.alpha_pattern):
            re.compile(pattern)
        numbers = (rank, settings.alpha, *settings.rank_pattern.values(), *settings.alpha_pattern.values())
        if not all(math.isfinite(number) and number for number in numbers):
            raise ValueError("a rank or alpha of 0, NaN or infinity")
        return settings

    def get_rank(self, module: str) -> int:
        return int(_get_by_pattern(self.rank_pattern, module, self.rank))

    def get_alpha(self, module: str) -> float:
        """The alpha that scales the update by alpha / rank, also with rank stabilization."""
        alpha = float(_get_by_pattern(self.alpha_pattern, module, self.alpha))
        return alpha * self.get_rank(module) ** 0.5 if self.use_rslora else alpha


def _get_by_pattern(values: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that matches the end of a name, as peft looks it up."""
    return next((value for pattern, value in values.items() if _matches(pattern, module)), default)


def _matches(pattern: str, module: str) -> bool:
    """Names of text encoders in files begin with text_model, which transformers 5 no longer has."""
    names = {module, module if module.startswith("text_model.") else f"text_model.{module}"}
    return any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)


def parse_peft_settings(text: str, components: Iterable[str], denoiser: str) -> dict[str, PeftSettings]:
    """The settings by component; those without a component are the denoiser's."""
    try:
        values = json.loads(text)
        settings, problems = {}, list[str]()
        for component in components:
            own = {key.removeprefix(f"{component}."): each for key, each in values.items() if _is_of(key, component)}
            if "r" in own:
                problems += find_unread_settings(own)
                settings[component] = PeftSettings.from_values(own)
        if not settings and values.get("r") is not None:
            problems += find_unread_settings(values)
            settings[denoiser] = PeftSettings.from_values(values)
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, re.error):
        raise UserError(f"{PEFT_METADATA_KEY} or {PEFT_CONFIG_NAME} is no valid LoRA config: {text[:60]!r}") from None
    if problems:
        raise UserError(f"{PEFT_METADATA_KEY} or {PEFT_CONFIG_NAME}: {join_messages(dict.fromkeys(problems))}")
    return settings


def _is_of(key: str, component: str) -> bool:
    return key.startswith(f"{component}.")


def apply_peft_alphas(
    updates: Mapping[str, ModuleAdapter],
    modules_with_alpha: Iterable[str],
    metadata: Mapping[str, str],
    components: Iterable[str],
    denoiser: str,
) -> dict[str, ModuleAdapter]:
    """Set the alphas of the metadata, except where the file itself has one."""
    text = metadata.get(PEFT_METADATA_KEY)
    if text is None or ALPHAS_KEY in metadata:
        return dict(updates)
    settings, excluded = parse_peft_settings(text, components, denoiser), set(modules_with_alpha)
    changed = {}
    for name, update in updates.items():
        component, _, module = name.partition(".")
        own = settings.get(component)
        changed[name] = update if own is None or name in excluded else _apply_settings(name, module, update, own)
    return changed


def _apply_settings(name: str, module: str, update: ModuleAdapter, settings: PeftSettings) -> ModuleAdapter:
    if update.adapter_type == "lokr" and {"lokr_w1", "lokr_w2"} <= update.tensors.keys():
        # peft scales two full matrices, too; no other program does, so the scale is multiplied in.
        scale = settings.get_alpha(module) / settings.get_rank(module)
        return fold_alpha(replace(update, alpha=scale))
    if update.adapter_type not in ("lora", "dora", "input-dora", "loha", "lokr"):
        return update
    if settings.use_dora and update.adapter_type == "lora":
        raise UserError(
            f"{name} has no DoRA magnitudes, but its {PEFT_METADATA_KEY} or {PEFT_CONFIG_NAME} says use_dora"
        )
    if update.rank != settings.get_rank(module):
        raise UserError(
            f"{name} has rank {update.rank}, but its {PEFT_METADATA_KEY} or {PEFT_CONFIG_NAME} says"
            f" {settings.get_rank(module)}; it belongs to another file"
        )
    return replace(update, alpha=settings.get_alpha(module))
