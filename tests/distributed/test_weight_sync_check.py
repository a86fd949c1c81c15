"""Weights that differ between ranks are detected before they are saved, and the rank is reported."""

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch
from rank_processes import run_on_ranks
from training_runs import write_images

from library.training.callbacks import hash_tensors


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    dataset = write_images(tmp_path_factory.mktemp("same"), {(64, 64): 4})
    flags = (
        "--pretrained_model_name_or_path random:sd1:tiny --network_dim 2 --max_train_steps 8 --save_every_n_steps 3 "
        "--save_state --mixed_precision no --max_data_loader_n_workers 0"
    )
    return ["--dataset_config", str(dataset), *flags.split()]


def train_with_flipped_bit(flipped_rank: int, flip_step: int, *words: str) -> tuple[int, str, int]:
    """Flip a bit of one weight on one rank after a step; return exit code, stderr, and the number of comparisons."""
    from library.cli import main
    from library.optim import optimizers
    from library.training import callbacks

    build_optimizer, steps, looks = optimizers.build_optimizer, [], []

    def at_optimizer(*arguments, **named):
        optimizer = build_optimizer(*arguments, **named)
        original = optimizer.step

        def step(*more, **named):
            original(*more, **named)
            steps.append(1)
            if int(os.environ["RANK"]) == flipped_rank and len(steps) == flip_step:
                optimizer.param_groups[0]["params"][-1].data.view(torch.int32).view(-1)[-1] ^= 1 << 12

        optimizer.step = step
        return optimizer

    optimizers.build_optimizer = at_optimizer
    real = callbacks.hash_tensors
    callbacks.hash_tensors = lambda tensors: looks.append(1) or real(tensors)
    with contextlib.redirect_stderr(io.StringIO()) as text:
        code = main([*words])
    return code, text.getvalue(), len(looks)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("ranks", "more", "detected_step", "last"),
    [
        pytest.param(3, [], 6, 3, marks=pytest.mark.slow),
        (2, ["--check_sync_every_n_steps", "2"], 4, 3),
    ],
)
def test_one_different_bit_on_one_rank_stops_the_run_before_saving(data, tmp_path, ranks, more, detected_step, last):
    flipped_rank = ranks - 1
    ends = run_on_ranks(ranks, train_with_flipped_bit, flipped_rank, 4, *data, "--output_dir", str(tmp_path), *more)
    assert [code for code, _, _ in ends] == [2] * ranks, ends
    message = "".join(text for _, text, _ in ends)
    other_ranks = "rank 0" if ranks == 2 else "the other 2"
    assert message.count("differ from those of") == 1
    assert (
        f"after step {detected_step} the weights of rank {flipped_rank} (on {os.uname().nodename}) differ from those of {other_ranks}"
        in message
    )
    assert f"after the check at step {last}, where all ranks were equal" in message and "Traceback" not in message
    assert sorted(path.name for path in Path(tmp_path).iterdir() if "step" in path.name) == [
        "lora-step00000003-state",
        "lora-step00000003.safetensors",
    ]


def test_weights_are_compared_at_the_start_and_before_each_save(data, tmp_path):
    ends = run_on_ranks(2, train_with_flipped_bit, 9, 0, *data, "--output_dir", str(tmp_path))
    assert [(code, looks) for code, _, looks in ends] == [(0, 4)] * 2, ends
    assert (tmp_path / "lora.safetensors").is_file()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_hash_depends_on_every_bit_and_its_position(kind):
    one = [torch.arange(6, dtype=kind).view(2, 3), torch.tensor(3, dtype=kind)]
    assert hash_tensors(one) == hash_tensors([item.clone() for item in one])
    for position in range(6):
        other = one[0].clone()
        other.view(-1)[position] += 0.03125
        assert hash_tensors([other, one[1]]) != hash_tensors(one)
    assert hash_tensors([one[0].T.contiguous().view(2, 3), one[1]]) != hash_tensors(one)
    assert hash_tensors([-0.0 * one[0], one[1]]) != hash_tensors([0.0 * one[0], one[1]])
