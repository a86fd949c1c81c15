"""The prompts file of ``--slider_prompts``: concepts to erase or enhance, and sliders, learned from texts alone.

It has the formats of sd-scripts' ``train_leco.py``, TOML or YAML: entries with ``target``, of LECO, and entries with
``target_class``, of sliders, which become four of the former.  Every entry becomes one or more ``SliderPrompt``.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..config.options import ALWAYS, Option, define_option, iter_options
from ..config.toml_positions import KeyPath, read_text_file, read_toml_with_lines
from ..config.types import MAX_SIDE, Resolution
from ..errors import ConfigError
from ..name_suggestions import suggest_name
from ..problems import Place, Problem, report_file

YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class SliderPrompt:
    """A direction for the LoRA to learn.

    With the LoRA at ``multiplier``, the target is predicted as the frozen model predicts ``neutral``, moved by
    ``guidance_scale`` times the difference of ``positive`` and ``unconditional``.
    """

    target: str
    positive: str
    unconditional: str
    neutral: str
    action: Literal["erase", "enhance"] = "erase"
    guidance_scale: float = 1.0
    resolution: Resolution = Resolution(512, 512)  # noqa: RUF009
    dynamic_resolution: bool = False
    batch_size: int = 1
    dynamic_crops: bool = False
    multiplier: float = 1.0
    weight: float = 1.0
    frames: int = 1
    places: Mapping[str, Place] = field(default_factory=dict, compare=False, repr=False)
    """The place of each key that the file sets; under the empty key that of the entry."""

    @property
    def direction(self) -> float:
        """The factor of the difference between the predictions of ``positive`` and ``unconditional``."""
        return -self.guidance_scale if self.action == "erase" else self.guidance_scale

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that the model gets, each once."""
        return tuple(dict.fromkeys((self.target, self.positive, self.unconditional, self.neutral)))

    @property
    def content_hash(self) -> str:
        """Hash everything that the training depends on but the batch size, which another batch layout may change."""
        return hashlib.blake2b(repr(replace(self, batch_size=1)).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """Describe it in one line, as the log and the names of samples have it."""
        direction = f"{self.direction:+g} x ({self.positive!r} - {self.unconditional!r})" if self.direction else "kept"
        return f"{self.target!r} at {self.multiplier:g}: {self.neutral!r} {direction}"

    def export_json(self) -> dict[str, object]:
        """Export what the metadata of a LoRA file say, by sd-scripts' names."""
        names = ("target", "positive", "unconditional", "neutral", "action", "multiplier", "weight")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ParsedSliderPrompts:
    """The prompts of a file as far as they could be parsed, and all problems."""

    prompts: tuple[SliderPrompt, ...] = ()
    problems: tuple[Problem, ...] = ()
    notices: tuple[str, ...] = ()


class _Size:
    """The size of pictures as sd-scripts' prompts file has it: ``512`` or ``[HEIGHT, WIDTH]``."""

    syntax: ClassVar[str] = "SIZE or [HEIGHT, WIDTH]"

    @classmethod
    def parse(cls, value: Any) -> Resolution:
        sides = [value, value] if type(value) is int else value
        if not isinstance(sides, list) or len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
            raise ValueError("expected a size in pixels, such as 512 or [512, 768] (height, width)")
        if max(sides) > MAX_SIDE:
            raise ValueError(f"must be at most {MAX_SIDE} pixels, got {max(sides)}")
        return Resolution(sides[1], sides[0])


@dataclass(frozen=True)
class _SharedKeys:
    neutral: str = define_option("", "the text whose prediction is moved", needs=ALWAYS)
    guidance_scale: float = define_option(1.0, "how far the prediction is moved", needs=ALWAYS)
    resolution: _Size = define_option(Resolution(512, 512), "size of the pictures", needs=ALWAYS)  # noqa: RUF009
    dynamic_resolution: bool = define_option(False, "draw a size between half of it and it", needs=ALWAYS)
    batch_size: int = define_option(1, "pictures in a batch", minimum=1, needs=ALWAYS)
    dynamic_crops: bool = define_option(False, "SDXL: draw the size and crop that it is told", needs=ALWAYS)
    multiplier: float = define_option(1.0, "strength of the LoRA while it is trained", needs=ALWAYS)
    weight: float = define_option(1.0, "weight of the loss", minimum=0, needs=ALWAYS)
    frames: int = define_option(1, "models of videos: frames of a clip", minimum=1, needs=ALWAYS)
    attributes: tuple[str, ...] = define_option((), "words before every text, one entry for each", needs=ALWAYS)
    preserve: tuple[str, ...] = define_option((), "texts that are predicted as without the LoRA", needs=ALWAYS)


@dataclass(frozen=True)
class _PromptKeys:
    target: str = define_option("", "the text that changes", needs=ALWAYS)
    positive: str | None = define_option(None, "the concept; default: target", needs=ALWAYS)
    unconditional: str = define_option("", "what the concept is compared with", needs=ALWAYS)
    action: Literal["erase", "enhance"] = define_option("erase", "away from the concept, or to it", needs=ALWAYS)


@dataclass(frozen=True)
class _SliderKeys:
    target_class: str = define_option("", "the text that changes", needs=ALWAYS)
    positive: str | None = define_option(None, "the end of the slider above 0", needs=ALWAYS)
    negative: str | None = define_option(None, "the end of the slider below 0", needs=ALWAYS)
    neutrals: tuple[str, ...] = define_option((), "several texts instead of neutral", needs=ALWAYS)
    neutral_prompt_file: str | None = define_option(None, "file with a text in each line", needs=ALWAYS)
    prompt_file: str | None = define_option(None, "the same", needs=ALWAYS)
    resolutions: tuple[_Size, ...] = define_option((), "several sizes instead of resolution", needs=ALWAYS)


@dataclass(frozen=True)
class _PromptTable:
    shared: _SharedKeys
    own: _PromptKeys


@dataclass(frozen=True)
class _SliderTable:
    shared: _SharedKeys
    own: _SliderKeys


PROMPT_KEYS: Mapping[str, Option] = {option.name: option for option in iter_options(_PromptTable)}
"""The keys of an entry with ``target``."""

SLIDER_KEYS: Mapping[str, Option] = {option.name: option for option in iter_options(_SliderTable)}
"""The keys of an entry with ``target_class``."""

_NEUTRAL_KEYS = ("neutrals", "neutral_prompt_file", "prompt_file", "neutral")
_OTHER_PROGRAMS = {
    "anchors": "ai-toolkit's; list the texts in preserve",
    "shuffle": "ai-toolkit's; write an entry for each order of the words",
    "negative": "of entries with target_class; here it is called unconditional",
    "unconditional": "of entries with target; here it is called negative",
    "action": "of entries with target: a slider is trained in both directions",
}
_OTHER_KINDS = {
    "negative": "it is called unconditional there",
    "unconditional": "it is called negative there",
    "neutrals": "set neutral; an entry has one",
    "neutral_prompt_file": "set neutral; an entry has one",
    "prompt_file": "set neutral; an entry has one",
    "resolutions": "set resolution; an entry has one",
    "action": "remove it: a slider is trained in both directions",
    "target": "it is called target_class there",
    "target_class": "it is called target there",
}
"""What to do about a default of the other kind of entries."""


def parse_slider_prompts(path: Path) -> ParsedSliderPrompts:
    """Parse a prompts file, and report every wrong entry with its line."""
    try:
        document, lines = (read_yaml_with_lines if path.suffix.lower() in YAML_SUFFIXES else read_toml_with_lines)(path)
    except ConfigError as error:
        return ParsedSliderPrompts(problems=tuple(error.problems))
    parser = _PromptFileParser(path, lines)
    prompts = tuple(parser.parse(document))
    if not prompts and not parser.problems:
        parser.problems.append(report_file(path, "has no prompts", "add [[prompts]] with target, or [[targets]]"))
    return ParsedSliderPrompts(prompts, tuple(parser.problems), tuple(dict.fromkeys(parser.notices)))


@dataclass
class _Values:
    """The values of a table by key, with the place of each."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)

    def merge(self, own: "_Values") -> "_Values":
        """Return the values of an entry over these, its defaults; a neutral text of its own replaces all of these."""
        dropped = _NEUTRAL_KEYS if own.values.keys() & {*_NEUTRAL_KEYS} else ()
        dropped = (*dropped, *(("resolutions",) if "resolution" in own.values else ()))
        kept = {name: value for name, value in self.values.items() if name not in dropped}
        return _Values({**kept, **own.values}, {**self.places, **own.places})


@dataclass
class _PromptFileParser:
    """Turns the tables of one file into prompts and collects problems."""

    path: Path
    lines: Mapping[KeyPath, int]
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def parse(self, document: Any) -> Iterator[SliderPrompt]:
        """Find the list of entries, and the table with their defaults."""
        if isinstance(document, list):  # YAML of LECO
            yield from self.parse_entries((), document, _Values(), needs_target=True)
        elif not isinstance(document, dict):
            self.problems.append(report_file(self.path, "expected a list of entries, or a table"))
        elif len(kinds := [name for name in ("prompts", "targets", "slider") if name in document]) > 1:
            text = f"a file has one kind of entries, but this one has {' and '.join(kinds)}"
            self.report((kinds[-1],), text, f"move {kinds[-1]} to a file of its own")
        elif "prompts" in document:
            defaults = self.parse_defaults((), document, "prompts")
            yield from self.parse_entries(("prompts",), document["prompts"], defaults, needs_target=True)
        else:
            base: KeyPath = ("slider",) if "slider" in document else ()
            table = document["slider"] if base else document
            for name in document if base else ():
                if name != "slider":
                    self.report((name,), f"unknown key beside [slider]{suggest_name(name, ['slider'])}")
            if not isinstance(table, dict):
                self.report(base, "expected a table")
            elif base and "prompts" in table:
                self.report((*base, "prompts"), "entries with target are not in [slider]", "write [[prompts]]")
            elif "targets" in table:
                defaults = self.parse_defaults(base, table, "targets")
                yield from self.parse_entries((*base, "targets"), table["targets"], defaults)
            elif "target" in table or "target_class" in table:
                yield from self.parse_entry(base, table, _Values())
            else:
                fix = "add [[prompts]] with target, or [[targets]] with target_class, positive and negative"
                self.problems.append(report_file(self.path, "neither prompts nor targets", fix))

    def parse_defaults(self, base: KeyPath, table: Mapping[str, Any], entries: str) -> _Values:
        """Parse the keys beside the list of entries, which hold for all of them."""
        own = {name: value for name, value in table.items() if name != entries}
        parsed = self.parse_table(base, own, {**PROMPT_KEYS, **SLIDER_KEYS})
        found = table[entries] if isinstance(table[entries], list) else []
        kinds = {"target" in entry for entry in found if isinstance(entry, dict)}
        for name in own:
            option = PROMPT_KEYS.get(str(name)) or SLIDER_KEYS.get(str(name))
            if len(kinds) == 1 and option is not None and option.name not in _get_keys(is_slider=kinds == {False}):
                kind = "target" if kinds == {True} else "target_class"
                hint = _OTHER_KINDS.get(option.name, "")
                self.report((*base, name), f"has no effect on entries with {kind}", hint or "remove it")
        return parsed

    def parse_entries(
        self, base: KeyPath, entries: Any, defaults: _Values, *, needs_target: bool = False
    ) -> Iterator[SliderPrompt]:
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            self.report(base, "expected a list of tables")
            return
        for number, entry in enumerate(entries):
            entry_path = (*base, number)
            if needs_target and not {"target", "target_class"} & entry.keys():
                self.report(entry_path, "target is missing", "set target, or target_class for a slider")
            else:
                yield from self.parse_entry(entry_path, entry, defaults)

    def parse_entry(self, key_path: KeyPath, entry: Mapping[str, Any], defaults: _Values) -> Iterator[SliderPrompt]:
        """Parse one entry, and expand it to its prompts."""
        is_slider, num_problems = "target" not in entry, len(self.problems)
        keys = _get_keys(is_slider=is_slider)
        own = self.parse_table(key_path, entry, keys)
        known = {name: value for name, value in defaults.values.items() if name in keys}
        merged = _Values(known, defaults.places).merge(own)
        merged.places[""] = self.locate(key_path)
        expand = self.expand_slider if is_slider else self.expand_prompt
        prompts = list(expand(key_path, merged))
        if merged.values.get("multiplier") == 0:
            self.report_value(merged, "multiplier", "0 trains nothing")
        if len(self.problems) == num_problems:
            yield from prompts

    def parse_table(self, base: KeyPath, table: Mapping[str, Any], keys: Mapping[str, Option]) -> _Values:
        parsed = _Values()
        for name, value in table.items():
            key_path, option = (*base, name), keys.get(str(name))
            if option is None:
                text = _OTHER_PROGRAMS.get(str(name))
                hint = f": {text}" if text else suggest_name(str(name), keys)
                self.report(key_path, f"unknown key{hint}")
                continue
            parsed.places[option.name] = self.locate(key_path)
            try:
                parsed.values[option.name] = _parse_value(option, value)
            except ValueError as error:
                self.report(key_path, str(error))
        return parsed

    def expand_prompt(self, key_path: KeyPath, entry: _Values) -> Iterator[SliderPrompt]:
        """Expand an entry with ``target``: one prompt, one for each attribute, and those that are kept."""
        values = dict(entry.values)
        attributes, preserve = values.pop("attributes", ()), values.pop("preserve", ())
        target, unconditional = values.pop("target", ""), values.pop("unconditional", "")
        positive = values.pop("positive", None)
        neutral = values.pop("neutral", unconditional)
        prompt = SliderPrompt(
            target, target if positive is None else positive, unconditional, neutral, places=entry.places, **values
        )
        yield from _add_attributes(prompt, attributes)
        yield from _keep_texts(prompt, preserve, [prompt.multiplier])

    def expand_slider(self, key_path: KeyPath, entry: _Values) -> Iterator[SliderPrompt]:
        """Expand an entry with ``target_class`` to both directions of each neutral text and size, as sd-scripts."""
        values = dict(entry.values)
        neutrals = self.list_neutrals(values)
        positive, negative = (str(values.pop(name, None) or "") for name in ("positive", "negative"))
        attributes, preserve = values.pop("attributes", ()), values.pop("preserve", ())
        sizes = values.pop("resolutions", ()) or (values.pop("resolution", Resolution(512, 512)),)
        values.pop("resolution", None)
        target, multiplier = values.pop("target_class", ""), values.pop("multiplier", 1.0)
        for name in _NEUTRAL_KEYS:
            values.pop(name, None)
        if not positive.strip() and not negative.strip():
            self.report(key_path, "a slider needs a positive or a negative text", "set positive, negative or both")
            return
        if target and neutrals == [""]:
            where = entry.places[""]
            self.notices.append(
                f"{where}: target_class {target!r} without neutral moves the prediction of the empty text, as in "
                f"sd-scripts; neutral = {target!r} keeps the class as it is at 0"
            )
        for size in sizes:
            base = SliderPrompt(target, positive, negative, "", resolution=size, places=entry.places, **values)
            for neutral in neutrals:
                for first, second, action, sign in _list_directions(positive, negative):
                    strength = sign * multiplier
                    prompt = replace(base, positive=first, unconditional=second, action=action, multiplier=strength)
                    yield from _add_attributes(replace(prompt, neutral=neutral), attributes)
            yield from _keep_texts(base, preserve, [multiplier, -multiplier])

    def list_neutrals(self, values: Mapping[str, Any]) -> list[str]:
        """List the neutral texts of a slider: its own, those of its files, or the empty one."""
        neutrals = [*values.get("neutrals", ())]
        for name in ("neutral_prompt_file", "prompt_file"):
            if values.get(name):
                try:
                    text = read_text_file(self.path.parent / values[name])
                except ConfigError as error:
                    self.problems += error.problems
                else:
                    neutrals += [line.strip() for line in text.splitlines() if line.strip()]
        return neutrals or [values.get("neutral", "")]

    def locate(self, key_path: KeyPath) -> Place:
        """Return the file with the line of a key, or of the table in which it is."""
        found = key_path
        while found and found not in self.lines:
            found = found[:-1]
        return Place(str(self.path), self.lines[found] if found else None)

    def report(self, key_path: KeyPath, text: str, fix: str = "") -> None:
        name = str(key_path[-1]) if key_path and isinstance(key_path[-1], str) else ""
        self.problems.append(Problem(name, text, fix, self.locate(key_path).with_key(name)))

    def report_value(self, entry: _Values, name: str, text: str) -> None:
        self.problems.append(Problem(name, text, place=entry.places[name].with_key(name)))


def _get_keys(*, is_slider: bool) -> Mapping[str, Option]:
    return SLIDER_KEYS if is_slider else PROMPT_KEYS


def list_slider_texts(prompts: Sequence[SliderPrompt]) -> list[str]:
    """List all texts of the prompts, each once."""
    return list(dict.fromkeys(text for prompt in prompts for text in prompt.texts))


def _parse_value(option: Option, value: Any) -> Any:
    if option.name == "resolutions" and isinstance(value, list) and any(type(item) is int for item in value):
        raise ValueError("write [[512, 512], [768, 768]]: height and width of each size")
    return option.parse_lenient_toml_value(value)


def _list_directions(positive: str, negative: str) -> list[tuple[str, str, Literal["erase", "enhance"], int]]:
    """List positive, unconditional, action and sign of the multiplier of the prompts that make a slider."""
    if positive.strip() and negative.strip():
        return [
            (negative, positive, "erase", 1),
            (positive, negative, "enhance", 1),
            (positive, negative, "erase", -1),
            (negative, positive, "enhance", -1),
        ]
    if negative.strip():
        return [(negative, "", "erase", 1), (negative, "", "enhance", -1)]
    return [(positive, "", "enhance", 1), (positive, "", "erase", -1)]


def _add_attributes(prompt: SliderPrompt, attributes: Sequence[str]) -> Iterator[SliderPrompt]:
    """Write each attribute before all texts; without any the prompt stays as it is."""
    names = ("target", "positive", "unconditional", "neutral")
    for attribute in attributes:
        changes: dict[str, Any] = {name: f"{attribute} {getattr(prompt, name)}".strip() for name in names}
        yield replace(prompt, **changes)
    if not attributes:
        yield prompt


def _keep_texts(prompt: SliderPrompt, texts: Iterable[str], multipliers: Sequence[float]) -> Iterator[SliderPrompt]:
    """Yield the prompts for which the model with the LoRA predicts as without it."""
    for text in texts:
        kept = replace(prompt, target=text, positive=text, unconditional=text, neutral=text, guidance_scale=0.0)
        for multiplier in multipliers:
            yield replace(kept, multiplier=multiplier)


def read_yaml_with_lines(path: Path) -> tuple[Any, Mapping[KeyPath, int]]:
    """Return the data of a YAML file, and the line of each key and item."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    text = read_text_file(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data, lines = yaml.safe_load(text), dict(_find_yaml_lines(root, ()))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = Place(str(path), None if mark is None else mark.line + 1)
        raise ConfigError([Problem("", f"not valid YAML: {getattr(error, 'problem', error)}", place=place)]) from None
    return ([] if data is None else data), lines


def _find_yaml_lines(node: Any, key_path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if node is None or isinstance(node.value, str):
        return
    for number, item in enumerate(node.value):
        key, value = item if isinstance(item, tuple) else (None, item)
        inner = (*key_path, number if key is None else key.value)
        yield inner, (value if key is None else key).start_mark.line + 1
        yield from _find_yaml_lines(value, inner)
