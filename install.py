"""Install the trainer into an environment of its own: ``python install.py``.

Finds Python, the GPU and its driver, chooses the build of torch, makes ``.venv``, installs, and trains one step on the
built-in model.  It needs nothing but Python's standard library, lies in a checkout or beside a wheel of the package,
and changes nothing outside of the environment.  What pip is set to (PIP_INDEX_URL, pip.conf) is honoured.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence  # noqa: UP035 - a Python that is too old has to get to the message

HERE = Path(__file__).resolve().parent
PYTHONS = ((3, 10), (3, 13))
TORCH_HOST = "https://download.pytorch.org/whl"
OLDEST_TORCH, TESTED_TORCH = "2.11", "2.13.0"
CUDA_BUILDS = ((13, 2), (13, 0), (12, 9), (12, 8), (12, 6))
"""Builds of torch for CUDA, the newest first; which of them a release has is asked of the index."""

FIRST_CAPABILITY_OF_CUDA_13 = 7.5
ROCM_BUILDS = ("rocm7.2", "rocm7.1", "rocm7.0", "rocm6.4")
MARKER = "made_by_install.txt"
DEVICES = ("cuda", "rocm", "xpu", "mps", "cpu")


class InstallError(Exception):
    """What the user has to do before it can go on."""


@dataclass(frozen=True)
class Hardware:
    """The accelerator of this machine, as its driver names it."""

    device: str = "cpu"
    name: str = ""
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA that the driver runs."""
    capability: float = 0.0
    note: str = ""

    def describe(self) -> str:
        parts = [self.name or "no GPU found", f"driver {self.driver}" if self.driver else ""]
        parts += [f"CUDA up to {self.cuda[0]}.{self.cuda[1]}" if self.cuda > (0, 0) else "", self.note]
        return ", ".join(part for part in parts if part)


def main(argv: Sequence[str]) -> int:
    """Install, update or repair; return the exit code."""
    options = build_parser().parse_args(argv)
    try:
        install(options)
    except InstallError as error:
        print(f"install: stopped.\n  {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninstall: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The options; each with a dash or an underscore between its words."""
    parser = argparse.ArgumentParser(
        description="Make an environment, install the trainer into it, and train one step.", allow_abbrev=False
    )

    def add(name: str, **facts: object) -> None:
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*names, **facts)  # type: ignore[arg-type]

    add("venv", default=str(HERE / ".venv"), metavar="FOLDER", help="the environment (default: .venv beside this file)")
    add("device", default="auto", choices=("auto", *DEVICES), help="the build of torch (default: what is found)")
    add("index_url", metavar="URL", help="the package index for torch, such as a mirror, instead of PyTorch's own")
    add("torch", metavar="VERSION", help=f"the version of torch, {OLDEST_TORCH} or later (default: {TESTED_TORCH})")
    add("source", metavar="PATH", help="a checkout or a wheel (default: what lies beside this file)")
    add("extras", default="web", metavar="NAMES", help="optional packages, with commas, such as web,bitsandbytes")
    add("update", action="store_true", help="get the newest version of a git checkout, and of the packages")
    add("repair", action="store_true", help="remove the environment that this program made, and make it again")
    add("skip_check", action="store_true", help="train no step at the end")
    add("dry_run", action="store_true", help="print the commands and run none")
    return parser


def install(options: argparse.Namespace) -> None:
    """Go through all steps, each of which is printed before it is run."""
    python, venv = find_python(), Path(options.venv).expanduser().resolve()
    source = find_source(options.source)
    print(f"Python:  {format_command(python)}")
    hardware = detect_hardware(options.device)
    print(f"machine: {platform.system()} {platform.machine()}; {hardware.describe()}")
    print(f"package: {source}")
    if options.repair:
        remove_environment(venv, options.dry_run)
    if options.update and (source / ".git").exists():
        run(["git", "-C", str(source), "pull", "--ff-only"], options.dry_run)
    inside = get_venv_python(venv)
    if not inside.exists() or options.dry_run:
        make_environment(python, venv, options.dry_run)
    pip = [str(inside), "-m", "pip"]
    run([*pip, "install", "--upgrade", "pip"], options.dry_run)
    index = options.index_url or choose_index(pip, hardware, options)
    try:
        run([*pip, *build_torch_arguments(index, options)], options.dry_run)
    except InstallError:
        if index is None or options.index_url:
            raise
        print("torch:   not from there; from the index that pip uses")
        run([*pip, *build_torch_arguments(None, options)], options.dry_run)
    run([*pip, *build_package_arguments(source, options)], options.dry_run)
    if not options.skip_check:
        check_by_training(inside, options.dry_run)
    print_next_steps(venv, source, options)


