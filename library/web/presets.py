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
    "flux_kontext": _build_preset("FLUX.1 Kontext", "black-forest-labs/FLUX.1-Kontext-dev", 11.9),
    "chroma": _build_preset("Chroma", "lodestones/Chroma1-HD", 8.9),
    "flux2_klein_4b": _build_preset("FLUX.2 klein 4B", "black-forest-labs/FLUX.2-klein-base-4B", 3.9),
    "flux2_klein": _build_preset("FLUX.2 klein 9B", "black-forest-labs/FLUX.2-klein-base-9B", 9.1),
    "flux2_dev": _build_preset("FLUX.2 dev", "black-forest-labs/FLUX.2-dev", 32.2),
    "z_image": _build_preset("Z-Image", "Tongyi-MAI/Z-Image-Turbo", 6.15),
    "qwen_image": _build_preset("Qwen-Image", "Qwen/Qwen-Image", 20.4),
    "qwen_image21": _build_preset("Qwen-Image 2.1", "Qwen/Qwen-Image-2.1", 7.1),
    "qwen_image_edit": _build_preset("Qwen-Image-Edit", "Qwen/Qwen-Image-Edit", 20.4),
    "qwen_image_edit_plus": _build_preset("Qwen-Image-Edit-Plus", "Qwen/Qwen-Image-Edit-2509", 20.4),
    "aura_flow": _build_preset("AuraFlow", "fal/AuraFlow-v0.3", 6.9),
    "ovis_image": _build_preset("Ovis-Image", "AIDC-AI/Ovis-Image-7B", 7.4),
    "longcat_image": _build_preset("LongCat-Image", "meituan-longcat/LongCat-Image", 6.3),
    "longcat_image_edit": _build_preset("LongCat-Image-Edit", "meituan-longcat/LongCat-Image-Edit", 6.3),
    "ernie_image": _build_preset("ERNIE-Image", "baidu/ERNIE-Image", 8.0),
    "lumina2": _build_preset("Lumina-Image 2.0", "Alpha-VLLM/Lumina-Image-2.0", 2.6),
    "krea2": _build_preset("Krea 2", "krea/Krea-2-Raw", 12.8),
    "sana": _build_preset("Sana", "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers", 1.6),
    "cogview4": _build_preset("CogView4", "THUDM/CogView4-6B", 6.4),
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
