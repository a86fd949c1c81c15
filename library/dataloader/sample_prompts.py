"""Read the prompts of preview images from .txt, .toml or .json files, as in sd-scripts; report all errors at once."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..config.schema_output import PreviewConfig
from ..config.toml_positions import read_toml_with_lines
from ..config.types import is_prompt_text
from ..dataset.clip_inspection import inspect_clip
from ..dataset.controls import CONTROLS_FROM_IMAGE
from ..dataset.image_inspection import inspect_image
from ..dataset.image_ref import ImageRef
from ..dataset.one_frame import parse_one_frame
from ..dataset.schema import resolve_path
from ..errors import FileError
from ..name_suggestions import suggest_name
from ..problems import Place, Problem, report_file
from ..storage.remote_store import RemoteStore

IMAGE_SIZE_MULTIPLE = 8
"""The multiple of the sides of previews: every VAE downsamples by 8 or more."""
MIN_FPS, MAX_FPS = 1, 240
"""The rates at which clips are written: WebP files count whole milliseconds, too coarse for faster ones."""


def _locate_nowhere(key: str) -> Place:
    return Place(key=key)


@dataclass(frozen=True)
class Prompt:
    """A prompt and the settings of its image or video; None means the default of the model family."""

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
    num_frames: int | None = None
    fps: float | None = None
    first_image: Path | None = None
    """The image with which the video begins."""
    last_image: Path | None = None
    """The image with which the video ends."""
    control_images: tuple[Path, ...] = ()
    control_clips: tuple[Path, ...] = ()
    """The control clips of a video: files, or folders of images."""
    control_from_image: str | None = None
    """The way control images are derived from the given ones: a key of ``CONTROLS_FROM_IMAGE``."""
    one_frame: str | None = None
    """The positions of one-frame inference, as ``parse_one_frame`` reads them."""
    network_multiplier: float = 1.0
    """The strength of the LoRA, such as that of a slider."""

    locate_key: Callable[[str], Place] = field(default=_locate_nowhere, compare=False, repr=False)
    """Return the place of a key in the file, for messages."""

    def report(self, key: str, text: str, fix: str = "") -> Problem:
        """Build a problem of a setting of this prompt."""
        return Problem("sample_prompts", text, fix, self.locate_key(key))


class _InvalidValue(ValueError):
    """A value is wrong; the text says why."""


def load_prompts(path: Path) -> list[Prompt]:
    """Read a .txt, .toml or .json file."""
    readers = {".txt": _load_txt, ".toml": _load_toml, ".json": _load_json}
    if path.suffix.lower() not in readers:
        raise FileError([report_file(path, "not a .txt, .toml or .json file")])
    problems: list[Problem] = []
    prompts = readers[path.suffix.lower()](path, problems)
    source = Place(str(path))
    return _require_prompts([_resolve_images(each, path, problems) for each in prompts], source, problems)


def _require_prompts(prompts: list[Prompt], source: Place, problems: list[Problem]) -> list[Prompt]:
    if not prompts and not problems:
        problems.append(Problem("sample_prompts", "no prompts", place=source))
    if problems:
        raise FileError(problems)
    return prompts


def _resolve_images(prompt: Prompt, path: Path | None, problems: list[Problem]) -> Prompt:
    """Find the images of a prompt, from the working directory or next to the file, and check them."""

    def resolve(key: str, image: Path) -> Path:
        found = resolve_path(path, str(image), RemoteStore())
        defect = inspect_image(found).problem if found.is_file() else "no such file"
        if defect:
            problems.append(prompt.report(key, f"{found}: {defect}"))
        return found

    ends = {"image_path": prompt.first_image, "end_image_path": prompt.last_image}
    first, last = (None if image is None else resolve(key, image) for key, image in ends.items())
    controls = tuple(resolve(_CONTROL_KEY, image) for image in prompt.control_images)
    clips = tuple(_resolve_clip(prompt, clip, path, problems) for clip in prompt.control_clips)
    return replace(prompt, first_image=first, last_image=last, control_images=controls, control_clips=clips)


def _resolve_clip(prompt: Prompt, clip: Path, path: Path | None, problems: list[Problem]) -> Path:
    """Find a control clip as images are found, and check it."""
    found = resolve_path(path, str(clip), RemoteStore())
    defect: str | None = "no such file or folder"
    if found.exists():
        defect = inspect_clip(ImageRef(found.parent, found.name), "").problem
    if defect:
        problems.append(prompt.report(_CLIP_KEY, f"{found}: {defect}"))
    return found


def load_preview_prompts(preview: PreviewConfig) -> list[Prompt]:
    """Load ``--sample_prompts``, a file or the prompts themselves, if set."""
    value = preview.sample_prompts
    if not value or not is_prompt_text(value):
        return load_prompts(Path(value)) if value else []
    problems, source = list[Problem](), Place(flag="--sample_prompts")
    prompts = [_resolve_images(each, None, problems) for each in _parse_lines(value, source, problems)]
    return _require_prompts(prompts, source, problems)


def _parse_int(value: Any, minimum: int, maximum: int | None = None) -> int:
    if type(value) is not int:
        raise _InvalidValue(f"expected an integer, got {value!r}")
    if value < minimum or (maximum is not None and value > maximum):
        limit = "" if maximum is None else f" and at most {maximum}"
        raise _InvalidValue(f"expected at least {minimum}{limit}, got {value}")
    return value


def _parse_seed(value: Any) -> int:
    number = _parse_int(value, 0)
    if number >= 2**63:
        raise _InvalidValue(f"{number} is too large; at most {2**63 - 1}")
    return number


def _parse_side(value: Any) -> int:
    pixels = _parse_int(value, IMAGE_SIZE_MULTIPLE)
    if remainder := pixels % IMAGE_SIZE_MULTIPLE:
        below = pixels - remainder
        above = below + IMAGE_SIZE_MULTIPLE
        raise _InvalidValue(f"{pixels} is not a multiple of {IMAGE_SIZE_MULTIPLE}; use {below} or {above}")
    return pixels


def _parse_non_negative(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise _InvalidValue(f"expected a number of at least 0, got {value!r}")
    return float(value)


def _parse_strength(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _InvalidValue(f"expected a number, got {value!r}")
    return float(value)


def _parse_positive(value: Any) -> float:
    if not _parse_non_negative(value):
        raise _InvalidValue("expected a number above 0, got 0")
    return float(value)


def _parse_fps(value: Any) -> float:
    if type(value) not in (int, float) or not MIN_FPS <= value <= MAX_FPS:
        limits = f"expected {MIN_FPS} to {MAX_FPS} frames per second"
        raise _InvalidValue(f"{limits}, got {value!r}; leave it out for the rate of the model")
    return float(value)


def _parse_text(value: Any) -> str:
    if not isinstance(value, str):
        raise _InvalidValue(f"expected a string, got {value!r}")
    return value.strip()


def _parse_sampler(value: Any) -> str:
    options = get_args(get_type_hints(PreviewConfig)["sample_sampler"])
    known = [name for option in options for name in get_args(option)]
    if value not in known:
        raise _InvalidValue(f"no sampler {value!r}{suggest_name(str(value), known) or '; use ' + ', '.join(known)}")
    return str(value)


def _parse_paths(value: Any) -> tuple[Path, ...]:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise _InvalidValue(f"expected a path or a list of paths, got {value!r}")
    return tuple(map(Path, names))


def _parse_path(value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise _InvalidValue(f"expected a path, got {value!r}")
    return Path(value)


def _parse_control_kind(value: Any) -> str:
    if value not in CONTROLS_FROM_IMAGE:
        hint = suggest_name(str(value), CONTROLS_FROM_IMAGE)
        raise _InvalidValue(f"expected {', '.join(CONTROLS_FROM_IMAGE)}, got {value!r}{hint}")
    return str(value)


def _parse_one_frame(value: Any) -> str:
    try:
        parse_one_frame(str(value))
    except ValueError as error:
        raise _InvalidValue(str(error)) from None
    return str(value)


_PROMPT_FIELDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "prompt": ("text", _parse_text),
    "negative_prompt": ("negative_prompt", _parse_text),
    "width": ("width", _parse_side),
    "height": ("height", _parse_side),
    "seed": ("seed", _parse_seed),
    "sample_steps": ("num_inference_steps", lambda value: _parse_int(value, 1, 1000)),
    "scale": ("cfg_scale", _parse_non_negative),
    "guidance_scale": ("embedded_guidance", _parse_non_negative),
    "cfg_scale": ("cfg_scale", _parse_non_negative),
    "flow_shift": ("flow_shift", _parse_positive),
    "discrete_flow_shift": ("flow_shift", _parse_positive),
    "frame_count": ("num_frames", lambda value: _parse_int(value, 1)),
    "fps": ("fps", _parse_fps),
    "image_path": ("first_image", _parse_path),
    "end_image_path": ("last_image", _parse_path),
    "sample_sampler": ("sampler", _parse_sampler),
    "control_image_path": ("control_images", _parse_paths),
    "control_video_path": ("control_clips", _parse_paths),
    "control_from_image": ("control_from_image", _parse_control_kind),
    "one_frame": ("one_frame", _parse_one_frame),
    "network_multiplier": ("network_multiplier", _parse_strength),
}
"""The field of ``Prompt`` that each key of a prompt file sets, and the parser of its values.

