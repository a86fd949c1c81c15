"""Full training with every layout of several GPUs, compared with one process, and resumed on another layout.

``PYTHONPATH=.:tests:tests/support python tests/support/full_one_result.py flux sd1 -- "FSDP 2 x TP 2"`` prints for each
family and layout: the largest difference of a weight after 8 steps of SGD in float32, whether a run that is interrupted
after 4 steps and resumed on the same layout is equal to the bit, and the difference if one process resumes it.  Options
after the layouts are those of all runs, such as ``--mixed_precision bf16 --full_bf16 --optimizer_type AdamW``.
"""

import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from one_result import write_even_dataset
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import train

STEPS, INTERRUPTED_AT = 8, 4
SETTINGS = (
    f"--train full --max_train_steps {STEPS} --learning_rate 0.5 --optimizer_type SGD --seed 3 --train_text_encoder"
    f" --mixed_precision no --max_grad_norm 1 --save_state --save_every_n_steps {INTERRUPTED_AT}"
).split()
REFERENCE = "1 process"
LAYOUTS = {
    REFERENCE: (1, 4, 1, ""),
    "DDP 2": (2, 2, 1, ""),
    "FSDP 2": (2, 2, 1, "--fsdp"),
    "HSDP 2 x 2": (4, 1, 1, "--fsdp --dp_replicate_size 2"),
    "ZeRO 1": (2, 2, 1, "--deepspeed --zero_stage 1"),
    "ZeRO 2": (2, 2, 1, "--deepspeed --zero_stage 2 --offload_optimizer_device cpu"),
    "ZeRO 3": (2, 2, 1, "--deepspeed --zero_stage 3 --offload_optimizer_device cpu --offload_param_device cpu"),
    "TP 2": (2, 4, 1, "--tp_size 2"),
    "CP 2": (2, 4, 1, "--cp_size 2"),
    "FSDP 2 x TP 2": (4, 2, 1, "--fsdp --tp_size 2"),
    "TP 2 x CP 2": (4, 4, 1, "--tp_size 2 --cp_size 2"),
    "PP 2": (2, 1, 4, "--pp_size 2"),
    "DP 2 x PP 2": (4, 1, 2, "--pp_size 2"),
}
"""Ranks, batch size, accumulation steps, options: four images in each step."""


def train_layout(name: str, family: str, dataset: Path, folder: Path, *more: str) -> Path:
    """Train in this layout, or resume; return the folder of the model."""
    ranks, batch, accumulation, flags = LAYOUTS[name]
    words = ("--pretrained_model_name_or_path", f"random:{family}:tiny", "--dataset_config", str(dataset))
    sizes = ("--train_batch_size", str(batch), "--gradient_accumulation_steps", str(accumulation))
    run_on_ranks(ranks, train, *SETTINGS, *words, *sizes, *flags.split(), "--output_dir", str(folder), *more)
    return folder / "lora"


def read_weights(model: Path) -> dict[str, torch.Tensor]:
    """Read the weights of all components of a model."""
    found = {}
    for path in sorted(model.rglob("*.safetensors")):
        found |= {f"{path.parent.name}.{name}": tensor for name, tensor in load_file(path).items()}
    return found


def compute_difference(one: Path, other: Path) -> float:
    """Compute the largest difference of a weight."""
    first, second = read_weights(one), read_weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def resume_with(name: str, family: str, dataset: Path, whole: Path, folder: Path, *more: str) -> Path:
    """Resume a copy of a run at its checkpoint in the middle."""
    ends = shutil.ignore_patterns("lora", "lora-state", "lora.*")
    shutil.copytree(whole.parent, folder, ignore=ends)
    return train_layout(name, family, dataset, folder, *more, "--auto_resume")


def compare(family: str, names: Collection[str], more: Sequence[str] = ()) -> None:
    """Print a line for each layout."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        dataset = write_even_dataset(folder)
        reference = train_layout(REFERENCE, family, dataset, folder / "reference", *more)
        base = train_layout(REFERENCE, family, dataset, folder / "base", *more, "--learning_rate", "1e-12")
        sys.stdout.write(f"{family}: one process changed weights by up to {compute_difference(base, reference):.2g}\n")
        for number, name in enumerate(names):
            own = folder / str(number)
            model = train_layout(name, family, dataset, own / "whole", *more)
            again = resume_with(name, family, dataset, model, own / "again", *more)
            single = resume_with(REFERENCE, family, dataset, model, own / "single", *more)
            onwards = resume_with(name, family, dataset, reference, own / "onwards", *more)
            differences = [compute_difference(*pair) for pair in ((reference, model), (model, again))]
            differences += [compute_difference(reference, each) for each in (single, onwards)]
            sys.stdout.write(
                f"{family}, {name}: {differences[0]:.1e}; resumed {differences[1]:.1e}; by one process"
                f" {differences[2]:.1e}; one process resumed by it {differences[3]:.1e}\n"
            )
            sys.stdout.flush()
            shutil.rmtree(own)


if __name__ == "__main__":
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    first = next((index for index, word in enumerate(words) if word.startswith("--") and index > cut), len(words))
    for family in words[:cut] or ("sd1", "sdxl", "flux", "z_image"):
        selected = [word for word in words[cut + 1 : first] if word in LAYOUTS]
        compare(family, selected or [name for name in LAYOUTS if name != REFERENCE], words[first:])
