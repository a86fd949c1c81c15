"""Pack the wheels that a machine without internet lacks: ``python -m scripts.pack_wheels --installed FILE``.

FILE is what ``python3 -m pip list --format=freeze`` prints on that machine.  pip resolves the dependencies of the
project for that Python; packages that the machine has in a version that will do stay out, and so does whatever only
they need (CUDA's packages, which torch brings).  The command that starts the GPU benchmark there is printed.
"""

import csv
import io
import json
import subprocess
import sys
import zipfile
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import toml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from library.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("bitsandbytes",)
"""Of the project: the kernels with which the benchmark compares its own."""
PLATFORMS = tuple(f"{name}_x86_64" for name in ["manylinux1", "manylinux2010", "manylinux2014",
                                                *(f"manylinux_2_{minor}" for minor in range(5, 36))])  # fmt: skip
"""Whose wheels run on Ubuntu 22.04 and later, the oldest first."""
TRACKERS = ("wandb", "tensorboard")
"""Half of all wheels, and the benchmark logs to none."""
MAX_MB = 60.0
UNUSED = ("*/libbitsandbytes_rocm*.so", "*/libbitsandbytes_xpu*.so", "*/libbitsandbytes_cuda1[12]*.so")
"""Compiled for other devices and for CUDA before 13; nine tenths of that wheel."""


@dataclass(frozen=True)
class Package:
    """One package of pip's resolution."""

    name: str
    version: str
    requirements: tuple[Requirement, ...]


def list_needed_packages(
    requirements: Sequence[Requirement], resolved: Mapping[str, Package], installed: Mapping[str, str], python: str
) -> list[Package]:
    """Walk from the requirements to the packages to pack; ``installed`` has versions, or "" for whatever will do."""
    specifiers: dict[str, SpecifierSet] = {}
    for requirement in [*requirements, *(each for package in resolved.values() for each in package.requirements)]:
        name = canonicalize_name(requirement.name)
        if _applies(requirement, (), python):
            specifiers[name] = specifiers.get(name, SpecifierSet()) & requirement.specifier
    needed: dict[str, Package] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [each for each in requirements if _applies(each, (), python)]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        version = installed.get(name)
        if version is not None and (not version or specifiers[name].contains(version, prereleases=True)):
            continue
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        needed[name] = package = resolved[name]
        waiting += [each for each in package.requirements if _applies(each, sorted(requirement.extras), python)]
    return sorted(needed.values(), key=lambda package: package.name)


def _applies(requirement: Requirement, extras: Sequence[str], python: str) -> bool:
    """Evaluate the marker for Linux and that Python."""
    if requirement.marker is None:
        return True
    values = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux",
              "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix",
              "implementation_name": "cpython", "platform_python_implementation": "CPython"}  # fmt: skip
    return any(requirement.marker.evaluate({**values, "extra": extra}) for extra in [*extras, ""])


def read_report(report: Mapping[str, Any]) -> dict[str, Package]:
    """Read the report of ``pip install --report``."""
    packages: dict[str, Package] = {}
    for item in report["install"]:
        metadata = item["metadata"]
        requirements = tuple(Requirement(each) for each in metadata.get("requires_dist", ()))
        name = canonicalize_name(metadata["name"])
        packages[name] = Package(name, metadata["version"], requirements)
    return packages


