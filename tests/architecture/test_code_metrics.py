"""The structure of `library/` and `tests/` is within its limits, and planted violations are measured."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from code_metrics import LIMITS, ROOT, begins_with_verb, is_bare_participle, main, measure

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
