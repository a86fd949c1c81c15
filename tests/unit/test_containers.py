"""The Dockerfile and the notebook: what they copy exists, and their commands are those of this program."""

import json
import re
import shlex
from pathlib import Path

import pytest
from install_script import load_install_script

from library.config import parse_config
from library.problems import Problem
from library.tools import TOOLS
from library.tools.web import WebOptions

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "scripts" / "Dockerfile"
NOTEBOOK = ROOT / "scripts" / "colab_and_kaggle.ipynb"


def read_instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile and their arguments, with continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for line in lines for name, _, rest in [line.partition(" ")]]


def read_cells(kind: str) -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def list_commands() -> list[list[str]]:
    """The commands of the notebook, which begin with an exclamation mark."""
    lines = [line for cell in read_cells("code") for line in cell.splitlines() if line.startswith("!")]
    return [shlex.split(line[1:]) for line in lines]


def test_what_the_image_copies_exists_and_is_not_ignored():
    copied = [word for name, rest in read_instructions() if name == "COPY" for word in rest.split()[:-1]]
    ignored = (ROOT / "scripts" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()

    assert all((ROOT / name).exists() for name in copied)
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    assert {"library", "dataset_configs", "train_lora.py", "pyproject.toml"} <= set(copied)


def test_the_image_has_the_tested_version_of_torch_from_pytorchs_own_index():
    arguments = dict(rest.split("=") for name, rest in read_instructions() if name == "ARG")
    (install,) = [rest for name, rest in read_instructions() if name == "RUN" and "torch" in rest]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")

    assert f"torch=={arguments['TORCH']}\n" in constraints
    assert "https://download.pytorch.org/whl/${BUILD}" in install
    release = tuple(int(part) for part in arguments["TORCH"].split(".")[:2])
    published = {build.name for build in load_install_script().CUDA_BUILDS if build.is_of_release(release)}
    comments = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert arguments["BUILD"] in published
    assert set(re.findall(r"\bcu\d+", " ".join(comments))) <= published
    assert '-e ".[web]"' in " ".join(rest for name, rest in read_instructions() if name == "RUN")


def test_the_image_starts_the_page_with_options_that_it_has():
    instructions = dict(read_instructions())
    entry, words = json.loads(instructions["ENTRYPOINT"]), json.loads(instructions["CMD"])

    assert entry == ["python", "-m", "library"] and words[0] in TOOLS
    assert {word[2:] for word in words if word.startswith("--")} <= set(WebOptions.__dataclass_fields__)


def test_the_notebook_is_one_and_its_cells_are_python():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 4)
    for cell in notebook["cells"]:
        assert {"cell_type", "metadata", "source"} <= cell.keys() and isinstance(cell["source"], list)
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    for cell in read_cells("code"):
        compile("\n".join(line for line in cell.splitlines() if not line.startswith("!")), "cell", "exec")


def test_the_commands_of_the_notebook_are_those_of_this_program():
    tools = [words[3] for words in list_commands() if words[:3] == ["python", "-m", "library"]]

    assert tools == ["doctor", "demo", "plan"] and set(tools) <= set(TOOLS)


def find_unknown_options(words: list[str]) -> list[Problem]:
    """The problems of a command line that do not come from files which this machine lacks."""
    return [each for each in parse_config(words).problems if "no such" not in str(each)]


@pytest.mark.parametrize("tool", ["demo", "accelerate"])
def test_the_options_of_training_in_the_notebook_are_accepted(tool, tmp_path, monkeypatch):
    (words,) = [words for words in list_commands() if tool in words[:4]]
    monkeypatch.chdir(tmp_path)
    given = words[4:] if tool == "demo" else words[words.index("{TRAIN}") + 1 :]
    given += ["--dataset_config", "dataset.toml"] if tool == "demo" else []

    assert find_unknown_options(given) == []
    assert find_unknown_options([*given, "--network_dimm", "4"]) != []
    if tool == "accelerate":
        assert words[:2] == ["accelerate", "launch"]


def test_the_dataset_of_the_notebook_is_valid(tmp_path):
    from library.config.toml_positions import read_toml_with_lines

    (cell,) = [cell for cell in read_cells("code") if "DATASET" in cell]
    text = cell.partition('"""')[2].partition('"""')[0]
    (tmp_path / "dataset.toml").write_text(text, "utf-8")
    data, _ = read_toml_with_lines(tmp_path / "dataset.toml")

    assert data["datasets"][0]["subsets"][0]["image_dir"] == "pictures"
