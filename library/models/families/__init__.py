"""The facts of every family by its name; no torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...registry import Registry
from ..facts import FamilyFacts
from ..facts_dit import FLUX_FACTS, QWEN_IMAGE_FACTS, SD3_FACTS, Z_IMAGE_FACTS
from ..facts_unet import SD1_FACTS, SD2_FACTS, SDXL_FACTS

if TYPE_CHECKING:
    from ..base import Family

FAMILY_FACTS: Mapping[str, FamilyFacts] = {
    "sd1": SD1_FACTS,
    "sd2": SD2_FACTS,
    "sdxl": SDXL_FACTS,
    "sd3": SD3_FACTS,
    "flux": FLUX_FACTS,
    "z_image": Z_IMAGE_FACTS,
    "qwen_image": QWEN_IMAGE_FACTS,
}


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
