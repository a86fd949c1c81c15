"""prepare_accelerator: its arguments for every setting, and the accelerators of two real processes."""

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from accelerate.utils import DistributedDataParallelKwargs, DynamoBackend, InitProcessGroupKwargs
from problem_lines import format_lines
from rank_processes import run_on_ranks

from library.config import parse_config
from library.config.schema import RunConfig
from library.distributed import accelerator
from library.distributed.accelerator import build_accelerator_kwargs, should_bind_to_numa_node
from library.distributed.devices import Machine, count_numa_nodes, find_numa_affinity_problem
from library.distributed.process_group import build_process_group_kwargs
from library.distributed.rendezvous import build_partial_state_kwargs
from library.distributed.validate_launch import (
    AcceleratorFacts,
    validate_accelerator,
    validate_distributed,
    validate_trackers,
)
from library.distributed.world import World, select_device_type
from library.errors import ConfigError
from library.trackers import resolve_tracker, resolve_tracker_dir

pytestmark = pytest.mark.quick

SHARED = ("--cp_size", "2")
ONE_PROCESS = World(started_at="20260203040506")
TWO_PROCESSES = replace(ONE_PROCESS, world_size=2, local_world_size=2, local_rank=1, rank=1)
CUDA = replace(TWO_PROCESSES, device_type="cuda", machine=Machine(device_type="cuda", device_count=4))


def build_config(*flags: str) -> RunConfig:
    return parse_config([*flags]).config


def build_kwargs(world: World, *flags: str):
    config_ = build_config(*flags)
    steps = config_.train.gradient_accumulation_steps
    return build_accelerator_kwargs(config_.distributed, config_.log, steps, world)


def build_handler(world: World, kind: type, *flags: str):
    return next((item for item in build_kwargs(world, *flags)["kwargs_handlers"] if isinstance(item, kind)), None)


# the process group


@pytest.mark.parametrize(
    ("world", "backend", "init_method"),
    [
        (TWO_PROCESSES, "gloo", None),
        (CUDA, "nccl", None),
        (replace(CUDA, is_windows=True), "gloo", "env://?use_libuv=False"),
        (replace(TWO_PROCESSES, is_windows=True), "gloo", "env://?use_libuv=False"),
        (replace(CUDA, device_type="cpu"), "gloo", None),
        (replace(TWO_PROCESSES, device_type="xpu"), None, None),
        (replace(ONE_PROCESS, local_rank=0), "gloo", None),
    ],
)
def test_the_backend_depends_on_operating_system_and_device(world, backend, init_method):
    group = build_process_group_kwargs(world, None)

    assert (group.backend, group.init_method) == (backend, init_method)


@pytest.mark.parametrize(
    "world", [ONE_PROCESS, replace(ONE_PROCESS, device_type="cuda", machine=Machine("cuda", device_count=8))]
)
def test_a_single_process_has_no_process_group(world):
    assert build_process_group_kwargs(world, 5) is None
    assert build_kwargs(world, "--ddp_timeout", "5", "--ddp_static_graph")["kwargs_handlers"] == []
    assert build_partial_state_kwargs(world, 5) == {"cpu": world.device_type == "cpu"}


def test_the_timeout_is_in_minutes_and_reaches_the_process_group():
    assert build_handler(CUDA, InitProcessGroupKwargs, "--ddp_timeout", "7").timeout == timedelta(minutes=7)
    assert build_partial_state_kwargs(CUDA, 7)["timeout"] == timedelta(minutes=7)


def test_ddp_settings_reach_ddp_and_frozen_buffers_stay_where_they_are():
    plain = build_handler(TWO_PROCESSES, DistributedDataParallelKwargs)
    requested = build_handler(
        TWO_PROCESSES, DistributedDataParallelKwargs, "--ddp_gradient_as_bucket_view", "--ddp_static_graph"
    )

    assert (plain.gradient_as_bucket_view, plain.static_graph, plain.broadcast_buffers) == (False, False, False)
    assert (requested.gradient_as_bucket_view, requested.static_graph, requested.find_unused_parameters) == (
        True,
        True,
        False,
    )


# trackers and their folder


