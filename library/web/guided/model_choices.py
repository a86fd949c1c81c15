"""The models that a LoRA can be made for: the built-in one, those on this machine, and those of the hub."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...models.detect import detect_model
from ...models.families import FAMILY_FACTS
from ...models.model_configs import list_cached_models
from ..folders import OpenedFolders
from ..lora_pages import find_models
from ..presets import PRESETS, FamilyPreset
from .family_pictures import ModelPicture, build_picture, describe_parameters
from .plain_words import describe_family

DEMO = "demo"
DEMO_PICTURE = ModelPicture(False, 0, 96, 96, 3_984_068)
DEMO_BUCKETS = {"resolution": "96", "min_bucket_reso": "64", "max_bucket_reso": "128", "bucket_reso_steps": "16"}
"""The sizes of pictures that the demo model knows."""

SMALL_FAMILIES = ("sd1", "sd2")
DEFAULT_RESOLUTION, SMALL_RESOLUTION = "1024", "512"

BEYOND_CLICKS = ("edit",)
"""Kinds of models that need pairs of pictures, which the five steps do not collect."""

CHECKPOINT_BYTES = 50 * 2**20
"""Files below this size hold a part of a model, or none."""


@dataclass(frozen=True)
class ModelChoice:
    """One model in the list."""

    id: str
    title: str
    sentence: str
    family: str
    place: str
    """``built in``, ``here`` (a file or folder), ``cache`` (of the hub) or ``hub``."""
    where: str = ""
    size: int = 0
    facts: str = ""
    number: str = ""
    """The number that is filled into ``facts``."""
    family_title: str = ""
    """The name of the family, if the title is that of a file or folder."""
    picture: ModelPicture | None = None
    is_usable: bool = True

    def export_json(self) -> dict[str, Any]:
        return asdict(self)


def list_choices(folders: OpenedFolders) -> list[ModelChoice]:
    """List all models: the built-in one first, then what is on this machine, then families of the hub."""
    return [build_demo_choice(), *_iter_local_models(folders), *_iter_cached_models(), *_iter_hub_models()]


def build_demo_choice() -> ModelChoice:
    """Build the choice of the model that comes with the program, with which every LoRA begins."""
    sentence = "A tiny model that comes with the program and draws emoji: try all five steps with it in a few minutes."
    facts = "no card and no download needed"
    return ModelChoice(DEMO, "Demo model", sentence, DEMO, "built in", facts=facts, picture=DEMO_PICTURE)


def _iter_local_models(folders: OpenedFolders) -> Iterator[ModelChoice]:
    for path in find_models(folders):
        size = _measure_size(path)
        if path.is_dir() or size >= CHECKPOINT_BYTES:
            yield _detect_choice(str(path), path.name, f"path:{folders.make_key(path)}", "here", size)


def _iter_cached_models() -> Iterator[ModelChoice]:
    for name, size in list_cached_models():
        yield _detect_choice(name, name, f"hub:{name}", "cache", size)


def _detect_choice(model: str, title: str, identity: str, place: str, size: int) -> ModelChoice:
    try:
        family = detect_model(model).family
    except (UserError, OSError) as error:
        reason = str(error.problems[0]) if isinstance(error, UserError) and error.problems else str(error)
        return ModelChoice(identity, title, reason, "", place, where=model, size=size, is_usable=False)
    facts = FAMILY_FACTS.get(family)
    choice = ModelChoice(identity, title, "", family, place, where=model, size=size)
    if facts is None:
        return choice
    sentence, picture = describe_family(family, facts), build_picture(facts)
    return replace(choice, sentence=sentence, family_title=facts.title, picture=picture)


def _iter_hub_models() -> Iterator[ModelChoice]:
    cached = {name for name, _ in list_cached_models()}
    for name, preset in PRESETS.items():
        facts = FAMILY_FACTS.get(name) or FAMILY_FACTS.get("flux2_klein")
        if name == DEMO or facts is None or not preset.model or preset.model in cached:
            continue
        if facts.pipeline.kind in BEYOND_CLICKS:
            continue
        family = name if name in FAMILY_FACTS else "flux2_klein"
        choice = ModelChoice(f"hub:{preset.model}", preset.title, describe_family(family, facts), family, "hub")
        size, number = describe_parameters(preset.num_parameters)
        picture = build_picture(facts, preset.num_parameters)
        yield replace(choice, where=preset.model, facts=size, number=number, picture=picture)


def _measure_size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def build_model_values(choice: ModelChoice, memory: str = "") -> dict[str, Any]:
    """Build the settings with which a LoRA of a model begins; ``memory`` is that of the card, if there is one."""
    preset = PRESETS.get(choice.family) or FamilyPreset(choice.title, "", PRESETS["sd1"].settings)
    values = {**preset.build_values(), "seed": "1", "enable_bucket": True}
    values.pop("pretrained_model_name_or_path", None)
    if choice.family == DEMO:
        return values | DEMO_BUCKETS | {"train_batch_size": "8", "save_every_n_steps": "100"}
    values |= {"pretrained_model_name_or_path": choice.where, "save_every_n_steps": "500", "train_batch_size": "1"}
    values["resolution"] = _choose_resolution(choice.family)
    if memory:
        values["gpu_memory"] = memory
    return values


def _choose_resolution(family: str) -> str:
    facts = FAMILY_FACTS.get(family)
    is_small = family.startswith(SMALL_FAMILIES) or (facts is not None and facts.pipeline.kind == "video")
    return SMALL_RESOLUTION if is_small else DEFAULT_RESOLUTION


def find_choice(folders: OpenedFolders, identity: str) -> ModelChoice:
    """Return the model of an id."""
    choices: Mapping[str, ModelChoice] = {each.id: each for each in list_choices(folders)}
    if identity not in choices:
        raise UserError("this model is no longer there; reload the page")
    return choices[identity]
