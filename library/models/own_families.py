"""Families of users, outside of this package: ``--family package.module:Class`` and what it has to fulfil; no torch.

A registered family passes the same checks, so that the contract test and users see one list of requirements.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_origin

from ..config.schema import ModelConfig
from ..config.schema_data import DataConfig
from ..errors import ConfigError
from ..problems import Problem
from ..registry import describe_exception
from .base import ControlTextFamily, Family, T5Family
from .facts import FamilyFacts, FamilyMatch
from .families import FAMILIES, FAMILY_FACTS
from .model_configs import ConfigReader, ModelError, is_tokenizer
from .own_sources import find_source_files, resolve_config_paths

GUIDE = "see docs/adding_a_family.md"
SOURCE_DIGEST = "_source_digest"
"""The attribute of a class with the hash of its source as of its import."""
PREDICTION_TYPES = ("epsilon", "v", "flow")


def get_family_facts(family: str) -> FamilyFacts:
    """The facts of a family by its registered name or its import path ``package.module:Class``."""
    return FAMILY_FACTS[family] if family in FAMILY_FACTS else load_own_family(family).facts


def load_own_family(family: str) -> type[Family]:
    """Import the class of a user's family; raise all that is missing in it or contradicts itself."""
    try:
        found = FAMILIES.get(family)
    except ConfigError as error:
        raise ConfigError([replace(problem, option="family") for problem in error.problems]) from None
    if texts := list(_find_missing_parts(found)):
        raise ConfigError([Problem("family", f"{family} {text}", GUIDE) for text in texts])
    if SOURCE_DIGEST not in vars(found):  # the first time
        if texts := list(find_contradictions(found)):
            raise ConfigError([Problem("family", f"{family} {text}", GUIDE) for text in texts])
        compute_source_digest(found)
    return found


def _find_missing_parts(family: Any) -> Iterator[str]:
    """Find what the author of a family has not written yet."""
    if not (isinstance(family, type) and issubclass(family, Family)):
        yield "is not a model family; subclass library.models.base.Family"
        return
    if not isinstance(getattr(family, "facts", None), FamilyFacts):
        yield "has no facts; set facts = FamilyFacts(...)"
    if methods := sorted(family.__abstractmethods__):
        yield f"does not write {', '.join(methods)}"


def find_contradictions(family: type[Family]) -> Iterator[str]:
    """Find facts of a family that contradict each other or its methods."""
    facts = family.facts
    if texts := list(_find_wrong_types(facts)):
        yield from texts
        return
    if not facts.pipeline.denoisers:
        yield "names no component in pipeline.denoisers"
        return
    tokenizers = {*filter(is_tokenizer, facts.text.components)}
    if names := tokenizers ^ {*facts.text.tokenizer_repo_ids}:
        yield f"has {_join(names)} in only one of text.components and text.tokenizer_repo_ids"
    if names := {*facts.lora.text_encoders} - {*facts.text.components}:
        yield f"has {_join(names)} in lora.text_encoders and not in text.components"
    if names := {*facts.options.components.values()} - {*facts.components}:
        yield f"has {_join(names)} in options.components, which is none of its components {_join(facts.components)}"
    known, extra = {*vars(ModelConfig)}, {*facts.options.extra} - {*vars(DataConfig)}
    if names := {*facts.options.components, *extra} - known:
        yield f"has {_join(names)} in its options, which is no option of this program"
    if names := {*facts.blocks.single_stream_lists} - {*facts.blocks.lists}:
        yield f"has {_join(names)} in blocks.single_stream_lists and not in blocks.lists"
    if not facts.lora.targets:
        yield "has no lora.targets, so nothing would be trained"
    for path in resolve_config_paths(family).values():
        if fault := _describe_config_fault(path):
            yield f"has {path} in pipeline.configs, {fault}"
    if (facts.pipeline.frames is not None) != (facts.pipeline.kind == "video"):
        yield f"has kind {facts.pipeline.kind!r} and frames {facts.pipeline.frames}; videos alone have a rule of frames"
    yield from _find_class_contradictions(family)


def _find_wrong_types(facts: FamilyFacts) -> Iterator[str]:
    """Find groups of facts that are something else, and facts in them that are no tuple or mapping and should be."""
    for group in fields(facts):
        value = getattr(facts, group.name)
        if isinstance(group.type, type) and not isinstance(value, group.type):
            yield f"has {group.name} of the type {type(value).__name__} instead of {group.type.__name__}"
            continue
        for each in fields(value) if is_dataclass(value) else ():
            part, kind, name = getattr(value, each.name), get_origin(each.type), f"{group.name}.{each.name}"
            if kind is tuple and isinstance(part, str):
                yield f"has the text {part!r} as {name} instead of a tuple; write ({part!r},) with its comma"
            elif kind in (tuple, Mapping) and not isinstance(part, Sequence if kind is tuple else Mapping):
                yield f"has {name} of the type {type(part).__name__} instead of a {kind.__name__.lower()}"


