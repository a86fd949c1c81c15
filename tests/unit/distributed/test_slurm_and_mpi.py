"""Ranks and rendezvous address from the variables of SLURM and MPI, as srun 22.05 and Open MPI 4.1 set them."""

import pytest
from problem_lines import format_lines

from library.config import RunConfig
from library.distributed.slurm_and_mpi import (
    build_rendezvous_address,
    find_first_host,
    find_world_size_variable,
    read_rank_variables,
)
from library.distributed.validate_launch import validate_distributed
from library.distributed.world import World

BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
STEP = {
    **BATCH_SCRIPT,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu-a[03-04]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"}


@pytest.mark.parametrize(
    ("environment", "expected", "variable"),
    [
        ({}, (), ""),
        (BATCH_SCRIPT, (), ""),
        (STEP, (3, 4, 1, 2), "SLURM_STEP_NUM_TASKS"),
        ({**STEP, "PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 1, 2), "SLURM_STEP_NUM_TASKS"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, (), ""),
        (OPEN_MPI, (1, 2, 1, 2), "OMPI_COMM_WORLD_SIZE"),
        ({**STEP, **OPEN_MPI}, (1, 2, 1, 2), "OMPI_COMM_WORLD_SIZE"),
        ({**STEP, **TORCHRUN}, (5, 8, 1, 4), "WORLD_SIZE"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2, 1, 2), "PMI_SIZE"),
    ],
)
def test_rank_and_sizes_are_those_of_the_innermost_launcher(environment, expected, variable):
    assert tuple(read_rank_variables(environment).values()) == expected
    assert find_world_size_variable(environment) == variable


def test_uneven_tasks_per_node_give_the_local_world_size_of_each_node():
    tasks = {**STEP, "SLURM_STEP_NUM_TASKS": "21", "SLURM_STEP_TASKS_PER_NODE": "8(x2),5"}
    sizes = [read_rank_variables({**tasks, "SLURM_NODEID": str(node)})["LOCAL_WORLD_SIZE"] for node in range(3)]
    assert sizes == [8, 8, 5]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("gpu-a[03-05,09],gpu-b1", "gpu-a03"),
        ("n7,n9", "n7"),
        ("rack[1-2]node[08-10]", "rack1node08"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_compressed_node_list(nodes, first):
    assert find_first_host(nodes) == first


def test_all_ranks_of_a_step_build_one_address_and_another_step_another_port():
    ranks = [{**STEP, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2)} for rank in range(4)]
    addresses = [build_rendezvous_address(env, read_rank_variables(env)) for env in ranks]
    assert addresses == [{"MASTER_ADDR": "gpu-a03", "MASTER_PORT": "15049"}] * 4
    later = {**STEP, "SLURM_STEP_ID": "1"}
    assert build_rendezvous_address(later, read_rank_variables(later))["MASTER_PORT"] == "15050"


def test_mpi_on_several_machines_asks_for_the_address_of_rank_0():
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
    problems = format_lines(validate_distributed(RunConfig(), World.from_environment(several)))
    assert len(problems) == 1 and "mpirun -x MASTER_ADDR=HOST" in problems[0]
    for environment in (OPEN_MPI, STEP, {**several, "MASTER_ADDR": "gpu-a03", "MASTER_PORT": "29500"}):
        assert format_lines(validate_distributed(RunConfig(), World.from_environment(environment))) == []
