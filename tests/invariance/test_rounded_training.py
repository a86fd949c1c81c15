"""Full training in bf16 with stochastic rounding: every layout of several GPUs rounds each element in the same way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nan_runs import train_with_nan_loss
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import even_dataset

from library.adapters.component_key_names import clean_parameter_name
from library.optim.stochastic_rounding import hash_positions
from library.parallel.sharded_weights import get_local_shard
from library.randomness import derive_seed
from library.training import nan_and_oom_handling

__all__ = ["even_dataset"]  # a fixture

SETTINGS = (
    "--pretrained_model_name_or_path random:flux:tiny --train full --mixed_precision bf16 --full_bf16"
    " --max_train_steps 4 --learning_rate 1e-3 --optimizer_type AdamW --seed 3 --ema_decay 0.9"
).split()
NAN_STEP = 1


def train_with_known_gradients(*flags: str) -> None:
    """Train with a step whose loss is NaN on the last rank, and gradients that depend on weight, place and step only.

    Those of a real step are rounded to bf16 by each rank, so that layouts differ before anything is updated.
    """
    should_step = nan_and_oom_handling.NanGuard.should_step

    def set_gradients(guard: Any, run: Any, batches: Any, metrics: Any) -> bool:
        decision = should_step(guard, run, batches, metrics)
        for name, weight in run.strategy.iter_trained_weights(run.model) if decision else ():
            key = derive_seed(5, clean_parameter_name(name), run.state.step)
            bits = hash_positions(run.strategy.list_positions(weight), key) & 0xFFFF
            gradient = get_local_shard(weight.grad)
            gradient.copy_((bits / 2**16 - 0.5).view(gradient.shape))
        return decision

    nan_and_oom_handling.NanGuard.should_step = set_gradients
    last_rank = torch.distributed.get_world_size() - 1 if torch.distributed.is_initialized() else 0
    train_with_nan_loss(last_rank, NAN_STEP, False, *flags)


def train_layout(dataset: Path, folder: Path, ranks: int, *flags: str) -> dict[str, torch.Tensor]:
    """Train with four images in each step; return the weights and their moving averages."""
    words = ("--dataset_config", str(dataset), "--output_dir", str(folder), *flags)
    run_on_ranks(ranks, train_with_known_gradients, *SETTINGS, *words)
    names = ("lora", "lora-ema")
    paths = [path for name in names for path in sorted((folder / name / "transformer").glob("*.safetensors"))]
    return {f"{path.parent.parent.name}.{key}": value for path in paths for key, value in load_file(path).items()}


@pytest.fixture(scope="module")
def one_process(even_dataset, tmp_path_factory):
    return train_layout(even_dataset, tmp_path_factory.mktemp("one"), 1, "--train_batch_size", "4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, "--train_batch_size 1 --gradient_accumulation_steps 4"),
        (2, "--train_batch_size 1 --gradient_accumulation_steps 2"),
        (2, "--train_batch_size 1 --gradient_accumulation_steps 2 --fsdp"),
        (2, "--train_batch_size 2 --gradient_accumulation_steps 2 --tp_size 2"),
        (4, "--train_batch_size 2 --fsdp --tp_size 2"),
    ],
)
def test_equal_gradients_give_equal_bits_in_every_layout(ranks, flags, even_dataset, one_process, tmp_path):
    found = train_layout(even_dataset, tmp_path, ranks, *flags.split())

    assert found.keys() == one_process.keys()
    assert [name for name in found if not torch.equal(found[name], one_process[name])] == []
    assert {each.dtype for name, each in found.items() if name.startswith("lora.")} == {torch.bfloat16}
