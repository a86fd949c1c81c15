"""install.py chooses the build of torch by what the drivers say, and removes nothing that it has not made."""

import argparse
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from install_script import NVIDIA_SMI, load_install_script, write_program

ROOT = Path(__file__).resolve().parents[2]
needs_scripts = pytest.mark.skipif(os.name == "nt", reason="the stand-ins for drivers are scripts of sh")


@pytest.fixture
def installer():
    return load_install_script()


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder that is the whole PATH, and a function that puts programs into it."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/bin")
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    return lambda name, text: write_program(folder / name, text)


@pytest.fixture
def print_commands(installer, capsys, tmp_path):
    """A function that returns what a dry run prints, and its commands, for a folder without an environment."""

    def print_commands(*words, code=0):
        assert installer.main(["--dry_run", "--venv", str(tmp_path / "no environment"), *words]) == code
        printed, errors = capsys.readouterr()
        return printed + errors, [line[2:] for line in printed.splitlines() if line.startswith("$ ")]

    return print_commands


def test_a_python_that_is_too_old_reads_it_and_says_which_one_is_needed(installer, monkeypatch, capsys):
    source = (ROOT / "install.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))
    monkeypatch.setattr(installer.sys, "version_info", (3, 8, 0))
    monkeypatch.setattr(installer.shutil, "which", lambda name: None)

    assert installer.main([]) == 2
    assert "Python 3.10 to 3.13 is needed, and this is 3.8" in capsys.readouterr().err


def test_another_python_of_this_machine_is_found(installer, monkeypatch):
    monkeypatch.setattr(installer.sys, "version_info", (3, 14, 0))
    monkeypatch.setattr(installer.shutil, "which", lambda name: name if name == "python3.11" else None)
    monkeypatch.setattr(installer, "ask", lambda command, timeout=30: "")

    assert installer.find_python() == ["python3.11"]


def test_it_imports_nothing_but_the_standard_library():
    tree = ast.parse((ROOT / "install.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_versions_are_those_of_the_project(installer):
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    assert f'"torch>={installer.OLDEST_TORCH}"' in text
    assert f"torch=={installer.TESTED_TORCH}" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    low, high = installer.PYTHONS
    assert f'requires-python = ">={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"' in text


@needs_scripts
@pytest.mark.parametrize(
    ("cuda", "capability", "torch", "builds"),
    [
        ("13.0", "9.0", "2.13.0", "cu130, cu132, cu126"),
        ("13.2", "12.0", "2.13.0", "cu130, cu132"),
        ("12.8", "8.9", "2.13.0", "cu126"),
        ("12.0", "8.6", "2.13.0", "cu126"),  # driver 525: a driver runs later minor versions of its CUDA, too
        ("12.4", "8.6", "2.11.0", "cu126, cu128"),
        ("12.8", "12.0", "2.11.0", "cu128"),
        ("13.0", "6.1", "2.13.0", "cu126"),  # Pascal, which CUDA 13 has left out
        ("12.8", "6.1", "2.11.0", "cu126"),
        ("12.8", "7.0", "2.11.0", "cu126"),
        ("13.0", "7.5", "2.11.0", "cu130, cu128, cu126"),
        ("13.0", "[N/A]", "2.13.0", "cu130, cu132, cu126"),
    ],
)
def test_driver_gpu_and_release_decide_which_builds_run(programs, print_commands, cuda, capability, torch, builds):
    programs("nvidia-smi", NVIDIA_SMI.format(name="NVIDIA X", driver="570.1", capability=capability, cuda=cuda))
    printed, commands = print_commands("--torch", torch)

    assert f"NVIDIA X, driver 570.1, CUDA up to {cuda}" in printed
    assert f"the first of {builds} that" in printed
    first = builds.partition(",")[0]
    words = f"torch=={torch}+{first} -i https://download.pytorch.org/whl/{first}"
    assert any(words in command for command in commands), "with its build, so that another one is replaced"


@needs_scripts
@pytest.mark.parametrize(
    ("cuda", "capability", "message"),
    [
        ("12.9", "12.0", "update the driver to one with CUDA 13 (580 or later)"),
        ("11.8", "12.0", "update the driver to one with CUDA 13 (580 or later)"),
        ("11.8", "8.6", "update the driver to one with CUDA 12 (525 or later)"),
        ("12.4", "3.7", "torch 2.13.0 has no build for NVIDIA X (compute capability 3.7)"),
    ],
)
def test_a_gpu_that_no_build_serves_ends_it_before_anything_is_made(
    programs, print_commands, cuda, capability, message
):
    programs("nvidia-smi", NVIDIA_SMI.format(name="NVIDIA X", driver="570.1", capability=capability, cuda=cuda))
    printed, commands = print_commands(code=2)
    assert message in printed and "--device cpu trains on the CPU" in printed and commands == []

    printed, _ = print_commands("--device", "cpu")
    assert "the first of cpu that" in printed


def test_a_version_may_name_its_build_and_is_checked(installer, print_commands):
    assert installer.parse_torch_version("2.13.0+cu126") == ("2.13.0", "cu126")
    assert installer.parse_torch_version("2.12") == ("2.12.0", "")
    _, commands = print_commands("--torch", "2.13.0+cu126")
    assert any("torch==2.13.0+cu126 -i https://download.pytorch.org/whl/cu126" in command for command in commands)
    for version, message in (("2.9.0", "2.11 or later is needed"), ("newest", "no version of torch")):
        printed, _ = print_commands("--torch", version, code=2)
        assert f"--torch {version}: {message}" in printed


@needs_scripts
def test_a_gpu_of_amd_gets_a_build_for_rocm(installer, programs, print_commands):
    programs("rocminfo", "#!/bin/sh\necho '  Marketing Name:          AMD Radeon RX 7900 XTX'\n")

    printed, _ = print_commands()
    assert "AMD Radeon RX 7900 XTX" in printed and f"the first of {installer.ROCM_BUILDS[0]}" in printed
    printed, _ = print_commands("--device", "cpu")
    assert "the first of cpu that" in printed


def test_a_mac_takes_the_build_of_pypi(installer, monkeypatch, print_commands):
    monkeypatch.setattr(installer, "detect_nvidia", lambda: None)
    monkeypatch.setattr(installer, "detect_amd", lambda: None)
    monkeypatch.setattr(installer, "detect_intel", lambda: None)
    monkeypatch.setattr(installer, "detect_apple", lambda: installer.Hardware("mps", "Apple M4"))
    _, commands = print_commands()

    assert " -i " not in " ".join(commands)


def test_the_variable_of_pip_and_the_option_decide_over_the_index(monkeypatch, print_commands):
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:secret@mirror.example/simple")
    printed, commands = print_commands()
    assert "mirror.example" in printed and "secret" not in printed and " -i " not in " ".join(commands)

    _, commands = print_commands("--torch_index", "https://you:hidden@other.example/whl")
    assert any("torch==2.13.0 -i https://other.example/whl" in command for command in commands)
    _, commands = print_commands("--torch_index", "https://other.example/whl/cu126/")
    assert any("torch==2.13.0+cu126 -i https://other.example/whl/cu126/" in command for command in commands)


def test_the_index_is_the_first_that_has_this_version(installer, monkeypatch):
    asked = []

    def ask(command, timeout=30):
        url = command[command.index("-i") + 1]
        asked.append(url.rpartition("/")[2])
        return "torch (2.12.0)\nAvailable versions: 12.13.0+cu130" if "cu130" in url else "2.14.0, 2.13.0+cu126"

    monkeypatch.setattr(installer, "ask", ask)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    hardware = installer.Hardware("cuda", "GPU", "600", (13, 0), 9.0)

    assert installer.choose_index(["pip"], hardware, ["cu130", "cu126"], "2.13.0", False).endswith("/cu126")
    assert asked == ["cu130", "cu126"]


def test_an_update_pulls_and_upgrades(tmp_path, print_commands):
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").touch()
    _, commands = print_commands("--update", "--source", str(tmp_path))

    assert any(command.startswith("git -C") and command.endswith("pull --ff-only") for command in commands)
    assert sum("--upgrade" in command for command in commands) == 3


def test_without_a_checkout_or_a_wheel_it_says_where_to_put_it(tmp_path):
    script = tmp_path / "install.py"
    script.write_bytes((ROOT / "install.py").read_bytes())
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, encoding="utf-8")

    assert result.returncode == 2 and "beside the wheel" in result.stderr
    (tmp_path / "lorikeet_lora-9-py3-none-any.whl").touch()
    result = subprocess.run(
        [sys.executable, str(script), "--dry_run"], capture_output=True, text=True, encoding="utf-8"
    )
    assert result.returncode == 0 and "lorikeet_lora-9-py3-none-any.whl[web]" in result.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_command_that_fails_ends_it_with_the_way_out(installer):
    with pytest.raises(installer.InstallError, match="exit code 3; read the log"):
        installer.run([sys.executable, "-c", "raise SystemExit(3)"], False, "read the log")
    with pytest.raises(installer.InstallError, match="cannot be started"):
        installer.run(["no-such-program"], False)


def test_every_option_is_in_the_help_and_has_an_effect(installer):
    source = (ROOT / "install.py").read_text(encoding="utf-8")
    names = vars(installer.build_parser().parse_args([]))

    assert all(re.search(rf"options\.{name}\b", source) for name in names)


def test_options_are_written_with_a_dash_or_an_underscore(installer):
    parse = installer.build_parser().parse_args

    assert parse(["--torch-index", "u", "--skip-check"]) == parse(["--torch_index", "u", "--skip_check"])
    assert isinstance(parse([]), argparse.Namespace)
