"""Which family a model belongs to, and why, read from its small JSON files or the header of its single file.

Loads no weights and no torch, so that a wrong model is told before anything slow begins.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..config.schema import ModelConfig
from ..demo import built_in
from ..errors import ConfigError
from ..registry import did_you_mean
from . import FAMILIES
from .configs import names, names_of, read_config
from .contents import config_for, is_denoiser_of, parts_in, pieces_in, refuse_odd_sizes, refuse_others, said
from .facts import Facts, Look
from .header import Header, read_header
from .known import FACTS
from .reading import Problem, Reader, from_config, from_folder, from_hub, needed
from .separate import Separate, separate

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

Kind = Literal["folder", "hub", "file", "random"]


@dataclass(frozen=True)
class Detected:
    """What can be known of a model before it is loaded; ``Family.load`` takes it."""

    family: str
    reason: str
    pixel_step: int
    """Sides of training pictures are multiples of this."""
    prediction: str = "epsilon"
    """What the model was made to predict: ``epsilon``, ``v`` or ``flow``."""
    is_guided: bool = False
    """Whether the denoiser is told how strong the guidance is to be."""
    kind: Kind = "folder"
    place: str = ""
    """The folder, hub id or file."""
    config: str | None = None
    """Name of the shipped configuration, for a single file and for random weights."""
    inside: tuple[str, ...] = ()
    """Parts whose weights are in a single file."""
    separate: Mapping[str, Separate] = field(default_factory=dict)
    """Parts that come from files of their own."""
    scheduler: Mapping[str, object] = field(default_factory=dict)
    """Settings in the place of those of the model's scheduler."""


def detect(model: ModelConfig | str | None) -> Detected:
    """Look at a model; a path or hub id alone is enough, and None is the built-in model."""
    if not isinstance(model, ModelConfig):
        model = ModelConfig(pretrained_model_name_or_path=model)
    if model.pretrained_model_name_or_path is None and model.family is None:
        found = _built_in()
    else:
        try:
            found = _detected(model)
        except Problem as problem:
            place = model.pretrained_model_name_or_path
            raise ConfigError([f"pretrained_model_name_or_path: {place}: {problem}"]) from None
    return _with_options(found, model)


def facts_of(family: str) -> Facts:
    """The facts of a family by its name, or of the user's own ``package.module:Class``."""
    if family in FACTS:
        return FACTS[family]
    try:
        facts = getattr(FAMILIES.get(family), "facts", None)
    except ConfigError as error:
        raise ConfigError([f"family: {line}" for line in error.problems]) from None
    if not isinstance(facts, Facts):
        raise ConfigError([f"family: {family} is no model family; subclass library.families.base.Family"])
    return facts


def _built_in() -> Detected:
    reason = "no model is named, so the built-in one is used, which draws 64 emoji and nothing else"
    return replace(_from_json(from_folder(built_in.FOLDER), "folder", str(built_in.FOLDER), None), reason=reason)


def _detected(model: ModelConfig) -> Detected:
    place = model.pretrained_model_name_or_path
    if place is None:
        raise Problem("missing; --family is of no use without a model")
    if place.startswith("random:"):
        return _random(place, model.family)
    path = Path(place).expanduser()  # a path from a file has not been through a shell
    if path.is_dir():
        return _from_json(from_folder(path), "folder", str(path), model.family)
    if path.is_file():
        return _from_file(path, model.family)
    if _HUB_ID.fullmatch(place) and not place.endswith((".safetensors", ".ckpt")):
        return _from_json(from_hub(place), "hub", place, model.family)
    raise Problem(f"no such file or folder (looked in {path.absolute().parent}), and no hub id such as owner/name")


def _from_json(read: Reader, kind: Kind, place: str, chosen: str | None) -> Detected:
    index = read("model_index.json")
    if index is None:
        raise Problem("no model_index.json in it, so it is no diffusers model; name the folder that has one"
                      + _hint_of_part(read))  # fmt: skip
    name = index.get("_class_name")
    for family in [chosen] if chosen else [key for key, facts in FACTS.items() if facts.pipeline == name]:
        facts = facts_of(family)
        look = facts.look(read)
        if look is None:
            continue
        for part in facts.parts:
            needed(read, f"{part}/{'tokenizer_config' if part.startswith('tokenizer') else 'config'}.json")
        why = f"--family says so; model_index.json says {name}" if chosen else f"model_index.json says {name}"
        reason = f"{why}, and {look.reason}"
        return Detected(family, reason, look.pixel_step, look.prediction, look.is_guided, kind, place)
    if chosen:
        raise Problem(f"its files are not those of family {chosen}")
    raise Problem(f"its model_index.json says {name}; not yet: this version trains {_titles()}")


def _hint_of_part(read: Reader) -> str:
    config = read("config.json")
    kind = config and (config.get("_class_name") or (config.get("architectures") or [None])[0])
    return f"; this one holds only {kind}" if kind else ""


def _titles() -> str:
    return ", ".join(facts.title for facts in FACTS.values())


