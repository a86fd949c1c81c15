"""No module of `library/` reads a problem back from its text; planted violations are found."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[2] / "library"
MODULES = sorted(path for path in LIBRARY.rglob("*.py"))

TEXT_METHODS = frozenset(
    "startswith endswith removeprefix removesuffix partition rpartition split rsplit splitlines strip lstrip rstrip"
    " find rfind index replace match fullmatch search".split()
)
"""Methods of texts and patterns that take a line apart."""


def find_parsed_problems(source: str) -> Iterator[str]:
    """Yield the lines that match a problem with a pattern, take its text apart, or look for words in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, method = node.func.value, node.func.attr
            takes_apart = method in TEXT_METHODS and is_problem(owner)
            matches = (is_pattern(owner) or method in TEXT_METHODS) and any(map(is_problem, node.args))
            if takes_apart or matches:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Compare) and any(isinstance(operator, (ast.In, ast.NotIn)) for operator in node.ops):
            is_text = isinstance(node.left, ast.JoinedStr) or (
                isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
            )
            if is_text and is_problem(node.comparators[0]):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def is_pattern(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "re"


def is_problem(node: ast.expr) -> bool:
    """Whether an expression is a problem by its name, or the text of one: `problem`, `str(problem)`, `problem.text`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return is_problem(node.args[0])
    if isinstance(node, ast.Subscript):
        return is_problem(node.value)
    if isinstance(node, ast.Attribute) and node.attr in ("text", "fix", "note", "scope", "place"):
        return is_problem(node.value)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ("problem", "problems") or name.endswith(("_problem", "_problems"))


def test_no_module_reads_a_problem_back_from_its_text():
    found = [
        f"{path.relative_to(LIBRARY)}: {line}"
        for path in MODULES
        for line in find_parsed_problems(path.read_text(encoding="utf-8"))
    ]

    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "re.match(r'--(\\w+)', problem)",
        "re.sub('a', 'b', str(problem))",
        "PATTERN.search(problem.text)",
        "problem.removeprefix('--')",
        "str(problem).partition(': ')",
        "problems[0].startswith('--dataset_config: missing')",
        "error.problems[0].split(';')",
        "'missing' in machine.numa_affinity_problem",
        "f'--{name}' in problem.text",
    ],
)
def test_a_problem_that_is_read_back_is_found(line):
    assert list(find_parsed_problems(f"x = {line}")) != []


@pytest.mark.parametrize(
    "line",
    ["replace(problem, fix='')", "problem.option in names", "problems.append(problem)", "name in problem.options"],
)
def test_what_uses_the_fields_of_a_problem_is_not_found(line):
    assert list(find_parsed_problems(f"x = {line}")) == []
