"""The same training with every strategy, and the largest difference between the adapters.

``PYTHONPATH=. python tests/support/one_result.py`` prints the whole table; arguments select rows, such as
``flux FSDP HSDP``, and options after them are those of all runs, such as ``--quantize_base nf4``.  The optimizer is SGD: Adam divides by the gradient's size and would hide a wrong scale.
"""

import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library.models.families import FAMILIES

STEPS = 8
BOUNDS = {"no": 1e-4, "bf16": 0.1}
"""Allowed difference of two adapters, relative to the largest value of a tensor; bf16 has three digits."""
DEEP = "sd3_deep"
"""A model with enough blocks for longer pipelines."""
MODELS = ("sdxl", "sd3", "flux", "flux2_klein", "chroma", DEEP)
TEXTS = ("--no-network_train_unet_only",)


@dataclass(frozen=True)
class Layout:
    """A layout that trains on four images per step."""

    ranks: int
    batch: int
    accumulation: int = 1
    flags: tuple[str, ...] = ()


CPU_OFFLOAD = ("--offload_optimizer_device", "cpu", "--offload_param_device", "cpu")
REFERENCE = "1 process x 4"
LAYOUTS: Mapping[str, Layout] = {
    REFERENCE: Layout(1, 4),
    "4 accumulated": Layout(1, 1, 4),
    "DDP 2 x 2": Layout(2, 2),
    "DDP 4 x 1": Layout(4, 1),
    "FSDP 2 x 2": Layout(2, 2, flags=("--fsdp",)),
    "FSDP 2 x 1, 2 accumulated": Layout(2, 1, 2, ("--fsdp",)),
    "FSDP 2 x 2, no reshard": Layout(2, 2, flags=("--fsdp", "--no-fsdp_reshard_after_forward")),
    "FSDP 2 x 2, CPU offload": Layout(2, 2, flags=("--fsdp", "--fsdp_offload_params")),
    "PP 2, 1f1b": Layout(2, 1, 4, ("--pp_size", "2")),
    "PP 2, gpipe": Layout(2, 2, 2, ("--pp_size", "2", "--pp_schedule", "gpipe")),
    "PP 2, interleaved": Layout(2, 1, 4, ("--pp_size", "2", "--pp_schedule", "interleaved")),
    "PP 2 x DP 2": Layout(4, 1, 2, ("--pp_size", "2")),
    "PP 4, 1f1b": Layout(4, 1, 4, ("--pp_size", "4")),
    "PP 4, gpipe": Layout(4, 1, 4, ("--pp_size", "4", "--pp_schedule", "gpipe")),
    "PP 4, interleaved": Layout(4, 1, 4, ("--pp_size", "4", "--pp_schedule", "interleaved")),
    "TP 2": Layout(2, 4, flags=("--tp_size", "2")),
    "TP 2 x DP 2": Layout(4, 2, flags=("--tp_size", "2")),
    "TP 2 x PP 2": Layout(4, 1, 4, ("--tp_size", "2", "--pp_size", "2")),
    "FSDP 2 x TP 2": Layout(4, 2, flags=("--fsdp", "--tp_size", "2")),
    "CP 2": Layout(2, 4, flags=("--cp_size", "2")),
    "CP 2 x DP 2": Layout(4, 2, flags=("--cp_size", "2")),
    "FSDP 2 x CP 2": Layout(4, 2, flags=("--fsdp", "--cp_size", "2")),
    "TP 2 x CP 2": Layout(4, 4, flags=("--tp_size", "2", "--cp_size", "2")),
    "PP 2 x CP 2": Layout(4, 1, 4, ("--pp_size", "2", "--cp_size", "2")),
    "ZeRO 1, 2 x 2": Layout(2, 2, flags=("--deepspeed", "--zero_stage", "1")),
    "ZeRO 2, 2 x 1, 2 accumulated": Layout(2, 1, 2, ("--deepspeed", "--zero_stage", "2")),
    "ZeRO 3, 2 x 2": Layout(2, 2, flags=("--deepspeed", "--zero_stage", "3")),
    "ZeRO 3, 2 x 2, CPU offload": Layout(2, 2, flags=("--deepspeed", "--zero_stage", "3", *CPU_OFFLOAD)),
    "HSDP 2 x 2": Layout(4, 1, flags=("--fsdp", "--dp_replicate_size", "2")),
}


