"""Full training with sharded weights (FSDP2, HSDP): equal to one process, and a part of everything on each rank."""

from pathlib import Path

import pytest
import torch
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import even_dataset, train

__all__ = ["even_dataset"]  # a fixture

SETTINGS = (
    "--train full --max_train_steps 3 --learning_rate 0.03 --optimizer_type SGD --seed 3 --train_text_encoder"
    " --mixed_precision no"
).split()
FAMILIES = ("sd1", "flux")
BATCHES = {1: ("2", "2"), 2: ("1", "2"), 4: ("1", "1")}
"""The batch size and the accumulation steps that give four images in each step, by the number of ranks."""


def train_full(dataset: Path, folder: Path, ranks: int, *flags: str) -> Path:
    """Train in full on ``ranks`` ranks with four images in each step; return the folder of the model."""
    batch, accumulation = BATCHES[ranks]
    split = ("--train_batch_size", batch, "--gradient_accumulation_steps", accumulation)
    run_on_ranks(ranks, train, *SETTINGS, *split, "--dataset_config", str(dataset), "--output_dir", str(folder), *flags)
    return folder / "lora"


def read_weights(model: Path) -> dict[str, torch.Tensor]:
    """Read the weights of all components of a model."""
    found = {}
    for path in sorted(model.rglob("*.safetensors")):
        found |= {f"{path.parent.name}.{name}": tensor for name, tensor in load_file(path).items()}
    return found


def max_difference(one: Path, other: Path) -> float:
    first, second = read_weights(one), read_weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.fixture(scope="module")
def whole_models(even_dataset, tmp_path_factory):
    """The model that one process trains, by family."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        name: train_full(even_dataset, folder / name, 1, "--pretrained_model_name_or_path", f"random:{name}:tiny")
        for name in FAMILIES
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, "--fsdp"),
        (2, "--fsdp --fsdp_offload_params --gradient_checkpointing --no-fsdp_reshard_after_forward"),
        (4, "--fsdp --dp_replicate_size 2"),
    ],
)
def test_sharded_training_gives_the_model_of_one_process(family, ranks, flags, even_dataset, whole_models, tmp_path):
    model = f"--pretrained_model_name_or_path random:{family}:tiny".split()
    sharded = train_full(even_dataset, tmp_path, ranks, *model, *flags.split())

    assert max_difference(whole_models[family], sharded) < 1e-5
