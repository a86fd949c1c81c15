"""The words of the page in other languages, by their English text; ``ko.json``, ``ja.json`` and ``zh.json`` hold them.

Texts of templates are looked up when a template is read, so that none can bypass the catalogue; scripts get the texts
that they pass to ``tr``.  A text that a catalogue lacks stays English; a test says which.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...report.rendering import build_environment
from .chart_texts import choose_age_text

LANGUAGES: Mapping[str, str] = {"en": "English", "ko": "한국어", "ja": "日本語", "zh": "中文"}
"""The languages, each by its own name."""

COOKIE = "language"
TRANSLATED_ATTRIBUTES = ("placeholder", "title", "aria-label", "alt", "label")

_TAG = r"<(?:[^<>{]|\{\{.*?\}\}|\{%.*?%\}|\{)*>"
_TOKEN = re.compile(
    rf"(\{{#.*?#\}}|\{{%.*?%\}}|<script\b.*?</script>|<code>.*?</code>|<!doctype[^>]*>|{_TAG})", re.S | re.I
)
_EXPRESSION = re.compile(r"\{\{.*?\}\}", re.S)
_ATTRIBUTE = re.compile(rf'(?<=\s)({"|".join(TRANSLATED_ATTRIBUTES)})="([^"]*)"')
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_NAMES = re.compile(r"--\w+|[a-z]+(_[a-z]+)+|[A-Z0-9]+|Lorikeet|· Lorikeet")
"""Names of options, units and the program, which are the same in all languages."""

SCRIPT_TEXT = re.compile(r'\btr\("((?:[^"\\]|\\.)*)"')
"""A text of a script."""


def choose_language(cookies: Mapping[str, str], accepted: str) -> str:
    """Choose the language that the user has set, or else the first known one that the browser asks for."""
    if cookies.get(COOKIE) in LANGUAGES:
        return cookies[COOKIE]
    wanted = []
    for number, part in enumerate(accepted[:1000].split(",")):
        tag, _, weight = part.strip().partition(";q=")
        try:
            wanted.append((-float(weight or 1), number, tag.lower().partition("-")[0]))
        except ValueError:
            continue
    return next((tag for _, _, tag in sorted(wanted) if tag in LANGUAGES), "en")


def read_catalogue(language: str) -> Mapping[str, str]:
    """Read the texts of a language; English has none."""
    if language == "en":
        return {}
    texts: Mapping[str, str] = json.loads((Path(__file__).parent / f"{language}.json").read_text("utf-8"))
    return texts


def translate_template(source: str, catalogue: Mapping[str, str]) -> str:
    """Replace the texts of a template, between its tags and in attributes, by those of a catalogue."""
    return _map_texts(source, lambda text: catalogue.get(text, text))


def list_template_texts(source: str) -> list[str]:
    """List the texts of a template; what is filled in is ``{0}``, ``{1}``."""
    found: list[str] = []

    def collect(text: str) -> str:
        found.append(text)
        return text

    _map_texts(source, collect)
    return found


def _map_texts(source: str, change: Callable[[str], str]) -> str:
    parts = []
    for token in _TOKEN.split(source):
        if token.startswith(("{#", "{%", "<script", "<code>", "<!")):
            parts.append(token)
        elif token.startswith("<"):
            parts.append(_ATTRIBUTE.sub(lambda found: f'{found[1]}="{_change_text(found[2], change)}"', token))
        else:
            parts.append(_change_text(token, change))
    return "".join(parts)


def _change_text(text: str, change: Callable[[str], str]) -> str:
    """Change one text; the spaces around it stay, and what is filled in is put where the changed text has it."""
    plain = _EXPRESSION.sub("", text)
    if not _LETTERS.search(re.sub(r"&\w+;", "", plain)) or "{%" in text or _NAMES.fullmatch(plain.strip()):
        return text
    expressions = _EXPRESSION.findall(text)
    numbers = iter(range(len(expressions)))
    key = " ".join(_EXPRESSION.sub(lambda found: f"{{{next(numbers)}}}", text).split())
    changed = change(key)
    for number, expression in enumerate(expressions):
        changed = changed.replace(f"{{{number}}}", expression)
    start, end = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return f"{start}{changed}{end}"


def iter_script_texts(source: str) -> Iterator[str]:
    """Iterate over the texts that a script passes to ``tr``."""
    for found in SCRIPT_TEXT.finditer(source):
        yield json.loads(f'"{found[1]}"')


def build_translated_environment(language: str) -> Any:
    """Build the templates of the page in a language."""
    catalogue = read_catalogue(language)
    environment = build_environment("library.web", change_source=lambda source: translate_template(source, catalogue))
    translate = build_translator(language)
    environment.filters["tr"] = lambda text, *parts: translate(str(text), *parts)
    environment.filters["age"] = lambda seconds: translate(*choose_age_text(seconds))
    return environment


def build_translator(language: str) -> Callable[..., str]:
    """Build the function that looks a text up and fills parts into it."""
    catalogue = read_catalogue(language)
    return lambda text, *parts: fill_in(catalogue.get(text, text), parts)


def fill_in(text: str, parts: Sequence[object]) -> str:
    """Put parts where a text has ``{0}``, ``{1}``."""
    for number, part in enumerate(parts):
        text = text.replace(f"{{{number}}}", str(part))
    return text


def list_script_texts() -> list[str]:
    """List the texts of all scripts of the page."""
    paths = sorted((Path(__file__).parents[1] / "static").glob("*.js"))
    return [text for path in paths for text in iter_script_texts(path.read_text("utf-8"))]
