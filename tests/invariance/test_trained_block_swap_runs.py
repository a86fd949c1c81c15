"""Full training with swapped blocks (``--blocks_to_swap``) is that without: weights, EMA, previews, resumed runs."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import even_dataset, train, write_prompts

__all__ = ["even_dataset"]  # a fixture

SETTINGS = "--train full --fused_backward_pass --max_train_steps 4 --learning_rate 1e-3 --seed 3".split()
SWAPPED = "--blocks_to_swap 4 --block_swap_ring_size 2".split()
RUNS = {
    "everything in bf16": "--full_bf16 --mixed_precision bf16 --optimizer_type Adafactor --optimizer_args"
    " relative_step=False scale_parameter=False --gradient_checkpointing --train_batch_size 2"
    " --gradient_accumulation_steps 2 --train_text_encoder --ema_decay 0.9 --save_every_n_steps 2 --save_state"
    " --validation_split 0.25 --validate_every_n_steps 2 --sample_every_n_steps 4",
    "AdamW without checkpointing": "--pretrained_model_name_or_path random:flux:tiny --train_batch_size 4"
    " --mixed_precision bf16 --max_grad_norm 0",
}


def run(dataset: Path, folder: Path, *flags: str) -> Path:
    folder.mkdir(exist_ok=True)
    output = ("--dataset_config", str(dataset), "--output_dir", str(folder))
    if "--sample_every_n_steps" in flags:
        output = (*output, "--sample_prompts", write_prompts(folder))
    run_on_ranks(1, train, *SETTINGS, *flags, *output)
    return folder


def find_differences(one: Path, other: Path) -> list[str]:
    """List the weights and the pictures that differ, or that one of both has only."""
    contents = []
    for folder in (one, other):
        found = {}
        for path in (path for name in ("lora", "lora-ema") for path in sorted((folder / name).rglob("*.safetensors"))):
            found |= {f"{path.relative_to(folder)}:{name}": value for name, value in load_file(path).items()}
        found |= {re.sub(r"_\d{14}_", "", path.name): path.read_bytes() for path in (folder / "sample").glob("*.png")}
        contents.append(found)
    first, second = contents
    assert len(first) > 50
    same = {
        name
        for name in first.keys() & second.keys()
        if (torch.equal if isinstance(first[name], torch.Tensor) else bytes.__eq__)(first[name], second[name])
    }
    return sorted((first.keys() | second.keys()) - same)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_swapped_blocks_is_equal_to_the_bit_and_so_is_a_resumed_one(name, even_dataset, tmp_path):
    flags = RUNS[name].split()
    plain = run(even_dataset, tmp_path / "plain", *flags)
    swapped = run(even_dataset, tmp_path / "swapped", *flags, *SWAPPED)
    assert find_differences(plain, swapped) == []
    if "--save_state" in flags:
        shutil.copytree(swapped, tmp_path / "killed", ignore=shutil.ignore_patterns("lora", "lora-ema", "lora-state"))
        resumed = run(even_dataset, tmp_path / "killed", *flags, *SWAPPED, "--auto_resume")
        assert find_differences(swapped, resumed) == []
        assert len(list((swapped / "sample").glob("*.png"))) == 2