``cfg_scale`` and ``discrete_flow_shift`` are the names of musubi-tuner for ``scale`` and ``flow_shift``.
"""

_CONTROL_KEY, _CLIP_KEY = "control_image_path", "control_video_path"
_LIST_KEYS = frozenset((_CONTROL_KEY, _CLIP_KEY))
_TEXT_KEYS = _LIST_KEYS | {
    *("prompt", "negative_prompt", "sample_sampler", "control_from_image", "image_path", "end_image_path"),
    "one_frame",
}

_SHORT_OPTIONS: Mapping[str, str] = {
    **{"n": "negative_prompt", "w": "width", "h": "height", "d": "seed", "s": "sample_steps", "l": "scale"},
    **{"ss": "sample_sampler", "g": "guidance_scale", "cn": _CLIP_KEY, "ctr": "cfg_trunc_ratio"},
    **{"rcfg": "renorm_cfg", "fs": "flow_shift", "ci": _CONTROL_KEY, "cf": "control_from_image"},
    **{"f": "frame_count", "fps": "fps", "i": "image_path", "ei": "end_image_path", "of": "one_frame"},
    "am": "network_multiplier",
}

_UNSUPPORTED_KEYS: Mapping[str, str] = {
    "controlnet_image": "ControlNet images are not supported; control images of editing models are control_image_path",
    "cfg_trunc_ratio": "for Lumina only; remove it",
    "renorm_cfg": "for Lumina only; remove it",
}


def _load_txt(path: Path, problems: list[Problem]) -> Iterator[Prompt]:
    return _parse_lines(_read_text(path), Place(str(path)), problems)


def _parse_lines(text: str, source: Place, problems: list[Problem]) -> Iterator[Prompt]:
    """Parse a prompt for each line; the place of a problem is the line, if the ``source`` is a file."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            if prompt := _parse_line(line, replace(source, line=number) if source.file else source, problems):
                yield prompt


