"""The model families by name: ``FAMILY_FACTS`` (no torch) and the ``FAMILIES`` registry of classes, imported lazily.

How to add a family, say ``foo``:

1. ``families/foo.py``: a subclass of ``models.base.Family`` that wraps the diffusers pipeline (copy the nearest one).
2. Its ``FOO_FACTS`` in ``facts_unet.py`` or ``facts_dit.py``: how the model is detected, its components and options.
3. The import of the facts, and one line each in ``FAMILY_FACTS`` and ``FAMILIES`` below.
4. ``configs/foo.json`` and ``configs/foo_tiny.json``: the JSON files of the published model, and of a tiny one.
5. A tiny pipeline in ``tests/support/tiny_pipelines.py``; ``tests/contract/test_family_contract.py`` then compares
   the family with diffusers' own pipeline.

A family outside of this package needs 1 and 2 only: ``--family package.module:Class``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...registry import Registry
from ..facts import FamilyFacts
from ..facts_dit import FLUX_FACTS, QWEN_IMAGE_FACTS, SD3_FACTS, Z_IMAGE_FACTS
from ..facts_unet import SD1_FACTS, SD2_FACTS, SDXL_FACTS

if TYPE_CHECKING:
    from ..base import Family

FAMILY_FACTS: Mapping[str, FamilyFacts] = {
    facts.name: facts
    for facts in (SD1_FACTS, SD2_FACTS, SDXL_FACTS, SD3_FACTS, FLUX_FACTS, Z_IMAGE_FACTS, QWEN_IMAGE_FACTS)
}

FAMILIES: "Registry[type[Family]]" = Registry(
    "model family",
    __package__,
    {
        "sd1": ".sd1_sd2:StableDiffusion1",
        "sd2": ".sd1_sd2:StableDiffusion2",
        "sdxl": ".sdxl:StableDiffusionXL",
        "sd3": ".sd3:StableDiffusion3",
        "flux": ".flux:Flux",
        "z_image": ".z_image:ZImage",
        "qwen_image": ".qwen_image:QwenImage",
    },
)