def _describe_config_fault(path: Any) -> str | None:
    """Say what is wrong with an entry of ``pipeline.configs``, if anything is."""
    if not isinstance(path, Path):
        return f"which is a {type(path).__name__} and no pathlib.Path"
    if path.suffix != ".json":
        return "whose name does not end in .json"
    try:
        if not path.is_file():
            return "which is no file"
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"which cannot be read: {error}"
    if not isinstance(data, dict) or not all(isinstance(each, dict) for each in data.values()):
        return "which does not map the path of each JSON file of a model to its content"
    return None if "model_index.json" in data else "which has no model_index.json"


def _find_class_contradictions(family: type[Family]) -> Iterator[str]:
    """Compare the facts with the base class and the methods of the family."""
    facts = family.facts
    if facts.text.t5_encoder in facts.lora.text_encoders and not issubclass(family, T5Family):
        yield f"has text.t5_encoder {facts.text.t5_encoder} in lora.text_encoders and is no T5Family"
    if (facts.control.text_tokens_per_image > 0) != issubclass(family, ControlTextFamily):
        yield "is a ControlTextFamily without control.text_tokens_per_image, or has these and is no ControlTextFamily"
    if facts.text.has_negative_encoding != (family.encode_negative_prompts is not Family.encode_negative_prompts):
        yield "has encode_negative_prompts without text.has_negative_encoding, or the reverse"
    names = [name for each in family.__mro__ for name in ("generate_frames", "generate_image") if name in vars(each)]
    if names[0] == "generate_image":
        yield "overrides generate_image, which previews do not call; override generate_frames"


def _join(names: Any) -> str:
    return ", ".join(sorted(names))


def find_class_mismatch(family: str, class_name: object) -> str | None:
    """Say why a model of this pipeline class is none of a user's family, if it is none."""
    expected = get_family_facts(family).pipeline.class_name
    if family in FAMILY_FACTS or class_name == expected:
        return None
    return f"model_index.json has the pipeline class {class_name}, and family {family} is for {expected}"


def match_family_configs(family: str, read: ConfigReader) -> FamilyMatch | None:
    """Match the JSON files of a model with a family; errors in a user's ``match_configs`` are those of the family."""
    facts = get_family_facts(family)
    if family in FAMILY_FACTS:
        return facts.detection.match_configs(read)
    try:
        match = facts.detection.match_configs(read)
    except ModelError:
        raise
    except Exception as error:  # whatever the user's code raises
        text = f"{family}: its match_configs fails: {describe_exception(error)}"
        raise ConfigError([Problem("family", text, GUIDE)]) from None
    for text in _find_match_problems(match):
        raise ConfigError([Problem("family", f"{family}: its match_configs {text}", GUIDE)])
    return match


def _find_match_problems(match: Any) -> Iterator[str]:
    if match is None:
        return
    if not isinstance(match, FamilyMatch):
        yield f"returns a {type(match).__name__}; return a FamilyMatch, or None for a model of another family"
    elif match.prediction_type not in PREDICTION_TYPES:
        yield f"returns the prediction type {match.prediction_type!r}; it is one of {', '.join(PREDICTION_TYPES)}"
    elif not isinstance(match.size_multiple, int) or match.size_multiple < 1:
        yield f"returns the size multiple {match.size_multiple!r}; it is a number of pixels"


def split_random_name(model_name: str) -> tuple[str, str]:
    """Split ``random:FAMILY:VARIANT`` into family and variant; that of a user's family has a colon of its own."""
    family, _, rest = model_name.removeprefix("random:").partition(":")
    is_own = family not in FAMILY_FACTS and bool(rest) and ("." in family or not rest.partition(":")[0].islower())
    if is_own:
        class_name, _, rest = rest.partition(":")
        family = f"{family}:{class_name}"
    return family, rest


def list_own_configs(family: str) -> Mapping[str, str]:
    """The names under which the configs of a user's family are loaded, by variant."""
    if ":" not in family:
        return {}
    paths = resolve_config_paths(load_own_family(family))
    return {variant: str(path.with_suffix("")) for variant, path in paths.items()}


def compute_family_fingerprint(family: str) -> str | None:
    """Hash the source of a user's family and of the classes outside of this package that it is made from.

    None is that of a family of this package, whose code is that of the release.
    """
    digest = "" if family in FAMILY_FACTS else compute_source_digest(load_own_family(family))
    return f"{family} {digest}" if digest else None


def compute_source_digest(family: type[Family]) -> str:
    """Hash the files outside of this package that a family's class is made from, and its configs, once for a class.

    What is edited while the class is in use does not count.  It is empty for a class from here.
    """
    if SOURCE_DIGEST not in vars(family):
        files = find_source_files(family)
        digest = hashlib.sha256()
        for path in (*sorted(files), *sorted(resolve_config_paths(family).values())):
            digest.update(path.read_bytes())
        setattr(family, SOURCE_DIGEST, digest.hexdigest()[:16] if files else "")
    return str(vars(family)[SOURCE_DIGEST])


def identify_class(family: type[Family]) -> tuple[str, ...]:
    """The name of a family's class in the keys of caches, with the hash of its source where it is a user's."""
    return tuple(filter(None, (family.__name__, compute_source_digest(family))))
