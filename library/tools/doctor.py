"""``python -m library doctor [--json] [-- accelerate launch ...]``: check packages, devices and a launch command.

Heavy packages are imported only after a child process has imported them.
"""

import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import parse_config
from ..config.options import flatten_config
from ..errors import ConfigError
from .doctor_checks import PRELOAD, CheckFailed, Finding, run_checks, run_in_child, start_fork_server
from .validate_arguments import check_doctor_arguments, find_training_arguments

if TYPE_CHECKING:
    from ..distributed.launcher_settings import ResolvedSetting

USAGE = "usage: python -m library doctor [--json] [-- accelerate launch ... train_lora.py ...]"
PACKAGE, DISTRIBUTION = __package__.split(".")[0], "lorikeet-lora"
ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "torch": (2, 11),
    "accelerate": (1, 15),
    "diffusers": (0, 41),
    "transformers": (5, 20),
    "peft": (0, 21),
    "safetensors": (0, 6),
    "wandb": (0, 30),
    "tensorboard": (2, 18),
}
"""The oldest release of each package that works, as in pyproject.toml."""
ANY_RELEASE = {
    "numpy": "numpy",
    "av": "av",
    "PIL": "pillow",
    "psutil": "psutil",
    "toml": "toml",
    "tqdm": "tqdm",
    "yaml": "pyyaml",
}
"""The module and package name of optional packages of which any release will do."""
OPTIONAL = ("deepspeed", "bitsandbytes", "nvidia-ml-py", "torchao", "pyarrow", "s3fs", "gcsfs")
PYTHONS = ((3, 10), (3, 13))
MIN_FREE_DISK = 2 * 2**30


def run_doctor(argv: Sequence[str]) -> Generator[str, None, int]:
    """Yield a line for each check as soon as it is done; return 1 if training cannot work."""
    words = list(argv)
    start = words.index("--") if "--" in words else len(words)
    own, command = words[:start], words[start + 1 :]
    if set(own) & {"--help", "-h"}:
        yield USAGE
        return 0
    check_doctor_arguments(own, USAGE)
    findings: list[Finding] = []
    settings: list[ResolvedSetting] = []
    for result in examine(command):
        if isinstance(result, Finding):
            findings.append(result)
        else:
            settings.append(result)
        if "--json" not in own:
            yield format_finding(result) if isinstance(result, Finding) else format_setting(result)
    errors = sum(finding.is_error for finding in findings)
    if "--json" in own:
        shown = [asdict(replace(finding, fix="" if finding.ok else finding.fix)) for finding in findings]
        content = {"findings": shown, "settings": [*map(asdict, settings)]}
        yield json.dumps({"ok": not errors, **content}, indent=2)
    else:
        yield f"\n{errors} error{'s' if errors > 1 else ''}" if errors else "\nno errors"
    return int(errors > 0)


def examine(command: Sequence[str]) -> "Iterator[Finding | ResolvedSetting]":
    """Check packages, which everything else needs; then the command, this machine and its devices."""
    has_errors = False
    for finding in check_packages():
        has_errors |= finding.is_error
        yield finding
    if has_errors:
        yield Finding("all other checks", "skipped while packages are broken", needed=False)
        return
    if command:
        yield from check_command(command)
    yield check_disk(Path.cwd())
    yield check_import_path()
    yield from run_checks()


def check_command(words: Sequence[str]) -> "Iterator[Finding | ResolvedSetting]":
    """Resolve the settings of a command as it is typed; then find what would stop it."""
    from ..distributed.launch_command import parse_launch_command, predict_script_environment, split_assignments

    assignments, words = split_assignments(words)
    os.environ |= assignments  # before accelerate is imported, which looks for its config file then
    from ..distributed.launcher_settings import resolve_settings
    from ..distributed.validate_launch import validate_distributed
    from ..distributed.world import World

    launch = parse_launch_command(words, os.environ)
    loaded = parse_config(find_training_arguments(words, launch))
    try:
        environment = dict(os.environ) if launch is None else predict_script_environment(launch)
    except ConfigError as error:
        for problem in error.problems:
            yield Finding("command", str(replace(problem, fix="")), ok=False, fix=problem.fix)
        return
    world = replace(World.from_environment(environment), launch_command=launch)
    for notice in loaded.list_notices():
        yield Finding("command", notice, ok=False, needed=False)
    yield from resolve_settings(flatten_config(loaded.config), loaded.locations, world, environment)
    for problem in (*loaded.problems, *validate_distributed(loaded.config, world)):
        yield Finding("command", str(replace(problem, fix="")), ok=False, fix=problem.fix)


