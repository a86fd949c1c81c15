"""Where this process stands among the others, read from its surroundings once."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import torch

from ..errors import ConfigError
from .devices import Machine, this_machine
from .launch_command import LaunchCommand, find_launch_command

ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
"""Variables by which a launcher asks for something else than plain data parallelism."""

ABOUT_ENGINES = ("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_CLIPPING")

SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
"""Names under which torchrun and the MPI launchers tell the same; accelerate reads them in this order."""


@dataclass(frozen=True)
class World:
    """The launcher's word, the machine, and the time that the run started at."""

    size: int = 1
    rank: int = 0
    local_rank: int | None = None
    """``None`` when no launcher gave one."""
    local_size: int = 1
    device: str = "cpu"
    """Kind of device that this process computes on."""
    machine: Machine = field(default_factory=Machine)
    windows: bool = False
    precision: str | None = None
    """What the launcher says; ``None`` when it says nothing.  The same for the next four."""
    accumulation: int | None = None
    dynamo: str | None = None
    dynamo_mode: str | None = None
    affinity: bool | None = None
    engines: tuple[str, ...] = ()
    said: Mapping[str, str] = field(default_factory=dict)
    """What the launcher says about them, by the names of its variables."""
    launch: LaunchCommand | None = None
    """The command that started this process, where it can be seen."""
    started: str = ""
    """YYYYmmddHHMMSS, the same on every rank; empty until the ranks have agreed."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "World":
        """This process."""
        env = os.environ if environment is None else environment
        machine = this_machine(env)
        size = _first(env, SIZES) or 1
        return cls(
            size=size,
            rank=_first(env, RANKS) or 0,
            local_rank=_first(env, LOCAL_RANKS),
            local_size=_first(env, LOCAL_SIZES) or size,
            device=chosen_device(env, machine),
            machine=machine,
            windows=sys.platform == "win32",
            precision=env.get("ACCELERATE_MIXED_PRECISION"),
            accumulation=_number(env, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
            dynamo=env.get("ACCELERATE_DYNAMO_BACKEND"),
            dynamo_mode=env.get("ACCELERATE_DYNAMO_MODE"),
            affinity=truth(env.get("ACCELERATE_CPU_AFFINITY")),
            engines=tuple(name for key, name in ENGINES.items() if truth(env.get(key))),
            said={name: value for name, value in env.items() if name.startswith(ABOUT_ENGINES)},
            launch=find_launch_command(),
        )

    @classmethod
    def imagined(cls, size: int, devices: int | None = None) -> "World":
        """So many processes on a machine with as many GPUs, or so many, whatever there is here."""
        machine = Machine("cuda", size if devices is None else devices)
        local_rank = 0 if size > 1 else None
        return cls(size=size, local_rank=local_rank, local_size=size, device=machine.device, machine=machine)

    @property
    def machines(self) -> int:
        """How many machines take part, as far as the launcher tells."""
        return max(1, self.size // max(1, self.local_size))

    @property
    def joins_group(self) -> bool:
        """accelerate forms a process group also for one process that was given a local rank."""
        return self.size > 1 or self.local_rank is not None


def now() -> str:
    """The local time as it stands in folder names."""
    return datetime.now().strftime("%Y%m%d%H%M%S")


def chosen_device(environment: Mapping[str, str], machine: Machine) -> str:
    """The kind of device, after what the environment may forbid."""
    if forced := environment.get("ACCELERATE_TORCH_DEVICE"):
        return torch.device(forced).type
    return "cpu" if truth(environment.get("ACCELERATE_USE_CPU")) else machine.device


def truth(word: str | None) -> bool | None:
    """A yes or no as accelerate reads it; ``None`` when nothing was said."""
    if word is None or not word.strip():
        return None
    if word.strip().lower() in ("y", "yes", "t", "true", "on", "1"):
        return True
    return False


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        if (number := _number(environment, name)) is not None and number >= 0:
            return number
    return None


def _number(environment: Mapping[str, str], name: str) -> int | None:
    word = environment.get(name)
    if word is None or not word.strip():
        return None
    try:
        return int(word)
    except ValueError:
        raise ConfigError([f"environment variable {name}: expected a whole number, got {word!r}"]) from None