def find_python() -> list[str]:
    """Return the command of a Python that is supported: this one, or another one of this machine."""
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return [sys.executable]
    versions = [f"3.{minor}" for minor in range(PYTHONS[1][1], PYTHONS[0][1] - 1, -1)]
    for version in versions:
        launcher = ["py", f"-{version}"] if os.name == "nt" else [f"python{version}"]
        if shutil.which(launcher[0]) and ask([*launcher, "-c", "import venv"]) is not None:
            return launcher
    this = ".".join(map(str, sys.version_info[:2]))
    raise InstallError(f"Python {versions[-1]} to {versions[0]} is needed, and this is {this}; https://www.python.org")


def find_source(given: str | None) -> Path:
    """Return the checkout or wheel to install."""
    if given is not None:
        path = Path(given).expanduser().resolve()
        if path.suffix == ".whl" or (path / "pyproject.toml").is_file():
            return path
        raise InstallError(f"--source {given}: neither a wheel nor a checkout")
    if (HERE / "pyproject.toml").is_file():
        return HERE
    wheels = sorted(HERE.glob("lorikeet_lora-*.whl"), key=lambda path: path.stat().st_mtime)
    if wheels:
        return wheels[-1]
    raise InstallError(
        f"there is nothing to install in {HERE}: put this file into a checkout or beside the wheel"
        " (lorikeet_lora-VERSION-py3-none-any.whl), or give --source PATH"
    )


def detect_hardware(device: str = "auto") -> Hardware:
    """Ask the drivers which accelerator this machine has; ``device`` keeps all others out."""
    found = [
        hardware
        for name, detect in zip(DEVICES, (detect_nvidia, detect_amd, detect_intel, detect_apple))
        if device in ("auto", name)
        for hardware in [detect()]
        if hardware is not None
    ]
    if found:
        return found[0]
    return Hardware("cpu" if device == "auto" else device)


def detect_nvidia() -> Hardware | None:
    """Ask nvidia-smi for name, driver and compute capability of the first GPU, and for the CUDA of the driver."""
    query = ask(["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"])
    if not query or "," not in query:
        return None
    name, driver, capability = (part.strip() for part in query.splitlines()[0].split(","))
    match = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", ask(["nvidia-smi"]) or "")
    cuda = (int(match[1]), int(match[2])) if match else (0, 0)
    number = float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0
    return Hardware("cuda", name, driver, cuda, number)


def detect_amd() -> Hardware | None:
    """Ask rocminfo for the GPU; torch's ROCm builds are for Linux."""
    text = ask(["rocminfo"])
    names = [each for each in re.findall(r"Marketing Name:\s*(.+)", text or "") if re.search(r"Radeon|Instinct", each)]
    return Hardware("rocm", names[0].strip()) if names and sys.platform.startswith("linux") else None


def detect_intel() -> Hardware | None:
    """Ask xpu-smi for a GPU of Intel."""
    match = re.search(r"Device Name:\s*([^|\n]+)", ask(["xpu-smi", "discovery"]) or "")
    return Hardware("xpu", match[1].strip()) if match else None


def detect_apple() -> Hardware | None:
    """Recognize Apple's own processors, whose GPU torch calls mps."""
    if sys.platform != "darwin":
        return None
    if platform.machine() != "arm64":
        raise InstallError("torch has no builds for Macs with a processor of Intel any more")
    return Hardware("mps", f"{platform.processor() or 'Apple'} GPU (Metal)")


def list_builds(hardware: Hardware) -> list[str]:
    """List the builds of torch that this machine runs, the best first; the last resort is that for the CPU."""
    if hardware.device == "mps":
        return []
    if hardware.device in ("rocm", "xpu"):
        return [*(ROCM_BUILDS if hardware.device == "rocm" else ["xpu"]), "cpu"]
    if hardware.device == "cuda":
        limit = hardware.cuda if hardware.cuda > (0, 0) else CUDA_BUILDS[0]
        is_old = 0 < hardware.capability < FIRST_CAPABILITY_OF_CUDA_13
        usable = [build for build in CUDA_BUILDS if build <= limit and not (is_old and build >= (13, 0))]
        return [*(f"cu{major}{minor}" for major, minor in usable), "cpu"]
    return ["cpu"]


def choose_index(pip: Sequence[str], hardware: Hardware, options: argparse.Namespace) -> str | None:
    """Return the index that has torch for this machine; None for that of pip's own settings."""
    if hardware.device == "mps":
        return None
    if mirror := os.environ.get("PIP_INDEX_URL"):
        print(f"torch:   from {hide_login(mirror)}, as PIP_INDEX_URL says; --index_url takes another index")
        return None
    builds = list_builds(hardware)
    if options.dry_run:
        print(f"torch:   the first of {', '.join(builds)} that {TORCH_HOST} has")
        return f"{TORCH_HOST}/{builds[0]}"
    version = options.torch or TESTED_TORCH
    for build in builds:
        url = f"{TORCH_HOST}/{build}"
        asked = ask([*pip, "index", "versions", "torch", "--index-url", url, "--retries", "1", "--timeout", "15"], 90)
        if asked and re.search(rf"\b{re.escape(version)}\+{build}\b", asked):
            if build == "cpu" and hardware.device != "cpu":
                print("torch:   no build for this driver: the CPU trains until the driver is updated")
            print(f"torch:   {version} for {build}")
            return url
    print(f"torch:   {TORCH_HOST} cannot be reached or has no torch {version}; from the index that pip uses")
    return None