def format_setting(setting: "ResolvedSetting") -> str:
    """Format a setting as one line, and a second one if its sources disagree."""
    line = f"setting {setting.name:<31} {setting.value:<9} {setting.source}"
    if setting.warning:
        return f"{line}\nwarning {setting.warning}"
    overridden = ", ".join(f"{source.value} ({source.location})" for source in setting.overridden)
    return f"{line}; overridden: {overridden}" if overridden else line


def format_finding(finding: Finding) -> str:
    """Format a finding as one line: what is wrong, and the fix."""
    mark = "ok" if finding.ok else "error" if finding.needed else "warning"
    fix = f"  -> {finding.fix}" if finding.fix and not finding.ok else ""
    return f"{mark:<7} {finding.name}: {finding.value}{fix}"


def check_packages() -> Iterator[Finding]:
    """Check Python and each package: installed, new enough, importable."""
    is_supported = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    version = f"{platform.python_version()} ({sys.executable})"
    yield Finding("python", version, is_supported, "use Python 3.10 to 3.13")
    broken = find_broken_modules([*NEEDED, *ANY_RELEASE])
    for name, oldest in NEEDED.items():
        yield _check_package(name, oldest, broken.get(name))
    for module, package in ANY_RELEASE.items():
        if module in broken:
            yield Finding(package, broken[module], False, f"pip install --force-reinstall {package}")
    for name in OPTIONAL:
        yield Finding(name, find_version(name) or "not installed (optional)", needed=False)


def check_disk(folder: Path) -> Finding:
    """Check the free disk space of the working directory."""
    free = shutil.disk_usage(folder).free
    fix = f"free at least {MIN_FREE_DISK / 2**30:.0f} GiB"
    return Finding("disk", f"{free / 2**30:.1f} GiB free in {folder}", free >= MIN_FREE_DISK, fix)


def check_import_path() -> Finding:
    """Check that Python imports this package in every directory, and no other one of the same name."""
    name, ours, fix = f"package `{PACKAGE}`", ROOT / PACKAGE, "use a separate virtual environment"
    source = f"import {PACKAGE} as it; print(it.__file__ or list(it.__path__)[0])"
    command = [sys.executable, "-X", "utf8", "-c", source]  # it may print a path
    done = subprocess.run(
        command,
        cwd=tempfile.gettempdir(),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=60,
        check=False,
    )
    if done.returncode == 0 and Path(done.stdout.strip()).resolve() not in (ours / "__init__.py", ours):
        return Finding(
            name, f"in other directories, Python imports {done.stdout.strip()} instead of {ours}", False, fix
        )
    owners = set(importlib.metadata.packages_distributions().get(PACKAGE, []))
    if foreign := sorted(owner for owner in owners if owner.lower().replace("_", "-") != DISTRIBUTION):
        return Finding(name, f"also installed by {' and '.join(foreign)}", False, fix)
    return Finding(name, str(ours) if done.returncode == 0 else f"{ours} (not installed)")


def import_modules(*names: str) -> dict[str, str]:
    """Import each module; return why those that failed did."""
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
    return failed


def find_version(package: str) -> str | None:
    """Return the installed release of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_broken_modules(modules: Sequence[str]) -> dict[str, str]:
    """Import all where checks are forked from, else in one child process; where that crashes, each in its own."""
    start_fork_server()
    for preload in (PRELOAD, ()):
        with suppress(CheckFailed):
            return dict(run_in_child(import_modules, *modules, timeout=180, preload=preload))
    broken: dict[str, str] = {}
    for module in modules:
        try:
            broken |= run_in_child(import_modules, module, timeout=180, preload=())
        except CheckFailed as error:
            broken[module] = str(error)
    return broken


def _check_package(name: str, oldest: tuple[int, int], broken: str | None) -> Finding:
    version, bound = find_version(name), f"{name}>={'.'.join(map(str, oldest))}"
    if version is None:
        return Finding(name, "not installed", False, f"pip install '{bound}'")
    major, minor = [*re.findall(r"\d+", version), "0", "0"][:2]
    if (int(major), int(minor)) < oldest:
        return Finding(name, version, False, f"pip install -U '{bound}'")
    if broken is not None:
        fix = f"pip install --force-reinstall '{name}=={version}'"
        return Finding(name, f"{version}, cannot be imported: {broken}", False, fix)
    return Finding(name, version)