def write_even_dataset(folder: Path) -> Path:
    """Write a dataset of two buckets that divide evenly into steps of four."""
    return write_images(folder, {(96, 64): 8, (64, 96): 4})


def get_model_path(model: str, folder: Path) -> str:
    """Return the path of the model of this name, building it if needed."""
    if model != DEEP:
        return f"random:{model}:tiny"
    path = folder / DEEP
    if not path.exists():
        run_on_ranks(1, save_deep_model, "sd3", path)
    return str(path)


def save_deep_model(family: str, path: Path) -> None:
    """Save the tiny model with eight blocks."""
    pipe = FAMILIES.get(family)().load(f"random:{family}:tiny", torch.float32)
    torch.manual_seed(3)
    pipe.transformer = type(pipe.transformer).from_config({**pipe.transformer.config, "num_layers": 8})
    pipe.save_pretrained(path)


def save_model_with_four_heads(path: Path) -> None:
    """Save the tiny SD3 with four heads and dual attention layers, in which the image attends to itself alone."""
    pipe = FAMILIES.get("sd3")().load("random:sd3:tiny", torch.float32)
    old = pipe.transformer
    heads = {"num_attention_heads": 4, "attention_head_dim": old.config.attention_head_dim // 2}
    torch.manual_seed(5)
    pipe.transformer = type(old).from_config(
        {**old.config, **heads, "dual_attention_layers": [0], "qk_norm": "rms_norm"}
    )
    pipe.save_pretrained(path)


def train_layout(name: str, model: str, dataset: Path, folder: Path, *flags: str) -> dict[str, torch.Tensor]:
    """Train in this layout and return the adapter."""
    layout = LAYOUTS[name]
    files = run_on_ranks(
        layout.ranks,
        train,
        "--pretrained_model_name_or_path",
        get_model_path(model, folder),
        "--dataset_config",
        str(dataset),
        "--train_batch_size",
        str(layout.batch),
        "--gradient_accumulation_steps",
        str(layout.accumulation),
        "--output_dir",
        str(folder),
        "--output_name",
        name.replace(" ", "_"),
        "--max_train_steps",
        str(STEPS),
        *"--learning_rate 0.5 --network_dim 4 --network_alpha 3 --optimizer_type SGD".split(),
        *TEXTS,
        *layout.flags,
        *flags,
    )
    return load_file(files[0])


def compare_layouts(model: str, kinds: Collection[str], *flags: str) -> Iterator[tuple[str, str]]:
    """Yield the difference of each layout to the reference, or why it fails."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_even_dataset(Path(folder))
        reference = train_layout(REFERENCE, model, dataset, Path(folder), *flags)
        for name in LAYOUTS:
            if name == REFERENCE or (kinds and name.split()[0] not in kinds):
                continue
            try:
                yield (
                    name,
                    f"{max_relative_difference(reference, train_layout(name, model, dataset, Path(folder), *flags)):.1e}",
                )
            except AssertionError as error:
                yield name, str(error).strip().splitlines()[-1]


if __name__ == "__main__":
    first_option = next((index for index, word in enumerate(sys.argv) if word.startswith("--")), len(sys.argv))
    words, options = set(sys.argv[1:first_option]), sys.argv[first_option:]
    for precision in BOUNDS:
        for model in [model for model in MODELS if model in words] or MODELS:
            for twice in (False, True):
                flags = ("--mixed_precision", precision, *(["--gradient_checkpointing"] if twice else []), *options)
                for name, max_difference in compare_layouts(model, words - {*MODELS}, *flags):
                    row = (model, precision, "twice" if twice else "once", name, max_difference)
                    sys.stdout.write(f"| {' | '.join(row)} |\n")
                    sys.stdout.flush()
