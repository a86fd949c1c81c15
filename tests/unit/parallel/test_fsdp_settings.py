"""FSDP settings of options and launcher are resolved to one configuration, or refused."""

import os
from dataclasses import replace
from unittest.mock import patch

import pytest
from launcher_cases import TRAIN, check_launch_command, use_environment, write_accelerate_config
from problem_lines import format_lines

from library.config import parse_config
from library.distributed.fsdp_settings import (
    FSDP_OPTION_VARIABLES,
    IGNORED_VARIABLES,
    UNSUPPORTED_VARIABLES,
    FSDPSettings,
    find_ignored_fsdp_settings,
    resolve_fsdp,
)
from library.distributed.validate_launch import validate_distributed
from library.distributed.validate_sharding import validate_fsdp
from library.distributed.world import ENGINE_VARIABLES, World

FOUR_PROCESSES = World(world_size=4, local_world_size=4, local_rank=0)
EXPORTED = {
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
"""The variables that ``accelerate launch --use_fsdp --fsdp_version 2`` sets."""
SIZES = {
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    "PARALLELISM_CONFIG_TP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_SIZE": "1",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
}


def parse_flags(*flags: str, world: World):
    """Parse flags in a process that the launcher of ``world`` has started."""
    launched = {key: "true" for key, engine in ENGINE_VARIABLES.items() if engine in world.engines}
    with patch.dict(os.environ, launched):
        return parse_config([*flags]).config


def build_launcher_environment(**variables: str) -> World:
    engines = ("FSDP", "a parallelism config") if any(name.startswith("PARA") for name in variables) else ("FSDP",)
    return replace(FOUR_PROCESSES, engines=engines, launcher_variables={**EXPORTED, **variables})


@pytest.mark.parametrize(
    ("flags", "world", "expected"),
    [
        ((), FOUR_PROCESSES, None),
        (("--no-fsdp",), FOUR_PROCESSES, None),
        ((), replace(FOUR_PROCESSES, launcher_variables=EXPORTED), None),  # leftover variables without an engine
        (("--fsdp",), FOUR_PROCESSES, FSDPSettings(1, 4)),
        (("--fsdp",), World(local_rank=0), FSDPSettings(1, 1)),
        ((), build_launcher_environment(), FSDPSettings(1, 4)),
        (("--fsdp",), build_launcher_environment(), FSDPSettings(1, 4)),
        (
            ("--fsdp", "--fsdp_offload_params", "--no-fsdp_reshard_after_forward"),
            FOUR_PROCESSES,
            FSDPSettings(1, 4, True, False),
        ),
        (
            (),
            build_launcher_environment(FSDP_OFFLOAD_PARAMS="true", FSDP_RESHARD_AFTER_FORWARD="false"),
            FSDPSettings(1, 4, True, False),
        ),
        (("--fsdp_offload_params",), build_launcher_environment(), FSDPSettings(1, 4, True)),
        (("--fsdp", "--dp_replicate_size", "2"), FOUR_PROCESSES, FSDPSettings(2, 2)),
        (("--fsdp", "--dp_shard_size", "4"), FOUR_PROCESSES, FSDPSettings(1, 4)),
        ((), build_launcher_environment(**SIZES), FSDPSettings(2, 2)),
        ((), build_launcher_environment(**{**SIZES, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1"}), FSDPSettings(2, 2)),
        (
            (),
            build_launcher_environment(FSDP_TRANSFORMER_CLS_TO_WRAP="A,B"),
            FSDPSettings(1, 4, block_classes=("A", "B")),
        ),
        (
            ("--gradient_checkpointing",),
            build_launcher_environment(FSDP_ACTIVATION_CHECKPOINTING="true"),
            FSDPSettings(1, 4),
        ),
    ],
)
def test_fsdp_options_and_launcher_are_resolved_to_one_configuration(flags, world, expected):
    settings_config = parse_flags(*flags, world=world)

    assert resolve_fsdp(settings_config.sharding, settings_config.parallel.tp_size, world) == expected
    assert (
        format_lines(
            validate_fsdp(settings_config.sharding, settings_config.train, settings_config.parallel.tp_size, world)
        )
        == []
    )
    assert [*find_ignored_fsdp_settings(world)] == []


@pytest.mark.parametrize(
    ("flags", "world", "expected"),
    [
        (("--no-fsdp",), build_launcher_environment(), "--no-fsdp: the launcher requests FSDP"),
        (
            (),
            replace(
                FOUR_PROCESSES,
                engines=("a parallelism config",),
                launcher_variables={"PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"},
            ),
            "parallelism_config_dp_shard_size: no effect without FSDP",
        ),
        (
            ("--no-fsdp_offload_params",),
            build_launcher_environment(FSDP_OFFLOAD_PARAMS="true"),
            "the launcher sets true; set it once",
        ),
        (("--dp_replicate_size", "4"), build_launcher_environment(**SIZES), "the launcher sets 2; set it once"),
        (("--fsdp", "--dp_replicate_size", "3"), FOUR_PROCESSES, "is 3 x 1, but the world size is 4"),
        (("--fsdp", "--dp_replicate_size", "4"), FOUR_PROCESSES, "nothing is sharded"),
        (
            ("--fsdp", "--dp_replicate_size", "2", "--tp_size", "2"),
            FOUR_PROCESSES,
            "2 x tp_size 2 takes all 4 processes",
        ),
        (("--fsdp",), World(), "this is a single one"),
        (("--fsdp", "--on_oom", "recover"), FOUR_PROCESSES, "use --on_oom fail"),
        ((), build_launcher_environment(FSDP_ACTIVATION_CHECKPOINTING="true"), "use --gradient_checkpointing instead"),
        ((), build_launcher_environment(FSDP_VERSION="1"), "use fsdp_version 2"),
        ((), build_launcher_environment(FSDP_SHARDING_STRATEGY="HYBRID_SHARD"), "dp_replicate_size is HYBRID_SHARD"),
        ((), build_launcher_environment(FSDP_AUTO_WRAP_POLICY="SIZE_BASED_WRAP"), "use TRANSFORMER_BASED_WRAP"),
        ((), build_launcher_environment(FSDP_RESHARD_AFTER_FORWARD="SHARD_GRAD_OP"), "write true or false"),
        ((), build_launcher_environment(FSDP_IGNORED_MODULES="vae.*"), "fsdp_ignored_modules vae.*: not supported"),
        (
            (),
            build_launcher_environment(**{**SIZES, "PARALLELISM_CONFIG_TP_SIZE": "2"}),
            "set --tp_size behind the script",
        ),
        (
            (),
            build_launcher_environment(**{**SIZES, "PARALLELISM_CONFIG_CP_SIZE": "2"}),
            "set --cp_size behind the script",
        ),
    ],
)
def test_invalid_fsdp_settings_are_refused_before_the_rendezvous(flags, world, expected):
    (problem,) = format_lines(validate_distributed(parse_flags(*flags, world=world), world))

    assert expected in problem


def test_launcher_settings_without_effect_are_reported():
    remarks = find_ignored_fsdp_settings(
        build_launcher_environment(FSDP_STATE_DICT_TYPE="FULL_STATE_DICT", FSDP_FORWARD_PREFETCH="true")
    )

    assert [remark.rpartition(" has no")[0] for remark in remarks] == [
        "the launcher's fsdp_forward_prefetch true",
        "the launcher's fsdp_state_dict_type FULL_STATE_DICT",
    ]


def test_every_exported_fsdp_variable_is_used_refused_or_reported():
    from argparse import Namespace

    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_extend_env_parallelism_config, prepare_multi_gpu_env

    words = ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--num_machines", "1", "script.py"]
    args = launch_command_parser().parse_args(words)
    words = {name: "x" for name, value in vars(args).items() if name.startswith("fsdp") and value is None}
    args = Namespace(**{**vars(args), **words, "mixed_precision": "no", "dynamo_backend": "no"})
    exported = prepare_extend_env_parallelism_config(args, prepare_multi_gpu_env(args))
    names = {name for name in exported if name.startswith(("FSDP_", "PARALLELISM_CONFIG_"))}
    handled = {
        *UNSUPPORTED_VARIABLES,
        *IGNORED_VARIABLES,
        *(variable for variable, _ in FSDP_OPTION_VARIABLES.values()),
        "FSDP_TRANSFORMER_CLS_TO_WRAP",
        "FSDP_ACTIVATION_CHECKPOINTING",
    }

    assert names - handled <= {
        "PARALLELISM_CONFIG_CP_BACKEND",
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        "PARALLELISM_CONFIG_SP_BACKEND",
    }
    assert {name: value for name, value in exported.items() if EXPORTED.get(name, value) != value} == {}


# the doctor


@pytest.mark.parametrize(
    ("command", "settings", "value", "expected"),
    [
        ("accelerate launch --use_fsdp --num_processes 2 t.py", {}, "true", "use fsdp_version 2"),
        ("accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 t.py", {}, "true", ""),
        ("accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 t.py --no-fsdp", {}, "false", "--no-fsdp"),
        (
            "accelerate launch t.py",
            {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2}},
            "true",
            "",
        ),
        (
            "accelerate launch t.py",
            {
                "distributed_type": "FSDP",
                "num_processes": 4,
                "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
            },
            "true",
            "use TRANSFORMER_BASED_WRAP",
        ),
        ("torchrun --nproc_per_node 4 t.py --fsdp --dp_replicate_size 3", {}, "true", "the world size is 4"),
        ("torchrun --nproc_per_node 4 t.py --fsdp --dp_replicate_size 2", {}, "true", ""),
    ],
)
def test_the_doctor_reports_the_same_problems_for_a_command(command, settings, value, expected, tmp_path, monkeypatch):
    use_environment(monkeypatch, tmp_path, ACCELERATE_USE_CPU="true")
    if settings:
        write_accelerate_config(tmp_path, **settings)
    resolved, problems = check_launch_command(command.replace("t.py", TRAIN))

    assert resolved["use_fsdp"].value == value
    assert expected in problems and bool(problems) == bool(expected)