@pytest.mark.parametrize(
    ("flags", "tracker", "folder"),
    [
        ((), None, None),
        (("--logging_dir", "logs"), "tensorboard", "logs/20260203040506"),
        (("--logging_dir", "logs", "--log_prefix", "cat_"), "tensorboard", "logs/cat_20260203040506"),
        (("--logging_dir", "logs", "--log_with", "tensorboard"), "tensorboard", "logs/20260203040506"),
        (("--logging_dir", "logs", "--log_with", "wandb"), "wandb", "logs/20260203040506"),
        (("--log_with", "wandb"), "wandb", None),
        (("--logging_dir", "logs", "--log_with", "all"), "all", "logs/20260203040506"),
        (("--logging_dir", "logs", "--log_with", "none"), None, None),
        (("--logging_dir", "logs", "--log_with", "mlflow"), "mlflow", "logs/20260203040506"),
    ],
)
def test_tracker_and_logging_dir_are_set_by_the_options(flags, tracker, folder):
    arguments = build_kwargs(ONE_PROCESS, *flags)

    assert (arguments["log_with"], arguments["project_dir"]) == (tracker, folder and str(Path(folder)))
    assert (
        resolve_tracker(build_config(*flags).log),
        resolve_tracker_dir(build_config(*flags).log, ONE_PROCESS.started_at),
    ) == (
        tracker,
        folder and str(Path(folder)),
    )


@pytest.mark.parametrize("tracker", ["tensorboard", "all"])
def test_a_tracker_with_files_needs_logging_dir(tracker):
    (problem,) = [
        line for line in format_lines(parse_config(["--log_with", tracker]).problems) if "dataset" not in line
    ]

    assert "needs logging_dir" in problem


def test_a_tracker_that_is_not_installed_is_reported_in_one_line():
    (problem,) = format_lines(validate_trackers(build_config("--log_with", "mlflow").log, {}))

    assert problem == "--log_with mlflow: the package mlflow is not installed; pip install mlflow"


def test_wandb_without_login_is_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    log = build_config("--log_with", "wandb").log
    (problem,) = format_lines(validate_trackers(log, {"NETRC": str(tmp_path / "none")}))

    assert "not logged in to wandb; run `wandb login`" in problem
    assert format_lines(validate_trackers(log, {"WANDB_API_KEY": "a" * 40})) == []
    assert format_lines(validate_trackers(log, {"WANDB_MODE": "offline"})) == []
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {'b' * 40}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert format_lines(validate_trackers(log, {})) == []


# dynamo


def test_without_torch_compile_the_launcher_sets_the_dynamo_backend():
    assert build_kwargs(ONE_PROCESS)["dynamo_plugin"] is None


def test_no_torch_compile_overrides_the_launcher(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")

    assert build_kwargs(ONE_PROCESS, "--no-torch_compile")["dynamo_plugin"].backend == DynamoBackend.NO


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), ("INDUCTOR", "default", False, None, True)),
        (("--dynamo_backend", "aot_eager"), ("AOT_EAGER", "default", False, None, True)),
        (("--dynamo_mode", "max-autotune"), ("INDUCTOR", "max-autotune", False, None, True)),
        (("--dynamo_fullgraph",), ("INDUCTOR", "default", True, None, True)),
        (("--no-dynamo_use_regional_compilation",), ("INDUCTOR", "default", False, None, False)),
    ],
)
def test_torch_compile_ignores_the_dynamo_settings_of_the_launcher(flags, expected, monkeypatch):
    for name, value in {
        "BACKEND": "EAGER",
        "MODE": "reduce-overhead",
        "USE_FULLGRAPH": "true",
        "USE_DYNAMIC": "True",
        "USE_REGIONAL_COMPILATION": str(not expected[4]),
    }.items():
        if not (expected[2] and name == "USE_FULLGRAPH"):
            monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    plugin = build_kwargs(ONE_PROCESS, "--torch_compile", *flags)["dynamo_plugin"]

    actual = (plugin.backend.value, plugin.mode, plugin.fullgraph, plugin.dynamic, plugin.use_regional_compilation)
    assert actual == expected


# precision, accumulation, devices


@pytest.mark.parametrize(
    ("world", "flags", "expected"),
    [
        (ONE_PROCESS, (), None),
        (ONE_PROCESS, ("--mixed_precision", "bf16"), "bf16"),
        (replace(ONE_PROCESS, mixed_precision="bf16"), (), None),
        (replace(ONE_PROCESS, mixed_precision="bf16"), ("--mixed_precision", "no"), "no"),
        (replace(ONE_PROCESS, mixed_precision="fp16"), (), "no"),
        (replace(CUDA, mixed_precision="fp16"), (), None),
        (CUDA, ("--mixed_precision", "fp16"), "fp16"),
    ],
)
def test_mixed_precision_is_the_option_or_the_launchers_and_never_fp16_on_a_cpu(world, flags, expected):
    assert build_kwargs(world, *flags)["mixed_precision"] == expected


