"""One frame of FramePack: the same with caches, on two ranks of each kind, and after a kill."""

from pathlib import Path

import pytest
import torch
from killed_runs import compare, train_and_kill
from PIL import Image
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import train

pytestmark = pytest.mark.slow
SETTINGS = "no_2x,no_4x,target_index=5,control_index=0;10"
CACHED = ("--cache_latents_to_disk", "--cache_text_encoder_outputs")


def draw(path: Path, angle: int, has_alpha: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.merge("RGB", [Image.linear_gradient("L").rotate(angle).resize((64, 64))] * 3)
    if has_alpha:
        image.putalpha(Image.radial_gradient("L").resize((64, 64)))
    image.save(path)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Four pictures with two control images each, of which the first one is partly transparent."""
    folder = tmp_path_factory.mktemp("one_frame")
    for number in range(4):
        draw(folder / "pictures" / f"{number}.png", 30 * number)
        (folder / "pictures" / f"{number}.txt").write_text(f"picture {number}", encoding="utf-8")
        for control in range(2):
            draw(folder / "controls" / f"{number}_{control}.png", 30 * number + 90 * control + 20, control == 0)
    (folder / "set.toml").write_text(
        f"""
[[datasets]]
resolution = 64
batch_size = 1
caption_extension = ".txt"
[[datasets.subsets]]
image_dir = '{folder / "pictures"}'
control_directory = '{folder / "controls"}'
"""
    )
    return folder / "set.toml"


def build_flags(data: Path, folder: Path, *more: str) -> tuple[str, ...]:
    return (
        *("--pretrained_model_name_or_path", "random:framepack:tiny", "--dataset_config", str(data)),
        *("--one_frame", "--one_frame_settings", SETTINGS, "--output_dir", str(folder), "--max_train_steps", "4"),
        *("--network_dim", "2", "--learning_rate", "1e-2", "--seed", "3", "--mixed_precision", "no", *more),
    )


def train_file(ranks: int, data: Path, folder: Path, *more: str) -> dict[str, torch.Tensor]:
    run_on_ranks(ranks, train, *build_flags(data, folder, *more))
    return load_file(folder / "lora.safetensors")


def test_a_run_on_cached_control_images_equals_one_without_caches_to_the_bit(dataset, tmp_path):
    cached, uncached = (train_file(1, dataset, tmp_path / name, *own) for name, own in (("c", CACHED), ("u", ())))
    assert cached.keys() == uncached.keys() and all(torch.equal(cached[key], uncached[key]) for key in cached)
    assert any(value.any() for key, value in uncached.items() if "lora_B" in key)
    other = train_file(1, dataset, tmp_path / "o", "--one_frame_settings", "target_index=5,control_index=0;10")
    assert any(not torch.equal(other[key], uncached[key]) for key in other), "empty frames change the result"


@pytest.mark.parametrize("layout", ["", "--fsdp", "--tp_size 2", "--pp_size 2", "--cp_size 2"])
def test_two_ranks_train_one_frame_as_one(layout, dataset, tmp_path):
    optimizer = ("--optimizer_type", "SGD")
    parts = () if "size" in layout else ("--gradient_accumulation_steps", "2")
    one = train_file(1, dataset, tmp_path / "one", *optimizer, *parts)
    two = train_file(2, dataset, tmp_path / "two", *optimizer, *layout.split())
    ups = [key for key in one if "lora_B" in key]
    largest = max(float(one[key].abs().max()) for key in ups)
    assert largest > 0
    assert max(float((one[key] - two[key]).abs().max()) for key in ups) < 1e-5 * largest


def test_a_killed_run_of_one_frame_resumes_to_the_same_bits(dataset, tmp_path):
    controls = " ".join(f"--ci {dataset.parent / 'controls'}/0_{number}.png" for number in range(2))
    more = ("--save_every_n_steps", "2", "--save_state", "--auto_resume", "--ema_decay", "0.9")
    more += ("--sample_prompts", f"a {controls} --w 64 --h 64 --s 2 --d 1", "--sample_every_n_steps", "4")
    run_on_ranks(1, train, *build_flags(dataset, tmp_path / "whole", *more))
    with pytest.raises(AssertionError):
        run_on_ranks(1, train_and_kill, (0,), 3, *build_flags(dataset, tmp_path / "killed", *more))
    run_on_ranks(1, train, *build_flags(dataset, tmp_path / "killed", *more))
    assert compare(tmp_path / "whole", tmp_path / "killed") == (0.0, True, True)
    pictures = [next((tmp_path / name / "sample").glob("*.png")).read_bytes() for name in ("whole", "killed")]
    assert pictures[0] == pictures[1]
