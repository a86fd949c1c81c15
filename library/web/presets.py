"""Starting points of a new run by model family; ``gpu_memory`` chooses what makes it fit, when the run starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..models.families import FAMILY_FACTS

DEFAULT_MEMORY = "24GB"
"""The page puts the memory that is typed there in its place."""

CARD_MEMORIES = ("8GB", "12GB", "16GB", "24GB", "32GB", "48GB", "80GB")
"""Cards by the memory that they have."""

GROUPS: Mapping[str, str] = {"image": "Pictures", "edit": "Editing pictures", "video": "Videos"}
"""Titles of the presets by the kind of model."""


@dataclass(frozen=True)
class FamilyPreset:
    """Settings that suit a family."""

    title: str
    model: str
    settings: Mapping[str, Any]
    is_for_gpu: bool = True
    num_parameters: int = 0
    """The number of parameters of the denoiser of ``model``."""

    def build_values(self) -> dict[str, Any]:
        model = {"pretrained_model_name_or_path": self.model} if self.model else {}
        gpu = {"mixed_precision": "bf16", "gpu_memory": DEFAULT_MEMORY} if self.is_for_gpu else {}
        return {**model, **self.settings, **gpu, "save_state": True}


def _build_preset(title: str, model: str, num_parameters: int, alpha: str = "16") -> FamilyPreset:
    settings: dict[str, Any] = {
        "network_dim": "16",
        "network_alpha": alpha,
        "learning_rate": "1e-4",
        "max_train_steps": "1500",
    }
    settings |= {"network_train_unet_only": True}
    return FamilyPreset(title, model, settings, num_parameters=num_parameters)


def _count(family: str) -> int:
    return FAMILY_FACTS[family].pipeline.num_parameters


CHOSEN_PRESETS: Mapping[str, FamilyPreset] = {
    "demo": FamilyPreset(
        "Demo model (CPU)",
        "",
        {"network_dim": "16", "network_alpha": "16", "network_train_unet_only": True, "learning_rate": "0.003"}
        | {"lr_scheduler": "cosine", "lr_warmup_steps": "5%", "max_train_steps": "300", "seed": "1"},
        is_for_gpu=False,
    ),
    "sd1": _build_preset("Stable Diffusion 1.5", "stable-diffusion-v1-5/stable-diffusion-v1-5", _count("sd1"), "8"),
    "sdxl": _build_preset("Stable Diffusion XL", "stabilityai/stable-diffusion-xl-base-1.0", _count("sdxl"), "8"),
    "sd3": _build_preset("Stable Diffusion 3.5 medium", "stabilityai/stable-diffusion-3.5-medium", 2_243_171_520),
    "flux": _build_preset("FLUX.1 dev", "black-forest-labs/FLUX.1-dev", _count("flux")),
    "flux2_klein_4b": _build_preset("FLUX.2 klein 4B", "black-forest-labs/FLUX.2-klein-base-4B", 3_875_544_576),
    "flux2_klein": _build_preset("FLUX.2 klein 9B", "black-forest-labs/FLUX.2-klein-base-9B", _count("flux2_klein")),
}
"""Starting points of models for which more is known; those of all other families follow."""

SMALLER_MODELS: Mapping[str, int] = {
    **{"wan": 1_418_996_800, "wan_vace": 2_153_972_032},
    **dict.fromkeys(("kandinsky5_video", "kandinsky5_i2v"), 2_007_702_848),
    "kandinsky6_video": 3_176_632_424,
    **{"cosmos2_text2image": 1_956_405_248, "cosmos2_video2world": 1_956_413_440},
}
"""The parameters of presets that are not the largest model of their family."""

PRESETS: Mapping[str, FamilyPreset] = {
    **CHOSEN_PRESETS,
    **{
        name: _build_preset(facts.title, facts.pipeline.hub_id, SMALLER_MODELS.get(name) or _count(name))
        for name, facts in FAMILY_FACTS.items()
        if facts.pipeline.hub_id and name not in CHOSEN_PRESETS
    },
}


def list_presets() -> list[dict[str, Any]]:
    """List all presets for the page, with their values."""
    return [
        {"name": preset.title, "group": _find_group(name), "values": preset.build_values()}
        for name, preset in PRESETS.items()
    ]


def _find_group(name: str) -> str:
    """Return the kind of model as the title of a group: what it makes."""
    facts = FAMILY_FACTS.get(name) or FAMILY_FACTS.get(name.rpartition("_")[0])
    return GROUPS[facts.pipeline.kind] if facts is not None and name != "demo" else "To try it"
