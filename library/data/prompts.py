"""Prompts for preview pictures, from kohya's three kinds of files; all mistakes are reported at once."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..config.schema_output import PreviewConfig
from ..config.toml_positions import read_toml_with_lines
from ..errors import ConfigError
from ..registry import suggest_name

IMAGE_SIZE_MULTIPLE = 8
"""Sides of pictures are multiples of this, since every VAE makes one latent of at least 8 x 8 pixels."""


@dataclass(frozen=True)
class Prompt:
    """One picture that is asked for; None means that the family decides."""

    text: str
    negative_prompt: str = ""
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    num_inference_steps: int | None = None
    cfg_scale: float | None = None
    embedded_guidance: float | None = None
    flow_shift: float | None = None
    sampler: str | None = None
    locate_key: Callable[[str], str] = field(default=str, compare=False, repr=False)
    """The key of a property -> where it is written, for messages."""


@dataclass(frozen=True)
class _PromptField:
    """How one property of a prompt is written."""

    field: str
    parse: Callable[[Any], Any]


class _InvalidValue(ValueError):
    """What is wrong with one value."""


def load_prompts(path: Path) -> list[Prompt]:
    """The prompts of a .txt, .toml or .json file."""
    readers = {".txt": _load_txt, ".toml": _load_toml, ".json": _load_json}
    if path.suffix.lower() not in readers:
        raise ConfigError([f"{path}: prompts are read from .txt, .toml and .json files"])
    problems: list[str] = []
    prompts = list(readers[path.suffix.lower()](path, problems))
    if not prompts and not problems:
        problems.append(f"{path}: no prompts in it")
    if problems:
        raise ConfigError(problems)
    return prompts


def load_preview_prompts(preview: PreviewConfig) -> list[Prompt]:
    """Load ``--sample_prompts``, if set."""
    return load_prompts(Path(preview.sample_prompts)) if preview.sample_prompts else []


def _parse_int(value: Any, minimum: int, maximum: int | None = None) -> int:
    if type(value) is not int:
        raise _InvalidValue(f"expected a whole number, got {value!r}")
    if value < minimum or (maximum is not None and value > maximum):
        raise _InvalidValue(
            f"expected at least {minimum}{'' if maximum is None else f' and at most {maximum}'}, got {value}"
        )
    return value


def _parse_seed(value: Any) -> int:
    number = _parse_int(value, 0)
    if number >= 2**63:
        raise _InvalidValue(f"{number} is too large; at most {2**63 - 1}")
    return number


def _parse_side(value: Any) -> int:
    pixels = _parse_int(value, IMAGE_SIZE_MULTIPLE)
    if pixels % IMAGE_SIZE_MULTIPLE:
        below = pixels - pixels % IMAGE_SIZE_MULTIPLE
        raise _InvalidValue(
            f"{pixels} is no multiple of {IMAGE_SIZE_MULTIPLE}; write {below} or {below + IMAGE_SIZE_MULTIPLE}"
        )
    return pixels


def _parse_non_negative(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise _InvalidValue(f"expected a number that is not negative, got {value!r}")
    return float(value)


def _parse_positive(value: Any) -> float:
    if not _parse_non_negative(value):
        raise _InvalidValue("expected a number above 0, got 0")
    return float(value)


def _parse_text(value: Any) -> str:
    if not isinstance(value, str):
        raise _InvalidValue(f"expected text, got {value!r}")
    return value.strip()


def _parse_sampler(value: Any) -> str:
    known = [name for kind in get_args(get_type_hints(PreviewConfig)["sample_sampler"]) for name in get_args(kind)]
    if value not in known:
        raise _InvalidValue(f"{value!r} is not one of {', '.join(known)}")
    return str(value)


_PROMPT_FIELDS: Mapping[str, _PromptField] = {
    "prompt": _PromptField("text", _parse_text),
    "negative_prompt": _PromptField("negative_prompt", _parse_text),
    "width": _PromptField("width", _parse_side),
    "height": _PromptField("height", _parse_side),
    "seed": _PromptField("seed", _parse_seed),
    "sample_steps": _PromptField("num_inference_steps", lambda value: _parse_int(value, 1, 1000)),
    "scale": _PromptField("cfg_scale", _parse_non_negative),
    "guidance_scale": _PromptField("embedded_guidance", _parse_non_negative),
    "flow_shift": _PromptField("flow_shift", _parse_positive),
    "sample_sampler": _PromptField("sampler", _parse_sampler),
}


_TEXT_KEYS = frozenset({"prompt", "negative_prompt", "sample_sampler"})


_SHORT_OPTIONS: Mapping[str, str] = {
    "n": "negative_prompt",
    "w": "width",
    "h": "height",
    "d": "seed",
    "s": "sample_steps",
    "l": "scale",
    "ss": "sample_sampler",
    "g": "guidance_scale",
    "cn": "controlnet_image",
    "ctr": "cfg_trunc_ratio",
    "rcfg": "renorm_cfg",
    "fs": "flow_shift",
}


_UNSUPPORTED_KEYS: Mapping[str, str] = {
    "controlnet_image": "control pictures are not supported",
    "cfg_trunc_ratio": "only Lumina has it; leave it out",
    "renorm_cfg": "only Lumina has it; leave it out",
}


def _load_txt(path: Path, problems: list[str]) -> Iterator[Prompt]:
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            prompt = _parse_line(line, f"{path}:{number}", problems)
            if prompt:
                yield prompt


def _parse_line(line: str, location: str, problems: list[str]) -> Prompt | None:
    """``a cat --w 512 --n a dog``: options stand behind the text, in any order."""
    text, *options = re.split(r"\s--(?=\S)", " " + line.strip())
    values: dict[str, Any] = {"prompt": text}
    found: list[str] = []
    for option in options:
        name, _, value = option.strip().partition(" ")
        key = _SHORT_OPTIONS.get(name.lower())
        if key is None:
            known = ", ".join(
                f"--{letter} {each}" for letter, each in _SHORT_OPTIONS.items() if each not in _UNSUPPORTED_KEYS
            )
            hint = suggest_name(name, _SHORT_OPTIONS, "--") or f"; there are: {known}"
            found.append(f"{location}: --{name}: unknown option{hint}")
        elif key in values:
            found.append(f"{location}: --{name}: given twice")
        elif not value.strip():
            found.append(f"{location}: --{name}: no value behind it")
        else:
            values[key] = value.strip() if key in _TEXT_KEYS else _parse_literal(value.strip())
    return _build_prompt(values, lambda key: f"{location}: {_format_short_option(key)}", found, problems)


def _parse_literal(text: str) -> int | float | str:
    """The number that is written there, or the word itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _load_toml(path: Path, problems: list[str]) -> Iterator[Prompt]:
    """``[prompt]`` holds what all have in common, each ``[[prompt.subset]]`` one prompt."""
    data, lines = read_toml_with_lines(path)
    common = data.get("prompt")
    if set(data) != {"prompt"} or not isinstance(common, dict) or not isinstance(common.get("subset"), list):
        problems.append(f"{path}: expected a table [prompt] and in it a [[prompt.subset]] for each picture")
        return
    shared = {key: value for key, value in common.items() if key != "subset"}
    for number, subset in enumerate(common["subset"]):

        def where(key: str, number: int = number) -> str:
            line = lines.get(("prompt", "subset", number, key)) or lines.get(("prompt", key))
            line = line or lines.get(("prompt", "subset", number), 1)
            return f"{path}:{line}: {key}"

        prompt = _build_prompt({**shared, **subset}, where, [], problems)
        if prompt:
            yield prompt


