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
from ..registry import suggest_name
from .checkpoint_inspection import (
    ComponentSource,
    SafetensorsHeader,
    describe_signature,
    find_component_names,
    find_component_signatures,
    has_denoiser,
    match_bundled_config,
    read_safetensors_header,
    reject_unsupported_file,
    reject_unsupported_model,
    resolve_component_source,
)
from .facts import FamilyFacts, FamilyMatch
from .families import FAMILIES, FAMILY_FACTS
from .model_configs import (
    ConfigReader,
    ModelError,
    build_bundled_reader,
    build_folder_reader,
    build_hub_reader,
    list_bundled_configs,
    list_family_configs,
    load_bundled_config,
    read_required,
)

_REPO_ID_PATTERN = re.compile(r"\w[\w.-]*/\w[\w.-]*")


SourceType = Literal["folder", "hub", "file", "random"]


@dataclass(frozen=True)
class DetectedModel:
    """What can be known of a model before it is loaded; ``Family.load`` takes it."""

    family: str
    reason: str
    size_multiple: int
    """Sides of training pictures are multiples of this."""
    prediction_type: str = "epsilon"
    """What the model was made to predict: ``epsilon``, ``v`` or ``flow``."""
    has_guidance_embeds: bool = False
    """Whether the denoiser is told how strong the guidance is to be."""
    source_type: SourceType = "folder"
    path_or_id: str = ""
    """The folder, hub id or file."""
    bundled_config: str | None = None
    """Name of the shipped configuration, for a single file and for random weights."""
    single_file_components: tuple[str, ...] = ()
    """Parts whose weights are in a single file."""
    component_sources: Mapping[str, ComponentSource] = field(default_factory=dict)
    """Parts that come from files of their own."""
    scheduler_overrides: Mapping[str, object] = field(default_factory=dict)
    """Settings in the place of those of the model's scheduler."""


def detect_model(model: ModelConfig | str | None) -> DetectedModel:
    """Look at a model; a path or hub id alone is enough, and None is the built-in model."""
    if not isinstance(model, ModelConfig):
        model = ModelConfig(pretrained_model_name_or_path=model)
    if model.pretrained_model_name_or_path is None and model.family is None:
        found = _detect_built_in()
    else:
        try:
            found = _detect_source(model)
        except ModelError as problem:
            place = model.pretrained_model_name_or_path
            raise ConfigError([f"pretrained_model_name_or_path: {place}: {problem}"]) from None
    return _apply_options(found, model)


def get_family_facts(family: str) -> FamilyFacts:
    """The facts of a family by its name, or of the user's own ``package.module:Class``."""
    if family in FAMILY_FACTS:
        return FAMILY_FACTS[family]
    try:
        facts = getattr(FAMILIES.get(family), "facts", None)
    except ConfigError as error:
        raise ConfigError([f"family: {line}" for line in error.problems]) from None
    if not isinstance(facts, FamilyFacts):
        raise ConfigError([f"family: {family} is no model family; subclass library.families.base.Family"])
    return facts


def _detect_built_in() -> DetectedModel:
    reason = "no model is named, so the built-in one is used, which draws 64 emoji and nothing else"
    return replace(
        _detect_from_configs(build_folder_reader(built_in.FOLDER), "folder", str(built_in.FOLDER), None), reason=reason
    )


def _detect_source(model_config: ModelConfig) -> DetectedModel:
    place = model_config.pretrained_model_name_or_path
    if place is None:
        raise ModelError("missing; --family is of no use without a model")
    if place.startswith("random:"):
        return _detect_random(place, model_config.family)
    path = Path(place).expanduser()  # a path from a file has not been through a shell
    if path.is_dir():
        return _detect_from_configs(build_folder_reader(path), "folder", str(path), model_config.family)
    if path.is_file():
        return _detect_single_file(path, model_config.family)
    if _REPO_ID_PATTERN.fullmatch(place) and not place.endswith((".safetensors", ".ckpt")):
        return _detect_from_configs(build_hub_reader(place), "hub", place, model_config.family)
    raise ModelError(f"no such file or folder (looked in {path.absolute().parent}), and no hub id such as owner/name")


