"""Runs of Cosmos Predict2: one result however they are distributed, and resumed to the same bits, with previews."""

from pathlib import Path

import pytest
import torch
from clip_files import decode_clip, write_clip
from killed_runs import compare, train_and_kill
from PIL import Image
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import train

pytestmark = pytest.mark.slow
FRAMES, STEPS, KILLED_AT = 9, 4, 3
LAYOUTS = ("", "--fsdp", "--tp_size 2", "--pp_size 2", "--cp_size 2", "--pp_size 2 --gradient_checkpointing")
MODEL = "random:cosmos2_video2world:tiny"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Four clips with captions, and a prompt that begins with a picture."""
    folder = tmp_path_factory.mktemp("cosmos")
    for number in range(4):
        clip = write_clip(folder / "clips" / f"{number}.mp4", 16, 16, (64, 32), shade=50 * number)
        clip.with_suffix(".txt").write_text(f"clip {number}" + ", moving" * number, encoding="utf-8")
    Image.new("RGB", (64, 32), (200, 90, 0)).save(folder / "first.png")
    (folder / "prompts.txt").write_text("a robot --i first.png --w 64 --h 32 --f 9 --s 2 --d 1\n")
    (folder / "set.toml").write_text(
        f"""
[[datasets]]
resolution = [64, 32]
batch_size = 2
caption_extension = ".txt"
[[datasets.subsets]]
video_dir = '{folder / "clips"}'
target_frames = [{FRAMES}]
"""
    )
    return folder / "set.toml"


def build_flags(data: Path, folder: Path, *more: str) -> tuple[str, ...]:
    model = "--pretrained_model_name_or_path", MODEL, "--dataset_config", str(data)
    settings = f"--max_train_steps {STEPS} --network_dim 2 --learning_rate 1e-2 --seed 3 --mixed_precision no"
    return *model, "--output_dir", str(folder), *settings.split(), *more


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights after a run of one process."""
    folder = tmp_path_factory.mktemp("whole")
    flags = build_flags(dataset, folder, "--optimizer_type", "SGD", "--gradient_accumulation_steps", "2")
    run_on_ranks(1, train, *flags)
    return load_file(folder / "lora.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_train_the_same_as_one(layout, dataset, whole, tmp_path):
    own = layout.split() if "size" not in layout else [*layout.split(), "--gradient_accumulation_steps", "2"]
    run_on_ranks(2, train, *build_flags(dataset, tmp_path, "--optimizer_type", "SGD", *own))
    found = load_file(tmp_path / "lora.safetensors")
    ups = [key for key in whole if "lora_up" in key or "lora_B" in key]
    largest = max(float(whole[key].abs().max()) for key in ups)
    assert ups and largest > 0 and found.keys() == whole.keys()
    assert max(float((found[key] - whole[key]).abs().max()) for key in ups) < 1e-5 * largest


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_killed_run_resumes_to_the_same_bits(is_cached, dataset, tmp_path):
    options = "--save_every_n_steps 2 --save_state --auto_resume --ema_decay 0.9".split()
    options += ["--cache_latents_to_disk", "--cache_text_encoder_outputs"] if is_cached else []
    options += ["--sample_prompts", str(dataset.with_name("prompts.txt")), "--sample_every_n_steps", str(STEPS)]
    run_on_ranks(1, train, *build_flags(dataset, tmp_path / "whole", *options))
    with pytest.raises(AssertionError):
        run_on_ranks(1, train_and_kill, (0,), KILLED_AT, *build_flags(dataset, tmp_path / "killed", *options))
    run_on_ranks(1, train, *build_flags(dataset, tmp_path / "killed", *options))
    assert compare(tmp_path / "whole", tmp_path / "killed") == (0.0, True, True)
    previews = [sorted((tmp_path / name / "sample").glob("*.mp4")) for name in ("whole", "killed")]
    assert len(previews[0]) == len(previews[1]) == 1
    frames = [decode_clip(path) for (path,) in previews]
    assert len(frames[0]) == FRAMES and frames[0][0].shape[:2] == (32, 64)
    assert previews[0][0].read_bytes() == previews[1][0].read_bytes()
