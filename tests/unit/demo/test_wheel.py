"""The wheel has all files of the package, and trains outside of a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("library", "dataset_configs")
FILES = ("train_lora.py", "pyproject.toml", "README.md", "LICENSE", "constraints.txt")
pytestmark = [pytest.mark.slow, pytest.mark.daily]


def list_files(folder: Path) -> set[str]:
    """The files below a folder, without those that Python and editors leave there."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    own = (path for path in files if not any(part.startswith((".", "__pycache__")) for part in path.parts))
    return {f"{folder.name}/{path.as_posix()}" for path in own}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, so that no folder of a build is left in the checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PARTS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in FILES:
        shutil.copyfile(ROOT / name, source / name)
    flags = ["--no-build-isolation"] if find_spec("setuptools") else []
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *flags, "-w", str(target), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    (path,) = target.glob("*.whl")
    return path


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}

    assert names == {"train_lora.py"}.union(*(list_files(ROOT / name) for name in PARTS))


def test_the_installed_wheel_trains_outside_of_the_checkout(wheel, tmp_path):
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    environment = os.environ | {"PYTHONPATH": str(site)}  # before the checkout that this environment has installed

    def run(*words):
        return subprocess.run(
            [sys.executable, *words], cwd=work, env=environment, capture_output=True, text=True, encoding="utf-8"
        )

    assert Path(run("-c", "import library; print(library.__file__)").stdout.strip()).is_relative_to(site)
    result = run(
        "-m", "library", "demo", *"--max_train_steps 2 --sample_every_n_steps 2 --max_data_loader_n_workers 0".split()
    )
    assert result.returncode == 0, result.stderr
    with safe_open(work / "output/demo/demo.safetensors", "pt") as file:
        assert file.metadata()["ss_steps"] == "2"
    assert (work / "output/demo/demo.before_after.png").is_file()
    assert str(ROOT) not in result.stdout + result.stderr
    assert "part of a checkout" in run("-m", "library", "test").stderr
    assert run("-m", "library", "options").stdout.startswith("# ")
