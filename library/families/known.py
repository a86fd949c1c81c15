"""The facts of every family by its name; no torch."""

from collections.abc import Mapping

from .facts import FamilyFacts
from .flow_facts import FLUX_FACTS, QWEN_IMAGE_FACTS, SD3_FACTS, Z_IMAGE_FACTS
from .unet_facts import SD1_FACTS, SD2_FACTS, SDXL_FACTS

FAMILY_FACTS: Mapping[str, FamilyFacts] = {
    "sd1": SD1_FACTS,
    "sd2": SD2_FACTS,
    "sdxl": SDXL_FACTS,
    "sd3": SD3_FACTS,
    "flux": FLUX_FACTS,
    "z_image": Z_IMAGE_FACTS,
    "qwen_image": QWEN_IMAGE_FACTS,
}
