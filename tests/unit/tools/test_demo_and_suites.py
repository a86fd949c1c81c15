"""``python -m library demo`` and ``python -m library test`` do without make what the Makefile's targets do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from library.cli import run_tool
from library.config import parse_config
from library.tools.demo import build_demo_command, find_missing_files
from library.tools.test import SUITES, run_suite

ROOT = Path(__file__).resolve().parents[3]


def test_options_after_the_demo_override_its_file():
    command = build_demo_command(["--max_train_steps", "7"])
    config = parse_config(command[command.index("--dataset_config") :]).require_valid()

    assert config.train.max_train_steps == 7
    assert config.save.output_name == "demo" and config.save.overwrite
    assert config.optim.learning_rate == 3e-3


def test_a_missing_file_of_the_demo_is_named_before_anything_starts(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("library.tools.demo.DEMO_CONFIG_DIR", tmp_path)
    (tmp_path / "demo.toml").touch()

    assert [Path(path).name for path in find_missing_files()] == [
        "demo_run.toml",
        "demo_prompts.txt",
        "demo",
        "demo_regularisation",
    ]
    assert run_tool(["demo"]) == 2
    assert "demo_run.toml" in capfd.readouterr().err


@pytest.mark.slow
def test_the_demo_runs_in_any_folder_and_says_where_its_files_are(tmp_path):
    words = "--max_train_steps 2 --sample_every_n_steps 2 --max_data_loader_n_workers 0".split()
    result = subprocess.run(
        [sys.executable, "-m", "library", "demo", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )

    assert result.returncode == 0, result.stderr
    with safe_open(tmp_path / "output/demo/demo.safetensors", "pt") as file:
        assert file.metadata()["ss_steps"] == "2"
    sheet = re.search(r"Open (\S+\.png):", result.stdout)[1]
    assert (tmp_path / sheet).is_file()


@pytest.mark.slow
def test_the_demo_returns_the_exit_code_of_the_training(tmp_path):
    command = [sys.executable, "-m", "library", "demo", "--network_dimm", "4"]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )

    assert result.returncode != 0
    assert "did you mean --network_dim?" in result.stderr
    assert "Open" not in result.stdout


FAILING, PASSING = ("json.tool", "no such file"), ("this",)


def test_chains_run_side_by_side_and_each_ends_at_its_first_failure(capfd):
    failed = run_suite([[PASSING, FAILING, ("no_module_of_this_name",)], [("no_other_module",)], [PASSING]])

    assert failed == ["json.tool no such file", "no_other_module"]
    assert "no_module_of_this_name" not in capfd.readouterr().err


@pytest.mark.parametrize(("command", "code"), [(FAILING, 1), (PASSING, 0)])
def test_the_exit_code_tells_whether_a_suite_failed(command, code, monkeypatch, capfd):
    monkeypatch.setitem(SUITES, "quick", ("", [[command]]))

    assert run_tool(["test", "quick"]) == code


def test_an_unknown_suite_is_answered_with_a_suggestion(capfd):
    assert run_tool(["test", "slwo"]) == 2
    assert "no suite 'slwo'; did you mean slow?" in capfd.readouterr().err


def test_without_a_checkout_there_is_nothing_to_test(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("library.tools.test.ROOT", tmp_path)

    assert run_tool(["test"]) == 2
    assert "checkout" in capfd.readouterr().err


def test_every_suite_has_a_target_of_the_makefile():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {name for line in re.findall(r"^([\w -]+):", text, re.M) for name in line.split()}
    names = {name if name.startswith("lint") else "test" if name == "default" else f"test-{name}" for name in SUITES}

    assert names | {"test-all", "demo"} <= targets
    assert "-m library demo" in text and "-m library test" in text
