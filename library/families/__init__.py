"""Model families: one file each, loaded only when chosen."""

from typing import TYPE_CHECKING

from ..registry import Registry

if TYPE_CHECKING:
    from .base import Family

FAMILIES: "Registry[type[Family]]" = Registry(
    "model family",
    __package__,
    {
        "sd1": ".sd1:StableDiffusion1",
        "sd2": ".sd2:StableDiffusion2",
        "sdxl": ".sdxl:StableDiffusionXL",
        "sd3": ".sd3:StableDiffusion3",
        "flux": ".flux:Flux",
        "z_image": ".z_image:ZImage",
        "qwen_image": ".qwen_image:QwenImage",
    },
)
