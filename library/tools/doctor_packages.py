"""Python and the packages: there, new enough, and really importable; looked at without importing any of them here."""

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterable

from ..distributed.attempt import Attempt, attempt
from .doctor_finding import Finding

NEEDED = {"torch": (2, 11), "accelerate": (1, 15), "diffusers": (0, 41), "transformers": (5, 20), "peft": (0, 21),
          "safetensors": (0, 6), "wandb": (0, 30), "tensorboard": (2, 18)}  # fmt: skip
"""The oldest releases that pyproject.toml allows."""
ALSO_NEEDED = {"numpy": "numpy", "PIL": "pillow", "psutil": "psutil", "toml": "toml", "tqdm": "tqdm", "yaml": "pyyaml"}
"""Module and package of what is needed in whatever release came with the rest."""
OPTIONAL = {"deepspeed": "pip install deepspeed", "bitsandbytes": "pip install bitsandbytes",
            "nvidia-ml-py": "pip install nvidia-ml-py", "torchao": "pip install torchao",
            "pyarrow": "pip install pyarrow"}  # fmt: skip
PYTHONS = ((3, 10), (3, 13))
SECONDS = 180.0


def packages() -> list[Finding]:
    """A line for Python and each package."""
    broken = _broken([*NEEDED, *ALSO_NEEDED])
    found = [_python(), *(_needed(name, oldest, broken) for name, oldest in NEEDED.items())]
    for module, package in ALSO_NEEDED.items():
        if module in broken:
            found.append(Finding(package, broken[module], False, f"pip install --force-reinstall {package}"))
    for name, install in OPTIONAL.items():
        version = version_of(name)
        found.append(Finding(name, version or "not installed (optional)", True, "" if version else install, False))
    return found


def version_of(package: str) -> str | None:
    """The installed release."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _needed(name: str, oldest: tuple[int, int], broken: dict[str, str]) -> Finding:
    version, bound = version_of(name), f"{name}>={'.'.join(map(str, oldest))}"
    if version is None:
        return Finding(name, "not installed", False, f"pip install '{bound}'")
    if numbers(version) < oldest:
        return Finding(name, version, False, f"pip install -U '{bound}'")
    if name in broken:
        fix = f"pip install --force-reinstall '{name}=={version}'"
        return Finding(name, f"{version}, but cannot be imported: {broken[name]}", False, fix)
    return Finding(name, version)


def _broken(modules: Iterable[str]) -> dict[str, str]:
    """Why modules cannot be imported.  Together first, which is quick; one by one only where that went wrong."""
    modules = list(modules)
    together = _imported(*modules)
    if together.ok:
        return dict(together.answer)
    one_by_one = {module: _imported(module) for module in modules}
    return {module: dict(tried.answer).get(module, "") if tried.ok else tried.reason
            for module, tried in one_by_one.items() if not tried.ok or tried.answer}  # fmt: skip


def _imported(*modules: str) -> Attempt:
    return attempt(attempt.__module__, "import_all", *modules, seconds=SECONDS)


def _python() -> Finding:
    here = sys.version_info[:2]
    ok = PYTHONS[0] <= here <= PYTHONS[1]
    return Finding("python", f"{platform.python_version()} ({sys.executable})", ok, "use Python 3.10 to 3.13")


def numbers(version: str) -> tuple[int, int]:
    """``2.13.0+cpu`` -> (2, 13)."""
    major, minor = [*re.findall(r"\d+", version), "0", "0"][:2]
    return int(major), int(minor)
