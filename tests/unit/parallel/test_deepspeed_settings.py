"""DeepSpeed settings of options, launcher and config file are resolved to one configuration, or refused."""

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from unittest.mock import patch

import pytest
from problem_lines import format_lines
from rank_processes import run_on_ranks
from training_runs import train

from library.config import parse_config
from library.distributed.deepspeed_settings import DeepSpeedSettings, resolve_deepspeed
from library.distributed.validate_launch import validate_distributed
from library.distributed.validate_sharding import validate_deepspeed, validate_deepspeed_batch_sizes
from library.distributed.world import ENGINE_VARIABLES, World
from library.optim.validate_optimizer import validate_elementwise_optimizer
from library.parallel.validate_engines import _warn_of_lock

STAGE_3 = ("--deepspeed", "--zero_stage", "3")
TWO_PROCESSES = World(world_size=2, local_world_size=2, local_rank=0, mixed_precision="no")
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def parse_flags(*flags: str, world: World):
    """Parse flags in a process that the launcher of ``world`` has started."""
    launched = {key: "true" for key, engine in ENGINE_VARIABLES.items() if engine in world.engines}
    with patch.dict(os.environ, launched):
        return parse_config([*flags]).config


def build_launcher_environment(**variables: str) -> World:
    names = {
        name if name == "ACCELERATE_GRADIENT_CLIPPING" else f"ACCELERATE_DEEPSPEED_{name}": value
        for name, value in variables.items()
    }
    return replace(TWO_PROCESSES, engines=("DeepSpeed",), launcher_variables=names)


@pytest.fixture
def write_deepspeed_config(tmp_path):
    def write(**content) -> World:
        (tmp_path / "ds.json").write_text(json.dumps(content))
        return build_launcher_environment(CONFIG_FILE=str(tmp_path / "ds.json"))

    return write


