"""Checks of devices: each is a small real computation in a child process, because it may crash or hang.

Heavy packages are imported inside of the functions; ``set_forkserver_preload`` imports them once for all children.
"""

import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UserError

PRELOAD = (
    *("torch", "accelerate", "diffusers", "transformers", "peft"),
    *("library.models.loading", "library.training.task", "library.distributed.accelerator"),
    *("diffusers.models.unets.unet_2d_condition", "diffusers.models.autoencoders.autoencoder_kl"),
    *("transformers.models.clip.modeling_clip", "torch._inductor.compile_fx"),
)
"""Modules that several checks import, which are imported once for all of them."""
LAUNCHER_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "MASTER_")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""A check must not inherit these: it is one process without a launcher."""


class CheckFailed(Exception):
    """A function in a child process raised, crashed or hung; the message says which."""


@dataclass(frozen=True)
class Finding:
    """The result of one check; ``fix`` says what to do if it is not ok."""

    name: str
    value: str
    ok: bool = True
    fix: str = ""
    needed: bool = True
    """Whether training is impossible without it."""

    @property
    def is_error(self) -> bool:
        """Whether training cannot work."""
        return self.needed and not self.ok


@dataclass(frozen=True)
class Check:
    """A check that runs in a child process: shows what the function returns, fails with what it raises."""

    name: str
    function: Callable[..., str]
    arguments: tuple[str, ...]
    fix: str
    needed: bool = True
    timeout: float = 120.0


def run_checks() -> Iterator[Finding]:
    """Run all checks of this machine, two at a time because the slowest mostly waits for a compiler; yield as done."""
    try:
        findings, checks = run_in_child(describe_machine, timeout=180)
    except CheckFailed as error:
        yield Finding("devices", str(error), False, "the driver or a device does not answer")
        return
    yield from findings
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield from (future.result() for future in as_completed([pool.submit(run_check, check) for check in checks]))


def run_check(check: Check) -> Finding:
    """Run one check in a child process."""
    start = time.monotonic()
    try:
        value = run_in_child(check.function, *check.arguments, timeout=check.timeout)
    except CheckFailed as error:
        return Finding(check.name, str(error), False, check.fix, check.needed)
    return Finding(check.name, f"{value} ({time.monotonic() - start:.0f} s)", needed=check.needed)


def start_fork_server() -> None:
    """Start the process that imports ``PRELOAD``, silently: what cannot be imported is a finding of its own."""
    if sys.platform != "linux":
        return
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        forkserver.ensure_running()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def run_in_child(
    function: Callable[..., Any], *arguments: str, timeout: float, preload: Sequence[str] = PRELOAD
) -> Any:
    """Call a function in a child process, and end it with everything that it started.

    With ``preload``, children are forked from a process that has these modules imported already, where forking is safe.
    """
    can_fork = bool(preload) and sys.platform == "linux"
    context: Any = multiprocessing.get_context("forkserver" if can_fork else "spawn")
    if can_fork:
        context.set_forkserver_preload(list(preload))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, arguments))
    try:
        process.start()
    except (EOFError, OSError) as error:
        raise CheckFailed(f"no process can be started: {type(error).__name__}") from None
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise CheckFailed(f"no answer within {timeout:g} s")
        ok, answer = receiver.recv()
        process.join(10)
        if not ok:
            raise CheckFailed(answer)
        return answer
    except EOFError:
        process.join()
        code = process.exitcode
        raise CheckFailed(f"crashed with {signal.Signals(-code).name}" if code < 0 else f"exit code {code}") from None
    finally:
        if sys.platform != "win32":
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _call(sender: Connection, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Run in the child: answer with the result, or with the first line of the error."""
    if sys.platform != "win32":
        os.setsid()
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES):
            del os.environ[name]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        sender.send((True, function(*arguments)))
    except Exception as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]
        sender.send((False, line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"))


def describe_machine() -> tuple[list[Finding], list[Check]]:
    """Describe this machine; return findings, and the checks that it can run."""
    from ..distributed.devices import detect_machine, get_compute_toolkit, list_backends, list_device_types

    machine = detect_machine(os.environ)
    devices = list_device_types(machine)
    findings = [
        Finding("toolkit", get_compute_toolkit()),
        check_driver(is_used=devices != (machine.device_type,)),
        Finding("processors", f"{machine.physical_cores} cores, {machine.usable_cpus} usable threads"),
        Finding("NUMA", describe_numa(machine.numa_nodes, machine.numa_affinity_problem), needed=False),
        check_accelerate_config(),
    ]
    checks = []
    for device in devices:
        compiler = "install a C++ compiler (apt install g++), or train without --torch_compile"
        checks.append(
            Check(
                name=f"torch.compile on {device}",
                function=check_compile,
                arguments=(device,),
                fix=compiler,
                needed=False,
                timeout=240,
            )
        )
        for precision in ("no", "bf16", "fp16"):
            name, is_plain = f"training step on {device}, mixed_precision {precision}", precision == "no"
            fix = "run the tests: python -m library test" if is_plain else "use another --mixed_precision"
            checks.append(Check(name, check_training_step, (device, precision), fix, is_plain))
        checks.append(Check(f"memory of {device}", check_memory, (device,), "the driver or the device does not answer"))
    for index in range(1, machine.device_count):
        device = f"{machine.device_type}:{index}"
        checks.append(Check(f"training step on {device}", check_training_step, (device, "no"), f"do not use {device}"))
    for backend, device in list_backends(machine):
        needed = machine.device_count > 1 and device == machine.device_type
        fix = "train with one process"
        checks.append(Check(f"{backend} all-reduce on {device}", check_all_reduce, (device,), fix, needed))
    return findings, checks


def check_driver(*, is_used: bool) -> Finding:
    """Compare the NVIDIA driver with what torch sees."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return Finding("driver", "none found", needed=False)
    version, fix = done.stdout.split()[0], "install the torch build for it: https://pytorch.org/get-started/locally"
    return Finding("driver", version if is_used else f"{version}, not used by torch", is_used, fix, needed=False)


def describe_numa(nodes: int, obstacle: str) -> str:
    """Return whether accelerate binds processes to NUMA nodes."""
    if nodes == 1:
        return "1 node, processes are not bound"
    binding = f"processes are not bound: {obstacle}" if obstacle else "each process is bound to the node of its device"
    return f"{nodes} nodes, {binding}"


def check_accelerate_config() -> Finding:
    """Show what ``accelerate config`` wrote."""
    from ..distributed.launcher_settings import get_accelerate_config_path, read_accelerate_config

    path = get_accelerate_config_path()
    if not path.is_file():
        return Finding("accelerate config", f"{path} does not exist (optional)", needed=False)
    try:
        content = read_accelerate_config(path)
    except ConfigError as error:
        return Finding("accelerate config", str(error), False, f"run `accelerate config`, or remove {path}")
    shown = ", ".join(f"{key}: {value}" for key, value in content.items() if key != "compute_environment")
    return Finding("accelerate config", f"{path}: {shown}", needed=False)


def check_memory(device: str) -> str:
    """Return name and free memory of every device of a type."""
    import torch

    from ..distributed.device_memory import get_free_memory
    from ..distributed.devices import HOST, get_device_name

    count = 1 if torch.device(device) == HOST else torch.accelerator.device_count()
    found = [torch.device(device, index) for index in range(count)]
    return "; ".join(f"{get_device_name(item)} {get_free_memory(item) / 2**30:.1f} GiB free".strip() for item in found)


def check_all_reduce(device: str) -> str:
    """Form a process group of one and all-reduce a tensor."""
    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in group.items()}
    accelerator = _prepare_accelerator(device)
    total = accelerator.reduce(torch.full((3,), 7.0, device=accelerator.device), reduction="sum")
    if accelerator.distributed_type == "NO" or total.tolist() != [7.0, 7.0, 7.0]:
        raise RuntimeError(
            f"all-reduce of 7 over one process returned {total.tolist()} ({accelerator.distributed_type})"
        )
    return "works"


def check_compile(device: str) -> str:
    """Compile one kernel without a cache, and compare with eager."""
    import torch
    from torch._inductor import config as inductor

    def compute(x: torch.Tensor) -> torch.Tensor:
        return (torch.sin(x) * 2 + torch.cos(x)).sum()

    faster = inductor.patch(compile_threads=1, cpp_cache_precompile_headers=False)  # for a single kernel
    with tempfile.TemporaryDirectory() as folder, faster:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        values = torch.linspace(0, 9, 1024, device=device)
        compiled = torch.compile(compute, backend="inductor")
        torch.testing.assert_close(compiled(values), compute(values), rtol=1e-4, atol=1e-4)
        if not any(Path(folder).rglob("*")):
            raise RuntimeError("torch.compile did nothing; is it disabled by an environment variable?")
    return "works"


def check_training_step(device: str, precision: str) -> str:
    """Train the built-in model for one step, through the same classes as a run."""
    import torch

    from ..adapters.injection import inject_into_model
    from ..config.schema import AdapterConfig
    from ..config.schema_objective import LossConfig, NoiseConfig
    from ..dataloader.batch import PixelBatch
    from ..diffusion.objective import Objective
    from ..models.detect import detect_model
    from ..models.families import FAMILIES
    from ..parallel.async_copy import CopyStream
    from ..training.task import DiffusionTask
    from ..training.trainable_modules import get_trainable_parameters

    accelerator, target = _prepare_accelerator(device, "--mixed_precision", precision), torch.device(device)
    family = FAMILIES.get(detect_model(None).family)()
    pipe = family.load(None, torch.float32)
    pipe.to(target)
    denoiser = getattr(pipe, family.facts.denoiser_name)
    inject_into_model(denoiser, AdapterConfig(), family.facts.lora.targets, seed=0)
    objective = Objective(family.build_training_process(pipe), NoiseConfig(), LossConfig())
    task = DiffusionTask(family, pipe, denoiser, objective, seed=0, to_device=CopyStream(target))
    optimizer = accelerator.prepare(torch.optim.SGD(get_trainable_parameters(denoiser), lr=1e-3))
    height, width = 64, 128
    pixels = torch.linspace(0, 255, 3 * height * width).to(torch.uint8).view(1, 3, height, width)
    frame = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32)
    with accelerator.autocast():
        loss = task(
            PixelBatch(
                pixels=pixels,
                captions=("a test",),
                size_conditioning=frame,
                loss_weights=torch.ones(1),
                global_positions=(0,),
                sample_keys=("test",),
            ),
            step=0,
        ).sum()
    accelerator.backward(loss)
    optimizer.step()
    gradients = [parameter.grad for parameter in get_trainable_parameters(denoiser) if parameter.grad is not None]
    if not math.isfinite(loss.item()) or not any(bool(gradient.any()) for gradient in gradients):
        raise RuntimeError(f"loss {loss.item()}, {len(gradients)} LoRA gradients")
    return f"loss {loss.item():.4f}"


def _prepare_accelerator(device: str, *flags: str) -> Any:
    """Build the ``Accelerator`` of a run with these options."""
    import torch

    from ..config import parse_config
    from ..distributed.accelerator import prepare_accelerator
    from ..distributed.devices import HOST

    if torch.device(device) == HOST:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    return prepare_accelerator(parse_config(list(flags)).config)
