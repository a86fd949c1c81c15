"""``World``: world size, ranks, device and launcher settings of this process."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import torch

from ..config.types import parse_env_bool
from .devices import Machine, detect_machine
from .launch_command import LaunchCommand, find_launch_command
from .slurm_and_mpi import build_rendezvous_address, is_device_bound_by_slurm, read_env_int, read_rank_variables

MAX_RANKS_SHOWN = 6


def format_ranks(ranks: Sequence[int], hostnames: Sequence[str] = ()) -> str:
    """Format ``ranks 2, 3 (on gpu-b)``."""
    shown = ", ".join(map(str, ranks[:MAX_RANKS_SHOWN]))
    shown += f" and {len(ranks) - MAX_RANKS_SHOWN} more" if len(ranks) > MAX_RANKS_SHOWN else ""
    names = list(dict.fromkeys(hostnames[rank] for rank in ranks)) if hostnames else []
    where = (
        f" (on {', '.join(names[:MAX_RANKS_SHOWN])}{', ...' if len(names) > MAX_RANKS_SHOWN else ''})" if names else ""
    )
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{where}"


ENGINE_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
"""Variables by which a launcher requests an engine other than plain data parallelism."""

ENGINE_VARIABLE_PREFIXES = ("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_CLIPPING")


@dataclass(frozen=True)
class World:
    """The values that the launcher set, the machine, and the start time of the run."""

    world_size: int = 1
    rank: int = 0
    local_rank: int | None = None
    """The rank on this machine; ``None`` without a launcher."""
    local_world_size: int = 1
    device_type: str = "cpu"
    """The type as in ``torch.device(...).type``: cpu, cuda, xpu or mps."""
    machine: Machine = field(default_factory=Machine)
    has_bound_device: bool = False
    """Whether SLURM shows each process a device of its own (``--gpus-per-task``)."""
    has_main_address: bool = True
    """Whether MASTER_ADDR is set, or follows from SLURM's or MPI's variables."""
    is_windows: bool = False
    mixed_precision: str | None = None
    """The launcher's value, like those of the next four fields; ``None`` where it sets nothing."""
    gradient_accumulation_steps: int | None = None
    dynamo_backend: str | None = None
    dynamo_mode: str | None = None
    numa_affinity: bool | None = None
    engines: tuple[str, ...] = ()
    launcher_variables: Mapping[str, str] = field(default_factory=dict)
    """The launcher's variables for the engines."""
    launch_command: LaunchCommand | None = None
    """The launcher's command, if it can be read."""
    started_at: str = ""
    """YYYYmmddHHMMSS, the same on every rank; empty until the ranks have agreed."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "World":
        """Read the environment of this process."""
        env = os.environ if environment is None else environment
        machine = detect_machine(env)
        ranks = read_rank_variables(env)
        size = ranks.get("WORLD_SIZE", 1)
        return cls(
            world_size=size,
            rank=ranks.get("RANK", 0),
            local_rank=ranks.get("LOCAL_RANK"),
            local_world_size=ranks.get("LOCAL_WORLD_SIZE", size),
            has_bound_device=is_device_bound_by_slurm(env),
            device_type=select_device_type(env, machine),
            machine=machine,
            has_main_address="MASTER_ADDR" in env or bool(build_rendezvous_address(env, ranks)),
            is_windows=sys.platform == "win32",
            mixed_precision=env.get("ACCELERATE_MIXED_PRECISION"),
            gradient_accumulation_steps=read_env_int(env, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
            dynamo_backend=env.get("ACCELERATE_DYNAMO_BACKEND"),
            dynamo_mode=env.get("ACCELERATE_DYNAMO_MODE"),
            numa_affinity=parse_env_bool(env.get("ACCELERATE_CPU_AFFINITY")),
            engines=tuple(name for key, name in ENGINE_VARIABLES.items() if parse_env_bool(env.get(key))),
            launcher_variables={
                name: value for name, value in env.items() if name.startswith(ENGINE_VARIABLE_PREFIXES)
            },
            launch_command=find_launch_command(),
        )

    @classmethod
    def build_fake(cls, world_size: int, device_count: int | None = None) -> "World":
        """Build a world of one machine with ``device_count`` GPUs (default: one per process), for estimates."""
        machine = Machine("cuda", world_size if device_count is None else device_count)
        local_rank = 0 if world_size > 1 else None
        return cls(
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=world_size,
            device_type=machine.device_type,
            machine=machine,
        )

    def resolve_mixed_precision(self, option: str | None) -> str | None:
        """Return ``--mixed_precision``; ``None`` leaves it to the launcher.

        A launcher's fp16 becomes ``no`` on a CPU: accelerate computes in fp32 there and still reports fp16.  That is no
        error, since accelerate's config file may have been written for another machine.
        """
        return "no" if (option, self.mixed_precision, self.device_type) == (None, "fp16", "cpu") else option

    @property
    def num_machines(self) -> int:
        """Number of machines, as far as the launcher sets it."""
        return max(1, self.world_size // max(1, self.local_world_size))

    @property
    def needs_process_group(self) -> bool:
        """Whether accelerate initializes one: also for a single process that has a local rank."""
        return self.world_size > 1 or self.local_rank is not None


def format_timestamp() -> str:
    """Format the local time for directory names."""
    return datetime.now().strftime("%Y%m%d%H%M%S")


def select_device_type(environment: Mapping[str, str], machine: Machine) -> str:
    """Return the device type, which the environment may override."""
    if forced := environment.get("ACCELERATE_TORCH_DEVICE"):
        return torch.device(forced).type
    return "cpu" if parse_env_bool(environment.get("ACCELERATE_USE_CPU")) else machine.device_type
