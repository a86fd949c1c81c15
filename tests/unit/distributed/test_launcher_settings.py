"""Launcher settings: the doctor reports what accelerate does, compared with accelerate's own code."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.commands import launch as accelerate_launch
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from launcher_cases import TRAIN, check_launch_command, use_environment, write_accelerate_config
from problem_lines import format_lines
from rank_processes import find_free_port

from library.config import RunConfig, parse_config
from library.config.options import flatten_config
from library.distributed.devices import Machine
from library.distributed.launch_command import find_launch_command, format_multi_process_command, parse_launch_command
from library.distributed.launcher_settings import (
    SettingSource,
    read_accelerate_config,
    resolve_settings,
)
from library.distributed.validate_launch import validate_distributed
from library.distributed.world import World
from library.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    use_environment(monkeypatch, tmp_path)
    return tmp_path


# parsing


@pytest.mark.parametrize(
    ("words", "launcher", "options", "script", "script_args"),
    [
        ("accelerate launch t.py --seed 3", "accelerate launch", {}, "t.py", ["--seed", "3"]),
        (
            "accelerate launch --num-processes=3 --multi_gpu t.py --cpu",
            "accelerate launch",
            {"num_processes": 3, "multi_gpu": True},
            "t.py",
            ["--cpu"],
        ),
        ("/v/bin/python -u /v/bin/accelerate launch --cpu t.py", "accelerate launch", {"cpu": True}, "t.py", []),
        (r"C:\v\Scripts\accelerate.exe launch t.py", "accelerate launch", {}, "t.py", []),
        ("accelerate-launch --mixed_precision bf16 t.py", "accelerate launch", {"mixed_precision": "bf16"}, "t.py", []),
        ("python -m accelerate.commands.launch t.py a", "accelerate launch", {}, "t.py", ["a"]),
        (
            "torchrun --standalone --nproc-per-node 2 t.py",
            "torchrun",
            {"standalone": True, "nproc_per_node": "2"},
            "t.py",
            [],
        ),
        ("python -m torch.distributed.run --nnodes=2 t.py b", "torchrun", {"nnodes": "2"}, "t.py", ["b"]),
    ],
)
def test_a_launch_command_is_parsed(words, launcher, options, script, script_args):
    command = parse_launch_command(words.split(), {"A": "1"})

    assert (command.launcher, dict(command.options), command.script, list(command.script_args)) == (
        launcher,
        options,
        script,
        script_args,
    )
    assert command.environment == {"A": "1"}


def test_variables_before_a_command_are_environment():
    command = parse_launch_command("env A=2 B=x=y accelerate launch t.py C=3".split(), {"A": "1"})

    assert command.environment == {"A": "2", "B": "x=y"} and command.script_args == ("C=3",)
    assert command.program == ("accelerate", "launch")


def test_a_command_without_launcher_is_none():
    assert parse_launch_command("python train_lora.py --seed 1".split(), {}) is None
    assert parse_launch_command(["bash", "-c", "accelerate launch t.py"], {}) is None


@pytest.mark.parametrize(
    ("flag", "expected"), [("--multi_gpus", "unrecognized arguments: --multi_gpus"), ("--help", "starts no training")]
)
def test_a_flag_that_starts_no_training_is_an_error(flag, expected):
    with pytest.raises(ConfigError, match=expected):
        parse_launch_command(["accelerate", "launch", flag, "t.py"], {})


def test_the_multi_process_command_keeps_everything_else():
    words = "/v/python /v/bin/accelerate launch --num_processes=2 --cpu --mixed_precision bf16 t.py --cpu --name 'a b'"
    command = parse_launch_command(shlex.split(words), {})

    expected = "accelerate launch --multi_gpu --num_processes=2 --mixed_precision bf16 t.py --cpu --name 'a b'"
    assert format_multi_process_command(command, on_cpu=False) == expected
    assert format_multi_process_command(command, on_cpu=True) == f"ACCELERATE_USE_CPU=true {expected}"
    module = parse_launch_command("/v/python -m accelerate.commands.launch t.py".split(), {})
    assert (
        format_multi_process_command(module, on_cpu=False) == "/v/python -m accelerate.commands.launch --multi_gpu t.py"
    )


class Parent:
    """A fake parent process."""

    def __init__(self, *words: str):
        self.words = list(words)

    def cmdline(self) -> list[str]:
        return self.words

    def environ(self) -> dict[str, str]:
        return {"FROM": "launcher"}


@pytest.mark.parametrize(
    ("between", "is_found"),
    [
        ([], True),
        ([["sh", "-c", "python t.py"], ["mpirun", "-n", "2", "python", "t.py"]], True),
        ([["python", "schedule.py"]], False),
        ([["C:/venv/Scripts/python.exe", "t.py", "--seed", "1"]], True),
    ],
    ids=["its child", "shells between", "another program between", "a virtual environment on Windows"],
)
def test_only_the_launcher_of_this_process_is_found(between, is_found, monkeypatch):
    own = Parent("C:/Python/python.exe", "t.py", "--seed", "1")
    above = [*(Parent(*words) for words in between), Parent("python", "/bin/accelerate", "launch", "--cpu", "t.py")]
    own.parents = lambda: above
    monkeypatch.setattr("library.distributed.launch_command.psutil.Process", lambda: own)
    command = find_launch_command()

    assert (command is not None) == is_found
    assert command is None or (dict(command.options), command.environment) == ({"cpu": True}, {"FROM": "launcher"})


def test_a_broken_config_file_is_an_error_in_the_words_of_accelerate(home):
    path = write_accelerate_config(home, num_procesess=2)

    with pytest.raises(ConfigError, match=r"default_config.yaml: accelerate cannot read .*num_procesess"):
        read_accelerate_config(path)
    settings, problems = check_launch_command(f"accelerate launch {TRAIN}")
    assert not settings and "num_procesess" in problems


@pytest.mark.slow
def test_variables_before_the_command_say_where_accelerate_finds_its_config_file(home):
    path = write_accelerate_config(home, mixed_precision="bf16")
    script = (
        "import sys; from library.tools.doctor import check_command\n"
        "print([(s.value, s.source) for s in check_command(sys.argv[1:]) if s.name == 'mixed_precision'])"
    )
    command = ["env", f"HF_HOME={home}", "accelerate", "launch", *TRAIN.split()]
    result = subprocess.run([sys.executable, "-c", script, *command], cwd=ROOT, capture_output=True, text=True)

    assert result.stdout.strip() == str([("bf16", str(path))]), result.stderr


# compared with accelerate's own code


COMMANDS = {
    "nothing": ("", {}, {}),
    "a flag": ("--mixed_precision bf16", {}, {}),
    "a flag over the file": ("--mixed_precision bf16", {"mixed_precision": "no"}, {}),
    "the file": ("", {"mixed_precision": "bf16"}, {}),
    "a variable that is overwritten": ("", {}, {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    "a variable below the file": ("", {"mixed_precision": "bf16"}, {"ACCELERATE_MIXED_PRECISION": "no"}),
    "a named file": ("--config_file {file} --cpu", {"mixed_precision": "bf16"}, {}),
    "--cpu leaves the default file unread": ("--cpu", {"mixed_precision": "bf16"}, {}),
    "compile by flag": ("--dynamo_backend aot_eager --dynamo_mode max-autotune --dynamo_use_dynamic", {}, {}),
    "compile by file": (
        "",
        {
            "dynamo_config": {
                "dynamo_backend": "INDUCTOR",
                "dynamo_use_fullgraph": True,
                "dynamo_mode": "reduce-overhead",
            }
        },
        {},
    ),
    "compile by both": (
        "--dynamo_backend eager",
        {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}},
        {},
    ),
    "compile by an old file": ("", {"dynamo_backend": "INDUCTOR"}, {}),
    "compile by a variable": ("", {}, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
    "several by flag": ("--multi_gpu --num_processes 3", {}, {}),
    "several by file": ("", {"distributed_type": "MULTI_GPU", "num_processes": 4}, {}),
    "several by both": ("--num_processes 2", {"distributed_type": "MULTI_GPU", "num_processes": 4}, {}),
    "several CPU processes by flag": ("--cpu --num_processes 2", {}, {}),
    "several CPU processes by file": ("", {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}, {}),
    "processes without --multi_gpu": ("--num_processes 2", {}, {}),
    "several on a CPU": ("--multi_gpu --num_processes 2", {}, {"ACCELERATE_USE_CPU": "true"}),
    "a CPU by a variable that is overwritten": ("", {}, {"ACCELERATE_USE_CPU": "true"}),
    "a CPU by file": ("", {"use_cpu": True}, {}),
    "--cpu with a file of several": (
        "--config_file {file} --cpu",
        {"distributed_type": "MULTI_GPU", "num_processes": 2},
        {},
    ),
    "threads by flag": ("--num_cpu_threads_per_process 5", {}, {"OMP_NUM_THREADS": "3"}),
    "threads by a variable": ("", {}, {"OMP_NUM_THREADS": "3"}),
    "threads by cores": ("--cpu --num_processes 1", {}, {}),
    "threads by cores of a file": ("", {"use_cpu": True, "num_processes": 1}, {}),
    "affinity by flag": ("--enable_cpu_affinity", {}, {}),
    "affinity by file, unread": ("", {"enable_cpu_affinity": True}, {}),
    "affinity by a variable": ("", {}, {"ACCELERATE_CPU_AFFINITY": "1"}),
    "affinity off by a variable, on by flag": ("--enable_cpu_affinity", {}, {"ACCELERATE_CPU_AFFINITY": "0"}),
    "machines": (
        "--multi_gpu --num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.9 "
        "--main_process_port {port} --same_network",
        {},
        {"MASTER_ADDR": "1.2.3.4"},
    ),
    "machines by file": (
        "",
        {
            "distributed_type": "MULTI_GPU",
            "num_processes": 4,
            "num_machines": 2,
            "machine_rank": 1,
            "main_process_ip": "10.0.0.8",
            "main_process_port": 4321,
        },
        {},
    ),
    "port of one machine": (
        "--multi_gpu --num_processes 2 --main_process_port {port}",
        {"main_process_port": 4321},
        {"MASTER_PORT": "5"},
    ),
    "FSDP by flag": ("--use_fsdp --num_processes 2", {}, {}),
    "FSDP by file": ("", {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}, {}),
    "a file of FSDP and another flag": ("--multi_gpu --num_processes 2", {"distributed_type": "FSDP"}, {}),
    "accumulation by a variable": ("", {}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}),
}


def run_accelerate(words: list[str], monkeypatch) -> tuple[str, dict[str, str], object]:
    """Run accelerate launch up to the start of processes; return their environment."""
    started = []

    def start_one(args):
        started.append(("one", prepare_simple_launcher_cmd_env(args)[1], args))

    def start_several(args):
        started.append(("several", prepare_multi_gpu_env(args), args))

    monkeypatch.setattr(accelerate_launch, "simple_launcher", start_one)
    monkeypatch.setattr(accelerate_launch, "multi_gpu_launcher", start_several)
    accelerate_launch.launch_command(accelerate_launch.launch_command_parser().parse_args(words))
    return started[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_resolved_settings_equal_those_of_accelerate(name, home, monkeypatch):
    flags, in_file, variables = COMMANDS[name]
    use_environment(monkeypatch, home, **variables)
    path = write_accelerate_config(home, **in_file) if in_file else home / "none"
    words = shlex.split(flags.format(file=path, port=find_free_port()))
    kind, exported, args = run_accelerate([*words, "t.py"], monkeypatch)

    settings, _ = check_launch_command(shlex.join(["accelerate", "launch", *words, "t.py"]))
    value = {setting.name: setting.value for setting in settings.values()}

    assert value["mixed_precision"] == exported["ACCELERATE_MIXED_PRECISION"]
    assert value["num_processes"] == (str(args.num_processes) if kind == "several" else "1")
    assert value["num_machines"] == str(args.num_machines)
    assert value.get("machine_rank", "0") == str(args.machine_rank or 0)
    assert value["num_cpu_threads_per_process"] == exported["OMP_NUM_THREADS"]
    assert value["enable_cpu_affinity"] == ("true" if exported.get("ACCELERATE_CPU_AFFINITY") == "1" else "false")
    assert value["dynamo_backend"] == exported["ACCELERATE_DYNAMO_BACKEND"].lower()
    assert value["use_fsdp"] == exported.get("ACCELERATE_USE_FSDP", "false")
    assert value["device"] == "cpu"  # the only device here; what sets it is compared below
    sets_cpu = exported.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    assert (settings["device"].source != "detected") == sets_cpu
    assert value["gradient_accumulation_steps"] == exported.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if value["dynamo_backend"] != "no":
        for option in ("mode", "use_fullgraph", "use_dynamic", "use_regional_compilation"):
            assert value[f"dynamo_{option}"] == exported[f"ACCELERATE_DYNAMO_{option.upper()}"].lower()
    if args.num_machines > 1 and kind == "several":
        address = args.master_addr if hasattr(args, "master_addr") else args.rdzv_endpoint.split(":")[0]
        assert value["main_process_ip"] == address
    if kind == "several":
        assert value["main_process_port"] == (getattr(args, "master_port", "") or args.rdzv_endpoint.split(":")[1])


# sources


def test_the_source_and_the_sources_that_it_overrides_are_named(home, monkeypatch):
    use_environment(monkeypatch, home, ACCELERATE_MIXED_PRECISION="fp16")
    path = write_accelerate_config(home, mixed_precision="no")
    settings, _ = check_launch_command("accelerate launch --mixed_precision bf16 t.py --mixed_precision bf16")
    setting = settings["mixed_precision"]

    assert (setting.value, setting.source) == ("bf16", "--mixed_precision")
    assert setting.overridden == (
        SettingSource("accelerate launch --mixed_precision", "bf16"),
        SettingSource(str(path), "no"),
        SettingSource("environment variable ACCELERATE_MIXED_PRECISION, overwritten by accelerate launch", "fp16"),
    )
    assert setting.warning == (
        f"mixed_precision: bf16 (--mixed_precision); overridden: no ({path}), fp16 "
        "(environment variable ACCELERATE_MIXED_PRECISION, overwritten by accelerate launch)"
    )


def test_a_variable_for_gradient_accumulation_overrides_our_option(home, monkeypatch):
    use_environment(monkeypatch, home, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    setting = check_launch_command("accelerate launch t.py --gradient_accumulation_steps 2")[0][
        "gradient_accumulation_steps"
    ]

    assert (setting.value, setting.overridden) == ("4", (SettingSource("--gradient_accumulation_steps", "2"),))


def test_a_config_file_that_accelerate_does_not_read_is_no_source(home):
    write_accelerate_config(home, mixed_precision="bf16", distributed_type="FSDP")

    assert check_launch_command("accelerate launch --cpu t.py")[0]["mixed_precision"].source == "default"
    settings, _ = check_launch_command("accelerate launch --multi_gpu --num_processes 2 t.py")
    assert settings["mixed_precision"].source != "default" and settings["use_fsdp"].source == "default"
    assert settings["main_process_port"].source == "default" and "main_process_ip" not in settings  # for one machine


def test_a_value_of_the_run_file_is_named_with_its_line(home):
    (home / "run.toml").write_text("seed = 1\nmixed_precision = 'no'\n")
    settings, _ = check_launch_command(
        f"accelerate launch --mixed_precision bf16 t.py --config_file {home / 'run.toml'}"
    )

    expected = f"mixed_precision: no ({home / 'run.toml'}:2); overridden: bf16 (accelerate launch --mixed_precision)"
    assert settings["mixed_precision"].warning == expected


@pytest.mark.parametrize(
    ("command", "variables", "expected"),
    [
        (
            "accelerate launch --cpu --num_processes 2 t.py --seed 1",
            {},
            "num_processes: 2 (accelerate launch --num_processes), but accelerate launch starts 1; several processes "
            "need --multi_gpu, on a CPU together with ACCELERATE_USE_CPU=true:\n"
            "  ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 t.py --seed 1",
        ),
        ("accelerate launch t.py --mixed_precision fp16", {}, "use bf16 or no"),
        (
            "accelerate launch t.py --gradient_accumulation_steps 2",
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 4",
        ),
        ("accelerate launch --gradient_accumulation_steps 4 t.py", {}, "only passed to DeepSpeed, training uses 1"),
        ("accelerate launch --use_fsdp --num_processes 2 t.py", {}, "use fsdp_version 2"),
        (
            "accelerate launch --use_deepspeed --num_processes 2 --zero_stage 2 t.py --deepspeed --zero_stage 3",
            {},
            "--zero_stage is 3; accelerate's zero_stage is 2",
        ),
        (
            "python train_lora.py",
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"},
            "zero_stage 0: shards nothing",
        ),
        ("accelerate launch --multi_gpu --cpu t.py", {}, "You can only use one of `--cpu`, `--multi_gpu`"),
        ("torchrun --nproc_per_node gpu t.py", {}, "torchrun: Cuda is not available"),
        ("accelerate launch --use_megatron_lm --num_processes 2 t.py", {}, "Megatron-LM"),
    ],
)
def test_invalid_launch_commands_are_problems(command, variables, expected, home, monkeypatch):
    use_environment(monkeypatch, home, **variables)

    assert expected in check_launch_command(command)[1]


@pytest.mark.parametrize(
    ("command", "variables", "name", "expected"),
    [
        (
            "accelerate launch --mixed_precision fp16 t.py",
            {},
            "mixed_precision",
            "not supported on a CPU; training uses",
        ),
        (
            "accelerate launch --mixed_precision bf16 t.py --mixed_precision no",
            {},
            "mixed_precision",
            "overridden: bf16",
        ),
        ("torchrun t.py --mixed_precision no", {"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision", "bf16 (env"),
        ("accelerate launch --dynamo_backend eager t.py --no-torch_compile", {}, "dynamo_backend", "overridden: eager"),
        ("accelerate launch --enable_cpu_affinity t.py", {}, "enable_cpu_affinity", "CUDA devices only"),
        ("torchrun --nproc_per_node 1 t.py", {"PET_NPROC_PER_NODE": "2"}, "num_processes", "PET_NPROC_PER_NODE"),
    ],
)
def test_overridden_settings_are_warnings(command, variables, name, expected, home, monkeypatch):
    use_environment(monkeypatch, home, **variables)
    settings, problems = check_launch_command(f"{command} --dataset_config dataset_configs/demo.toml")

    assert expected in settings[name].warning and not problems


@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch t.py",
        "python train_lora.py",
        "torchrun --nproc_per_node 2 t.py",
        "accelerate launch --mixed_precision bf16 --multi_gpu --num_processes 2 t.py --torch_compile",
    ],
)
def test_one_source_for_each_setting_gives_no_warning(command, home, monkeypatch):
    use_environment(monkeypatch, home, ACCELERATE_USE_CPU="true")

    assert [setting for setting in check_launch_command(command)[0].values() if setting.warning] == []


def test_a_launch_flag_over_the_config_file_gives_no_warning(home):
    write_accelerate_config(home, mixed_precision="no")
    setting = check_launch_command("accelerate launch --mixed_precision bf16 t.py")[0]["mixed_precision"]

    assert (setting.value, setting.warning) == ("bf16", "")
    assert [source.value for source in setting.overridden] == ["no"]


def test_torchrun_and_plain_python_read_no_config_file(home, monkeypatch):
    use_environment(monkeypatch, home, ACCELERATE_MIXED_PRECISION="bf16", OMP_NUM_THREADS="2")
    write_accelerate_config(home, mixed_precision="fp16", distributed_type="FSDP")
    words = "torchrun --nnodes 2 --nproc_per_node 3 --node_rank 1 --master_addr h --master_port 7 t.py"
    expected = {
        "mixed_precision": "bf16",
        "num_processes": "6",
        "num_machines": "2",
        "machine_rank": "1",
        "main_process_ip": "h",
        "main_process_port": "7",
        "use_fsdp": "false",
        "num_cpu_threads_per_process": "2",
    }

    values = {name: setting.value for name, setting in check_launch_command(words)[0].items()}
    assert {name: values[name] for name in expected} == expected
    single = {name: setting.value for name, setting in check_launch_command("python train_lora.py")[0].items()}
    assert (single["mixed_precision"], single["num_processes"]) == ("bf16", "1")


@pytest.mark.parametrize(
    ("flags", "starts"),
    [("--num_processes 2 --cpu", "ACCELERATE_USE_CPU=true accelerate"), ("--num_processes 2", "accelerate")],
)
def test_the_suggested_command_uses_the_requested_device(flags, starts):
    command = parse_launch_command(f"accelerate launch {flags} t.py".split(), {})
    world = World(machine=Machine("cuda", 4), device_type="cuda", launch_command=command)
    (problem,) = format_lines(validate_distributed(RunConfig(), world))

    assert problem.splitlines()[1] == f"  {starts} launch --multi_gpu --num_processes 2 t.py"


def test_torchrun_has_its_own_default_values():
    values = {
        name: setting.value for name, setting in check_launch_command("torchrun --nproc_per_node 2 t.py")[0].items()
    }
    assert (values["num_cpu_threads_per_process"], values["main_process_port"]) == ("1", "29500")
    values = {
        name: setting.value
        for name, setting in check_launch_command("torchrun --standalone --nproc_per_node 2 t.py")[0].items()
    }
    assert values["main_process_port"] == "a free port"


def test_mpi_variables_set_the_number_of_processes(home, monkeypatch):
    use_environment(
        monkeypatch, home, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_LOCAL_SIZE="2"
    )
    settings, _ = check_launch_command("python train_lora.py")

    assert (settings["num_processes"].value, settings["num_machines"].value) == ("4", "2")
    assert settings["num_processes"].source == "environment variable OMPI_COMM_WORLD_SIZE"


def test_processes_are_bound_to_numa_nodes_by_default():
    machine = Machine("cuda", device_count=4, physical_cores=16, usable_cpus=32, numa_nodes=2)
    world = World(world_size=4, local_rank=0, local_world_size=4, device_type="cuda", machine=machine)
    command = parse_launch_command("accelerate launch t.py".split(), {})
    settings = {
        s.name: s for s in resolve_settings(flatten_config(RunConfig()), {}, replace(world, launch_command=command), {})
    }

    assert [settings[name].value for name in ("num_processes", "device", "enable_cpu_affinity")] == [
        "4",
        "cuda",
        "true",
    ]


SOURCES = [
    (flag, file, code) for flag in ("", "no", "bf16") for file in ("", "no", "bf16") for code in ("", "no", "bf16")
]


@pytest.mark.parametrize(("flag", "file", "code"), SOURCES)
def test_a_resolved_value_is_that_of_an_accelerator(flag, file, code, home, monkeypatch):
    from library.distributed.accelerator import build_accelerator_kwargs

    if file:
        write_accelerate_config(home, mixed_precision=file)
    flags, arguments = f"--mixed_precision {flag}" if flag else "", ["--mixed_precision", code] if code else []
    settings, _ = check_launch_command(shlex.join([*f"accelerate launch {flags}".split(), "t.py", *arguments]))
    _, exported, _ = run_accelerate([*flags.split(), "t.py"], monkeypatch)
    config = parse_config(arguments).config
    arguments = build_accelerator_kwargs(config.distributed, config.log, 1, World.from_environment(exported))[
        "mixed_precision"
    ]

    # for None, AcceleratorState takes the variable that accelerate launch has set
    expected = exported["ACCELERATE_MIXED_PRECISION"] if arguments is None else arguments
    assert settings["mixed_precision"].value == expected
    assert os.environ.get("ACCELERATE_MIXED_PRECISION") is None
