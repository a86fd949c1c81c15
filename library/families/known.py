"""The facts of every family by its name; no torch."""

from collections.abc import Mapping

from .facts import Facts
from .flow_facts import FLUX, QWEN_IMAGE, SD3, Z_IMAGE
from .unet_facts import SD1, SD2, SDXL

FACTS: Mapping[str, Facts] = {
    "sd1": SD1,
    "sd2": SD2,
    "sdxl": SDXL,
    "sd3": SD3,
    "flux": FLUX,
    "z_image": Z_IMAGE,
    "qwen_image": QWEN_IMAGE,
}
