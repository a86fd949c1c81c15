"""Which family a model belongs to, read from its small JSON files, and why; loads no weights and no torch."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import FAMILIES

_OPTION = "pretrained_model_name_or_path"
_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


@dataclass(frozen=True)
class Detected:
    """What can be known of a model before it is loaded."""

    family: str
    reason: str
    pixel_step: int  # sides of training pictures are multiples of this


def detect(source: str | None, family: str | None = None) -> Detected:
    """Find the family of a diffusers folder or hub id; a named family is taken as right.

    Without a source it is the built-in model.
    """
    if source is None:
        # An eighth of the size by the VAE and a half by the UNet, against an eighth more in the real ones.
        found = Detected("sd1", "no model is named, so the built-in one is used", pixel_step=16)
    else:
        found = _read(source, _reader(source), family)
    if family not in (None, found.family):
        FAMILIES.get(str(family))
        raise ConfigError([f"family: {family!r} is asked for, but it is {found.family!r}: {found.reason}"])
    return found


def _read(source: str, read: "Reader", family: str | None) -> Detected:
    index = read("model_index.json")
    if index is None:
        raise ConfigError([f"{_OPTION}: {source}: no model_index.json in it, so it is no diffusers model; "
                           "name the folder that has one"])  # fmt: skip
    name = index.get("_class_name")
    if name != "StableDiffusionPipeline":
        raise ConfigError([f"{_OPTION}: {source}: its model_index.json says {name}; not yet: this version trains "
                           "Stable Diffusion 1 (StableDiffusionPipeline)"])  # fmt: skip
    unet, vae = read("unet/config.json"), read("vae/config.json")
    if unet is None or vae is None:
        missing = "unet/config.json" if unet is None else "vae/config.json"
        raise ConfigError([f"{_OPTION}: {source}: {missing} is missing; the model is not complete"])
    if problem := _not_sd1(index, unet):
        raise ConfigError([f"{_OPTION}: {source}: {problem}"])
    reason = f"model_index.json says {name}, the text encoder is CLIP-L"
    return Detected("sd1", reason, _shrinks(vae) * _shrinks(unet))
