"""Install the trainer into an environment of its own: ``python install.py``.

Finds Python, the GPU and its driver, chooses the build of torch, makes ``.venv``, installs, and trains one step on the
built-in model.  It needs nothing but Python's standard library, lies in a checkout or beside a wheel of the package,
and changes nothing outside of the environment.  torch comes from PyTorch's own index, or from PIP_INDEX_URL, or from
``--torch_index``; all other packages from where pip is set to.
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
CUDA_DRIVERS = {12: 525, 13: 580}
"""The first driver for each major version of CUDA; it runs all minor versions of it, the later ones included."""

ROCM_BUILDS = ("rocm7.2", "rocm7.1", "rocm7.0", "rocm6.4")
MARKER, STAMP = "made_by_install.txt", "install_finished.txt"
"""Files of an environment: this program made it; installing has finished (the start scripts ask for both)."""

DEVICES = ("cuda", "rocm", "xpu", "mps", "cpu")
FIX_FOR_TORCH = "the same command goes on; --torch_index URL takes torch from a mirror"
PROBE = """import sys, torch
print(torch.__version__, flush=True)
torch.ones(1, device=sys.argv[1]).add(1).cpu()
"""


class InstallError(Exception):
    """What the user has to do before it can go on."""


@dataclass(frozen=True)
class CudaBuild:
    """A build of torch for CUDA: the GPUs and the releases of torch that have it."""

    cuda: tuple[int, int]
    capabilities: tuple[float, float]
    """The lowest and the highest compute capability that it has kernels for."""
    releases: tuple[tuple[int, int], tuple[int, int]]

    @property
    def name(self) -> str:
        return f"cu{self.cuda[0]}{self.cuda[1]}"

    def is_of_release(self, release: tuple[int, int]) -> bool:
        return self.releases[0] <= release <= self.releases[1]

    def has_kernels_for(self, capability: float) -> bool:
        """Whether it runs on such a GPU; 0 is one whose driver does not name its compute capability."""
        return capability == 0 or self.capabilities[0] <= capability <= self.capabilities[1]


LATER, ANY_LATER = (99, 0), 99.0
CUDA_BUILDS = (
    CudaBuild((13, 0), (7.5, ANY_LATER), ((2, 11), LATER)),
    CudaBuild((13, 2), (7.5, ANY_LATER), ((2, 12), LATER)),  # PyTorch calls it experimental in 2.12 and 2.13
    CudaBuild((12, 8), (7.5, 12.9), ((2, 11), (2, 11))),
    CudaBuild((12, 6), (5.0, 9.9), ((2, 11), LATER)),
)
"""PyTorch's table of CUDA and architectures, the preferred ones first; the index is asked as well."""


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
    except (InstallError, OSError) as error:
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
    add("torch_index", metavar="URL", help="the package index for torch, such as a mirror, instead of PyTorch's own")
    add("torch", metavar="VERSION", help=f"{OLDEST_TORCH} or later, such as 2.13.0+cu126 (default: {TESTED_TORCH})")
    add("source", metavar="PATH", help="a checkout or a wheel (default: what lies beside this file)")
    add("extras", default="web", metavar="NAMES", help="optional packages, with commas, such as web,bitsandbytes")
    add("update", action="store_true", help="get the newest version of a git checkout, and of the packages")
    add("use_existing", action="store_true", help="install into an environment that this program has not made")
    add("repair", action="store_true", help="remove the environment that this program made, and make it again")
    add("skip_check", action="store_true", help="train no step at the end")
    add("dry_run", action="store_true", help="print the commands and run none")
    return parser


def install(options: argparse.Namespace) -> None:
    """Go through all steps, each of which is printed before it is run."""
    python, venv = find_python(), Path(options.venv).expanduser().resolve()
    source = find_source(options.source)
    version, build = parse_torch_version(options.torch or TESTED_TORCH)
    print(f"Python:  {format_command(python)}")
    hardware = detect_hardware("cpu" if build == "cpu" else options.device)
    print(f"machine: {platform.system()} {platform.machine()}; {hardware.describe()}")
    print(f"package: {source}")
    builds = [build] if build else list_builds(hardware, version)
    if options.repair:
        remove_environment(venv, options.dry_run)
    if options.update and (source / ".git").exists():
        run(["git", "-C", str(source), "pull", "--ff-only"], options.dry_run)
    prepare_environment(python, venv, options)
    inside = get_venv_python(venv)
    pip = [str(inside), "-m", "pip"]
    run([*pip, "install", "--upgrade", "pip"], options.dry_run)
    index = options.torch_index or choose_index(pip, hardware, builds, version, options.dry_run)
    if not options.dry_run:
        (venv / STAMP).unlink(missing_ok=True)
    run([*pip, *build_torch_arguments(index, version, build, options.update)], options.dry_run, FIX_FOR_TORCH)
    run([*pip, *build_package_arguments(source, options)], options.dry_run)
    if not options.dry_run:
        check_device(inside, hardware, builds, options.skip_check)
    if not options.skip_check:
        check_by_training(inside, options.dry_run)
    if not options.dry_run:
        (venv / STAMP).write_text("install.py has finished\n", encoding="utf-8")
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
    name, driver, capability = (part.strip() for part in query.splitlines()[0].rsplit(",", 2))
    match = re.search(r"CUDA(?: UMD)? Version:\s*(\d+)\.(\d+)", ask(["nvidia-smi"]) or "")
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


