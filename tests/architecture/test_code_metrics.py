"""The structure of `library/` and `tests/` is within its limits, and planted violations are measured."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from code_metrics import (
    LIMITS,
    ROOT,
    begins_with_verb,
    has_many_positional_arguments,
    is_bare_participle,
    is_fragment,
    list_docstrings,
    list_variadic_names,
    main,
    measure,
)

TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))
TEST_FOLDERS = {"unit", "pairs", "contract", "invariance", "golden", "distributed", "interop", "architecture"}


def test_the_structure_is_within_its_limits():
    table = measure(ROOT)
    outside = {name: table[name] for name, (low, high) in LIMITS.items() if not low <= table[name] <= high}

    assert not outside, f"outside the limits of tests/architecture/code_metrics.py: {outside}"


PLANTED = {
    "files over 600 lines": ("dataloader/x.py", "A = 1\n" * 601),
    "functions over 60 lines": ("dataloader/x.py", "def load_all():\n" + "    a = 1\n" * 60),
    "bare participles": ("dataloader/x.py", "def kept(): ...\n" + "A = 1\n" * 60),
    "begin with a verb, %": ("dataloader/x.py", "def images(): ...\ndef captions(): ...\n"),
    "public names defined twice": ("dataloader/x.py", "def load_b(): ...\n" + "A = 1\n" * 60),
    "docstring fragments": ("dataloader/x.py", 'SHARE = 0.9\n"""Of the limit."""\n' * 100),
    "calls with six or more positional arguments": ("dataloader/x.py", "build(1, 2, 3, 4, 5, 6)\n" * 100),
    "knobs on the family interface": (
        "models/facts.py",
        "class FamilyFacts:\n" + "".join(f"    a{number}: int = 1\n" for number in range(14)),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_measured(name, tmp_path):
    file, source = PLANTED[name]
    for path, text in {file: source, "dataloader/b.py": "def load_b(): ...\n" + "A = 1\n" * 60}.items():
        (tmp_path / "library" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "library" / path).write_text(text, encoding="utf-8")
    low, high = LIMITS[name]
    value = measure(tmp_path)[name]

    assert not low <= value <= high


def test_many_files_in_one_folder_are_measured(tmp_path):
    (tmp_path / "library" / "data").mkdir(parents=True)
    for number in range(21):
        (tmp_path / "library" / "data" / f"x{number}.py").write_text("A = 1\n", encoding="utf-8")

    assert measure(tmp_path)["folders over 20 files"] == 1


@pytest.mark.parametrize(
    ("name", "is_bare"),
    [("told", True), ("_kept", True), ("within", True), ("counted", True), ("seed", False), ("load_kept", False)],
)
def test_bare_participles_are_recognized(name, is_bare):
    assert is_bare_participle(name) == is_bare


@pytest.mark.parametrize(("name", "is_verb"), [("load_lora", True), ("_is_open", True), ("images", False)])
def test_verbs_are_recognized(name, is_verb):
    assert begins_with_verb(name) == is_verb


WHOLE_SENTENCES = (
    "The part of the limit that remains.",
    "Write a function ``(prediction, target) -> loss``.",
    "Whether the file is read whole.",
    "What a callback has to know, and where it is kept.",
)
FRAGMENTS = (
    "Of the limit.",
    "Of whom is writing.",
    "For programs.",
    "What a checkpoint records besides the settings -> what messages call it.",
    "The same for a text encoder: two of them.",
    "In torch's warning of each; others have none.",
    "Its name in metadata.",
    "Shown first; the others are below.",
    "None for a model of unknown size.",
    "",
)


@pytest.mark.parametrize("text", WHOLE_SENTENCES)
def test_a_whole_sentence_is_no_fragment(text):
    assert not is_fragment(text)


@pytest.mark.parametrize("text", FRAGMENTS)
def test_fragments_are_recognized(text):
    assert is_fragment(text)


@pytest.mark.parametrize("decorator", ["", "@property"])
def test_a_function_is_not_described_by_a_relative_clause_and_a_property_may_be(decorator):
    source = f'class A:\n    {decorator}\n    def name(self):\n        """How messages call the file."""\n'
    (docstring,) = list_docstrings("a.py", ast.parse(source))

    assert docstring.is_fragment == (not decorator)


def test_strings_below_fields_and_constants_count_as_docstrings():
    source = '''"""A module."""
A = 1
"""A constant."""
class B:
    """A class."""
    c: int
    """A field."""
    def load_all(self):
        """A function."""
        self.d = 1
        """An attribute."""
        return "A value."
'''
    texts = {item.text for item in list_docstrings("a.py", ast.parse(source))}

    assert texts == {"A module.", "A constant.", "A class.", "A field.", "A function.", "An attribute."}


@pytest.mark.parametrize(
    ("call", "is_long"),
    [
        ("build(1, 2, 3, 4, 5, 6)", True),
        ("part.build(1, 2, 3, 4, 5, 6, g=7)", True),
        ("build(1, 2, 3, 4, 5, f=6, g=7)", False),
        ("build(1, 2, 3, 4, 5, *rest)", False),
        ("logger.info('%d %d %d %d %d', 1, 2, 3, 4, 5)", False),
        ("join_all(1, 2, 3, 4, 5, 6)", False),
    ],
)
def test_calls_with_many_positional_arguments_are_recognized(call, is_long):
    names = list_variadic_names([ast.parse("def join_all(*parts): ...\ndef build(a, b, c, d, e, f, g=0): ...")])

    assert has_many_positional_arguments(ast.parse(call, mode="eval").body, names) == is_long


def test_no_test_imports_another_test_file():
    names = {path.stem for path in TEST_FILES}
    actual = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            actual += [f"{path.name} imports {name}" for name in modules if name.rpartition(".")[2] in names]

    assert not actual


def test_test_files_are_in_their_folders_and_have_unique_names():
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in TEST_FILES}
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))

    assert folders == TEST_FOLDERS
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("room", sorted(path.name for path in Path(ROOT / "tests" / "unit").iterdir() if path.is_dir()))
def test_every_folder_of_unit_tests_is_named_after_a_package(room):
    folders = [ROOT / "library", ROOT / "benchmarks"]

    assert room == "__pycache__" or any((folder / room).is_dir() or folder.name == room for folder in folders)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no checkout of this project"):
        main([str(tmp_path)])
