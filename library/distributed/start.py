"""How many processes a command asks for, and how many it really starts."""

from dataclasses import dataclass

from .claims import Claim, Sources
from .launch_command import working_command
from .launch_file import MANY
from .world import SIZES, truth

PARADIGMS = ("multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
"""With one of these flags, ``accelerate launch`` leaves ``distributed_type`` in its file unread."""


@dataclass(frozen=True)
class Start:
    """``None`` stands for a number that only the launcher will know."""

    asked: Claim | None
    processes: int | None
    machines: int | None

    @property
    def several(self) -> bool:
        return self.processes != 1

    @property
    def local(self) -> int:
        """Processes on each machine, as far as known."""
        return max(1, (self.processes or 1) // (self.machines or 1))


def how_it_starts(sources: Sources) -> Start:
    """Follow the launcher's own rules."""
    if sources.by_accelerate:
        return _by_accelerate(sources)
    if sources.by_torchrun:
        return _by_torchrun(sources)
    for name in SIZES:
        if (claim := sources.variable(name)) is not None and claim.value.isdigit():
            return Start(claim, int(claim.value), None)
    return Start(None, 1, 1)


def too_few(sources: Sources, came: int) -> str:
    """What to do when fewer (or more) processes came than were asked for; empty when all is well."""
    start = how_it_starts(sources)
    asked = start.asked
    if asked is None or not asked.value.isdigit() or int(asked.value) == came or sources.launch is None:
        return ""
    number = int(asked.value)
    if sources.by_torchrun:
        number = start.processes or came
        return "" if number == came else f"torchrun was asked for {number} processes, and {came} came"
    on_cpu = sources.machine.device == "cpu" or bool(sources.launch.given.get("cpu")) or _file_says_cpu(sources)
    why = "accelerate launch starts several processes only with --multi_gpu"
    why += ", on a CPU together with ACCELERATE_USE_CPU=true" if on_cpu else ""
    return (f"{asked.place} asks for {number} processes and gets {came}: {why}; use\n"
            f"  {working_command(sources.launch, number, on_cpu=on_cpu)}")  # fmt: skip


def starts_several(sources: Sources, processes: int) -> bool:
    """Whether ``accelerate launch`` takes its multi-process way."""
    given = sources.launch.given if sources.launch is not None else {}
    if given.get("mpirun_hostfile") or (sources.file and (sources.file.content.get("mpirun_config") or {}).get(
            "mpirun_hostfile")):  # fmt: skip
        return True
    if given.get("cpu"):
        return False
    if any(given.get(name) for name in PARADIGMS):
        return not given.get("tpu")
    if sources.file is not None:
        return sources.file.distributed_type in (*MANY, "DEEPSPEED", "FSDP", "MEGATRON_LM")
    return processes > 1 and sources.machine.device_count > 1


def _by_accelerate(sources: Sources) -> Start:
    asked = sources.flag("num_processes") or sources.filed("num_processes")
    wanted = int(asked.value) if asked is not None else 1 if sources.file else sources.machine.device_count
    machines = sources.flag("num_machines") or sources.filed("num_machines")
    processes = max(1, wanted) if starts_several(sources, wanted) else 1
    return Start(asked, processes, int(machines.value) if machines else 1)


def _by_torchrun(sources: Sources) -> Start:
    local = sources.flag("nproc_per_node") or sources.variable("PET_NPROC_PER_NODE") or Claim("default", "1")
    nodes = sources.flag("nnodes") or sources.variable("PET_NNODES") or Claim("default", "1")
    devices, processors = sources.machine.device_count, sources.machine.processors
    numbers = {"gpu": devices, "cpu": processors, "auto": devices or processors, sources.machine.device: devices}
    per_machine = int(local.value) if local.value.isdigit() else numbers.get(local.value)
    machines = int(nodes.value) if nodes.value.isdigit() else None
    known = per_machine is not None and machines is not None
    return Start(local, (per_machine or 0) * (machines or 0) if known else None, machines)


def _file_says_cpu(sources: Sources) -> bool:
    claim = sources.filed("use_cpu")
    return claim is not None and bool(truth(claim.value))
