"""Prompts for preview pictures, from kohya's three kinds of files; all mistakes are reported at once."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..config.schema import PreviewConfig
from ..config.toml_lines import read_toml
from ..errors import ConfigError
from ..registry import did_you_mean

SIZE_STEP = 8
"""Sides of pictures are multiples of this, since every VAE makes one latent of at least 8 x 8 pixels."""


@dataclass(frozen=True)
class Prompt:
    """One picture that is asked for; None means that the family decides."""

    text: str
    negative: str = ""
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    steps: int | None = None
    scale: float | None = None
    guidance: float | None = None
    flow_shift: float | None = None
    sampler: str | None = None
    where: Callable[[str], str] = field(default=str, compare=False, repr=False)
    """The key of a property -> where it is written, for messages."""


@dataclass(frozen=True)
class _Field:
    """How one property of a prompt is written."""

    field: str
    kind: Callable[[Any], Any]


class _Problem(ValueError):
    """What is wrong with one value."""


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a .txt, .toml or .json file."""
    readers = {".txt": _from_text, ".toml": _from_toml, ".json": _from_json}
    if path.suffix.lower() not in readers:
        raise ConfigError([f"{path}: prompts are read from .txt, .toml and .json files"])
    problems: list[str] = []
    prompts = list(readers[path.suffix.lower()](path, problems))
    if not prompts and not problems:
        problems.append(f"{path}: no prompts in it")
    if problems:
        raise ConfigError(problems)
    return prompts


def _whole(value: Any, least: int, most: int | None = None) -> int:
    if type(value) is not int:
        raise _Problem(f"expected a whole number, got {value!r}")
    if value < least or (most is not None and value > most):
        raise _Problem(f"expected at least {least}{'' if most is None else f' and at most {most}'}, got {value}")
    return value


def _seed(value: Any) -> int:
    number = _whole(value, 0)
    if number >= 2**63:
        raise _Problem(f"{number} is too large; at most {2**63 - 1}")
    return number


def _side(value: Any) -> int:
    pixels = _whole(value, SIZE_STEP)
    if pixels % SIZE_STEP:
        below = pixels - pixels % SIZE_STEP
        raise _Problem(f"{pixels} is no multiple of {SIZE_STEP}; write {below} or {below + SIZE_STEP}")
    return pixels


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise _Problem(f"expected a number that is not negative, got {value!r}")
    return float(value)


def _above_zero(value: Any) -> float:
    if not _number(value):
        raise _Problem("expected a number above 0, got 0")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Problem(f"expected text, got {value!r}")
    return value.strip()


def _sampler(value: Any) -> str:
    known = [name for kind in get_args(get_type_hints(PreviewConfig)["sample_sampler"]) for name in get_args(kind)]
    if value not in known:
        raise _Problem(f"{value!r} is not one of {', '.join(known)}")
    return str(value)


_KEYS: Mapping[str, _Field] = {
    "prompt": _Field("text", _text),
    "negative_prompt": _Field("negative", _text),
    "width": _Field("width", _side),
    "height": _Field("height", _side),
    "seed": _Field("seed", _seed),
    "sample_steps": _Field("steps", lambda value: _whole(value, 1, 1000)),
    "scale": _Field("scale", _number),
    "guidance_scale": _Field("guidance", _number),
    "flow_shift": _Field("flow_shift", _above_zero),
    "sample_sampler": _Field("sampler", _sampler),
}
_TEXTS = frozenset({"prompt", "negative_prompt", "sample_sampler"})
_LETTERS: Mapping[str, str] = {
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
_REFUSED: Mapping[str, str] = {
    "controlnet_image": "control pictures are not supported",
    "cfg_trunc_ratio": "only Lumina has it; leave it out",
    "renorm_cfg": "only Lumina has it; leave it out",
}


def _from_text(path: Path, problems: list[str]) -> Iterator[Prompt]:
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            prompt = _from_line(line, f"{path}:{number}", problems)
            if prompt:
                yield prompt


def _from_line(line: str, place: str, problems: list[str]) -> Prompt | None:
    """``a cat --w 512 --n a dog``: options stand behind the text, in any order."""
    text, *options = re.split(r"\s--(?=\S)", " " + line.strip())
    values: dict[str, Any] = {"prompt": text}
    found: list[str] = []
    for option in options:
        name, _, value = option.strip().partition(" ")
        key = _LETTERS.get(name.lower())
        if key is None:
            known = ", ".join(f"--{letter} {each}" for letter, each in _LETTERS.items() if each not in _REFUSED)
            hint = did_you_mean(name, _LETTERS, "--") or f"; there are: {known}"
            found.append(f"{place}: --{name}: unknown option{hint}")
        elif key in values:
            found.append(f"{place}: --{name}: given twice")
        elif not value.strip():
            found.append(f"{place}: --{name}: no value behind it")
        else:
            values[key] = value.strip() if key in _TEXTS else _literal(value.strip())
    return _prompt(values, lambda key: f"{place}: {_shown(key)}", found, problems)


def _literal(word: str) -> int | float | str:
    """The number that is written there, or the word itself."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _from_toml(path: Path, problems: list[str]) -> Iterator[Prompt]:
    """``[prompt]`` holds what all have in common, each ``[[prompt.subset]]`` one prompt."""
    data, lines = read_toml(path)
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

        prompt = _prompt({**shared, **subset}, where, [], problems)
        if prompt:
            yield prompt


def _from_json(path: Path, problems: list[str]) -> Iterator[Prompt]:
    """A list of objects, or of lines as in a text file."""
    try:
        data = json.loads(_read(path))
    except json.JSONDecodeError as error:
        problems.append(f"{path}:{error.lineno}: not valid JSON: {error.msg}")
        return
    if not isinstance(data, list):
        problems.append(f"{path}: expected a list of prompts")
        return
    for number, item in enumerate(data, start=1):
        place = f"{path}: prompt {number}"
        if isinstance(item, str):
            prompt = _from_line(item, place, problems)
        elif isinstance(item, dict):
            prompt = _prompt(item, lambda key, place=place: f"{place}: {key}", [], problems)  # type: ignore[misc]
        else:
            prompt = None
            problems.append(f"{place}: expected an object or text, got {item!r}")
        if prompt:
            yield prompt


def _prompt(
    values: Mapping[str, Any], where: Callable[[str], str], found: list[str], problems: list[str]
) -> Prompt | None:
    """The prompt, or None and what is wrong with it; ``found`` are problems that are known already."""
    fields: dict[str, Any] = {}
    for key, value in values.items():
        if key in _REFUSED:
            found.append(f"{where(key)}: {_REFUSED[key]}")
        elif key not in _KEYS:
            found.append(f"{where(key)}: unknown key{did_you_mean(key, _KEYS)}")
        else:
            try:
                fields[_KEYS[key].field] = _KEYS[key].kind(value)
            except _Problem as problem:
                found.append(f"{where(key)}: {problem}")
    if "prompt" not in values:
        found.append(f"{where('prompt')}: missing")
    problems.extend(found)
    return None if found else Prompt(**fields, where=where)


def _shown(key: str) -> str:
    """A key as it is written in a line."""
    short = next((letter for letter, name in _LETTERS.items() if name == key), None)
    return f"--{short}" if short else key


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