def read_installed(path: Path) -> dict[str, str]:
    """Read lines of ``name==version``; a name alone is taken as a version that will do."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--installed {path}: {error.strerror}") from error
    pairs = [line.partition("==") for line in map(str.strip, lines) if line and not line.startswith(("#", "-"))]
    return {canonicalize_name(name.partition(" @ ")[0].strip()): version.strip() for name, _, version in pairs}


def read_requirements() -> list[Requirement]:
    project = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = [each for extra in EXTRAS for each in project["optional-dependencies"][extra]]
    return [Requirement(each) for each in [*project["dependencies"], *optional]]


def write_wheel_without(source: Path, target: Path, unused: Sequence[str] = UNUSED) -> None:
    """Copy a wheel without the files that match, in its RECORD as well."""
    with zipfile.ZipFile(source) as wheel, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as kept:
        names = [name for name in wheel.namelist() if not any(Path(name).match(pattern) for pattern in unused)]
        (record,) = (name for name in names if name.endswith(".dist-info/RECORD"))
        for name in names:
            content = wheel.read(name)
            if name == record:
                rows = csv.reader(io.StringIO(content.decode("utf-8")))
                text = io.StringIO()
                csv.writer(text, lineterminator="\n").writerows(row for row in rows if row and row[0] in names)
                content = text.getvalue().encode("utf-8")
            kept.writestr(wheel.getinfo(name), content)


def pack_wheels(installed: Mapping[str, str], python: str, output: Path) -> list[Path]:
    """Resolve, download and write the wheels; return them."""
    requirements = [each for each in read_requirements() if _applies(each, (), python)]
    torch = [f"torch=={installed['torch']}"] if installed.get("torch") else []
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in PLATFORMS:
        target += ["--platform", platform]
    with TemporaryDirectory() as folder:
        report, downloads = Path(folder, "report.json"), Path(folder, "wheels")
        names = [str(Requirement(f"{each.name}{each.specifier}")) for each in requirements]
        _run_pip("install", "--dry-run", "--ignore-installed", "--target", str(Path(folder, "target")), *target,
                 "--report", str(report), *_write_constraints(Path(folder), installed), *names, *torch)  # fmt: skip
        resolved = read_report(json.loads(report.read_text(encoding="utf-8")))
        needed = list_needed_packages(requirements, resolved, installed, python)
        pins = [f"{package.name}=={package.version}" for package in needed]
        if pins:
            _run_pip("download", "--no-deps", "--dest", str(downloads), *target, *pins)
        output.mkdir(parents=True, exist_ok=True)
        for old in output.glob("*.whl"):
            old.unlink()
        for wheel in sorted(downloads.glob("*.whl")):
            write_wheel_without(wheel, output / wheel.name)
    return sorted(output.glob("*.whl"))


def _write_constraints(folder: Path, installed: Mapping[str, str]) -> list[str]:
    """The tested versions of packages that the machine does not have."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    path = folder / "constraints.txt"
    lines = [line for line in lines if canonicalize_name(line.partition("==")[0]) not in installed]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["--constraint", str(path)]


def _run_pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    result = subprocess.run([*command, *arguments], check=False, capture_output=True, encoding="utf-8")
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR: ")]
        raise UserError(f"pip {arguments[0]}: {' '.join(lines) or result.stderr.strip()}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m scripts.pack_wheels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--installed", type=Path, required=True, help="pip list --format=freeze of that machine")
    parser.add_argument("--python_version", default="3.12", help="of that machine (default 3.12)")
    parser.add_argument("--output", type=Path, default=Path("wheels"), help="folder of the wheels (default wheels)")
    parser.add_argument("--max_mb", type=float, default=MAX_MB, help=f"of all wheels (default {MAX_MB:g})")
    parser.add_argument(
        "--without",
        nargs="*",
        default=TRACKERS,
        help=f"left out, with what only they need (default {' '.join(TRACKERS)})",
    )
    options = parser.parse_args(argv)
    available = read_installed(options.installed) | {canonicalize_name(name): "" for name in options.without}
    wheels = pack_wheels(available, options.python_version, options.output)
    for line in format_result(wheels, options.output):
        sys.stdout.write(line + "\n")
    size = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    if size > options.max_mb:
        raise UserError(f"--max_mb: {size:.1f} MB of wheels are over the limit of {options.max_mb:g} MB")
    return 0


def format_result(wheels: Sequence[Path], folder: Path) -> Iterator[str]:
    for wheel in sorted(wheels, key=lambda wheel: -wheel.stat().st_size):
        yield f"{wheel.stat().st_size / 1e6:6.1f} MB  {wheel.name}"
    yield f"{sum(wheel.stat().st_size for wheel in wheels) / 1e6:6.1f} MB  in {len(wheels)} wheels"
    yield "On that machine, in a checkout of this project:"
    yield f"  python3 -m pip install --no-index --no-deps --target packages {folder}/*.whl"
    yield '  PYTHONPATH="$PWD/packages" python3 -m benchmarks gpu --minutes 9'
    yield "Keep gpu_benchmark.json, or the file of --output: the next call goes on from it."


if __name__ == "__main__":
    try:
        code = main()
    except UserError as error:
        sys.exit(f"error: {error}")
    raise SystemExit(code)