def parse_torch_version(text: str) -> tuple[str, str]:
    """Split ``2.13.0+cu126`` into the version and the build; without one the build is chosen by the hardware."""
    match = re.fullmatch(r"(\d+\.\d+)(\.\d+)?((?:a|b|rc)\d+)?(?:\+(cpu|xpu|cu\d+|rocm\d[\d.]*))?", text)
    if match is None:
        raise InstallError(f"--torch {text}: no version of torch; 2.13.0 and 2.13.0+cu126 are such")
    if parse_release(match[1]) < parse_release(OLDEST_TORCH):
        raise InstallError(f"--torch {text}: {OLDEST_TORCH} or later is needed")
    return f"{match[1]}{match[2] or '.0'}{match[3] or ''}", match[4] or ""


def parse_release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def list_builds(hardware: Hardware, version: str) -> list[str]:
    """List the builds of this version of torch that run on the hardware, the best first."""
    if hardware.device == "cuda":
        return list_cuda_builds(hardware, version)
    return {"mps": [], "rocm": list(ROCM_BUILDS)}.get(hardware.device, [hardware.device])


def list_cuda_builds(hardware: Hardware, version: str) -> list[str]:
    """List the builds that have kernels for the GPU and that the driver runs.

    A driver runs every minor version of the CUDA that it has; those up to its own come first, later ones follow.
    """
    limit = hardware.cuda if hardware.cuda > (0, 0) else LATER
    release = parse_release(version)
    fitting = [b for b in CUDA_BUILDS if b.is_of_release(release) and b.has_kernels_for(hardware.capability)]
    usable = [build for build in fitting if build.cuda[0] <= limit[0]]
    if usable:
        usable.sort(key=lambda b: (-b.cuda[0], b.cuda > limit, b.cuda if b.cuda > limit else (0, 0)))
        return [build.name for build in usable]
    gpu = f"{hardware.name} (compute capability {hardware.capability})"
    if not fitting:
        raise InstallError(f"torch {version} has no build for {gpu}; --device cpu trains on the CPU")
    major = min(build.cuda[0] for build in fitting)
    raise InstallError(
        f"torch {version} for {gpu} needs a driver with CUDA {major}, and {hardware.driver} has CUDA up to"
        f" {limit[0]}.{limit[1]}: update the driver to one with CUDA {major} ({CUDA_DRIVERS[major]} or later);"
        " --device cpu trains on the CPU"
    )


def choose_index(
    pip: Sequence[str], hardware: Hardware, builds: Sequence[str], version: str, is_dry: bool
) -> str | None:
    """Return the index that has torch for this machine; None for that of pip's own settings."""
    if not builds:
        return None
    if mirror := os.environ.get("PIP_INDEX_URL"):
        print(f"torch:   from {hide_login(mirror)}, as PIP_INDEX_URL says; --torch_index takes another index")
        return None
    if is_dry:
        print(f"torch:   the first of {', '.join(builds)} that {TORCH_HOST} has")
        return f"{TORCH_HOST}/{builds[0]}"
    for build in builds:
        url = f"{TORCH_HOST}/{build}"
        asked = ask([*pip, "index", "versions", "torch", "-i", url, "--retries", "1", "--timeout", "15"], 90)
        if asked and re.search(rf"(?<![\w.]){re.escape(version)}\+{re.escape(build)}(?![\w.])", asked):
            print(f"torch:   {version} for {build}")
            return url
    missing = f"{TORCH_HOST} cannot be reached or has no torch {version} for {', '.join(builds)}"
    has_cuda_13 = sys.platform.startswith("linux") and any(build.startswith("cu13") for build in builds)
    if hardware.device != "cpu" and not has_cuda_13:
        raise InstallError(f"{missing}, and that of PyPI does not run on this GPU; {FIX_FOR_TORCH}; or --device cpu")
    brings = ", which brings CUDA 13 along (some GB)" if sys.platform.startswith("linux") else ""
    print(f"torch:   {missing}; from the index that pip uses{brings}")
    return None


def build_torch_arguments(index: str | None, version: str, build: str, is_update: bool) -> list[str]:
    """The arguments of pip that install torch.

    The name of the build, such as cu126, is asked for where the index is of one build, so that another build that is
    there already is replaced.
    """
    last = (index or "").rstrip("/").rpartition("/")[2]
    if not build and re.fullmatch(r"cpu|xpu|cu\d+|rocm\d[\d.]*", last):
        build = last
    upgrade = ["--upgrade"] if is_update else []
    what = f"torch=={version}{f'+{build}' if build else ''}"
    return ["install", what, *upgrade, *(["-i", index] if index else [])]


