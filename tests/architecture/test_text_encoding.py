"""Text files and the output of programs are read and written as UTF-8: without a word, Windows takes its code page."""

import ast
import re
from collections.abc import Iterator

import pytest
from code_metrics import ROOT

PARTS = ("library", "scripts", "benchmarks")
FILES = [*(path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))), ROOT / "train_lora.py"]
TEXT_MODE = re.compile(r"[rwxa]t?\+?|[rwxa]\+t?")


def find_missing_encodings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the function of each call that reads or writes text in an encoding of the system."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" in given or None in given:
            continue
        count = len(node.args)
        if (name == "read_text" and count < 1) or (name == "write_text" and count < 2):
            yield node.lineno, name
        elif name in ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile") and _is_text_mode(node, name):
            yield node.lineno, name
        elif name in ("run", "Popen", "check_output", "check_call") and _asks_for_text(given):
            yield node.lineno, name


def _asks_for_text(given: dict[str | None, ast.expr]) -> bool:
    values = [given.get("text"), given.get("universal_newlines")]
    return any(isinstance(value, ast.Constant) and bool(value.value) for value in values)


def _is_text_mode(node: ast.Call, name: str) -> bool:
    """Whether it opens a file as text: by its mode, or without one."""
    modes = [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
    is_method = isinstance(node.func, ast.Attribute) and name == "open"
    if is_method and ast.unparse(node.func.value) in ("os", "Image", "av", "webbrowser", "tarfile", "zipfile", "wave"):
        return False
    if not modes and is_method:
        modes = node.args[:1]
    elif not modes and name in ("open", "fdopen"):
        modes = node.args[1:2]
    elif not modes:
        modes = node.args[:1]
    if not modes:  # temporary files are binary; a method that is called without a word is one of a path
        return name in ("open", "fdopen") and (not is_method or not node.args)
    return isinstance(modes[0], ast.Constant) and bool(TEXT_MODE.fullmatch(str(modes[0].value)))


@pytest.mark.parametrize("part", [*PARTS, "train_lora.py"])
def test_text_is_read_and_written_as_utf8(part):
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name} without an encoding"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == part
        for line, name in find_missing_encodings(path.read_text(encoding="utf-8"))
    ]

    assert missing == []


@pytest.mark.parametrize(
    ("call", "is_missing"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text)", True),
        ("path.write_text(text, encoding='utf-8')", False),
        ("open(path)", True),
        ("open(path, 'a')", True),
        ("open(path, 'rb')", False),
        ("path.open()", True),
        ("path.open('w')", True),
        ("path.open('xb')", False),
        ("Image.open(path)", False),
        ("os.open(path, os.O_RDONLY)", False),
        ("tempfile.NamedTemporaryFile('w')", True),
        ("tempfile.NamedTemporaryFile()", False),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command, text=True, encoding='utf-8')", False),
        ("subprocess.run(command, **options)", False),
    ],
)
def test_a_call_without_an_encoding_is_found(call, is_missing):
    assert bool(list(find_missing_encodings(call))) == is_missing
