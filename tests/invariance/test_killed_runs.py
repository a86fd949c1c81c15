"""A run that is killed without warning goes on to the same result, however its model is spread.

``kills.py`` does it with launched runs at random moments.
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
"""States are kept after the second and the fourth step; it is killed with the next one half done."""


def dies(victims: tuple[int, ...], *flags: str) -> None:
    """A run in which processes are killed between the gradients of a step and its update."""
    from library.training import step_guards

    honest = step_guards.NanGuard.should_step

    def may_learn_from(watch, run, work, figures) -> bool:
        if run.state.step == KILLED_AT and run.strategy.comm.rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(watch, run, work, figures)

    step_guards.NanGuard.should_step = may_learn_from
    train(*flags)


def flags(data: Path, folder: Path, batch: int, *more: str) -> tuple[str, ...]:
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
        "--network_dim",
        "2",
        "--learning_rate",
        "1e-2",
        "--ema_decay",
        "0.9",
        "--save_every_n_steps",
        "2",
        "--save_state",
        "--mixed_precision",
        "no",
        "--auto_resume",
        *more,
    )


ZERO = ("--deepspeed", "--zero_stage")
FORGETFUL = {"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0}}
"""Which weights come again soon takes long to find out, and of a tiny model all do."""
WAYS = [
    ("ZeRO 3", 2, (*ZERO, "3"), (1,)),
    ("FSDP", 2, ("--fsdp",), (0, 1)),
    ("ZeRO 3", 2, (*ZERO, "3"), (0, 1)),
    ("ZeRO 2", 2, (*ZERO, "2"), (0,)),
    ("ZeRO 3 in host memory", 2, (*ZERO, "3", *CPU_OFFLOAD), (0,)),
    ("HSDP", 4, ("--fsdp", "--dp_replicate_size", "2"), (2,)),
]


@pytest.mark.parametrize(
    ("name", "ranks", "more", "victims"), [WAYS[0], *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS[1:])]
)
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(name, ranks, more, victims, tmp_path):
    if name.startswith("ZeRO"):
        pytest.importorskip("deepspeed")
    data, launched = write_even_dataset(tmp_path), {}
    if name == "ZeRO 3":
        (tmp_path / "ds.json").write_text(json.dumps(FORGETFUL))
        launched = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")}
    whole, killed = ((tmp_path / word) for word in ("whole", "killed"))
    run_on_ranks(ranks, train, *flags(data, whole, 4 // ranks, *more), environment=launched)
    with pytest.raises(AssertionError):
        run_on_ranks(ranks, dies, victims, *flags(data, killed, 4 // ranks, *more), environment=launched)
    states = {path.name for path in killed.glob("*-state")}
    assert states == {"lora-step00000002-state"}, "the state of the last reading, and nothing half written"
    run_on_ranks(ranks, train, *flags(data, killed, 4 // ranks, *more), environment=launched)

    assert compare(whole, killed) == (0.0, True, True)
