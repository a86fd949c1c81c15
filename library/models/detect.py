"""Detect the family of a model from its JSON files, or from the header of its single-file checkpoint.

Imports no torch and loads no weights, so that a wrong model is reported at once.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..config.schema import ModelConfig
from ..config.schema_data import CacheConfig
from ..dataset.clip_windows import FrameRule
from ..dataset.controls import ControlLimits
from ..dataset.one_frame import OneFrame, parse_one_frame
from ..demo import BUILT_IN_MODEL_DIR
from ..errors import ConfigError, FileError
from ..name_suggestions import suggest_name
from ..problems import Problem
from .checkpoint_header import CheckpointHeader, read_checkpoint_header
from .checkpoint_inspection import (
    ComponentSource,
    describe_signature,
    find_component_names,
    find_component_signatures,
    has_denoiser,
    list_denoiser_formats,
    match_bundled_configs,
    reject_unsupported_file,
    reject_unsupported_model,
    resolve_component_source,
    resolve_denoiser_source,
)
from .facts import FamilyFacts, FamilyMatch
from .families import (
    CONTROL_FAMILIES,
    EXPERT_FAMILIES,
    FAMILY_FACTS,
    IMAGE_TO_VIDEO_FAMILIES,
    ONE_FRAME_FAMILIES,
    SOUND_FAMILIES,
)
from .model_configs import (
    ConfigReader,
    ModelError,
    build_bundled_reader,
    build_folder_reader,
    build_hub_reader,
    get_config_name,
    has_config_value,
    is_tokenizer,
    list_config_formats,
    list_family_configs,
    load_bundled_config,
    read_required,
    reject_unread_quantization,
)
from .own_families import (
    find_class_mismatch,
    get_family_facts,
    list_own_configs,
    load_own_family,
    match_family_configs,
    split_random_name,
)

_REPO_ID_PATTERN = re.compile(r"\w[\w.-]*/\w[\w.-]*")
COMPONENT_OPTIONS = (
    *("vae", "clip_l", "clip_g", "t5xxl", "byt5", "ae", "text_encoder", "image_encoder"),
    *("llm_adapter_path", "t5_tokenizer_path", "dit_high_noise"),
)
SourceType = Literal["folder", "hub", "file", "random"]


@dataclass(frozen=True)
class DetectedModel:
    """A model that is not loaded yet: its family, its files and what they tell; the input of ``Family.load``."""

    family: str
    reason: str
    size_multiple: int
    """Width and height of training images are multiples of this."""
    prediction_type: str = "epsilon"
    """The target that the model predicts: ``epsilon``, ``v`` or ``flow``."""
    has_guidance_embeds: bool = False
    """Whether the denoiser takes the guidance scale as an input."""
    source_type: SourceType = "folder"
    path_or_id: str = ""
    """The folder, hub id or file of the model."""
    bundled_config: str | None = None
    """Name of the bundled config, for single files and random weights."""
    single_file_components: tuple[str, ...] = ()
    """Components contained in the single file."""
    component_sources: Mapping[str, ComponentSource] = field(default_factory=dict)
    """Components that are loaded from elsewhere (``--vae``, ``--clip_l`` ...)."""
    scheduler_overrides: Mapping[str, object] = field(default_factory=dict)
    """Values that replace those of the scheduler config."""
    max_side: int | None = None
    """The longest side of an image that the denoiser has positions for; None: any."""
    frame_rule: FrameRule | None = None
    """What the model asks of the frames of clips; None: it makes images."""
    control_sides: tuple[int, ...] = ()
    """The sides in pixels of control clips that are square, by their numbers; 0: they have the size of their clip."""
    one_frame: OneFrame | None = None
    """The positions of one-frame training."""
    stored_formats: tuple[str, ...] = ()
    """The formats in which its files have weights of the denoiser quantized: ``fp8``, ``nf4``, ``Q4_K`` ..."""

    @property
    def is_built_in(self) -> bool:
        """Whether it is the demo model, which is used if no model is set."""
        return self.path_or_id == str(BUILT_IN_MODEL_DIR)

    @property
    def family_name(self) -> str:
        """The family in messages: its registered name, or the title of a family that is found by its import path."""
        return self.family if self.family in FAMILY_FACTS else get_family_facts(self.family).title

    @property
    def short_name(self) -> str:
        """The model in messages."""
        return "the built-in demo model" if self.is_built_in else "this model"


def detect_model(model: ModelConfig | str | None) -> DetectedModel:
    """Detect a model by its options, its path or its hub id; None is the built-in demo model."""
    if not isinstance(model, ModelConfig):
        model = ModelConfig(pretrained_model_name_or_path=model)
    if model.pretrained_model_name_or_path is None and model.family is None:
        return _apply_options(_detect_built_in(), model)
    if ":" in (own := model.family or "") and own.partition(":")[0] not in FAMILY_FACTS:
        load_own_family(own)  # whose problems come before those of the model
    try:
        detected = _detect_source(model)
    except ModelError as problem:
        name = model.pretrained_model_name_or_path
        raise FileError([Problem("pretrained_model_name_or_path", f"{name}: {problem}")]) from None
    return _apply_options(detected, model)


def build_control_limits(model: DetectedModel, cache: CacheConfig | None = None) -> ControlLimits:
    """Build the limits on the number of control images of a model, with the names of the models that take some.

    ``cache``: of a run that encodes texts, perhaps with control images.
    """
    facts = get_family_facts(model.family)
    is_rejected = cache is not None and facts.text_images == "controls" and lacks_text_images(cache)
    are_clips = facts.pipeline.frames is not None
    others = [each for each in FAMILY_FACTS.values() if (each.pipeline.frames is not None) == are_clips]
    titles = [each.title for each in others if each.control.num_images[1]]
    titles += [] if are_clips else [f"{FAMILY_FACTS[name].title} with --control" for name in CONTROL_FAMILIES]
    control = facts.control
    num_given = None if model.one_frame is None else len(model.one_frame.control_index)
    return ControlLimits(
        control.num_images[0] if num_given is None else num_given,
        control.num_images[1] if num_given is None else num_given,
        facts.title,
        ", ".join(titles),
        are_masks=control.are_masks,
        have_alpha=control.have_alpha,
        group_size=control.group_size,
        are_clips=are_clips,
        are_layers=control.are_layers,
        most_references=control.most_references,
        reference_models=", ".join(each.title for each in others if each.control.most_references),
        rejection=report_text_images(facts) if is_rejected else None,
    )


def lacks_text_images(cache: CacheConfig) -> bool:
    """Whether texts are encoded in the run while the images, whose latents are cached, are not loaded."""
    return cache.caches_latents and not cache.caches_text_outputs


def report_text_images(facts: FamilyFacts) -> Problem:
    """Report that a text encoder needs images that are not loaded."""
    read = "the control images, which are" if facts.text_images == "controls" else "the first frame, which is"
    reason = f"the text encoder of {facts.title} needs {read} not loaded when latents are cached"
    return Problem("cache_latents", reason, "add cache_text_encoder_outputs")


def list_video_models() -> str:
    """List the titles of the families that are trained on clips."""
    return ", ".join(facts.title for facts in FAMILY_FACTS.values() if facts.pipeline.frames is not None)


def list_size_multiples() -> dict[str, int]:
    """The size multiple of the published model of each family, by title."""
    return {facts.title: get_size_multiple(family) for family, facts in FAMILY_FACTS.items()}


def get_size_multiple(family: str) -> int:
    """Width and height of training images of the published model are multiples of this."""
    return _match_bundled_config(family, list_family_configs(family)[0]).size_multiple


def _detect_built_in() -> DetectedModel:
    reason = "no model is set; using the built-in demo model, which generates 64 emoji only"
    folder = BUILT_IN_MODEL_DIR
    return replace(_detect_from_configs(build_folder_reader(folder), "folder", str(folder), None), reason=reason)


def _detect_source(model_config: ModelConfig) -> DetectedModel:
    name = model_config.pretrained_model_name_or_path
    if name is None:
        raise ModelError("missing; --family needs a model")
    if name.startswith("random:"):
        return _detect_random(name, model_config.family)
    family, variant = _split_variant(model_config.family)
    path = Path(name).expanduser()  # paths from TOML files may have a tilde
    if path.is_file():
        return _detect_single_file(path, family, variant, model_config)
    if variant is not None:
        raise ModelError(f"its own files tell the variant; set --family {family}, or leave it out")
    if path.is_dir():
        return _detect_from_configs(build_folder_reader(path), "folder", str(path), model_config.family)
    if _REPO_ID_PATTERN.fullmatch(name) and not name.endswith((".safetensors", ".ckpt")):
        return _detect_from_configs(build_hub_reader(name), "hub", name, model_config.family)
    raise ModelError(f"no such file or folder (looked in {path.absolute().parent}), and no hub id such as owner/name")


def _split_variant(family_option: str | None) -> tuple[str | None, str | None]:
    """Split ``z_image:base`` into family and variant; ``package.module:Class`` is a family."""
    family, _, variant = (family_option or "").partition(":")
    if family not in FAMILY_FACTS or not variant:
        return family_option, None
    names = [name.removeprefix(f"{family}_") for name in list_family_configs(family)[1:]]
    if variant not in names:
        known = [family, *(f"{family}:{name}" for name in names if name != "tiny")]
        raise ConfigError([Problem("family", f"{family} has no variant {variant}", f"set {' or '.join(known)}")])
    return family, variant


def _detect_from_configs(
    read: ConfigReader, source_type: SourceType, path_or_id: str, family_option: str | None
) -> DetectedModel:
    index = read("model_index.json")
    if index is None:
        raise ModelError(
            "no model_index.json in it, so it is not a diffusers model; give the folder that has one"
            + _hint_single_component(read)
        )
    name = index.get("_class_name")
    registered = [key for key, facts in FAMILY_FACTS.items() if facts.pipeline.class_name == name]
    candidates = [family_option] if family_option else registered
    for family in candidates:
        facts = get_family_facts(family)
        read = _add_separate_components(read, family)
        if mismatch := find_class_mismatch(family, name):
            raise ModelError(mismatch)
        match = match_family_configs(family, read)
        if match is None:
            continue
        for component in facts.components:
            config = read_required(read, f"{component}/{get_config_name(component)}")
            reject_unread_quantization(config, component)
        reason = f"model_index.json has {name}, and {match.reason}"
        reason = f"set by --family; {reason}" if family_option else reason
        configs = [read(f"{name}/config.json") or {} for name in facts.pipeline.denoisers]
        stored = tuple(dict.fromkeys(name for config in configs for name in list_config_formats(config)))
        return _build_detected(family, reason, match, source_type, path_or_id, stored_formats=stored)
    if family_option:
        raise ModelError(f"its files are not those of family {family_option}")
    raise ModelError(f"its pipeline class {name} is not supported; supported: {_list_family_titles()}")


def _build_detected(
    family: str, reason: str, match: FamilyMatch, source_type: SourceType, path_or_id: str, **more: Any
) -> DetectedModel:
    properties = match.size_multiple, match.prediction_type, match.has_guidance_embeds
    more |= {"max_side": match.max_side, "control_sides": match.control_sides}
    return DetectedModel(family, reason, *properties, source_type, path_or_id, **more)


def _hint_single_component(read: ConfigReader) -> str:
    config = read("config.json")
    class_name = config and (config.get("_class_name") or (config.get("architectures") or [None])[0])
    return f"; this one holds only {class_name}" if class_name else ""


def _list_family_titles() -> str:
    return ", ".join(facts.title for facts in FAMILY_FACTS.values())


def _detect_single_file(
    path: Path, family_option: str | None, variant: str | None, options: ModelConfig
) -> DetectedModel:
    version = options.model_version
    header = read_checkpoint_header(path)
    reject_unsupported_file(header)
    reject_unsupported_model(header, FAMILY_FACTS.values())
    candidates = [
        family
        for family in ([family_option] if family_option else FAMILY_FACTS)
        if has_denoiser(header, get_family_facts(family))
    ]
    candidates = [
        each for each in candidates if version in get_family_facts(each).options.musubi_versions
    ] or candidates
    if options.dit_high_noise is not None:
        candidates = [
            each for each in candidates if "dit_high_noise" in get_family_facts(each).options.components
        ] or candidates
    for family in candidates:
        facts = get_family_facts(family)
        version_config = facts.options.musubi_versions.get(version or "")
        if configs := match_bundled_configs(header, family, facts, version_config):
            if variant is not None and f"{family}_{variant}" not in configs:
                raise ModelError(f"does not have the sizes of {family}:{variant}")
            _reject_unsupported_name(path, facts)
            config = configs[0] if variant is None else f"{family}_{variant}"
            detected = _build_single_file_model(path, header, family, config, family_option is not None)
            is_told = variant is not None or family not in FAMILY_FACTS  # whose variants --family does not take
            return detected if is_told else _mention_variants(detected, configs[1:])
    reject_unsupported_model(header, FAMILY_FACTS.values(), is_unmatched=True)
    if candidates:
        raise ModelError(
            f"looks like {get_family_facts(candidates[0]).title}, but of unknown sizes; use the model as "
            "a diffusers folder"
        )
    if family_option and any(has_denoiser(header, facts) for facts in FAMILY_FACTS.values()):
        raise ModelError(f"does not contain weights of family {family_option}; leave --family out to detect it")
    raise ModelError(_describe_unknown_file(header))


def _reject_unsupported_name(path: Path, facts: FamilyFacts) -> None:
    for part, model in facts.detection.unsupported_file_names.items():
        if part in path.name.lower():
            raise ModelError(f"is named ({part}) like {model}")


def _mention_variants(detected: DetectedModel, configs: Sequence[str]) -> DetectedModel:
    """Name the variants whose files have the same keys and shapes, which only ``--family`` tells apart."""
    variants = (name.removeprefix(f"{detected.family}_") for name in configs)
    names = " or ".join(f"--family {detected.family}:{variant}" for variant in variants)
    return replace(detected, reason=f"{detected.reason}; {names} if it is that one") if configs else detected


def _build_single_file_model(
    path: Path, header: CheckpointHeader, family: str, config: str, has_family_option: bool
) -> DetectedModel:
    facts = get_family_facts(family)
    match = _match_bundled_config(family, config)
    prediction_type, overrides = match.prediction_type, dict[str, object]()
    if prediction_type != "flow":
        declared = header.metadata.get("modelspec.prediction_type", "")
        if declared.startswith("v") or "v_pred" in header.shapes:
            prediction_type, overrides = "v", {"prediction_type": "v_prediction"}
        elif declared.startswith("eps"):
            prediction_type, overrides = "epsilon", {"prediction_type": "epsilon"}
    if "ztsnr" in header.shapes:  # a marker key in models by NovelAI and others
        overrides["rescale_betas_zero_snr"] = True
    key = facts.detection.keys[-1]
    reason = "set by --family" if has_family_option else f"the file has {key} with the shape of {facts.title}"
    return _build_detected(
        family,
        f"{reason} (config {Path(config).name})",
        replace(match, prediction_type=prediction_type),
        "file",
        str(path),
        bundled_config=config,
        single_file_components=find_component_names(header, facts),
        stored_formats=list_denoiser_formats(header, facts),
        scheduler_overrides=overrides,
    )


def _match_bundled_config(family: str, config: str) -> FamilyMatch:
    match = match_family_configs(family, build_bundled_reader(load_bundled_config(config)))
    if match is None:
        raise ModelError(f"its files are not those of {get_family_facts(family).title}")
    return match


def _describe_unknown_file(header: CheckpointHeader) -> str:
    pieces = [describe_signature(piece) for piece in find_component_signatures(header)]
    if pieces:
        return f"is not a complete model; it holds a {' and a '.join(pieces)}"
    example = next(iter(header.shapes), None)
    return f"is not a known model; it holds {len(header.shapes)} weights, the first is {example}"


def _detect_random(model_name: str, family_option: str | None) -> DetectedModel:
    """``random:FAMILY`` has the published sizes, ``random:FAMILY:VARIANT`` those of another bundled config."""
    family, config = split_random_name(model_name)
    if family in FAMILY_FACTS:
        configs: Mapping[str, str] = {each: each for each in list_family_configs(family)}
        config = "_".join(filter(None, (family, *config.split(":"))))
    else:
        configs = list_own_configs(family)
    if config not in configs:
        raise ModelError(f"no such model{_suggest_random_model(model_name, family)}")
    if family_option not in (None, family):
        raise ModelError(f"is of family {family}, not {family_option}; leave --family out")
    match = _match_bundled_config(family, configs[config])
    reason = f"random weights in the sizes of {Path(configs[config]).name}"
    return _build_detected(family, reason, match, "random", model_name, bundled_config=configs[config])


def _suggest_random_model(model_name: str, family: str) -> str:
    if family not in FAMILY_FACTS and ":" in family:
        names = [f"random:{family}" + (f":{variant}" if variant else "") for variant in list_own_configs(family)]
        return "; available: " + ", ".join(names) if names else "; the family has no pipeline.configs"
    known = [
        f"random:{name}"
        for family in FAMILY_FACTS
        for name in (each.replace(f"{family}_", f"{family}:", 1) for each in list_family_configs(family))
    ]
    return suggest_name(model_name, known) or "; available: " + ", ".join(known)


def _apply_options(detected: DetectedModel, model_config: ModelConfig) -> DetectedModel:
    """Resolve the component options and check the options of the family; all problems are raised together."""
    control, controls = model_config.control, CONTROL_FAMILIES.get(detected.family, {})
    detected = replace(detected, family=controls.get(control, detected.family))
    detected = _select_expert(_select_variant(detected, model_config), model_config.noise_experts)
    facts, problems, read = get_family_facts(detected.family), list[Problem](), get_config_reader(detected)
    sources, named = {}, set[str]()
    for option in COMPONENT_OPTIONS:
        path_or_id = getattr(model_config, option)
        if path_or_id is None:
            continue
        component = facts.options.components.get(option)
        if component is None:
            problems.append(Problem(option, f"{facts.title} has no such component"))
            continue
        if component in named:
            problems.append(Problem(option, f"{facts.title} has one {component}, which another option names, too"))
            continue
        named.add(component)
        try:
            sources[component] = (
                resolve_denoiser_source(path_or_id, facts, load_bundled_config(detected.bundled_config))
                if component in facts.pipeline.denoisers and detected.bundled_config
                else resolve_component_source(
                    path_or_id,
                    component,
                    read,
                    needs_vision=component in facts.text.components and bool(facts.control.text_tokens_per_image),
                )
            )
        except ModelError as problem:
            problems.append(Problem(option, f"{path_or_id}: {problem}"))
    problems += [*_find_unsupported_options(model_config, facts), *facts.options.validate(read, model_config)]
    if detected.source_type == "file":
        problems += _find_missing_components(detected, facts, sources)
    if control not in ("none", *controls):
        others = ", ".join(FAMILY_FACTS[name].title for name, each in CONTROL_FAMILIES.items() if control in each)
        problems.append(Problem("control", f"{control} is not supported for {facts.title}, only for {others}"))
    if model_config.model_version is not None:
        problems += validate_version(model_config.model_version, facts, read)
    if model_config.v2 and not facts.options.is_version_2:
        problems.append(Problem("v2", f"the model is {facts.title}", "leave this option out"))
    if problems:
        raise ConfigError(problems)
    files = [Path(sources[name].path_or_id).expanduser() for name in facts.pipeline.denoisers if name in sources]
    formats = [list_denoiser_formats(read_checkpoint_header(path), facts) for path in files]  # of another expert
    stored = tuple(dict.fromkeys(name for each in (detected.stored_formats, *formats) for name in each))
    separate = _find_separate_sources(detected, facts, sources)
    rule = facts.get_frame_rule(model_config)
    return replace(
        detected,
        component_sources={**separate, **sources},
        stored_formats=stored,
        frame_rule=rule and replace(rule, control_sides=detected.control_sides),
        one_frame=parse_one_frame(model_config.one_frame_settings) if facts.sampling.reads_one_frame else None,
    )


def _select_variant(detected: DetectedModel, model_config: ModelConfig) -> DetectedModel:
    """Take the family that trains in place of the detected one, with options that say so."""
    family = detected.family
    if model_config.image_to_video:
        family = IMAGE_TO_VIDEO_FAMILIES.get(family, family)
    if model_config.one_frame:
        family = ONE_FRAME_FAMILIES.get(family, family)
    if model_config.train_audio:
        family = SOUND_FAMILIES.get(family, family)
    return replace(detected, family=family)


def _select_expert(detected: DetectedModel, noise_experts: str) -> DetectedModel:
    """Take the family that trains one expert alone, if that is chosen; a single file is that one."""
    family = EXPERT_FAMILIES.get(detected.family, {}).get(noise_experts)
    if family is None:
        return detected
    both, only = get_family_facts(detected.family), get_family_facts(family)
    names = detected.single_file_components
    renamed = tuple(only.file_denoiser if name in both.pipeline.denoisers else name for name in names)
    return replace(detected, family=family, single_file_components=renamed)


def _find_separate_sources(
    detected: DetectedModel, facts: FamilyFacts, sources: Mapping[str, ComponentSource]
) -> dict[str, ComponentSource]:
    """Find from where components are loaded that a folder of the model lacks; a tokenizer comes with its encoder."""
    if detected.bundled_config is not None or not facts.pipeline.separate_components:
        return {}
    index = _build_source_reader(detected)("model_index.json") or {}
    found = {}
    for component, repo_id in facts.pipeline.separate_components.items():
        encoder = sources.get(component.replace("tokenizer", "text_encoder"))
        if not any(index.get(component) or ()):
            is_complete = encoder is not None and encoder.source_type != "file"
            found[component] = encoder if encoder and is_complete else ComponentSource("hub", repo_id)
    return found


def _add_separate_components(read: ConfigReader, family: str) -> ConfigReader:
    """Add the components that folders of the model lack, with the configuration that is bundled."""
    separate = get_family_facts(family).pipeline.separate_components
    if not separate:
        return read
    bundled = load_bundled_config(family)

    def read_all(name: str) -> dict[str, Any] | None:
        data = read(name)
        if data is None:
            return bundled.get(name) if name.partition("/")[0] in separate else None
        if name != "model_index.json":
            return data
        return {**data, **{key: bundled[name][key] for key in separate if not any(data.get(key) or ())}}

    return read_all


def validate_version(version: str, facts: FamilyFacts, read: ConfigReader) -> Iterator[Problem]:
    """Check ``model_version`` against the family and the config of the denoiser."""
    known = facts.options.musubi_versions
    if version not in known:
        titles = [each.title for each in FAMILY_FACTS.values() if version in each.options.musubi_versions]
        text = f"{version} is a version of {titles[0]}" if titles else f"there is no version {version}"
        versions = f"its versions are {', '.join(known)}" if known else ""
        yield Problem("model_version", f"{text}, and the model is {facts.title}", versions)
        return
    config = read(f"{facts.denoiser_name}/config.json") or {}
    for key, expected in known[version].items():
        if not has_config_value(config, key, expected):
            actual = bool(config.get(key)) if isinstance(expected, bool) else config.get(key)
            theirs, ours = (str(value).lower() for value in (expected, actual))
            text = f"{version} has {key} {theirs} in its config, and the model {ours}"
            yield Problem("model_version", text, "leave it out, and the model's files decide")


def _find_unsupported_options(model_config: ModelConfig, facts: FamilyFacts) -> list[Problem]:
    """Options of other families that are set."""
    special = {option for each in FAMILY_FACTS.values() for option in each.options.extra} - set(facts.options.extra)
    return [
        Problem(option, f"does not apply to {facts.title}", "leave this option out")
        for option in sorted(special)
        if hasattr(ModelConfig, option) and getattr(model_config, option) != getattr(ModelConfig, option)
    ]


def _find_missing_components(
    detected: DetectedModel, facts: FamilyFacts, component_sources: Mapping[str, ComponentSource]
) -> list[Problem]:
    options = {component: option for option, component in facts.options.components.items()}
    available = {*detected.single_file_components, *component_sources}
    missing = [name for name in facts.components if name not in available and not is_tokenizer(name)]
    more = ", or train one alone with --noise_experts" if facts.pipeline.experts is not None else ""
    return [
        Problem(
            "pretrained_model_name_or_path",
            f"{detected.path_or_id}: the file has no {name}",
            f"give one with --{options[name]}{more if name in facts.pipeline.denoisers else ''}"
            if name in options
            else "",
        )
        for name in missing
    ]


def get_config_reader(model: DetectedModel) -> ConfigReader:
    """Reader of the model's JSON files."""
    if model.bundled_config is not None:
        return build_bundled_reader(load_bundled_config(model.bundled_config))
    return _add_separate_components(_build_source_reader(model), model.family)


def _build_source_reader(model: DetectedModel) -> ConfigReader:
    if model.source_type == "hub":
        return build_hub_reader(model.path_or_id)
    return build_folder_reader(Path(model.path_or_id))