def build_torch_arguments(index: str | None, options: argparse.Namespace) -> list[str]:
    """The arguments of pip that install torch; another build that is there already, such as cpu, is replaced."""
    version = f"torch=={options.torch or TESTED_TORCH}"
    if index is not None and index.startswith(f"{TORCH_HOST}/") and "+" not in version:
        version += f"+{index.rpartition('/')[2]}"
    upgrade = ["--upgrade"] if options.update else []
    return ["install", version, *upgrade, *(["--index-url", index] if index else [])]


def build_package_arguments(source: Path, options: argparse.Namespace) -> list[str]:
    """The arguments of pip that install the package, from a checkout so that an edit or a pull is in effect at once."""
    extras = f"[{options.extras}]" if options.extras else ""
    constraints = ["-c", str(source / "constraints.txt")] if (source / "constraints.txt").is_file() else []
    if options.torch:
        constraints = []  # which pin torch, too
    what = ["-e", f"{source}{extras}"] if source.suffix != ".whl" else [f"{source}{extras}"]
    upgrade = ["--upgrade"] if options.update else []
    return ["install", *constraints, *upgrade, *what]


def make_environment(python: Sequence[str], venv: Path, is_dry: bool) -> None:
    """Make the environment, and mark it as one that ``--repair`` may remove."""
    run([*python, "-m", "venv", str(venv)], is_dry, "on Debian and Ubuntu: apt install python3-venv")
    if not is_dry:
        (venv / MARKER).write_text("python install.py --repair makes this environment again\n", encoding="utf-8")


def remove_environment(venv: Path, is_dry: bool) -> None:
    """Remove the environment, if this program made it and does not run in it."""
    if not venv.exists():
        return
    if not (venv / MARKER).is_file():
        raise InstallError(f"{venv} was not made by this program, so it is not removed; remove it, or give --venv")
    if Path(sys.prefix).resolve() == venv:
        raise InstallError(f"this Python is in {venv}; start the repair with the one outside of it")
    print(f"$ remove {venv}")
    if not is_dry:
        shutil.rmtree(venv)


def check_by_training(python: Path, is_dry: bool) -> None:
    """Train one step on the built-in model, in a temporary folder."""
    folder = tempfile.mkdtemp(prefix="lorikeet-install-")
    words = "--max_train_steps 1 --sample_every_n_steps 1000 --max_data_loader_n_workers 0 --output_dir".split()
    try:
        command = [str(python), "-m", "library", "demo", *words, folder]
        run(command, is_dry, f"{python} -m library doctor says what is wrong", cwd=folder)
        if not is_dry and not (Path(folder) / "demo.safetensors").is_file():
            raise InstallError("the step has trained no LoRA file")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def print_next_steps(venv: Path, source: Path, options: argparse.Namespace) -> None:
    """Say what was done, and how to start."""
    ending = {"win32": "bat", "darwin": "command"}.get(sys.platform, "sh")
    start = source / "scripts" / f"start.{ending}"
    if options.dry_run:
        print("\nnothing was run")
        return
    print(f"\ninstalled{'' if options.skip_check else '; a step on the built-in model was trained'}")
    print(f"the page in the browser: {start if start.is_file() else f'{get_venv_python(venv)} -m library web'}")


def get_venv_python(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def hide_login(url: str) -> str:
    """An address without name and password."""
    return re.sub(r"//[^/@]*@", "//", url)


def format_command(words: Sequence[str]) -> str:
    shown = [hide_login(word) for word in words]
    return subprocess.list2cmdline(shown) if os.name == "nt" else " ".join(f"'{w}'" if " " in w else w for w in shown)


def run(command: Sequence[str], is_dry: bool, fix: str = "", cwd: str | None = None) -> None:
    """Print a command and run it."""
    print(f"$ {format_command(command)}", flush=True)
    if is_dry:
        return
    try:
        code = subprocess.call(list(command), cwd=cwd)
    except OSError as error:
        raise InstallError(f"{command[0]}: cannot be started: {error.strerror}") from None
    if code:
        raise InstallError(f"{format_command(command[:4])} ...: exit code {code}{f'; {fix}' if fix else ''}")


def ask(command: Sequence[str], timeout: float = 30) -> str | None:
    """Return what a program prints; None if there is none of this name, or it fails."""
    try:
        done = subprocess.run(
            list(command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
