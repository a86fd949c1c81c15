"""A run of twenty steps has the recorded losses, which change only when training is meant to change.

To change them: say why in CHANGELOG.md, then run ``python tests/golden/test_golden_losses.py`` to record new ones.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden_losses.json"
FLAGS = [
    "--dataset_config",
    str(ROOT / "dataset_configs" / "demo.toml"),
    *(
        "--max_train_steps 20 --network_dim 8 --network_alpha 3 --learning_rate 2e-3 --network_train_unet_only "
        "--lr_scheduler cosine --lr_warmup_steps 3 --gradient_accumulation_steps 2 --seed 11 --flip_aug "
        "--shuffle_caption --optimizer_args weight_decay=0.1 --mixed_precision no --quiet "
        "--max_data_loader_n_workers 0"
    ).split(),
]


def record_losses(*flags: str) -> list[float]:
    """The loss of each step of a run."""
    from library.config import parse_config
    from library.parallel.ddp import DDPStrategy
    from library.training.run import run_training

    recorded: list[float] = []
    compute_gradients = DDPStrategy.compute_gradients

    def gradients(self, *arguments):
        loss = compute_gradients(self, *arguments)
        recorded.append(float(loss))
        return loss

    DDPStrategy.compute_gradients = gradients
    run_training(parse_config(flags).require_valid())
    return recorded


def test_losses_equal_those_of_the_golden_run(tmp_path):
    from rank_processes import run_on_ranks

    (actual,) = run_on_ranks(1, record_losses, *FLAGS, "--output_dir", str(tmp_path))

    assert actual == pytest.approx(json.loads(GOLDEN.read_text()), rel=2e-4)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps([round(loss, 6) for loss in record_losses(*FLAGS, "--output_dir", folder)]) + "\n")