def build_package_arguments(source: Path, options: argparse.Namespace) -> list[str]:
    """The arguments of pip that install the package, from a checkout so that an edit or a pull is in effect at once."""
    extras = f"[{options.extras}]" if options.extras else ""
    constraints = ["-c", str(source / "constraints.txt")] if (source / "constraints.txt").is_file() else []
    if options.torch and parse_torch_version(options.torch)[0] != TESTED_TORCH:
        constraints = []  # which pin torch, too
    what = ["-e", f"{source}{extras}"] if source.suffix != ".whl" else [f"{source}{extras}"]
    upgrade = ["--upgrade"] if options.update else []
    return ["install", *constraints, *upgrade, *what]


def prepare_environment(python: Sequence[str], venv: Path, options: argparse.Namespace) -> None:
    """Make the environment, go on with one that this program made, or stop before one that it did not make."""
    inside = get_venv_python(venv)
    is_ours = (venv / MARKER).is_file()
    is_there = venv.exists() and (not venv.is_dir() or any(venv.iterdir()))
    if options.repair and options.dry_run:
        is_there = False  # it was only said that it is removed
    if is_there and not is_ours:
        if not inside.exists():
            raise InstallError(f"{venv} is there and is no environment; --venv FOLDER takes another folder")
        if not options.use_existing:
            raise InstallError(
                f"{venv} was not made by this program: --use_existing installs into it and may replace its torch,"
                " --venv FOLDER makes another one"
            )
    has_pip = inside.exists() and ask([str(inside), "-m", "pip", "--version"]) is not None
    if has_pip and is_there:
        return
    if is_there and not is_ours:
        raise InstallError(f"{venv} has no pip that works; {inside} -m ensurepip installs it")
    if is_there:
        print(f"{venv} is unfinished and is made again")
        remove_environment(venv, options.dry_run)
    make_environment(python, venv, options.dry_run)


def make_environment(python: Sequence[str], venv: Path, is_dry: bool) -> None:
    """Mark the folder as one that ``--repair`` may remove, then make the environment in it."""
    if not is_dry:
        try:
            venv.mkdir(parents=True, exist_ok=True)
            (venv / MARKER).write_text("python install.py --repair makes this environment again\n", encoding="utf-8")
        except OSError as error:
            raise InstallError(f"{venv} cannot be made: {error.strerror}; --venv takes another folder") from None
    run([*python, "-m", "venv", str(venv)], is_dry, "on Debian and Ubuntu: apt install python3-venv")


def remove_environment(venv: Path, is_dry: bool) -> None:
    """Remove the environment, if this program made it and does not run in it; its marker goes last."""
    if not venv.exists():
        return
    if not (venv / MARKER).is_file():
        raise InstallError(f"{venv} was not made by this program, so it is not removed; remove it, or give --venv")
    if Path(sys.prefix).resolve() == venv:
        raise InstallError(f"this Python is in {venv}; start install.py with the one outside of it")
    print(f"$ remove {venv}")
    if is_dry:
        return
    try:
        for path in sorted(venv.iterdir(), key=lambda path: path.name != STAMP):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARKER:
                path.unlink()
        (venv / MARKER).unlink()
        venv.rmdir()
    except OSError as error:
        raise InstallError(
            f"{error.filename or venv} cannot be removed: {error.strerror}; close the programs that use {venv},"
            " then the same command goes on"
        ) from None


def check_device(python: Path, hardware: Hardware, builds: Sequence[str], skips_unseen: bool) -> None:
    """Compute one sum by the torch of the environment on the GPU that the driver has named.

    A device that was asked for and that no driver has named is not tried with ``--skip_check``, so that an image for
    another machine can be made.
    """
    if hardware.device == "cpu" or (skips_unseen and not hardware.name):
        return
    device = "cuda" if hardware.device == "rocm" else hardware.device
    try:
        command = [str(python), "-c", PROBE, device]
        done = subprocess.run(command, capture_output=True, timeout=600, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise InstallError(f"{python}: torch cannot be tried: {error}") from None
    if done.returncode == 0:
        return
    version = done.stdout.decode("utf-8", "replace").strip()
    reason = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"])[-1]
    if not version:
        raise InstallError(f"torch cannot be imported ({reason}); --repair makes the environment again")
    index = f"--torch_index {TORCH_HOST}/{builds[0]}, or " if builds else ""
    raise InstallError(
        f"training would run on the CPU: torch {version} does not run on {hardware.name or hardware.device} ({reason})."
        f" Install with {index}a newer driver; --device cpu trains on the CPU"
    )


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
