"""VACE with reference images: the same with caches, on two ranks, and after a kill; they change what is trained."""

from pathlib import Path

import pytest
import torch
from clip_files import write_clip
from killed_runs import compare, train_and_kill
from PIL import Image
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import train

pytestmark = pytest.mark.slow
CACHED = ("--cache_latents_to_disk", "--cache_text_encoder_outputs")


def write_dataset(folder: Path, has_references: bool = True) -> Path:
    """Four clips: with two references each, of which two clips have a control clip and a mask."""
    for number in range(4):
        clip = write_clip(folder / "clips" / f"{number}.mp4", 9, 16, (64, 64), shade=40 * number)
        clip.with_suffix(".txt").write_text(f"clip {number}", encoding="utf-8")
        for control in range(2 if number < 2 else not has_references):
            write_clip(folder / "controls" / f"{number}_{control}.mp4", 9, 16, (64, 64), shade=50 + 80 * control)
        for reference in range(2 * has_references):
            image = Image.linear_gradient("L").rotate(40 * number + 90 * reference).resize((90, 60))
            Image.merge("RGB", [image] * 3).save(folder / "controls" / f"{number}_{reference}.png")
    (folder / "set.toml").write_text(
        f"""
[[datasets]]
resolution = 64
batch_size = 1
caption_extension = ".txt"
[[datasets.subsets]]
video_dir = '{folder / "clips"}'
target_frames = [5]
control_directory = '{folder / "controls"}'
"""
    )
    return folder / "set.toml"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("references"))


def build_flags(data: Path, folder: Path, *more: str) -> tuple[str, ...]:
    return (
        *("--pretrained_model_name_or_path", "random:wan_vace:tiny", "--dataset_config", str(data)),
        *("--output_dir", str(folder), "--max_train_steps", "4", "--network_dim", "2", "--learning_rate", "1e-2"),
        *("--seed", "3", "--mixed_precision", "no", *more),
    )


def train_file(ranks: int, data: Path, folder: Path, *more: str) -> dict[str, torch.Tensor]:
    run_on_ranks(ranks, train, *build_flags(data, folder, *more))
    return load_file(folder / "lora.safetensors")


def test_a_run_on_cached_references_equals_one_without_caches_and_differs_from_one_without_references(
    dataset, tmp_path
):
    cached, uncached = (train_file(1, dataset, tmp_path / name, *own) for name, own in (("c", CACHED), ("u", ())))
    assert cached.keys() == uncached.keys() and all(torch.equal(cached[key], uncached[key]) for key in cached)
    without = train_file(1, write_dataset(tmp_path / "without", has_references=False), tmp_path / "w")
    assert any(not torch.equal(without[key], uncached[key]) for key in without)


@pytest.mark.parametrize("layout", ["", "--fsdp", "--tp_size 2", "--fsdp --gradient_checkpointing"])
def test_two_ranks_train_on_references_as_one(layout, dataset, tmp_path):
    optimizer = ("--optimizer_type", "SGD")
    parts = () if "tp" in layout else ("--gradient_accumulation_steps", "2")
    one = train_file(1, dataset, tmp_path / "one", *optimizer, *parts)
    two = train_file(2, dataset, tmp_path / "two", *optimizer, *layout.split())
    ups = [key for key in one if "lora_up" in key]
    largest = max(float(one[key].abs().max()) for key in ups)
    assert largest > 0
    assert max(float((one[key] - two[key]).abs().max()) for key in ups) < 1e-5 * largest


def test_a_killed_run_on_references_resumes_to_the_same_bits(dataset, tmp_path):
    more = ("--save_every_n_steps", "2", "--save_state", "--auto_resume")
    previews = ("--sample_prompts", f"a --ci {dataset.parent / 'controls' / '0_0.png'} --w 64 --h 64 --f 5 --s 2 --d 1")
    more += (*previews, "--sample_every_n_steps", "4", "--ema_decay", "0.9")
    run_on_ranks(1, train, *build_flags(dataset, tmp_path / "whole", *more))
    with pytest.raises(AssertionError):
        run_on_ranks(1, train_and_kill, (0,), 3, *build_flags(dataset, tmp_path / "killed", *more))
    run_on_ranks(1, train, *build_flags(dataset, tmp_path / "killed", *more))
    assert compare(tmp_path / "whole", tmp_path / "killed") == (0.0, True, True)
    clips = [next((tmp_path / name / "sample").glob("*.webp")).read_bytes() for name in ("whole", "killed")]
    assert clips[0] == clips[1]
