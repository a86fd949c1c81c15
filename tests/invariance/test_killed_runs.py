"""A run that is killed resumes to the same result, with FSDP, HSDP and ZeRO.

``tests/support/killed_runs.py`` does this with launched runs at random moments.
"""

import json
import os
import signal
from pathlib import Path

import pytest
from killed_runs import compare
from one_result import CPU_OFFLOAD, write_even_dataset
from rank_processes import run_on_ranks
from training_runs import train

STEPS, KILLED_AT = 6, 3
"""Checkpoints are saved after steps 2 and 4; the kill comes between backward and optimizer step of step 4."""


def train_and_kill(victims: tuple[int, ...], *build_flags: str) -> None:
    """Train, and kill these ranks between the backward pass and the optimizer step of a step.

    The checkpoint before that step is written first, which on a slow machine takes longer than a step.
    """
    from library.training import nan_and_oom_handling
    from library.training.checkpoint import SaveCheckpoint

    should_step = nan_and_oom_handling.NanGuard.should_step

    def kill_or_check(guard, run, batches, metrics) -> bool:
        if run.state.step == KILLED_AT and run.strategy.comm.rank in victims:
            for callback in run.callbacks:
                if isinstance(callback, SaveCheckpoint):
                    callback._join_writer()
            os.kill(os.getpid(), signal.SIGKILL)
        return should_step(guard, run, batches, metrics)

    nan_and_oom_handling.NanGuard.should_step = kill_or_check
    train(*build_flags)


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
            ranks, train_and_kill, victims, *build_flags(data, killed, 4 // ranks, *options), environment=environment
        )
    checkpoints = {path.name for path in killed.glob("*-state")}
    assert checkpoints == {"lora-step00000002-state"}, "the last checkpoint, and no incomplete one"
    run_on_ranks(ranks, train, *build_flags(data, killed, 4 // ranks, *options), environment=environment)

    assert compare(uninterrupted, killed) == (0.0, True, True)
