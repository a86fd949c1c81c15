"""Which wheels a machine without internet is given."""

import csv
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from library.errors import UserError
from scripts import pack_wheels
from scripts.pack_wheels import list_needed_packages, read_installed, read_report, write_wheel_without

RESOLVED = read_report(
    {
        "install": [
            {"metadata": {"name": name, "version": version, "requires_dist": requirements}}
            for name, version, requirements in [
                ("torch", "2.11.0", ["nvidia-cublas==13; platform_system == 'Linux'"]),
                ("nvidia-cublas", "13", []),
                ("Diffusers", "0.42.1", ["numpy", "regex", "old-only; python_version < '3.10'", "extra-only; extra == 'x'"]),
                ("peft", "0.21", ["torch>=1.13", "transformers", "numpy>=1.17"]),
                ("transformers", "5.23", ["huggingface-hub>=2.4", "numpy>=2"]),
                ("huggingface_hub", "2.5", ["httpx[http2]"]),
                ("httpx", "0.28", ["h2; extra == 'http2'"]),
                ("h2", "4", []),
                ("numpy", "2.5", []),
                ("regex", "2026", []),
            ]
        ]
    }
)  # fmt: skip
PROJECT = [Requirement(each) for each in ("torch>=2.11", "diffusers>=0.41", "transformers>=5.20", "peft>=0.21")]


def list_packed(installed: dict[str, str]) -> list[str]:
    return [package.name for package in list_needed_packages(PROJECT, RESOLVED, installed, "3.12")]


def test_what_the_machine_has_and_what_only_that_needs_stays_out():
    installed = {"torch": "2.11.0", "numpy": "2.4", "transformers": "5.20.0"}
    assert list_packed(installed) == ["diffusers", "peft", "regex"]


def test_a_version_that_is_too_old_is_packed_with_its_own_needs():
    installed = {"torch": "2.11.0", "numpy": "2.4", "transformers": "5.17.0", "huggingface-hub": "1.33.0", "regex": ""}
    assert list_packed(installed) == ["diffusers", "h2", "httpx", "huggingface-hub", "peft", "transformers"]


def test_every_requirement_on_a_package_counts():
    """numpy 1.26 is enough for peft and diffusers, and not for transformers."""
    assert "numpy" in list_packed({"torch": "2.11.0", "numpy": "1.26"})


def test_a_bare_machine_is_given_everything():
    assert set(list_packed({})) == set(RESOLVED)


def test_the_list_of_the_machine_is_read(tmp_path):
    path = tmp_path / "installed.txt"
    path.write_text("# of that machine\nTorch==2.11.0\nhuggingface_hub==1.33.0\nlocal @ file:///x\nnumpy\n\n")
    assert read_installed(path) == {"torch": "2.11.0", "huggingface-hub": "1.33.0", "local": "", "numpy": ""}
    with pytest.raises(UserError, match=r"--installed .*missing.txt: No such file"):
        read_installed(tmp_path / "missing.txt")


def test_a_wheel_without_unused_libraries_installs(tmp_path):
    source, target = tmp_path / "tool-1-py3-none-any.whl", tmp_path / "packed" / "tool-1-py3-none-any.whl"
    target.parent.mkdir()
    files = {
        "tool/__init__.py": "VALUE = 7\n",
        "tool/libbitsandbytes_cuda130.so": "new",
        "tool/libbitsandbytes_cuda118.so": "old" * 1000,
        "tool/libbitsandbytes_rocm64.so": "other" * 1000,
        "tool-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: tool\nVersion: 1\n",
        "tool-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in files) + "tool-1.dist-info/RECORD,,\n"
    with zipfile.ZipFile(source, "w") as wheel:
        for name, text in {**files, "tool-1.dist-info/RECORD": record}.items():
            wheel.writestr(name, text)
    write_wheel_without(source, target)
    with zipfile.ZipFile(target) as wheel:
        names = wheel.namelist()
        rows = [row[0] for row in csv.reader(io.StringIO(wheel.read("tool-1.dist-info/RECORD").decode()))]
    assert sorted(rows) == sorted(names)
    assert [Path(name).name for name in names if name.endswith(".so")] == ["libbitsandbytes_cuda130.so"]
    folder = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", folder, target]
    subprocess.run(install, check=True)
    assert (folder / "tool" / "__init__.py").read_text() == files["tool/__init__.py"]


def test_wheels_over_the_limit_are_an_error_after_the_list(tmp_path, monkeypatch, capsys):
    wheel = tmp_path / "big-1-py3-none-any.whl"
    wheel.write_bytes(bytes(2_000_000))
    (tmp_path / "installed.txt").write_text("torch==2.11.0\n")
    seen = {}
    monkeypatch.setattr(pack_wheels, "pack_wheels", lambda installed, *_: seen.update(installed) or [wheel])
    arguments = ["--installed", str(tmp_path / "installed.txt"), "--output", str(tmp_path)]
    with pytest.raises(UserError, match=r"2\.0 MB of wheels are over the limit of 1 MB"):
        pack_wheels.main([*arguments, "--max_mb", "1"])
    assert pack_wheels.main([*arguments, "--max_mb", "3"]) == 0
    printed = capsys.readouterr().out
    assert "python3 -m benchmarks gpu" in printed and "Keep gpu_benchmark.json" in printed
    assert seen == {"torch": "2.11.0", "wandb": "", "tensorboard": ""}
