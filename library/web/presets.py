"""Starting points of a new run by model family and memory of the GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def _quantize(kind: str, **more: Any) -> dict[str, Any]:
    return {**CACHES, **TEXT_CACHES, "quantize_base": kind, **more}


PRESETS: Mapping[str, FamilyPreset] = {
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
    "z_image": FamilyPreset(
        "Z-Image",
        "Tongyi-MAI/Z-Image-Turbo",
        {"network_dim": "16", "network_alpha": "16", "learning_rate": "1e-4", "max_train_steps": "1500"},
        {8: _quantize("nf4"), 12: _quantize("fp8"), 16: _quantize("fp8"), 24: CACHES | TEXT_CACHES},
    ),
    "qwen_image": FamilyPreset(
        "Qwen-Image",
        "Qwen/Qwen-Image",
        {"network_dim": "16", "network_alpha": "16", "learning_rate": "1e-4", "max_train_steps": "1500"},
        {16: _quantize("nf4", **SMALL_OPTIMIZER), 24: _quantize("nf4"), 48: _quantize("fp8"), 80: CACHES | TEXT_CACHES},
    ),
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
