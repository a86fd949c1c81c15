"""The command line: messages and exit codes."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from library import cli
from library.registry import pause_garbage_collection
from library.tools import TOOLS

ROOT = Path(__file__).resolve().parents[3]
TRAIN = str(ROOT / "train_lora.py")


def run_python(*words, cwd=ROOT, **environment):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def foreign_library(tmp_path):
    """A directory with a package of another project that is also named library."""
    (tmp_path / "site" / "library").mkdir(parents=True)
    (tmp_path / "site" / "library" / "__init__.py").write_text("STRANGER = True\n")
    return tmp_path / "site"


def test_config_errors_exit_with_code_2_and_one_line_per_problem(tmp_path):
    result = run_python(TRAIN, "--network_dimm", "4", "--dataset_config", tmp_path / "none.toml")

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "train_lora: stopped. 2 problems:",
        "  --network_dimm: unknown option; did you mean --network_dim?",
        f"  --dataset_config: {tmp_path}/none.toml: no such file (looked in {tmp_path})",
    ]


@pytest.mark.slow
def test_config_errors_are_printed_once_per_node():
    argv = (TRAIN, "--network_dimm", "4")

    assert "network_dimm" in run_python(*argv, RANK="0", LOCAL_RANK="0", WORLD_SIZE="4").stderr
    assert run_python(*argv, RANK="1", LOCAL_RANK="1", WORLD_SIZE="4").stderr == ""
    assert "stopped on rank 2" in run_python(*argv, RANK="2", LOCAL_RANK="0", WORLD_SIZE="4").stderr
    assert run_python(*argv, RANK="1", LOCAL_RANK="1", WORLD_SIZE="4").returncode == 2


def test_under_accelerate_launch_the_traceback_of_the_launcher_is_explained():
    result = run_python(TRAIN, "--network_dimm", "4", ACCELERATE_MIXED_PRECISION="no")

    assert result.stderr.splitlines()[-1].startswith("(accelerate launch reports below")


def test_help_works_from_another_directory(tmp_path):
    assert run_python(TRAIN, "--help", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("command", [(TRAIN, "--help"), ("-m", "library", "options")])
def test_a_closed_pipe_is_not_an_error(command):
    """As with ``head``: the pipe is closed before the first write."""
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_foreign_library_in_pythonpath_is_not_imported(foreign_library, tmp_path):
    result = run_python(TRAIN, "--help", cwd=tmp_path, PYTHONPATH=str(foreign_library))

    assert result.returncode == 0 and "--dataset_config" in result.stdout


def test_an_imported_foreign_library_is_reported(foreign_library):
    script = (
        f"import runpy, sys; sys.path.insert(0, {str(foreign_library)!r}); import library; "
        f"sys.argv = ['train_lora.py', '--help']; runpy.run_path({TRAIN!r}, run_name='__main__')"
    )
    result = run_python("-c", script)

    assert result.returncode == 2
    assert f"'import library' finds {foreign_library}/library/__init__.py" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_foreign_namespace_package_is_reported(tmp_path):
    (tmp_path / "library").mkdir()
    script = (
        f"import runpy, sys; sys.path[:] = [{str(tmp_path)!r}, *sys.path]; import library; "
        f"runpy.run_path({TRAIN!r}, run_name='__main__')"
    )
    result = run_python("-c", script, cwd=tmp_path)

    assert result.returncode == 2 and "nothing was started" in result.stderr and "Traceback" not in result.stderr


def test_an_unknown_tool_is_answered_with_a_suggestion():
    result = run_python("-m", "library", "docter")

    assert result.returncode == 2
    assert result.stderr == f"library: no tool 'docter'; did you mean doctor?; available: {', '.join(TOOLS)}\n"


@pytest.mark.slow
def test_tools_report_config_errors_as_training_does():
    result = run_python("-m", "library", "plan", "--network_dimm", "4")

    assert result.returncode == 2
    assert "  --network_dimm: unknown option; did you mean --network_dim?" in result.stderr.splitlines()


def test_an_error_on_one_rank_is_printed_by_that_rank(monkeypatch, capsys):
    from library import cli
    from library.errors import ConfigError, UserError
    from library.problems import Problem

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    reported_elsewhere = UserError("the disk is full")
    reported_elsewhere.is_reported = True
    for error in (UserError("a.png: broken"), reported_elsewhere, ConfigError([Problem("network_dimm", "unknown")])):
        cli._report_user_error(error)

    assert capsys.readouterr().err == "train_lora: stopped on rank 3.\n  a.png: broken\n"


def test_all_problems_are_reported_together_before_torch_is_imported(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat --w 100\n")
    (tmp_path / "data.toml").write_text("[[datasets]]\nresolutoin = 512\n[[datasets.subsets]]\nimage_dir = 'nowhere'\n")
    script = (
        "import sys; from library.cli import main; code = main(sys.argv[1:]); "
        "print(code, [name for name in ('torch', 'diffusers') if name in sys.modules])"
    )
    result = run_python(
        "-c",
        script,
        *"--network_dim x --pretrained_model_name_or_path /no/where".split(),
        "--sample_prompts",
        tmp_path / "prompts.txt",
        "--dataset_config",
        tmp_path / "data.toml",
    )

    assert result.stdout.strip() == "2 []"
    for part in (
        "--network_dim: expected an integer",
        "data.toml:2: resolutoin: ",
        "prompts.txt:1: --w: 100 is no",
        "pretrained_model_name_or_path: /no/where: no such file",
        "data.toml:4: image_dir",
    ):
        assert part in result.stderr, (part, result.stderr)


def test_an_interrupted_tool_prints_one_line(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("library.tools.TOOLS", {"plan": ("", interrupted)})
    assert cli.run_tool(["plan"]) == 130
    assert capsys.readouterr().err == "library plan: interrupted\n"


@pytest.mark.slow
def test_garbage_collection_is_enabled_again_after_a_failed_import():
    with pytest.raises(KeyError), pause_garbage_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count()
    gc.unfreeze()