def _detect_from_configs(
    read: ConfigReader, source_type: SourceType, path_or_id: str, family_option: str | None
) -> DetectedModel:
    index = read("model_index.json")
    if index is None:
        raise ModelError(
            "no model_index.json in it, so it is no diffusers model; name the folder that has one"
            + _hint_single_component(read)
        )
    name = index.get("_class_name")
    for family in (
        [family_option]
        if family_option
        else [key for key, facts in FAMILY_FACTS.items() if facts.pipeline_class == name]
    ):
        facts = get_family_facts(family)
        look = facts.match_configs(read)
        if look is None:
            continue
        for part in facts.components:
            read_required(read, f"{part}/{'tokenizer_config' if part.startswith('tokenizer') else 'config'}.json")
        why = f"--family says so; model_index.json says {name}" if family_option else f"model_index.json says {name}"
        reason = f"{why}, and {look.reason}"
        return DetectedModel(
            family, reason, look.size_multiple, look.prediction_type, look.has_guidance_embeds, source_type, path_or_id
        )
    if family_option:
        raise ModelError(f"its files are not those of family {family_option}")
    raise ModelError(f"its model_index.json says {name}; not yet: this version trains {_list_family_titles()}")


def _hint_single_component(read: ConfigReader) -> str:
    config = read("config.json")
    kind = config and (config.get("_class_name") or (config.get("architectures") or [None])[0])
    return f"; this one holds only {kind}" if kind else ""


def _list_family_titles() -> str:
    return ", ".join(facts.title for facts in FAMILY_FACTS.values())


def _detect_single_file(path: Path, family_option: str | None) -> DetectedModel:
    header = read_safetensors_header(path)
    reject_unsupported_file(header)
    reject_unsupported_model(header)
    candidates = [
        family
        for family in ([family_option] if family_option else FAMILY_FACTS)
        if has_denoiser(header, get_family_facts(family))
    ]
    for family in candidates:
        config = match_bundled_config(header, family, get_family_facts(family))
        if config is not None:
            return _build_single_file_model(path, header, family, config, family_option is not None)
    if candidates:
        raise ModelError(
            f"looks like {get_family_facts(candidates[0]).title}, but of sizes that are not known; use the model as "
            "a diffusers folder"
        )
    if family_option and any(has_denoiser(header, facts) for facts in FAMILY_FACTS.values()):
        raise ModelError(f"has not the weights of family {family_option}; leave --family out to see what it is")
    raise ModelError(_describe_unknown_file(header))


def _build_single_file_model(
    path: Path, header: SafetensorsHeader, family: str, config: str, has_family_option: bool
) -> DetectedModel:
    facts = get_family_facts(family)
    look = _require_match(facts, build_bundled_reader(load_bundled_config(config)))
    found = DetectedModel(
        family,
        "",
        look.size_multiple,
        look.prediction_type,
        look.has_guidance_embeds,
        "file",
        str(path),
        config,
        find_component_names(header, facts),
    )
    told = header.metadata.get("modelspec.prediction_type", "")
    if found.prediction_type != "flow" and (told.startswith("v") or "v_pred" in header.shapes):
        found = _override_prediction_type(found, "v")
    elif found.prediction_type != "flow" and told.startswith("eps"):
        found = _override_prediction_type(found, "epsilon")
    if "ztsnr" in header.shapes:  # SDXL models by NovelAI and others are marked so
        found = replace(found, scheduler_overrides={**found.scheduler_overrides, "rescale_betas_zero_snr": True})
    why = (
        "--family says so"
        if has_family_option
        else f"the file holds {facts.single_file_keys[-1]} with the sizes of {facts.title}"
    )
    return replace(found, reason=f"{why} (configuration {config})")


def _require_match(facts: FamilyFacts, read: ConfigReader) -> FamilyMatch:
    look = facts.match_configs(read)
    if look is None:
        raise ModelError(f"its files are not those of {facts.title}")
    return look


def _describe_unknown_file(header: SafetensorsHeader) -> str:
    pieces = [describe_signature(piece) for piece in find_component_signatures(header)]
    if pieces:
        return f"is no whole model; it holds a {' and a '.join(pieces)}"
    example = next(iter(header.shapes), None)
    return f"is no model that is known; it holds {len(header.shapes)} weights, the first is {example}"


