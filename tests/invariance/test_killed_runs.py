"""A run that is killed resumes to the same result, with FSDP, HSDP and ZeRO.

``tests/support/killed_runs.py`` does this with launched runs at random moments.
"""

import json
from pathlib import Path

import pytest
from killed_runs import compare, train_and_kill
from one_result import CPU_OFFLOAD, write_even_dataset
from rank_processes import run_on_ranks
from training_runs import train

STEPS, KILLED_AT = 6, 3
"""Checkpoints are saved after steps 2 and 4; the kill comes between backward and optimizer step of step 4."""


def build_flags(data: Path, folder: Path, batch: int, *more: str) -> tuple[str, ...]:
    return (
        "--pretrained_model_name_or_path",
        "random:flux:tiny",
        "--dataset_config",
        str(data),
        "--output_dir",
        str(folder),
        "--train_batch_size",
        str(batch),
        "--max_train_steps",
        str(STEPS),
        *(
            "--network_dim 2 --learning_rate 1e-2 --ema_decay 0.9 --save_every_n_steps 2 --save_state "
            "--mixed_precision no --auto_resume"
        ).split(),
        *more,
    )


ZERO = ("--deepspeed", "--zero_stage")
DEEPSPEED_CONFIG = {"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0}}
"""Without parameter reuse: tracing it takes long, and all weights of a tiny model are reused soon."""
CASES = [
    ("ZeRO 3", 2, (*ZERO, "3"), (1,)),
    ("FSDP", 2, ("--fsdp",), (0, 1)),
    ("ZeRO 3", 2, (*ZERO, "3"), (0, 1)),
    ("ZeRO 2", 2, (*ZERO, "2"), (0,)),
    ("ZeRO 3 in host memory", 2, (*ZERO, "3", *CPU_OFFLOAD), (0,)),
    ("HSDP", 4, ("--fsdp", "--dp_replicate_size", "2"), (2,)),
]


@pytest.mark.daily
@pytest.mark.parametrize(
    ("name", "ranks", "options", "victims"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_resume_after_kill_gives_bitwise_equal_weights_state_and_metrics(name, ranks, options, victims, tmp_path):
    if name.startswith("ZeRO"):
        pytest.importorskip("deepspeed")
    data, environment = write_even_dataset(tmp_path), {}
    if name == "ZeRO 3":
        (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED_CONFIG))
        environment = {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json"),
        }
    uninterrupted, killed = ((tmp_path / name) for name in ("whole", "killed"))
    run_on_ranks(ranks, train, *build_flags(data, uninterrupted, 4 // ranks, *options), environment=environment)
    with pytest.raises(AssertionError):
        run_on_ranks(
            ranks,
            train_and_kill,
            victims,
            KILLED_AT,
            *build_flags(data, killed, 4 // ranks, *options),
            environment=environment,
        )
    checkpoints = {path.name for path in killed.glob("*-state")}
    assert checkpoints == {"lora-step00000002-state"}, "the last checkpoint, and no incomplete one"
    run_on_ranks(ranks, train, *build_flags(data, killed, 4 // ranks, *options), environment=environment)

    assert compare(uninterrupted, killed) == (0.0, True, True)