def _parse_line(line: str, place: Place, problems: list[Problem]) -> Prompt | None:
    """Parse ``a cat --w 512 --n a dog``: a prompt, then options in any order."""
    text, *options = re.split(r"\s--(?=\S)", " " + line.strip())
    values: dict[str, Any] = {"prompt": text}
    line_problems: list[Problem] = []
    for option in options:
        name, _, value = option.strip().partition(" ")
        key = _SHORT_OPTIONS.get(name.lower())
        if key is None:
            supported = {short: key for short, key in _SHORT_OPTIONS.items() if key not in _UNSUPPORTED_KEYS}
            known = ", ".join(f"--{short} {key}" for short, key in supported.items())
            hint = suggest_name(name, _SHORT_OPTIONS, "--") or f"; use {known}"
            line_problems.append(
                Problem("sample_prompts", f"unknown option{hint}", place=replace(place, key=f"--{name}"))
            )
        elif key in values and key not in _LIST_KEYS:
            where = replace(place, key=f"--{name}")
            line_problems.append(Problem("sample_prompts", "duplicate option", "remove one of the two", where))
        elif not value.strip():
            line_problems.append(Problem("sample_prompts", "value missing", place=replace(place, key=f"--{name}")))
        else:
            parsed = value.strip() if key in _TEXT_KEYS else _parse_number(value.strip())
            values[key] = [*values.get(key, []), parsed] if key in _LIST_KEYS else parsed
    return _build_prompt(values, lambda key: replace(place, key=_format_short_option(key)), line_problems, problems)


