"""install.py chooses the build of torch by what the drivers say, and removes nothing that it has not made."""

import argparse
import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *query-gpu*) echo "{name}, {driver}, {capability}";;
  *) echo "| NVIDIA-SMI {driver}   Driver Version: {driver}   CUDA Version: {cuda} |";;
esac
"""
needs_scripts = pytest.mark.skipif(os.name == "nt", reason="the stand-ins for drivers are scripts of sh")


@pytest.fixture
def installer():
    spec = importlib.util.spec_from_file_location("install_script", ROOT / "install.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["install_script"] = module  # where dataclasses look for its names
    spec.loader.exec_module(module)
    yield module
    del sys.modules["install_script"]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder that is the whole PATH, and a function that puts programs into it."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/bin")
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)

    def write(name, text):
        (folder / name).write_text(text, "utf-8")
        (folder / name).chmod(0o755)

    return write


def print_commands(installer, capsys, *words):
    assert installer.main(["--dry_run", *words]) == 0
    printed = capsys.readouterr().out
    return printed, [line[2:] for line in printed.splitlines() if line.startswith("$ ")]


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
    ("cuda", "capability", "builds"),
    [
        ("13.0", "9.0", "cu130, cu129, cu128, cu126, cpu"),
        ("12.8", "8.9", "cu128, cu126, cpu"),
        ("13.0", "6.1", "cu129, cu128, cu126, cpu"),  # Pascal, which CUDA 13 has left out
        ("12.4", "8.6", "cpu"),  # a driver that is older than every build
    ],
)
def test_the_driver_and_the_gpu_decide_which_builds_of_torch_run(installer, programs, capsys, cuda, capability, builds):
    programs("nvidia-smi", NVIDIA_SMI.format(name="NVIDIA X", driver="570.1", capability=capability, cuda=cuda))
    printed, commands = print_commands(installer, capsys)

    assert f"NVIDIA X, driver 570.1, CUDA up to {cuda}" in printed
    assert f"the first of {builds} that" in printed
    first = builds.partition(",")[0]
    torch = f"torch=={installer.TESTED_TORCH}+{first} --index-url {installer.TORCH_HOST}/{first}"
    assert any(torch in command for command in commands), "with its build, so that another one is replaced"


@needs_scripts
def test_a_gpu_of_amd_gets_a_build_for_rocm(installer, programs, capsys):
    programs("rocminfo", "#!/bin/sh\necho '  Marketing Name:          AMD Radeon RX 7900 XTX'\n")

    printed, _ = print_commands(installer, capsys)
    assert "AMD Radeon RX 7900 XTX" in printed and f"the first of {installer.ROCM_BUILDS[0]}" in printed
    printed, _ = print_commands(installer, capsys, "--device", "cpu")
    assert "the first of cpu that" in printed


def test_a_mac_takes_the_build_of_pypi(installer, monkeypatch, capsys):
    monkeypatch.setattr(installer, "detect_nvidia", lambda: None)
    monkeypatch.setattr(installer, "detect_amd", lambda: None)
    monkeypatch.setattr(installer, "detect_intel", lambda: None)
    monkeypatch.setattr(installer, "detect_apple", lambda: installer.Hardware("mps", "Apple M4"))
    _, commands = print_commands(installer, capsys)

    assert "--index-url" not in " ".join(commands)


def test_pips_settings_and_the_option_decide_over_the_index(installer, monkeypatch, capsys):
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:secret@mirror.example/simple")
    printed, commands = print_commands(installer, capsys)
    assert "mirror.example" in printed and "secret" not in printed and "--index-url" not in " ".join(commands)

    _, commands = print_commands(installer, capsys, "--index-url", "https://you:hidden@other.example/whl")
    assert any("--index-url https://other.example/whl" in command for command in commands)


def test_the_index_is_the_first_that_has_this_version(installer, monkeypatch):
    asked = []

    def ask(command, timeout=30):
        url = command[command.index("--index-url") + 1]
        asked.append(url.rpartition("/")[2])
        return "torch (2.12.0)\nAvailable versions: 2.12.0" if "cu130" in url else f"{installer.TESTED_TORCH}+cu129"

    monkeypatch.setattr(installer, "ask", ask)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    hardware = installer.Hardware("cuda", "GPU", "600", (13, 0), 9.0)
    options = installer.build_parser().parse_args([])

    assert installer.choose_index(["pip"], hardware, options).endswith("/cu129")
    assert asked == ["cu130", "cu129"]


def test_an_update_pulls_and_upgrades(installer, monkeypatch, tmp_path, capsys):
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").touch()
    _, commands = print_commands(installer, capsys, "--update", "--source", str(tmp_path))

    assert any(command.startswith("git -C") and command.endswith("pull --ff-only") for command in commands)
    assert sum("--upgrade" in command for command in commands) == 3


def test_a_repair_removes_only_what_it_has_made(installer, tmp_path):
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "mine.txt").touch()
    with pytest.raises(installer.InstallError, match="not made by this program"):
        installer.remove_environment(venv, False)
    (venv / installer.MARKER).touch()
    installer.remove_environment(venv, True)
    assert venv.exists()
    installer.remove_environment(venv, False)

    assert not venv.exists()
    installer.remove_environment(venv, False)


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


@pytest.mark.parametrize("name", ["start.sh", "start.command", "start.bat"])
def test_start_scripts_open_the_page_of_this_environment(name):
    data = (ROOT / "scripts" / name).read_bytes()
    text = data.decode("ascii")

    if name == "start.bat":
        assert data.count(b"\n") == data.count(b"\r\n") and ".venv\\Scripts\\python.exe" in text
    else:
        assert b"\r" not in data and os.access(ROOT / "scripts" / name, os.X_OK) == (os.name != "nt")
    if name != "start.command":
        assert "install.py" in text and "-m library web --open_browser" in text


@needs_scripts
def test_the_start_script_runs_the_python_of_the_environment(tmp_path):
    for name in ("start.sh", "start.command"):
        (tmp_path / "a b" / "scripts").mkdir(parents=True, exist_ok=True)
        target = tmp_path / "a b" / "scripts" / name
        target.write_bytes((ROOT / "scripts" / name).read_bytes())
        target.chmod(0o755)
    python = tmp_path / "a b" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$PWD" "$@"\n', "utf-8")
    python.chmod(0o755)
    for name in ("start.sh", "start.command"):
        command = [str(tmp_path / "a b" / "scripts" / name), "--port", "7861"]
        result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd="/")
        assert result.stdout.split("\n")[0] == f"{tmp_path / 'a b'} -m library web --open_browser --port 7861"


def test_options_are_written_with_a_dash_or_an_underscore(installer):
    parse = installer.build_parser().parse_args

    assert parse(["--index-url", "u", "--skip-check"]) == parse(["--index_url", "u", "--skip_check"])
    assert isinstance(parse([]), argparse.Namespace)
