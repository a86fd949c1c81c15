"""The learning rate is a function of the optimizer step, for any batch split and any way to set the length of a run."""

import json
import math
import os
from pathlib import Path

import pytest
from rank_processes import find_free_port, run_on_ranks
from training_runs import train, write_images

PEAK, STEPS, WARMUP_STEPS, MIN_LR_RATIO = 2e-3, 6, 2, 0.1


@pytest.fixture(scope="module")
def twelve_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("twelve"), {(64, 64): 12})


def expected_rates() -> list[float]:
    """Warmup from 0 to the peak, then cosine decay to a tenth of it."""
    rising = [PEAK * step / WARMUP_STEPS for step in range(WARMUP_STEPS)]
    falling = [(step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS) for step in range(WARMUP_STEPS, STEPS)]
    return [
        *rising,
        *(PEAK * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * (1 + math.cos(math.pi * part)) / 2) for part in falling),
    ]


def read_rates(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "lora.metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["lr/unet"]) for line in lines if "lr/unet" in line]


def train_with_each_setting(folder: Path, dataset: Path, ranks: int, ports: list[int]) -> None:
    """Train four runs in sequence, each with its own process group."""
    from accelerate.state import AcceleratorState, GradientState

    for (name, accumulation, length), port in zip(SETTINGS, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        train(
            "--dataset_config",
            str(dataset),
            "--output_dir",
            str(folder / name),
            f"--max_train_{length}",
            str(STEPS),
            "--train_batch_size",
            str(12 // (ranks * accumulation)),
            "--gradient_accumulation_steps",
            str(accumulation),
            "--learning_rate",
            str(PEAK),
            "--lr_scheduler",
            "cosine_with_min_lr",
            "--lr_scheduler_min_lr_ratio",
            str(MIN_LR_RATIO),
            "--lr_warmup_steps",
            str(WARMUP_STEPS),
        )
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


SETTINGS = [
    (f"{length}-{accumulation}", accumulation, length) for accumulation in (1, 3) for length in ("steps", "epochs")
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))])
def test_learning_rates_are_the_same_for_any_batch_split_and_any_way_to_set_the_length(ranks, twelve_images, tmp_path):
    run_on_ranks(ranks, train_with_each_setting, tmp_path, twelve_images, ranks, [find_free_port() for _ in SETTINGS])
    for name, _, _ in SETTINGS:
        actual = read_rates(tmp_path / name)

        assert [step for step, _ in actual] == list(range(1, STEPS + 1))
        assert [rate for _, rate in actual] == pytest.approx(expected_rates(), rel=1e-9)
        assert actual[WARMUP_STEPS][1] == PEAK == max(rate for _, rate in actual)