def _parse_number(text: str) -> int | float | str:
    """Parse a number; other text is returned unchanged."""
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return text


def _load_toml(path: Path, problems: list[Problem]) -> Iterator[Prompt]:
    """Read ``[prompt]``, the shared settings, and a ``[[prompt.subset]]`` for each prompt."""
    data, lines = read_toml_with_lines(path)
    common = data.get("prompt")
    if set(data) != {"prompt"} or not isinstance(common, dict) or not isinstance(common.get("subset"), list):
        problems.append(report_file(path, "expected a [prompt] table with a [[prompt.subset]] for each image"))
        return
    shared = {key: value for key, value in common.items() if key != "subset"}
    for number, subset in enumerate(common["subset"]):

        def locate_key(key: str, number: int = number) -> Place:
            line = lines.get(("prompt", "subset", number, key)) or lines.get(("prompt", key))
            line = line or lines.get(("prompt", "subset", number), 1)
            return Place(str(path), line, key=key)

        if prompt := _build_prompt({**shared, **subset}, locate_key, [], problems):
            yield prompt


def _load_json(path: Path, problems: list[Problem]) -> Iterator[Prompt]:
    """Read a list of objects, or of lines as in a text file."""
    try:
        data = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        problems.append(Problem("", f"not valid JSON: {error.msg}", place=Place(str(path), error.lineno)))
        return
    if not isinstance(data, list):
        problems.append(report_file(path, "expected a list of prompts"))
        return
    for number, item in enumerate(data, start=1):
        place = Place(str(path), part=f"prompt {number}")
        prompt = None
        if isinstance(item, str):
            prompt = _parse_line(item, place, problems)
        elif isinstance(item, dict):
            prompt = _build_prompt(item, place.with_key, [], problems)
        else:
            problems.append(Problem("", f"expected an object or a string, got {item!r}", place=place))
        if prompt:
            yield prompt


def _build_prompt(
    values: Mapping[str, Any],
    locate_key: Callable[[str], Place],
    prompt_problems: list[Problem],
    problems: list[Problem],
) -> Prompt | None:
    """Build a prompt, or append its problems, after the given ``prompt_problems``, and return None."""
    fields: dict[str, Any] = {}

    def add_problem(key: str, text: str, fix: str = "") -> None:
        prompt_problems.append(Problem("sample_prompts", text, fix, locate_key(key)))

    for key, value in values.items():
        if key in _UNSUPPORTED_KEYS:
            add_problem(key, _UNSUPPORTED_KEYS[key])
        elif key not in _PROMPT_FIELDS:
            add_problem(key, f"unknown key{suggest_name(key, _PROMPT_FIELDS)}")
        else:
            try:
                field_name, parse = _PROMPT_FIELDS[key]
                if field_name in fields:
                    raise _InvalidValue("is set twice, by two names")
                fields[field_name] = parse(value)
            except _InvalidValue as error:
                add_problem(key, str(error))
    if "control_from_image" in fields and "control_images" not in fields:
        add_problem("control_from_image", "no control image to make it from", "add --ci PATH")
    if "prompt" not in values:
        add_problem("prompt", "missing")
    problems.extend(prompt_problems)
    return None if prompt_problems else Prompt(**fields, locate_key=locate_key)


def _format_short_option(key: str) -> str:
    short = next((short for short, name in _SHORT_OPTIONS.items() if name == key), None)
    return f"--{short}" if short else key


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise FileError([report_file(path, "no such file")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileError([report_file(path, f"cannot be read: {error}")]) from None