def test_accelerate_does_not_step_the_scheduler_and_gets_the_accumulation_steps():
    arguments = build_kwargs(CUDA, "--gradient_accumulation_steps", "3")

    assert (arguments["step_scheduler_with_optimizer"], arguments["gradient_accumulation_steps"], arguments["cpu"]) == (
        False,
        3,
        False,
    )
    assert build_kwargs(TWO_PROCESSES)["cpu"] is True


@pytest.mark.parametrize(
    ("world", "flags", "expected"),
    [
        (
            ONE_PROCESS,
            ("--mixed_precision", "fp16"),
            "not supported on a CPU, accelerate would silently compute in fp32",
        ),
        (replace(ONE_PROCESS, mixed_precision="half"), (), "'half' is not one of no, fp16, bf16, fp8"),
        (ONE_PROCESS, ("--mixed_precision", "fp8"), "fp8: needs a CUDA device, and this is cpu"),
        (replace(ONE_PROCESS, mixed_precision="fp8"), (), "the launcher's mixed_precision fp8: needs a CUDA device"),
        (CUDA, ("--mixed_precision", "fp8"), "needs torchao, transformer-engine or MS-AMP"),
        (replace(ONE_PROCESS, gradient_accumulation_steps=4), (), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 4"),
        (replace(ONE_PROCESS, engines=("FSDP",)), (), "FSDP: needs several processes, and this is a single one"),
        (
            replace(ONE_PROCESS, engines=("Megatron-LM",)),
            (),
            "requests Megatron-LM, which supports language models only",
        ),
        (replace(ONE_PROCESS, engines=("DeepSpeed",)), ("--no-deepspeed",), "the launcher requests DeepSpeed"),
        (
            TWO_PROCESSES,
            (*SHARED, "--torch_compile", "--dynamo_mode", "reduce-overhead"),
            "mode reduce-overhead uses CUDA graphs",
        ),
        (
            replace(TWO_PROCESSES, dynamo_backend="INDUCTOR", dynamo_mode="max-autotune"),
            SHARED,
            "mode max-autotune uses CUDA graphs",
        ),
        (
            replace(TWO_PROCESSES, dynamo_backend="INDUCTOR"),
            (*SHARED, "--gradient_checkpointing", "--activation_memory_budget", "0.5"),
            "decides which all-to-alls to recompute",
        ),
        (replace(CUDA, machine=Machine("cuda", 1)), (), "2 processes on this machine, but 1 devices (cuda)"),
        (
            replace(TWO_PROCESSES, device_type="mps", machine=Machine("mps", 1)),
            (),
            "2 processes cannot share the device mps",
        ),
        (
            replace(
                CUDA,
                numa_affinity=True,
                machine=Machine(
                    "cuda", 4, numa_affinity_problem="the package pynvml is missing", lacks_numa_package=True
                ),
            ),
            (),
            "NUMA affinity is enabled, but the package pynvml is missing",
        ),
    ],
)
def test_invalid_launch_settings_are_refused_before_the_rendezvous(world, flags, expected):
    (problem,) = format_lines(validate_distributed(build_config(*flags), world))

    assert expected in problem


def test_valid_launch_settings_pass():
    for world in (
        ONE_PROCESS,
        TWO_PROCESSES,
        CUDA,
        replace(ONE_PROCESS, mixed_precision="fp16"),
        replace(CUDA, mixed_precision="fp16", gradient_accumulation_steps=1),
    ):
        assert format_lines(validate_distributed(build_config(), world)) == []
    assert format_lines(validate_distributed(build_config("--mixed_precision", "fp16"), CUDA)) == []
    compiling = replace(TWO_PROCESSES, dynamo_backend="INDUCTOR", dynamo_mode="reduce-overhead")
    assert (
        format_lines(validate_distributed(build_config(), compiling))
        == format_lines(validate_distributed(build_config(*SHARED, "--no-torch_compile"), compiling))
        == []
    )
    assert (
        format_lines(validate_distributed(build_config(*SHARED, "--torch_compile", "--dynamo_fullgraph"), compiling))
        == []
    )


ACCELERATOR_STATE = AcceleratorFacts(
    world_size=2,
    rank=1,
    device_type="cpu",
    distributed_type="MULTI_CPU",
    mixed_precision="no",
    gradient_accumulation_steps=1,
    dynamo_backend="no",
)


def test_an_accelerator_that_matches_its_settings_passes():
    assert format_lines(validate_accelerator(build_config().distributed, 1, TWO_PROCESSES, ACCELERATOR_STATE)) == []


@pytest.mark.parametrize(
    ("flags", "came", "expected"),
    [
        ((), replace(ACCELERATOR_STATE, world_size=1), "world size: expected 2, but accelerate has 1"),
        ((), replace(ACCELERATOR_STATE, rank=0), "rank: expected 1"),
        ((), replace(ACCELERATOR_STATE, device_type="cuda"), "device: expected cpu"),
        ((), replace(ACCELERATOR_STATE, gradient_accumulation_steps=2), "gradient accumulation: expected 1"),
        ((), replace(ACCELERATOR_STATE, distributed_type="FSDP"), "accelerate set up FSDP, which is not supported"),
        (("--mixed_precision", "bf16"), ACCELERATOR_STATE, "mixed precision: expected bf16"),
        (("--torch_compile",), ACCELERATOR_STATE, "dynamo backend: expected inductor"),
        (("--no-torch_compile",), replace(ACCELERATOR_STATE, dynamo_backend="eager"), "dynamo backend: expected no"),
    ],
)
def test_an_accelerator_that_differs_from_its_settings_stops_the_run(flags, came, expected):
    (problem,) = format_lines(validate_accelerator(build_config(*flags).distributed, 1, TWO_PROCESSES, came))

    assert expected in problem


# NUMA


def test_numa_affinity_is_the_default_where_it_is_supported_and_not_set():
    several = replace(CUDA, machine=Machine("cuda", 4, numa_nodes=2))

    assert should_bind_to_numa_node(several)
    assert not should_bind_to_numa_node(CUDA)
    assert not should_bind_to_numa_node(replace(several, numa_affinity=False))
    assert not should_bind_to_numa_node(
        replace(several, machine=Machine("cuda", 4, numa_nodes=2, numa_affinity_problem="no"))
    )


def test_a_failed_numa_binding_is_only_a_warning(monkeypatch, caplog):
    def refuse(local_rank):
        raise OSError(22, f"Invalid argument, of process {local_rank}")

    monkeypatch.setattr(accelerator, "set_numa_affinity", refuse)
    with caplog.at_level("WARNING"):
        accelerator.bind_to_numa_node(3)
    assert "not bound to the NUMA node of its device: [Errno 22] Invalid argument, of process 3" in caplog.text


def test_numa_nodes_with_cpus_are_counted(tmp_path):
    for name, cpus in {"node0": "0-3\n", "node1": "4-7\n", "node2": "\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
    (tmp_path / "nodes_online").mkdir()

    assert count_numa_nodes(tmp_path) == 2
    assert count_numa_nodes(tmp_path / "nothing") == 1


def test_numa_affinity_is_off_for_devices_that_accelerate_would_miscount(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)

    assert find_numa_affinity_problem("cuda", {}) == ""
    assert find_numa_affinity_problem("cuda", {"CUDA_VISIBLE_DEVICES": "0,1"}) == ""
    assert "ignores CUDA_VISIBLE_DEVICES=4,5" in find_numa_affinity_problem("cuda", {"CUDA_VISIBLE_DEVICES": "4,5"})
    assert "CUDA devices only" in find_numa_affinity_problem("cpu", {})


# the world


def test_the_world_is_read_from_the_launchers_variables():
    world = World.from_environment(
        {
            "WORLD_SIZE": "6",
            "RANK": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "3",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_USE_FSDP": "true",
            "ACCELERATE_USE_DEEPSPEED": "false",
            "ACCELERATE_CPU_AFFINITY": "0",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
        }
    )

    assert (world.world_size, world.rank, world.local_rank, world.local_world_size, world.num_machines) == (
        6,
        4,
        1,
        3,
        2,
    )
    assert (world.mixed_precision, world.engines, world.numa_affinity, world.gradient_accumulation_steps) == (
        "bf16",
        ("FSDP",),
        False,
        3,
    )


def test_mpi_variables_are_read():
    world = World.from_environment(
        {
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        }
    )

    assert (world.world_size, world.rank, world.local_rank, world.num_machines) == (4, 3, 1, 2)


@pytest.mark.parametrize(
    ("environment", "device"),
    [
        ({}, "cuda"),
        ({"ACCELERATE_USE_CPU": "true"}, "cpu"),
        ({"ACCELERATE_USE_CPU": "False"}, "cuda"),
        ({"ACCELERATE_TORCH_DEVICE": "xpu:1", "ACCELERATE_USE_CPU": "1"}, "xpu"),
    ],
)
def test_the_device_type_is_detected_unless_the_environment_overrides_it(environment, device):
    assert select_device_type(environment, Machine("cuda", 1)) == device


def test_an_invalid_number_in_a_variable_is_a_config_error():
    with pytest.raises(ConfigError, match="WORLD_SIZE: expected a whole number, got 'two'"):
        World.from_environment({"WORLD_SIZE": "two"})


# real processes


def prepare_and_describe(*flags: str) -> tuple:
    from library.distributed.accelerator import prepare_accelerator, read_accelerator_facts

    accelerator = prepare_accelerator(build_config(*flags))
    tracker = (accelerator.logging_dir, os.environ.get("WANDB_DIR"), [str(name) for name in accelerator.log_with])
    dynamo = accelerator.state.dynamo_plugin
    return (
        read_accelerator_facts(accelerator),
        tracker,
        (dynamo.backend.value, dynamo.dynamic),
        accelerator.state.backend,
    )


@pytest.mark.slow
def test_two_processes_write_into_one_folder_though_their_clocks_differ(tmp_path):
    ranks = run_on_ranks(2, prepare_with_shifted_clock, "--logging_dir", str(tmp_path / "logs"), "--log_prefix", "run_")

    assert ranks[0][1][0] == ranks[1][1][0] and ranks[0][1][0].startswith(str(tmp_path / "logs" / "run_2"))
    assert [rank[0].world_size for rank in ranks] == [2, 2] and ranks[0][3] == "gloo"
    assert len(list((tmp_path / "logs").iterdir())) == 1


def prepare_with_shifted_clock(*flags: str) -> tuple:
    import library.distributed.accelerator as module

    module.format_timestamp = lambda: f"2026010203040{os.environ['RANK']}"
    return prepare_and_describe(*flags)


@pytest.mark.slow
def test_wandb_writes_inside_the_logging_folder(tmp_path):
    flags = ("--logging_dir", str(tmp_path), "--log_with", "wandb")
    ((_, (folder, wandb_folder, log_with), _, _),) = run_on_ranks(
        1, prepare_and_describe, *flags, environment={"WANDB_MODE": "offline"}
    )

    assert (wandb_folder, log_with) == (folder, ["wandb"]) and Path(folder).is_dir()


@pytest.mark.slow
def test_a_tracker_that_cannot_start_stops_all_processes_with_the_same_line():
    lines = run_on_ranks(2, prepare_and_return_error, "--log_with", "mlflow")

    assert lines == ["--log_with mlflow: the package mlflow is not installed; pip install mlflow"] * 2


def prepare_and_return_error(*flags: str) -> str:
    try:
        prepare_and_describe(*flags)
    except ConfigError as error:
        return str(error)
    return "not stopped"


@pytest.mark.slow
def test_the_launchers_dynamo_backend_is_used_without_torch_compile():
    environment = {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER", "ACCELERATE_DYNAMO_USE_DYNAMIC": "False"}
    ((_, _, launcher, _),) = run_on_ranks(1, prepare_and_describe, environment=environment)
    ((_, _, ours, _),) = run_on_ranks(
        1, prepare_and_describe, "--torch_compile", "--dynamo_backend", "eager", environment=environment
    )

    assert (launcher, ours) == (("AOT_EAGER", False), ("EAGER", None))


@pytest.mark.slow
def test_settings_of_an_earlier_accelerator_in_the_process_stop_the_run():
    (line,) = run_on_ranks(1, prepare_twice)

    assert "dynamo backend: expected eager, but accelerate has no" in line


def prepare_twice() -> str:
    prepare_and_describe()
    return prepare_and_return_error("--torch_compile", "--dynamo_backend", "eager")


# deterministic kernels


def find_deterministic_settings() -> list[tuple[bool, str | None]]:
    import torch

    found = []
    for flags in ([], ["--deterministic"]):
        accelerator.prepare_accelerator(build_config(*flags))
        found.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
    return found


@pytest.mark.slow
def test_deterministic_kernels_are_used_on_request_only():
    assert run_on_ranks(1, find_deterministic_settings) == [[(False, None), (True, ":4096:8")]]
