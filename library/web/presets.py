"""Starting points of a new run by model family and memory of the GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..models.families import FAMILY_FACTS

CACHES = {"cache_latents": True, "gradient_checkpointing": True}
TEXT_CACHES = {"cache_text_encoder_outputs": True, "network_train_unet_only": True}
SMALL_OPTIMIZER = {"optimizer_type": "AdamW8bit"}


@dataclass(frozen=True)
class FamilyPreset:
    """Settings that suit a family, and for each memory size in GB what makes it fit."""

    title: str
    model: str
    settings: Mapping[str, Any]
    by_memory: Mapping[int, Mapping[str, Any]]

    def build_values(self, memory: int) -> dict[str, Any]:
        model = {"pretrained_model_name_or_path": self.model} if self.model else {}
        precision = {"mixed_precision": "bf16"} if memory else {}
        return {**model, **self.settings, **precision, **self.by_memory[memory], "save_state": True}


SIZES = (8, 12, 16, 24, 48, 80)
GIGABYTES_PER_BILLION = {"none": 2.0, "fp8": 1.05, "nf4": 0.56}
ROOM_GIGABYTES = 4.0
"""The memory of activations of one image of 1024 pixels, with gradient checkpointing, the adapter and its optimizer."""


def _suggest_savings(billions: float) -> dict[int, Mapping[str, Any]]:
    """Choose for each memory size the least quantization with which a denoiser fits, up to the size that needs none."""
    savings: dict[int, Mapping[str, Any]] = {}
    for memory in SIZES:
        fitting = (kind for kind, size in GIGABYTES_PER_BILLION.items() if billions * size + ROOM_GIGABYTES <= memory)
        if kind := next(fitting, None):
            savings[memory] = CACHES | TEXT_CACHES if kind == "none" else _quantize(kind)
            if kind == "none":
                break
    return savings


def _build_preset(title: str, model: str, billions: float) -> FamilyPreset:
    settings = {"network_dim": "16", "network_alpha": "16", "learning_rate": "1e-4", "max_train_steps": "1500"}
    return FamilyPreset(title, model, settings, _suggest_savings(billions))


def _quantize(kind: str, **more: Any) -> dict[str, Any]:
    return {**CACHES, **TEXT_CACHES, "quantize_base": kind, **more}


CHOSEN_PRESETS: Mapping[str, FamilyPreset] = {
    "demo": FamilyPreset(
        "Demo model (CPU)",
        "",
        {"network_dim": "16", "network_alpha": "16", "network_train_unet_only": True, "learning_rate": "0.003"}
        | {"lr_scheduler": "cosine", "lr_warmup_steps": "5%", "max_train_steps": "300", "seed": "1"},
        {0: {}},
    ),
    "sd1": FamilyPreset(
        "Stable Diffusion 1.5",
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        {"network_dim": "16", "network_alpha": "8", "learning_rate": "1e-4", "max_train_steps": "1500"},
        {6: CACHES | TEXT_CACHES, 8: CACHES, 12: {"cache_latents": True}, 24: {"cache_latents": True}},
    ),
    "sdxl": FamilyPreset(
        "Stable Diffusion XL",
        "stabilityai/stable-diffusion-xl-base-1.0",
        {"network_dim": "16", "network_alpha": "8", "learning_rate": "1e-4", "max_train_steps": "1500"},
        {
            8: _quantize("fp8"),
            12: CACHES | TEXT_CACHES,
            16: CACHES | TEXT_CACHES,
            24: CACHES | TEXT_CACHES,
        },
    ),
    "sd3": FamilyPreset(
        "Stable Diffusion 3.5 medium",
        "stabilityai/stable-diffusion-3.5-medium",
        {"network_dim": "16", "network_alpha": "16", "learning_rate": "1e-4", "max_train_steps": "1500"},
        {8: _quantize("fp8"), 12: CACHES | TEXT_CACHES, 16: CACHES | TEXT_CACHES, 24: CACHES | TEXT_CACHES},
    ),
    "flux": FamilyPreset(
        "FLUX.1 dev",
        "black-forest-labs/FLUX.1-dev",
        {"network_dim": "16", "network_alpha": "16", "learning_rate": "1e-4", "max_train_steps": "1500"},
        {
            12: _quantize("nf4", **SMALL_OPTIMIZER),
            16: _quantize("nf4"),
            24: _quantize("fp8"),
            48: CACHES | TEXT_CACHES,
        },
    ),
    "flux2_klein_4b": _build_preset("FLUX.2 klein 4B", "black-forest-labs/FLUX.2-klein-base-4B", 3.9),
    "flux2_klein": _build_preset("FLUX.2 klein 9B", "black-forest-labs/FLUX.2-klein-base-9B", 9.1),
}
"""Starting points of models for which more is known than their size; those of all other families follow."""

PRESETS: Mapping[str, FamilyPreset] = {
    **CHOSEN_PRESETS,
    **{
        name: _build_preset(facts.title, facts.pipeline.hub_id, facts.pipeline.num_parameters / 1e9)
        for name, facts in FAMILY_FACTS.items()
        if facts.pipeline.hub_id and name not in CHOSEN_PRESETS
    },
}
"""The memory estimate of the plan says whether a run fits; these are where to begin."""


def list_presets() -> list[dict[str, Any]]:
    """List all presets for the page, with their values."""
    return [
        {
            "name": f"{preset.title}, {memory} GB" if memory else preset.title,
            "values": preset.build_values(memory),
        }
        for preset in PRESETS.values()
        for memory in preset.by_memory
    ]
