"""What the launcher and the machine say, read once: how many processes, which of them this is, on what device."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

MANY_NODES = "/sys/devices/system/node"
_OURS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "WANDB_", "MASTER_")


@dataclass(frozen=True)
class World:
    """One process's place among all; made up in tests, read from the environment in a run."""

    size: int = 1
    rank: int = 0
    local_rank: int = 0
    device: str = "cpu"  # kind of device that accelerate takes
    is_windows: bool = False
    torch_version: tuple[int, int] = (2, 13)
    numa_nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_environment(cls) -> "World":
        environment = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
        return cls(
            size=int(os.environ.get("WORLD_SIZE", "1")),
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            device=device_kind(environment),
            is_windows=sys.platform == "win32",
            torch_version=version_of(torch.__version__),
            numa_nodes=numa_nodes(),
            environment=environment,
        )

    def says(self, name: str) -> bool:
        """Whether the launcher switched something on by an environment variable."""
        return self.environment.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


def device_kind(environment: Mapping[str, str]) -> str:
    """The kind of device that accelerate works on: the CPU when it is told so or finds nothing else."""
    if environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        return "cpu"
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else "cpu"


def version_of(text: str) -> tuple[int, int]:
    """``2.13.0+cpu`` -> (2, 13)."""
    major, minor, *_ = text.split("+")[0].split(".")
    return int(major), int(minor)


def numa_nodes(folder: str = MANY_NODES) -> int:
    """NUMA nodes of this machine; 1 where the system does not say."""
    return max(1, sum(1 for path in Path(folder).glob("node[0-9]*"))) if Path(folder).is_dir() else 1