def _load_json(path: Path, problems: list[str]) -> Iterator[Prompt]:
    """A list of objects, or of lines as in a text file."""
    try:
        data = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        problems.append(f"{path}:{error.lineno}: not valid JSON: {error.msg}")
        return
    if not isinstance(data, list):
        problems.append(f"{path}: expected a list of prompts")
        return
    for number, item in enumerate(data, start=1):
        place = f"{path}: prompt {number}"
        if isinstance(item, str):
            prompt = _parse_line(item, place, problems)
        elif isinstance(item, dict):
            prompt = _build_prompt(item, lambda key, place=place: f"{place}: {key}", [], problems)  # type: ignore[misc]
        else:
            prompt = None
            problems.append(f"{place}: expected an object or text, got {item!r}")
        if prompt:
            yield prompt


def _build_prompt(
    values: Mapping[str, Any], locate_key: Callable[[str], str], prompt_problems: list[str], problems: list[str]
) -> Prompt | None:
    """The prompt, or None and what is wrong with it; ``found`` are problems that are known already."""
    fields: dict[str, Any] = {}
    for key, value in values.items():
        if key in _UNSUPPORTED_KEYS:
            prompt_problems.append(f"{locate_key(key)}: {_UNSUPPORTED_KEYS[key]}")
        elif key not in _PROMPT_FIELDS:
            prompt_problems.append(f"{locate_key(key)}: unknown key{suggest_name(key, _PROMPT_FIELDS)}")
        else:
            try:
                fields[_PROMPT_FIELDS[key].field] = _PROMPT_FIELDS[key].parse(value)
            except _InvalidValue as problem:
                prompt_problems.append(f"{locate_key(key)}: {problem}")
    if "prompt" not in values:
        prompt_problems.append(f"{locate_key('prompt')}: missing")
    problems.extend(prompt_problems)
    return None if prompt_problems else Prompt(**fields, locate_key=locate_key)


def _format_short_option(key: str) -> str:
    """A key as it is written in a line."""
    short = next((letter for letter, name in _SHORT_OPTIONS.items() if name == key), None)
    return f"--{short}" if short else key


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
