"""The doctor's checks: each looks at one thing, by trying it where that is possible."""

import importlib.metadata
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..distributed.attempt import ROOT, Attempt, attempt, command_output, found_elsewhere
from ..distributed.devices import Machine, compute_toolkit, group_backends, trial_devices
from ..distributed.launch_file import default_path, read_launch_file
from ..errors import ConfigError
from .doctor_finding import Finding

PACKAGE = __package__.split(".")[0]
DISTRIBUTION = "lorikeet-lora"
TRIALS = f"{PACKAGE}.distributed.trials"
SECONDS = {"memory": 60.0, "precision": 120.0, "all_reduce": 60.0, "compile_one_kernel": 240.0, "one_step": 240.0}
"""How long a trial may take before it counts as hanging."""
ENOUGH_DISK = 2 * 2**30


def toolkit(machine: Machine) -> list[Finding]:
    """What torch was built for, and the driver below it."""
    driver = command_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    fix = "install the torch that fits your driver: https://pytorch.org/get-started/locally"
    unused = driver is not None and trial_devices(machine) == (machine.device,)
    return [Finding("toolkit", compute_toolkit()),
            Finding("driver", (driver or "none found").splitlines()[0] + (", not used by torch" if unused else ""),
                    not unused, fix if unused else "", needed=False)]  # fmt: skip


def machine_facts(machine: Machine) -> list[Finding]:
    """Processors and NUMA nodes, and what becomes of them."""
    nodes = f"{machine.numa_nodes} NUMA node{'s' if machine.numa_nodes > 1 else ''}"
    if machine.numa_nodes == 1:
        affinity = "processes are not bound: there is one node"
    else:
        affinity = f"processes are not bound: {machine.affinity_obstacle}" if machine.affinity_obstacle else (
            "each process is bound to the node of its device")  # fmt: skip
    return [Finding("processors", f"{machine.cores} cores, {machine.processors} usable threads"),
            Finding("NUMA", f"{nodes}; {affinity}", needed=False)]  # fmt: skip


def places(folder: Path, environment: Mapping[str, str]) -> list[Finding]:
    """Disk, the package's own name, and accelerate's file."""
    return [_disk(folder), _library(), _accelerate_file(environment)]


def trials(machine: Machine) -> list[Finding]:
    """Everything that is found out by doing it; two at a time, because the slowest one mostly compiles."""
    calls: list[Callable[[], Finding]] = []
    for device in trial_devices(machine):
        calls += [partial(_memory, device), partial(_precision, device, "bf16"), partial(_precision, device, "fp16"),
                  partial(_compile, device), partial(_step, device)]  # fmt: skip
    calls += [partial(_step, f"{machine.device}:{index}") for index in range(1, machine.device_count)]
    calls += [partial(_group, backend, device, machine) for backend, device in group_backends(machine)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(lambda call: call(), calls))


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    return Finding("disk", f"{free / 2**30:.1f} GiB free in {folder}", free >= ENOUGH_DISK, "make room: 2 GiB or more")


def _library() -> Finding:
    """Which package Python finds when it is started somewhere else; a second one of this name mixes with ours."""
    tried = found_elsewhere(PACKAGE, tempfile.gettempdir())
    owners = sorted(set(importlib.metadata.packages_distributions().get(PACKAGE, [])))
    name = f"`{PACKAGE}` is ours"
    ours = str(ROOT / PACKAGE)
    fix = "use a virtual environment of its own"
    if tried.ok and Path(str(tried.answer)).resolve() not in (ROOT / PACKAGE / "__init__.py", ROOT / PACKAGE):
        return Finding(name, f"Python finds {tried.answer} elsewhere", False, fix)
    if foreign := [owner for owner in owners if owner.lower().replace("_", "-") != DISTRIBUTION]:
        return Finding(name, f"installed by {' and '.join(foreign)}, too", False, fix)
    return Finding(name, ours if tried.ok else f"{ours} (used from its folder, not installed)")


def _accelerate_file(environment: Mapping[str, str]) -> Finding:
    path, name = default_path(environment), "accelerate's file"
    if not path.is_file():
        return Finding(name, f"{path} (not there; `accelerate config` would write it)", needed=False)
    try:
        content = read_launch_file(path).content
    except ConfigError as error:
        return Finding(name, str(error), False, f"run `accelerate config`, or remove {path}")
    said = ", ".join(f"{key} {value}" for key, value in content.items() if key != "compute_environment")
    return Finding(name, f"{path}: {said}", needed=False)


def _memory(device: str) -> Finding:
    tried = _try("memory", device)
    shown = "; ".join(f"{one['name']}: {one['free']:.1f} of {one['total']:.1f} GiB free" for one in tried.answer or [])
    return Finding(f"device {device}", shown or tried.reason, tried.ok, "the driver or the device does not answer")


def _precision(device: str, kind: str) -> Finding:
    tried = _try("precision", device, kind)
    return _worked(f"{kind} on {device}", tried, "train with --mixed_precision no, or another precision", needed=False)


def _compile(device: str) -> Finding:
    tried = _try("compile_one_kernel", device)
    return _worked(f"compile on {device}", tried, "needs a C++ compiler (apt install g++); train without "
                   "--torch_compile", needed=False)  # fmt: skip


def _group(backend: str, device: str, machine: Machine) -> Finding:
    tried = _try("all_reduce", backend, device)
    return _worked(f"{backend} on {device}", tried, "several processes cannot work together; train with one",
                   needed=machine.device_count > 1 and device == machine.device)  # fmt: skip


def _step(device: str) -> Finding:
    tried = attempt(f"{PACKAGE}.training.smoke", "one_step", device, seconds=SECONDS["one_step"])
    value = f"loss {tried.answer:.4f} ({tried.seconds:.0f} s)" if tried.ok else tried.reason
    is_sane = tried.ok and math.isfinite(tried.answer)
    return Finding(f"a training step on {device}", value, is_sane, "run the tests (make test) and see what they say")


def _try(function: str, *arguments: str) -> Attempt:
    return attempt(TRIALS, function, *arguments, seconds=SECONDS[function])


def _worked(name: str, tried: Attempt, fix: str, *, needed: bool) -> Finding:
    value = f"works ({tried.seconds:.0f} s)" if tried.ok else f"does not work: {tried.reason}"
    return Finding(name, value, tried.ok, "" if tried.ok else fix, needed)


def working_folder() -> Path:
    """Where the doctor was called."""
    return Path(os.getcwd())