def _detect_random(model_name: str, family_option: str | None) -> DetectedModel:
    """``random:FAMILY`` has the published sizes, ``random:FAMILY:VARIANT`` those of another shipped configuration."""
    wanted = model_name.removeprefix("random:")
    config = wanted.replace(":", "_")
    family = wanted.partition(":")[0]
    if config not in list_bundled_configs() or family not in FAMILY_FACTS:
        known = [
            f"random:{name}"
            for family in FAMILY_FACTS
            for name in (each.replace(f"{family}_", f"{family}:", 1) for each in list_family_configs(family))
        ]
        raise ModelError(
            f"there is no such model{suggest_name(model_name, known) or '; there are: ' + ', '.join(known)}"
        )
    if family_option not in (None, family):
        raise ModelError(f"is of family {family} and not {family_option}; leave --family out")
    look = _require_match(FAMILY_FACTS[family], build_bundled_reader(load_bundled_config(config)))
    reason = f"{model_name} was asked for: random weights from the seed, in the sizes of {config}"
    return DetectedModel(
        family, reason, look.size_multiple, look.prediction_type, look.has_guidance_embeds, "random", model_name, config
    )


def _apply_options(detected: DetectedModel, model_config: ModelConfig) -> DetectedModel:
    """Check the options for parts and for the family, and take them in; all problems together."""
    facts, problems = get_family_facts(detected.family), []
    pieces = {}
    for option in ("vae", "clip_l", "clip_g", "t5xxl", "ae", "text_encoder"):
        place = getattr(model_config, option)
        if place is None:
            continue
        part = facts.component_options.get(option)
        if part is None:
            problems.append(f"{option}: {facts.title} has no such part")
            continue
        try:
            pieces[part] = resolve_component_source(place, part, get_config_reader(detected))
        except ModelError as problem:
            problems.append(f"{option}: {place}: {problem}")
    problems += [
        *_find_unsupported_options(model_config, facts),
        *facts.validate_options(get_config_reader(detected), model_config),
    ]
    if detected.source_type == "file":
        problems += _find_missing_components(detected, facts, pieces)
    if model_config.v2 and detected.family != "sd2":
        problems.append(f"v2: the model is {facts.title}; leave this option out")
    if problems:
        raise ConfigError(problems)
    return replace(detected, component_sources=pieces)


def _override_prediction_type(detected: DetectedModel, prediction_type: str) -> DetectedModel:
    """The same model, said to predict this."""
    kinds = {"v": "v_prediction", "epsilon": "epsilon"}
    return replace(
        detected,
        prediction_type=prediction_type,
        scheduler_overrides={**detected.scheduler_overrides, "prediction_type": kinds[prediction_type]},
    )


def _find_unsupported_options(model_config: ModelConfig, facts: FamilyFacts) -> list[str]:
    """Options that only other families have, and that are set."""
    special = {option for each in FAMILY_FACTS.values() for option in each.extra_options} - set(facts.extra_options)
    return [
        f"{option}: means nothing for {facts.title}; leave this option out"
        for option in sorted(special)
        if getattr(model_config, option) != getattr(ModelConfig, option)
    ]


def _find_missing_components(
    detected: DetectedModel, facts: FamilyFacts, component_sources: Mapping[str, ComponentSource]
) -> list[str]:
    """Parts that neither the single file nor another one has."""
    options = {part: option for option, part in facts.component_options.items()}
    lacks = [
        part
        for part in facts.components
        if part not in detected.single_file_components
        and part not in component_sources
        and not part.startswith("tokenizer")
    ]
    return [
        f"pretrained_model_name_or_path: {detected.path_or_id}: the file has no {part}"
        + (f"; name one with --{options[part]}" if part in options else "")
        for part in lacks
    ]


def get_config_reader(model: DetectedModel) -> ConfigReader:
    """The JSON files of the model itself."""
    if model.bundled_config is not None:
        return build_bundled_reader(load_bundled_config(model.bundled_config))
    return (
        build_hub_reader(model.path_or_id)
        if model.source_type == "hub"
        else build_folder_reader(Path(model.path_or_id))
    )