@pytest.mark.parametrize(
    ("flags", "world", "expected"),
    [
        ((), TWO_PROCESSES, None),
        (("--zero_stage", "2"), TWO_PROCESSES, None),  # the default of sd-scripts, set explicitly
        (
            (),
            replace(TWO_PROCESSES, launcher_variables={"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}),
            None,
        ),  # leftover variable without DeepSpeed
        (("--deepspeed",), TWO_PROCESSES, DeepSpeedSettings(2)),
        (
            ("--deepspeed", "--zero_stage", "3", "--offload_param_device", "cpu"),
            TWO_PROCESSES,
            DeepSpeedSettings(3, offload_param_device="cpu"),
        ),
        ((), build_launcher_environment(), DeepSpeedSettings(2)),
        (
            (),
            build_launcher_environment(
                ZERO_STAGE="1",
                OFFLOAD_OPTIMIZER_DEVICE="cpu",
                OFFLOAD_PARAM_DEVICE="none",
                ZERO3_INIT="true",
                ACCELERATE_GRADIENT_CLIPPING="1.0",
            ),
            DeepSpeedSettings(1, "cpu"),
        ),
        (("--deepspeed", "--zero_stage", "3"), build_launcher_environment(ZERO_STAGE="3"), DeepSpeedSettings(3)),
    ],
)
def test_options_and_launcher_are_resolved_to_one_configuration(flags, world, expected):
    assert resolve_deepspeed(parse_flags(*flags, world=world).deepspeed, world) == expected
    assert format_lines(validate_distributed(parse_flags(*flags, world=world), world)) == []


def test_a_deepspeed_config_file_is_completed_and_passed_on(write_deepspeed_config):
    world = write_deepspeed_config(
        train_batch_size=16,
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=2,
        gradient_clipping="auto",
        steps_per_print=50,
        bf16={"enabled": True},
        fp16={"enabled": False},
        zero_optimization={
            "stage": 3,
            "offload_param": {"device": "cpu", "buffer_count": 7},
            "stage3_prefetch_bucket_size": "auto",
            "stage3_max_live_parameters": 5,
        },
    )
    settings_config = parse_flags("--gradient_accumulation_steps", "2", "--mixed_precision", "bf16", world=world)
    settings = resolve_deepspeed(settings_config.deepspeed, world)

    assert [*format_lines(validate_deepspeed(settings_config, world))] == [] and (
        settings.stage,
        settings.offload_param_device,
    ) == (
        3,
        "cpu",
    )
    handed = settings.build_config(pin_memory=False)
    assert handed["zero_optimization"] == {
        "stage": 3,
        "stage3_max_live_parameters": 5,
        "offload_param": {"device": "cpu", "buffer_count": 7, "pin_memory": False},
    }
    assert handed["steps_per_print"] == 50 and handed["gradient_accumulation_steps"] == 1
    assert not {"bf16", "fp16", "train_batch_size"} & handed.keys()
    assert format_lines(validate_deepspeed_batch_sizes(settings, [4], 2, 2)) == []
    micro, global_batch = format_lines(validate_deepspeed_batch_sizes(settings, [4, 8], 2, 2))
    assert "train_micro_batch_size_per_gpu is 4, but the batch plan has 4 and 8" in micro
    assert "train_batch_size is 16, but the batch plan has 16 and 32" in global_batch


@pytest.mark.parametrize(
    ("flags", "world", "expected"),
    [
        (("--deepspeed", "--zero_stage", "0"), TWO_PROCESSES, "zero_stage 0: shards nothing"),
        (("--deepspeed", "--offload_param_device", "cpu"), TWO_PROCESSES, "only ZeRO stage 3 shards the model"),
        (
            (),
            build_launcher_environment(OFFLOAD_OPTIMIZER_DEVICE="nvme", OFFLOAD_OPTIMIZER_NVME_PATH="/x"),
            "--offload_optimizer_device nvme: not supported: a LoRA's optimizer state is small",
        ),
        (
            (*STAGE_3, "--offload_param_device", "nvme"),
            TWO_PROCESSES,
            "set --offload_param_nvme_path, a directory on a fast disk",
        ),
        (
            (*STAGE_3, "--offload_param_device", "nvme", "--offload_param_nvme_path", "/nowhere"),
            TWO_PROCESSES,
            "--offload_param_nvme_path /nowhere: not a writable directory",
        ),
        (
            ("--deepspeed", "--offload_param_device", "nvme", "--offload_param_nvme_path", "/tmp"),
            TWO_PROCESSES,
            "only ZeRO stage 3 shards the model",
        ),
        (
            ("--deepspeed", "--offload_optimizer_device", "disk"),
            TWO_PROCESSES,
            "device disk: expected none, cpu or nvme",
        ),
        (
            (),
            build_launcher_environment(OFFLOAD_OPTIMIZER_NVME_PATH="/x"),
            "offload_optimizer_nvme_path: no effect without",
        ),
        (
            ("--deepspeed", "--full_bf16", "--mixed_precision", "bf16"),
            TWO_PROCESSES,
            "DeepSpeed keeps adapters in fp32",
        ),
        (
            ("--deepspeed", "--on_oom", "recover"),
            TWO_PROCESSES,
            "--on_oom recover: DeepSpeed reduces gradients in every backward",
        ),
        (("--deepspeed", "--fsdp"), TWO_PROCESSES, "--fsdp: DeepSpeed is requested as well"),
        (
            ("--deepspeed",),
            replace(TWO_PROCESSES, engines=("FSDP",), launcher_variables={"FSDP_VERSION": "2"}),
            "the launcher's FSDP: DeepSp",
        ),
        (
            ("--deepspeed", "--zero_stage", "3", "--torch_compile"),
            TWO_PROCESSES,
            "--torch_compile: ZeRO stage 3 gathers",
        ),
        (
            ("--deepspeed", "--zero_stage", "3"),
            replace(TWO_PROCESSES, dynamo_backend="INDUCTOR"),
            "ZeRO stage 3 gathers",
        ),
        (("--deepspeed", "--tp_size", "2"), TWO_PROCESSES, "--tp_size 2: not supported with DeepSpeed"),
        (
            ("--deepspeed",),
            replace(TWO_PROCESSES, device_type="cuda", mixed_precision="fp16"),
            "--mixed_precision fp16: not supported",
        ),
        (
            ("--deepspeed", "--zero_stage", "2"),
            build_launcher_environment(ZERO_STAGE="3"),
            "--zero_stage is 2; accelerate's zero_stage is 3; set it once",
        ),
        (
            (),
            build_launcher_environment(ACCELERATE_GRADIENT_CLIPPING="0.5"),
            "gradient_clipping is 0.5, but --max_grad_norm is 1.0",
        ),
        ((), build_launcher_environment(MOE_LAYER_CLS_NAMES="Experts"), "deepspeed_moe_layer_cls_names: no model here"),
        ((), build_launcher_environment(CONFIG_FILE="/nowhere.json"), "/nowhere.json: DeepSpeed's file cannot be read"),
    ],
)
def test_incompatible_deepspeed_settings_are_refused_before_the_rendezvous(flags, world, expected):
    world = replace(world, machine=replace(world.machine, device_count=2))
    lines = format_lines(validate_distributed(parse_flags(*flags, world=world), world))
    (problem,) = [line for line in lines if expected in line]
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("flags", "content", "expected"),
    [
        ((), {"optimizer": {"type": "AdamW"}}, "optimizer: not supported in DeepSpeed's file; remove it, set"),
        ((), {"bf16": {"enabled": True}}, "bf16 enables bf16, but mixed_precision is no"),
        (("--mixed_precision", "bf16"), {"torch_autocast": {"enabled": True, "dtype": "float16"}}, "enables fp16"),
        ((), {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4, but --gradient_accumulation_steps"),
        ((), {"gradient_clipping": 0.1}, "gradient_clipping is 0.1, but --max_grad_norm is 1.0"),
        (
            ("--deepspeed", "--zero_stage", "1"),
            {"zero_optimization": {"stage": 3}},
            "zero_optimization.stage is 3; set it once",
        ),
        ((), {"zero_optimization": {"offload_optimizer": {"device": "auto"}}}, "zero_optimization.stage is missing"),
        (
            (),
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "offload_optimizer.ratio: a split optimizer state is not supported",
        ),
        ((), {"aio": {"use_gds": True}}, "aio.use_gds: weights are read through host memory here; remove it"),
        ((), {"zero_optimization": []}, "not a DeepSpeed config"),
    ],
)
def test_a_config_file_that_contradicts_the_options_is_refused(flags, content, expected, write_deepspeed_config):
    world = write_deepspeed_config(**{"zero_optimization": {"stage": 1}, **content})
    (problem,) = format_lines(validate_deepspeed(parse_flags(*flags, world=world), world))
    assert expected in problem


def test_nvme_settings_are_passed_on(write_deepspeed_config, tmp_path):
    part = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 7, "buffer_size": 10**8, "max_in_cpu": 10**9}
    aio = {"block_size": 262144, "queue_depth": 32}
    world = write_deepspeed_config(zero_optimization={"stage": 3, "offload_param": part}, aio=aio)
    settings = resolve_deepspeed(parse_flags(world=world).deepspeed, world)
    handed = settings.build_config(pin_memory=False)

    assert [*validate_deepspeed(parse_flags(world=world), world)] == []
    assert (settings.offload_param_device, settings.offload_param_path) == ("nvme", str(tmp_path))
    assert handed["zero_optimization"]["offload_param"] == {**part, "pin_memory": False} and handed["aio"] == aio
    assert "model offloaded to NVMe" in settings.format_summary(2)


def test_what_full_training_keeps_in_files_is_host_memory_to_deepspeed_and_not_pinned(tmp_path, write_deepspeed_config):
    part = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": True, "buffer_count": 4}
    zero = {"stage": 3, "offload_optimizer": part, "offload_param": {"device": "cpu", "pin_memory": True}}
    launched = {"ZERO_STAGE": "3", "OFFLOAD_OPTIMIZER_DEVICE": "nvme", "OFFLOAD_OPTIMIZER_NVME_PATH": str(tmp_path)}
    of_file, of_launcher = write_deepspeed_config(zero_optimization=zero), build_launcher_environment(**launched)
    for world in (of_file, of_launcher):
        config = parse_flags("--train", "full", world=world)
        assert format_lines(validate_deepspeed(config, world)) == []
        settings = resolve_deepspeed(config.deepspeed, world)
        assert settings.uses_files and settings.offload_optimizer_path == str(tmp_path)
        handed = settings.keep_in_host_memory().build_config(pin_memory=False)["zero_optimization"]
        assert (handed["offload_optimizer"]["device"], handed["offload_optimizer"]["pin_memory"]) == ("cpu", False)
        if world is of_file:
            assert handed["offload_param"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize("name", ["", "AdamW", "SGDNesterov", "lion", "RMSprop"])
def test_elementwise_optimizers_can_be_sharded(name):
    optim = parse_flags("--optimizer_type", name, world=World()).optim
    assert not [*validate_elementwise_optimizer(optim, "DeepSpeed")]


@pytest.mark.parametrize("name", ["Adafactor", "Prodigy", "CAME", "AdamW8bit", "Muon", "AdamWScheduleFree"])
def test_other_optimizers_are_refused_with_alternatives(name):
    optim = parse_flags("--optimizer_type", name, world=World()).optim
    (problem,) = format_lines(validate_elementwise_optimizer(optim, "DeepSpeed"))
    assert problem.startswith(f"--optimizer_type {name}: needs whole tensors") and "or --fsdp" in problem


def test_a_lock_that_a_killed_compilation_left_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    _warn_of_lock("async_io")
    assert not caplog.messages
    (tmp_path / "async_io" / "lock").touch()
    _warn_of_lock("async_io")
    assert caplog.messages[0].startswith(f"{tmp_path}/async_io/lock is there: waiting for another process to compile")


@pytest.mark.slow
def test_a_run_fails_for_such_an_optimizer_and_for_unknown_zero_settings(tmp_path, write_deepspeed_config):
    (tmp_path / "data.toml").write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{tmp_path}'\n")
    flags = ("--dataset_config", str(tmp_path / "data.toml"), "--output_dir", str(tmp_path / "out"))
    with pytest.raises(AssertionError, match="DeepSpeed shards them over processes; use AdamW"):
        run_on_ranks(1, train, *flags, "--deepspeed", "--optimizer_type", "Adafactor")

    world = write_deepspeed_config(zero_optimization={"stage": 3, "stage3_max_live_parameter": 5})
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", **world.launcher_variables}
    with pytest.raises(AssertionError, match=r"zero_optimization\.stage3_max_live_parameter: Extra inputs"):
        run_on_ranks(1, train, *flags, environment=environment)
