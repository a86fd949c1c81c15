"""Which setting counts: the table says what accelerate does, held against accelerate's own code."""

import os
import shlex
from pathlib import Path

import pytest
from accelerate.commands import launch as accelerate_launch
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from launching import file_of, table
from ranks import free_port

from library.config import load_options
from library.distributed.claims import Claim, Sources
from library.distributed.contradictions import sources_of
from library.distributed.devices import Machine
from library.distributed.launch_command import LaunchCommand, launch_of_this_process, parse_launch, working_command
from library.distributed.launch_file import default_path, read_launch_file
from library.distributed.verdicts import verdicts
from library.errors import ConfigError

# taking commands apart


@pytest.mark.parametrize(
    ("words", "launcher", "given", "script", "arguments"),
    [
        ("accelerate launch t.py --seed 3", "accelerate launch", {}, "t.py", ["--seed", "3"]),
        ("accelerate launch --num-processes=3 --multi_gpu t.py --cpu", "accelerate launch",
         {"num_processes": 3, "multi_gpu": True}, "t.py", ["--cpu"]),
        ("/v/bin/python -u /v/bin/accelerate launch --cpu t.py", "accelerate launch", {"cpu": True}, "t.py", []),
        (r"C:\v\Scripts\accelerate.exe launch t.py", "accelerate launch", {}, "t.py", []),
        ("accelerate-launch --mixed_precision bf16 t.py", "accelerate launch", {"mixed_precision": "bf16"}, "t.py", []),
        ("python -m accelerate.commands.launch t.py a", "accelerate launch", {}, "t.py", ["a"]),
        ("torchrun --standalone --nproc-per-node 2 t.py", "torchrun", {"standalone": True, "nproc_per_node": "2"},
         "t.py", []),
        ("python -m torch.distributed.run --nnodes=2 t.py b", "torchrun", {"nnodes": "2"}, "t.py", ["b"]),
    ],
)  # fmt: skip
def test_a_command_is_taken_apart(words, launcher, given, script, arguments):
    split = words.split()
    launch = parse_launch(split, {"A": "1"})

    assert (launch.launcher, dict(launch.given), launch.script, list(launch.arguments)) == (
        launcher, given, (script,), arguments)  # fmt: skip
    assert launch.environment == {"A": "1"}


def test_variables_before_a_command_are_environment():
    launch = parse_launch("env A=2 B=x=y accelerate launch t.py C=3".split(), {"A": "1"})

    assert launch.environment == {"A": "2", "B": "x=y"} and launch.arguments == ("C=3",)
    assert launch.program == ("accelerate", "launch")


def test_a_command_without_launcher_is_none_of_ours():
    assert parse_launch("python train_lora.py --seed 1".split(), {}) is None
    assert parse_launch(["bash", "-c", "accelerate launch t.py"], {}) is None


def test_a_mistyped_launch_flag_is_a_line():
    with pytest.raises(ConfigError, match="unrecognized arguments: --multi_gpus"):
        parse_launch("accelerate launch --multi_gpus t.py".split(), {})


def test_the_working_command_keeps_everything_else():
    words = "/v/python /v/bin/accelerate launch --num_processes=2 --cpu --mixed_precision bf16 t.py --cpu --name 'a b'"
    launch = parse_launch(shlex.split(words), {})

    expected = "accelerate launch --multi_gpu --num_processes 3 --mixed_precision bf16 t.py --cpu --name 'a b'"
    assert working_command(launch, 3, on_cpu=False) == expected
    assert working_command(launch, 3, on_cpu=True) == f"ACCELERATE_USE_CPU=true {expected}"


class Parent:
    """A process above this one."""

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
def test_the_launcher_of_this_process_is_found_and_no_other(between, is_found, monkeypatch):
    own = Parent("C:/Python/python.exe", "t.py", "--seed", "1")
    above = [*(Parent(*words) for words in between), Parent("python", "/bin/accelerate", "launch", "--cpu", "t.py")]
    own.parents = lambda: above
    monkeypatch.setattr("library.distributed.launch_command.psutil.Process", lambda: own)
    launch = launch_of_this_process()

    assert (launch is not None) == is_found
    assert launch is None or (dict(launch.given), launch.environment) == ({"cpu": True}, {"FROM": "launcher"})


def test_what_the_launcher_was_started_with_counts_and_not_what_it_made_of_it():
    launch = parse_launch("accelerate launch t.py".split(), {"ACCELERATE_MIXED_PRECISION": "bf16"})
    hidden = parse_launch("accelerate launch t.py".split(), {})

    assert sources_of(launch, {"OMP_NUM_THREADS": "1"}).environment == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert sources_of(hidden, {"OMP_NUM_THREADS": "1"}).environment == {"OMP_NUM_THREADS": "1"}


