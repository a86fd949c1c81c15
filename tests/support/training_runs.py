"""Write a small dataset and train on it, in this process or on several ranks."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from tiny_pipelines import get_tiny_sd1_folder

from library.config import parse_config

PROMPTS = """\
a red circle on white ground --w 64 --h 96 --d 1 --s 8 --l 3
a blue triangle on black ground --n red --w 96 --h 64 --d 2 --s 8 --l 3
"""


def write_images(folder: Path, sizes: dict[tuple[int, int], int]) -> Path:
    """Write images of these sizes, each with its own colors and caption, and a dataset file; return its path."""
    (folder / "images").mkdir(parents=True)
    number = 0
    for (width, height), count in sizes.items():
        for _ in range(count):
            number += 1
            image = Image.radial_gradient("L").resize((width, height)).convert("RGB")
            image.putpixel((number, 1), (255, 10 * number, 0))
            image = Image.blend(image, Image.new("RGB", image.size, (7 * number, 255 - 11 * number, 90)), 0.5)
            image.save(folder / "images" / f"{number:02d}.png")
            (folder / "images" / f"{number:02d}.txt").write_text(f"picture {number}, a {number * 17} b", "utf-8")
    path = folder / "dataset.toml"
    path.write_text(f"""
[general]
enable_bucket = true
caption_extension = ".txt"
[[datasets]]
resolution = 64
min_bucket_reso = 32
max_bucket_reso = 128
bucket_reso_steps = 16
[[datasets.subsets]]
image_dir = '{folder / "images"}'
""")
    return path


def write_prompts(folder: Path) -> str:
    """Write a file of two prompts with different image sizes; return its path."""
    path = folder / "prompts.txt"
    path.write_text(PROMPTS)
    return str(path)


def train(*flags: str) -> str:
    """Train in this process; return the path of the LoRA file."""
    from library.training.run import run_training

    loaded = parse_config(
        [
            "--network_train_unet_only",
            "--pretrained_model_name_or_path",
            get_tiny_sd1_folder(),
            *flags,
            *"--quiet --max_data_loader_n_workers 0".split(),
        ]
    )
    run_training(loaded.require_valid())
    return str(Path(loaded.config.save.output_dir) / f"{loaded.config.save.output_name}.safetensors")


def train_adapter(
    folder: Path, ranks: int, batch: int, accumulation: int, *flags: str, dataset: Path
) -> dict[str, torch.Tensor]:
    """Train on ``ranks`` ranks and return the tensors of the LoRA file."""
    name = f"r{ranks}b{batch}a{accumulation}"
    files = run_on_ranks(
        ranks,
        train,
        "--dataset_config",
        str(dataset),
        "--train_batch_size",
        str(batch),
        "--gradient_accumulation_steps",
        str(accumulation),
        "--output_dir",
        str(folder),
        "--output_name",
        name,
        *"--max_train_steps 6 --learning_rate 0.5 --network_dim 4 --network_alpha 3".split(),
        *flags,
    )
    return load_file(files[0])


def max_relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference in any tensor, relative to the tensor's largest value."""
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max() / one[key].abs().max().clamp_min(1e-12)) for key in one)


@pytest.fixture(scope="module")
def even_dataset(tmp_path_factory):
    """The dataset file of two buckets that divide evenly into steps of four."""
    return write_images(tmp_path_factory.mktemp("even"), {(96, 64): 8, (64, 96): 4})
