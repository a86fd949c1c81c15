"""Ranks and rendezvous address of a process that SLURM or MPI starts, as torchrun's environment variables.

``srun python train_lora.py`` and ``mpirun python train_lora.py`` start one process per rank, but torch and accelerate
read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``: without them, each process would be
a run of its own.
"""

import os
import re
from collections.abc import Mapping

from ..errors import ConfigError
from ..problems import Problem

MPI_VARIABLES = {
    "Open MPI": {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    "MVAPICH": {
        "RANK": "MV2_COMM_WORLD_RANK",
        "WORLD_SIZE": "MV2_COMM_WORLD_SIZE",
        "LOCAL_RANK": "MV2_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "MV2_COMM_WORLD_LOCAL_SIZE",
    },
}
SLURM_VARIABLES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
PMI_VARIABLES = {
    "RANK": "PMI_RANK",
    "WORLD_SIZE": "PMI_SIZE",
    "LOCAL_RANK": "MPI_LOCALRANKID",
    "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
}
"""Intel MPI and MPICH; srun --mpi=pmi2 sets the first two as well."""

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
FIRST_PORT, NUM_PORTS = 15000, 15000
"""The ports for jobs of SLURM: below those that Linux gives to outgoing connections."""


def export_rank_variables() -> None:
    """Set torchrun's variables in this process's environment where only SLURM or MPI has set its own."""
    ranks = read_rank_variables(os.environ)
    for name, value in {**ranks, **build_rendezvous_address(os.environ, ranks)}.items():
        if not os.environ.get(name, "").strip():
            os.environ[name] = str(value)


def read_rank_variables(environment: Mapping[str, str]) -> dict[str, int]:
    """Read rank and sizes by torchrun's names: from a launcher, else MPI, else the SLURM step; empty without any.

    A launcher under ``srun`` and MPI under SLURM have ranks of their own; SLURM's then count machines.
    """
    variables = {name: read_env_int(environment, name) for name in TORCHRUN_VARIABLES}
    if variables["RANK"] is None and variables["WORLD_SIZE"] is None:
        for names in (*MPI_VARIABLES.values(), SLURM_VARIABLES, PMI_VARIABLES):
            if names is SLURM_VARIABLES and not is_slurm_step(environment):
                continue
            found = {name: read_env_int(environment, variable) for name, variable in names.items()}
            if found["WORLD_SIZE"] is not None and found["RANK"] is not None:
                if names is SLURM_VARIABLES:
                    found["LOCAL_WORLD_SIZE"] = count_local_tasks(environment)
                variables = found
                break
    return {name: value for name, value in variables.items() if value is not None and value >= 0}


def find_world_size_variable(environment: Mapping[str, str]) -> str:
    """Return the name of the variable that sets the world size; empty without one."""
    sources = (*MPI_VARIABLES.values(), SLURM_VARIABLES, PMI_VARIABLES)
    size = str(read_rank_variables(environment).get("WORLD_SIZE", ""))
    names = (*(names["WORLD_SIZE"] for names in sources), "WORLD_SIZE")
    return next((name for name in names if size and environment.get(name) == size), "")


def is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process as one of several tasks; a batch script itself is no step."""
    return (
        environment.get("SLURM_STEP_ID", "").isdigit() and (read_env_int(environment, "SLURM_STEP_NUM_TASKS") or 1) > 1
    )


def is_device_bound_by_slurm(environment: Mapping[str, str]) -> bool:
    """Whether each task sees only its own device, which is then device 0 in every task."""
    by_task = "SLURM_GPUS_PER_TASK" in environment or "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
    return is_slurm_step(environment) and (by_task or "SLURM_GPU_BIND" in environment)


def count_local_tasks(environment: Mapping[str, str]) -> int | None:
    """Count the tasks of the step on this machine, from a list such as ``8(x2),4``."""
    counts: list[int] = []
    for entry in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip()):
            counts += [int(match[1])] * int(match[2] or 1)
    node = read_env_int(environment, "SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else None


def build_rendezvous_address(environment: Mapping[str, str], ranks: Mapping[str, int]) -> dict[str, str]:
    """Build MASTER_ADDR and MASTER_PORT: the machine of rank 0, and a port that two jobs on it hardly share.

    Empty where nothing tells the address: ranks of MPI on several machines.
    """
    is_one_machine = ranks.get("LOCAL_WORLD_SIZE", 1) == ranks.get("WORLD_SIZE", 1)
    if not is_slurm_step(environment):
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} if is_one_machine else {}
    job, step = (read_env_int(environment, name) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    address = "127.0.0.1" if is_one_machine else find_first_host(environment.get("SLURM_STEP_NODELIST", ""))
    port = FIRST_PORT + (job * 7 + step) % NUM_PORTS
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)} if address else {}


def find_first_host(node_list: str) -> str:
    """Return the first host of SLURM's compressed list: ``gpu-a03`` of ``gpu-a[03-05,09],gpu-b1``."""
    first = re.match(r"((?:[^,\[]|\[[^\]]*\])*)", node_list)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[1]) if first else ""


def read_env_int(environment: Mapping[str, str], name: str) -> int | None:
    """Read a whole number; ``None`` if the variable is not set."""
    text = environment.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            [Problem("", f"environment variable {name}: expected a whole number, got {text!r}")]
        ) from None