# accelerate's file


def test_accelerates_file_is_found_where_accelerate_looks(tmp_path):
    assert default_path({"HF_HOME": "/a"}) == Path("/a/accelerate/default_config.yaml")
    assert default_path({"XDG_CACHE_HOME": "/b"}) == Path("/b/huggingface/accelerate/default_config.yaml")
    assert default_path({}) == Path("~/.cache/huggingface/accelerate/default_config.yaml").expanduser()


def test_a_broken_file_is_told_in_accelerates_words(tmp_path):
    path = file_of(tmp_path, num_procesess=2)

    with pytest.raises(ConfigError, match=r"default_config.yaml: accelerate cannot read its settings: .*num_procesess"):
        read_launch_file(path)


# the table against accelerate's own code


COMMANDS = {
    "nothing said": ("", {}, {}),
    "a flag": ("--mixed_precision bf16", {}, {}),
    "a flag over the file": ("--mixed_precision bf16", {"mixed_precision": "no"}, {}),
    "the file": ("", {"mixed_precision": "bf16"}, {}),
    "a variable that is overwritten": ("", {}, {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    "a variable below the file": ("", {"mixed_precision": "bf16"}, {"ACCELERATE_MIXED_PRECISION": "no"}),
    "a named file": ("--config_file {file} --cpu", {"mixed_precision": "bf16"}, {}),
    "--cpu leaves the default file unread": ("--cpu", {"mixed_precision": "bf16"}, {}),
    "compile by flag": ("--dynamo_backend aot_eager --dynamo_mode max-autotune --dynamo_use_dynamic", {}, {}),
    "compile by file": ("", {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_fullgraph": True,
                                               "dynamo_mode": "reduce-overhead"}}, {}),
    "compile by both": ("--dynamo_backend eager", {"dynamo_config": {
        "dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}}, {}),
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
    "--cpu with a file that says several": ("--config_file {file} --cpu",
                                            {"distributed_type": "MULTI_GPU", "num_processes": 2}, {}),
    "threads by flag": ("--num_cpu_threads_per_process 5", {}, {"OMP_NUM_THREADS": "3"}),
    "threads by a variable": ("", {}, {"OMP_NUM_THREADS": "3"}),
    "threads by cores": ("--cpu --num_processes 1", {}, {}),
    "threads by cores of a file": ("", {"use_cpu": True, "num_processes": 1}, {}),
    "affinity by flag": ("--enable_cpu_affinity", {}, {}),
    "affinity by file, unread": ("", {"enable_cpu_affinity": True}, {}),
    "affinity by a variable": ("", {}, {"ACCELERATE_CPU_AFFINITY": "1"}),
    "affinity off by a variable, on by flag": ("--enable_cpu_affinity", {}, {"ACCELERATE_CPU_AFFINITY": "0"}),
    "machines": ("--multi_gpu --num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.9 "
                 "--main_process_port {port} --same_network", {}, {"MASTER_ADDR": "1.2.3.4"}),
    "machines by file": ("", {"distributed_type": "MULTI_GPU", "num_processes": 4, "num_machines": 2, "machine_rank": 1,
                              "main_process_ip": "10.0.0.8", "main_process_port": 4321}, {}),
    "port of one machine": ("--multi_gpu --num_processes 2 --main_process_port {port}",
                            {"main_process_port": 4321}, {"MASTER_PORT": "5"}),
    "FSDP by flag": ("--use_fsdp --num_processes 2", {}, {}),
    "FSDP by file": ("", {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}, {}),
    "accumulation by a variable": ("", {}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}),
}  # fmt: skip


def truth_of(words: list[str], home: Path, monkeypatch) -> tuple[str, dict[str, str], object]:
    """What accelerate hands to the processes it starts: its own code up to the moment of starting them."""
    seen = []
    monkeypatch.setattr(accelerate_launch, "default_config_file", str(default_path({"HF_HOME": str(home)})))
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file",
                        str(default_path({"HF_HOME": str(home)})))  # fmt: skip
    monkeypatch.setattr(accelerate_launch, "simple_launcher",
                        lambda args: seen.append(("one", prepare_simple_launcher_cmd_env(args)[1], args)))  # fmt: skip
    monkeypatch.setattr(accelerate_launch, "multi_gpu_launcher",
                        lambda args: seen.append(("several", prepare_multi_gpu_env(args), args)))  # fmt: skip
    accelerate_launch.launch_command(accelerate_launch.launch_command_parser().parse_args(words))
    return seen[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_accelerate_does(name, tmp_path, monkeypatch):
    flags, settings, variables = COMMANDS[name]
    for variable in [*os.environ]:
        if variable.startswith(("ACCELERATE_", "MASTER_", "OMP_", "WORLD_SIZE", "RANK")):
            monkeypatch.delenv(variable)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    path = file_of(tmp_path, **settings) if settings else tmp_path / "none"
    words = [*shlex.split(flags.format(file=path, port=free_port())), "t.py"]
    kind, given, args = truth_of(words, tmp_path, monkeypatch)

    found = table(shlex.join(["accelerate", "launch", *words]), {**variables, "HF_HOME": str(tmp_path)})
    value = {setting: verdict.value for setting, verdict in found.items()}

    assert value["precision"] == given["ACCELERATE_MIXED_PRECISION"]
    assert value["processes"] == (str(args.num_processes) if kind == "several" else "1")
    assert value["machines"] == str(args.num_machines)
    assert value["rank of this machine"] == str(args.machine_rank or 0)
    assert value["CPU threads"] == given["OMP_NUM_THREADS"]
    assert value["NUMA affinity"] == ("on" if given.get("ACCELERATE_CPU_AFFINITY") == "1" else "off")
    assert value["dynamo backend"] == given["ACCELERATE_DYNAMO_BACKEND"].lower()
    assert value["FSDP"] == ("on" if given.get("ACCELERATE_USE_FSDP") == "true" else "off")
    assert value["device"] == "cpu"  # this machine has nothing else; which place said so is told below
    says_cpu = given.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    assert (found["device"].winner != "what there is") == says_cpu
    assert value["gradient accumulation"] == given.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if value["dynamo backend"] != "no":
        assert value["dynamo mode"] == given["ACCELERATE_DYNAMO_MODE"]
        assert value["dynamo full graph"] == given["ACCELERATE_DYNAMO_USE_FULLGRAPH"].lower()
        assert value["dynamo dynamic shapes"] == given["ACCELERATE_DYNAMO_USE_DYNAMIC"].lower()
        assert value["dynamo regional compilation"] == given["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"].lower()
    if kind == "several":
        address = args.master_addr if hasattr(args, "master_addr") else getattr(args, "rdzv_endpoint", "").split(":")[0]
        port = getattr(args, "master_port", None) or args.rdzv_endpoint.split(":")[1]
        assert (value["main address"], value["main port"]) == (address or "127.0.0.1", port)


# who won, who lost, and what is said about it


def test_winner_and_losers_are_named_with_what_they_said(tmp_path):
    path = file_of(tmp_path, mixed_precision="no")
    environment = {"HF_HOME": str(tmp_path), "ACCELERATE_MIXED_PRECISION": "fp16"}
    verdict = table("accelerate launch --mixed_precision bf16 t.py --mixed_precision bf16", environment)["precision"]

    assert (verdict.value, verdict.winner, verdict.is_error) == ("bf16", "--mixed_precision", False)
    assert verdict.losers == (
        Claim("launch flag --mixed_precision", "bf16"),
        Claim(f"{path}: mixed_precision", "no"),
        Claim("environment variable ACCELERATE_MIXED_PRECISION (accelerate launch overwrites it)", "fp16"),
    )
    assert "launch flag" not in verdict.contradiction and f"{path}: mixed_precision says no" in verdict.contradiction


@pytest.mark.parametrize(
    ("command", "environment", "setting", "expected"),
    [
        ("accelerate launch --cpu --num_processes 2 t.py --seed 1", {}, "processes",
         "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 t.py --seed 1"),
        ("accelerate launch t.py --mixed_precision fp16", {}, "precision", "which a CPU does not have; use bf16 or no"),
        ("accelerate launch t.py --gradient_accumulation_steps 2", {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
         "gradient accumulation", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS says 4 and counts"),
        ("accelerate launch --gradient_accumulation_steps 4 t.py", {}, "gradient accumulation",
         "handed to DeepSpeed only"),
        ("accelerate launch --use_fsdp t.py", {}, "FSDP", "use fsdp_version 2"),
        ("accelerate launch --use_deepspeed --zero_stage 2 t.py --deepspeed --zero_stage 3", {}, "DeepSpeed",
         "--zero_stage says 3; accelerate's zero_stage says 2"),
        ("python t.py", {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "DeepSpeed",
         "zero_stage 0: divides nothing"),
    ],
)  # fmt: skip
def test_what_would_stop_training_is_an_error(command, environment, setting, expected):
    verdict = table(command, {"HF_HOME": "/nowhere", **environment})[setting]

    assert verdict.is_error and expected in verdict.contradiction


@pytest.mark.parametrize(
    ("command", "environment", "setting", "expected"),
    [
        ("accelerate launch --mixed_precision fp16 t.py", {}, "precision", "it computes in fp32"),
        ("accelerate launch --mixed_precision bf16 t.py --mixed_precision no", {}, "precision", "says no and counts"),
        (
            "torchrun t.py --mixed_precision no",
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            "precision",
            "says no and counts",
        ),
        (
            "accelerate launch --dynamo_backend eager t.py --no-torch_compile",
            {},
            "dynamo backend",
            "says no and counts",
        ),
        ("accelerate launch --enable_cpu_affinity t.py", {}, "NUMA affinity", "CUDA devices only"),
    ],
)
def test_what_is_allowed_but_discouraged_is_said(command, environment, setting, expected):
    verdict = table(command, {"HF_HOME": "/nowhere", **environment})[setting]

    assert not verdict.is_error and expected in verdict.contradiction


def test_one_setting_in_one_place_contradicts_nothing():
    several = "accelerate launch --mixed_precision bf16 --multi_gpu --num_processes 2 t.py --torch_compile"
    for command in ("accelerate launch t.py", "python t.py", "torchrun --nproc_per_node 2 t.py", several):
        assert [v for v in table(command, {"HF_HOME": "/nowhere"}).values() if v.contradiction] == []


def test_torchrun_and_plain_python_are_understood(tmp_path):
    environment = {"HF_HOME": str(tmp_path), "ACCELERATE_MIXED_PRECISION": "bf16", "OMP_NUM_THREADS": "2"}
    file_of(tmp_path, mixed_precision="fp16", distributed_type="FSDP")
    found = table(
        "torchrun --nnodes 2 --nproc_per_node 3 --node_rank 1 --master_addr h --master_port 7 t.py", environment
    )

    assert [found[name].value for name in ("precision", "processes", "machines", "rank of this machine", "main address",
                                           "main port", "FSDP", "CPU threads", "backend")] == [
        "bf16", "6", "2", "1", "h", "7", "off", "2", "gloo"]  # fmt: skip
    alone = table("python t.py", environment)
    assert [alone[name].value for name in ("precision", "processes", "backend")] == ["bf16", "1", "none: one process"]


def test_on_a_machine_with_several_devices_the_defaults_are_others():
    machine = Machine("cuda", device_count=4, cores=16, processors=32, numa_nodes=2)
    launch = LaunchCommand("accelerate launch", ("accelerate", "launch"), (), {}, ("t.py",), ())
    found = {verdict.setting: verdict for verdict in verdicts(Sources(launch=launch, machine=machine))}

    assert [found[name].value for name in ("processes", "backend", "device", "NUMA affinity")] == [
        "4", "nccl", "cuda", "on"]  # fmt: skip
    windows = {v.setting: v for v in verdicts(Sources(launch=launch, machine=machine, windows=True))}
    assert (windows["backend"].value, windows["backend"].winner) == ("gloo", "Windows")


PLACES = [
    (flag, file, code) for flag in ("", "no", "bf16") for file in ("", "no", "bf16") for code in ("", "no", "bf16")
]


@pytest.mark.parametrize(("flag", "file", "code"), PLACES)
def test_the_winner_in_the_table_is_what_an_accelerator_would_have(flag, file, code, tmp_path, monkeypatch):
    from library.distributed.accelerator import accelerator_kwargs
    from library.distributed.world import World

    if file:
        file_of(tmp_path, mixed_precision=file)
    flags, arguments = f"--mixed_precision {flag}" if flag else "", ["--mixed_precision", code] if code else []
    _, given, _ = truth_of([*flags.split(), "t.py"], tmp_path, monkeypatch)
    config = load_options(arguments).config
    asked = accelerator_kwargs(config, World.from_environment(given))["mixed_precision"]
    command = shlex.join([*f"accelerate launch {flags}".split(), "t.py", *arguments])

    # for None, AcceleratorState takes the variable that accelerate launch has set
    expected = given["ACCELERATE_MIXED_PRECISION"] if asked is None else asked
    assert table(command, {"HF_HOME": str(tmp_path)})["precision"].value == expected


def test_a_launch_flag_over_accelerates_file_is_no_contradiction(tmp_path):
    file_of(tmp_path, mixed_precision="no")
    verdict = table("accelerate launch --mixed_precision bf16 t.py", {"HF_HOME": str(tmp_path)})["precision"]

    assert (verdict.value, verdict.contradiction) == ("bf16", "")
    assert [claim.value for claim in verdict.losers] == ["no"]