def _from_file(path: Path, chosen: str | None) -> Detected:
    header = read_header(path)
    refuse_others(header)
    refuse_odd_sizes(header)
    candidates = [family for family in ([chosen] if chosen else FACTS) if is_denoiser_of(header, facts_of(family))]
    for family in candidates:
        config = config_for(header, family, facts_of(family))
        if config is not None:
            return _of_file(path, header, family, config, chosen is not None)
    if candidates:
        raise Problem(f"looks like {facts_of(candidates[0]).title}, but of sizes that are not known; use the model as "
                      "a diffusers folder")  # fmt: skip
    if chosen and any(is_denoiser_of(header, facts) for facts in FACTS.values()):
        raise Problem(f"has not the weights of family {chosen}; leave --family out to see what it is")
    raise Problem(_not_a_model(header))


def _of_file(path: Path, header: Header, family: str, config: str, is_chosen: bool) -> Detected:
    facts = facts_of(family)
    look = _look(facts, from_config(read_config(config)))
    found = Detected(family, "", look.pixel_step, look.prediction, look.is_guided, "file", str(path), config,
                     parts_in(header, facts))  # fmt: skip
    told = header.metadata.get("modelspec.prediction_type", "")
    if found.prediction != "flow" and (told.startswith("v") or "v_pred" in header.shapes):
        found = _predicting(found, "v")
    elif found.prediction != "flow" and told.startswith("eps"):
        found = _predicting(found, "epsilon")
    if "ztsnr" in header.shapes:  # SDXL models by NovelAI and others are marked so
        found = replace(found, scheduler={**found.scheduler, "rescale_betas_zero_snr": True})
    why = "--family says so" if is_chosen else f"the file holds {facts.keys[-1]} with the sizes of {facts.title}"
    return replace(found, reason=f"{why} (configuration {config})")


def _look(facts: Facts, read: Reader) -> Look:
    look = facts.look(read)
    if look is None:
        raise Problem(f"its files are not those of {facts.title}")
    return look


def _not_a_model(header: Header) -> str:
    pieces = [said(piece) for piece in pieces_in(header)]
    if pieces:
        return f"is no whole model; it holds a {' and a '.join(pieces)}"
    example = next(iter(header.shapes), None)
    return f"is no model that is known; it holds {len(header.shapes)} weights, the first is {example}"


def _random(place: str, chosen: str | None) -> Detected:
    """``random:FAMILY`` has the published sizes, ``random:FAMILY:VARIANT`` those of another shipped configuration."""
    wanted = place.removeprefix("random:")
    config = wanted.replace(":", "_")
    family = wanted.partition(":")[0]
    if config not in names() or family not in FACTS:
        known = [f"random:{name}" for family in FACTS for name in (
            each.replace(f"{family}_", f"{family}:", 1) for each in names_of(family))]  # fmt: skip
        raise Problem(f"there is no such model{did_you_mean(place, known) or '; there are: ' + ', '.join(known)}")
    if chosen not in (None, family):
        raise Problem(f"is of family {family} and not {chosen}; leave --family out")
    look = _look(FACTS[family], from_config(read_config(config)))
    reason = f"{place} was asked for: random weights from the seed, in the sizes of {config}"
    return Detected(family, reason, look.pixel_step, look.prediction, look.is_guided, "random", place, config)


def _with_options(found: Detected, model: ModelConfig) -> Detected:
    """Check the options for parts and for the family, and take them in; all problems together."""
    facts, problems = facts_of(found.family), []
    pieces = {}
    for option in ("vae", "clip_l", "clip_g", "t5xxl", "ae", "text_encoder"):
        place = getattr(model, option)
        if place is None:
            continue
        part = facts.files.get(option)
        if part is None:
            problems.append(f"{option}: {facts.title} has no such part")
            continue
        try:
            pieces[part] = separate(place, part, reader_of(found))
        except Problem as problem:
            problems.append(f"{option}: {place}: {problem}")
    problems += [*_without_meaning(model, facts), *facts.refused(reader_of(found), model)]
    if found.kind == "file":
        problems += _missing(found, facts, pieces)
    if model.v2 and found.family != "sd2":
        problems.append(f"v2: the model is {facts.title}; leave this option out")
    if problems:
        raise ConfigError(problems)
    return replace(found, separate=pieces)


def _predicting(found: Detected, prediction: str) -> Detected:
    """The same model, said to predict this."""
    kinds = {"v": "v_prediction", "epsilon": "epsilon"}
    return replace(found, prediction=prediction,
                   scheduler={**found.scheduler, "prediction_type": kinds[prediction]})  # fmt: skip


def _without_meaning(model: ModelConfig, facts: Facts) -> list[str]:
    """Options that only other families have, and that are set."""
    special = {option for each in FACTS.values() for option in each.options} - set(facts.options)
    return [f"{option}: means nothing for {facts.title}; leave this option out"
            for option in sorted(special) if getattr(model, option) != getattr(ModelConfig, option)]  # fmt: skip


def _missing(found: Detected, facts: Facts, pieces: Mapping[str, Separate]) -> list[str]:
    """Parts that neither the single file nor another one has."""
    options = {part: option for option, part in facts.files.items()}
    lacks = [part for part in facts.parts
             if part not in found.inside and part not in pieces and not part.startswith("tokenizer")]  # fmt: skip
    return [f"pretrained_model_name_or_path: {found.place}: the file has no {part}"
            + (f"; name one with --{options[part]}" if part in options else "") for part in lacks]  # fmt: skip


def reader_of(found: Detected) -> Reader:
    """The JSON files of the model itself."""
    if found.config is not None:
        return from_config(read_config(found.config))
    return from_hub(found.place) if found.kind == "hub" else from_folder(Path(found.place))
