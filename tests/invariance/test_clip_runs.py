"""Clips of all kinds go through plan, caches, training, previews and export; a killed run resumes to the same bits."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_files import decode_clip, write_clip
from killed_runs import compare, train_and_kill
from PIL import Image
from rank_processes import run_on_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from training_runs import train

from library.dataset.clip_encoding import decode_animation
from library.models.families import FAMILY_FACTS
from library.tools.plan import run_plan

pytestmark = pytest.mark.slow
STEPS, KILLED_AT = 6, 3
VIDEO_FAMILIES = [name for name, facts in FAMILY_FACTS.items() if facts.pipeline.frames is not None]
SIZES = ((96, 64), (64, 96), (64, 64), (128, 72), (72, 128))
RATES = (16, 24, Fraction(30000, 1001))
LONG_FPS = 2
LONG_FRAMES = 60 * 60 * LONG_FPS  # an hour


def write_clips(folder: Path) -> Path:
    """Twenty clips: five sizes, three rates, a variable rate, a rotated one, a broken one and one of an hour."""
    clips = folder / "clips"
    for number in range(16):
        size, rate = SIZES[number % 5], RATES[number % 3]
        write_clip(clips / f"{number:02d}.mp4", 20 + number, rate, size, shade=12 * number)
    write_clip(clips / "variable.mp4", 30, 25, times=[40 * number + number % 3 * 15 for number in range(30)], shade=200)
    write_clip(clips / "rotated.mov", 24, rotation=90, shade=210)
    write_clip(
        clips / "long.mkv", LONG_FRAMES, LONG_FPS, (32, 32), options={"preset": "ultrafast", "g": "250"}, shade=220
    )
    (clips / "broken.mp4").write_bytes((clips / "00.mp4").read_bytes()[:700])
    for clip in sorted(clips.iterdir()):
        clip.with_suffix(".txt").write_text(f"a clip of {clip.stem}, moving", encoding="utf-8")
    (folder / "prompts.txt").write_text("a walk --n still --w 64 --h 48 --f 9 --fps 8 --s 2 --d 1\n", encoding="utf-8")
    (folder / "set.toml").write_text(
        f"""
[general]
caption_extension = ".txt"
enable_bucket = true
[[datasets]]
resolution = 64
min_bucket_reso = 16
bucket_reso_steps = 16
batch_size = 2
[[datasets.subsets]]
video_dir = '{clips}'
target_frames = [9, 5]
frame_extraction = "uniform"
frame_sample = 2
flip_aug = true
"""
    )
    return folder / "set.toml"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_clips(tmp_path_factory.mktemp("clips"))


CACHED = ("--cache_latents_to_disk", "--cache_text_encoder_outputs")


PREVIEWS_AT = 4
"""A step after that of the kill."""


def build_cached_flags(data: Path, folder: Path) -> tuple[str, ...]:
    """The settings of a run with caches and previews."""
    previews = ("--sample_prompts", str(data.with_name("prompts.txt")), "--sample_at_first")
    return build_flags(data, folder, *CACHED, *previews, "--sample_every_n_steps", str(PREVIEWS_AT))


def build_run_flags(folder: Path, *more: str) -> tuple[str, ...]:
    settings = "--network_dim 2 --learning_rate 1e-2 --seed 3 --mixed_precision no"
    return "--output_dir", str(folder), *settings.split(), *more


def build_flags(data: Path, folder: Path, *more: str) -> tuple[str, ...]:
    return (
        *("--pretrained_model_name_or_path", "random:wan:tiny", "--dataset_config", str(data)),
        *("--max_train_steps", str(STEPS), "--on_invalid_images", "skip"),
        *"--ema_decay 0.9 --save_every_n_steps 2 --save_state --auto_resume".split(),
        *build_run_flags(folder, *more),
    )


@pytest.fixture(scope="module")
def cached_run(dataset, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    run_on_ranks(1, train, *build_cached_flags(dataset, folder))
    return folder


def test_the_plan_shows_the_frames_and_windows_of_each_clip(dataset):
    flags = ["--dataset_config", str(dataset), "--pretrained_model_name_or_path", "random:wan:tiny"]
    text, _ = run_plan([*flags, "--on_invalid_images", "skip"])
    assert "dataset 1, " in text and "76 windows of 19 clips" in text
    assert "clips/00.mp4: 96x64, 20 frames in 1.25 s (16 per second); windows: 2 x 5, 2 x 9" in text
    assert "clips/01.mp4: 64x96, 21 frames in 0.88 s (24 per second), 14 for training; windows: 2 x 5, 2 x 9" in text
    assert "clips/02.mp4: 64x64, 22 frames in 0.73 s (29.97 per second), 12 for training" in text
    assert "clips/variable.mp4: 64x48, 30 frames in 1.23 s (variable rate), 20 for training" in text
    assert "clips/rotated.mov: 48x64, 24 frames" in text
    assert "clips/long.mkv: 32x32, 7200 frames in 3600.00 s (2 per second), 57600 for training" in text
    assert "1 clip of more than ten minutes, whose windows are read by seeking: clips/long.mkv" in text
    assert "broken.mp4: cannot be opened as a video" in text
    plan = json.loads(run_plan([*flags, "--on_invalid_images", "skip", "--json"])[0])["datasets"][0]
    assert len(plan["clips"]) == 19 and len(plan["samples"]) == 76
    (last,) = [
        each for each in plan["samples"] if "long" in each["image"] and each["first_frame"] and each["frames"] == 9
    ]
    assert last["first_frame"] == 57600 - 9


def test_a_run_on_cached_clips_equals_one_without_caches_to_the_bit(dataset, cached_run, tmp_path):
    run_on_ranks(1, train, *build_flags(dataset, tmp_path / "uncached"))
    files = [load_file(folder / "lora.safetensors") for folder in (cached_run, tmp_path / "uncached")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])


@pytest.mark.parametrize("build", [build_cached_flags, build_flags], ids=["cached", "uncached"])
def test_a_killed_run_on_clips_resumes_to_the_same_bits(build, dataset, cached_run, tmp_path):
    whole, killed = cached_run, tmp_path / "killed"
    if build is build_flags:
        whole = tmp_path / "whole"
        run_on_ranks(1, train, *build(dataset, whole))
    with pytest.raises(AssertionError):
        run_on_ranks(1, train_and_kill, (0,), KILLED_AT, *build(dataset, killed))
    assert {path.name for path in killed.glob("*-state")} == {"lora-step00000002-state"}
    run_on_ranks(1, train, *build(dataset, killed))
    assert compare(whole, killed) == (0.0, True, True)
    if build is build_cached_flags:
        previews = [find_previews(folder, PREVIEWS_AT) for folder in (whole, killed)]
        assert previews[0][".webp"].read_bytes() == previews[1][".webp"].read_bytes()


def find_previews(folder: Path, step: int) -> dict[str, Path]:
    """The files of the preview at a step, by extension; there is one prompt."""
    found = {path.suffix: path for path in (folder / "sample").glob(f"lora_{step:06d}_00_*_1.*")}
    assert found.keys() == {".mp4", ".webp"}
    return found


def test_previews_are_clips_of_the_frames_rate_and_size_of_their_prompt(cached_run):
    frames = {}
    for step in (0, PREVIEWS_AT):
        files = find_previews(cached_run, step)
        decoded, fps = decode_animation(files[".webp"].read_bytes())
        videos = decode_clip(files[".mp4"])
        assert (len(decoded), len(videos), decoded[0].size, round(fps)) == (9, 9, (64, 48), 8)
        differences = [np.abs(np.asarray(a, int) - b).mean() for a, b in zip(decoded, videos, strict=True)]
        assert max(differences) < 12, "both are the same frames, compressed in their own ways"
        frames[step] = np.stack([np.asarray(frame) for frame in decoded])
    assert (frames[0] != frames[PREVIEWS_AT]).any(), "the adapter is trained"
    with Image.open(cached_run / "lora.before_after.png") as sheet:
        assert sheet.width > 2 * 3 * 100, "two columns of three frames"
    assert (cached_run / "lora.report.html").read_text("utf-8").count("data:image/webp;base64,") == 2


def test_the_exported_file_has_the_names_of_musubi_tuner_and_loads_into_diffusers(cached_run):
    from library.models.families import FAMILIES

    path = cached_run / "lora.safetensors"
    with safe_open(path, "pt") as file:
        names = {key.split(".")[0] for key in file.keys()}
        buckets = json.loads(file.metadata()["ss_bucket_info"])["buckets"].values()
    layers = [*(f"{kind}_attn_{name}" for kind in ("self", "cross") for name in "qkvo"), "ffn_0", "ffn_2"]
    assert names == {f"lora_unet_blocks_{block}_{layer}" for block in range(2) for layer in layers}
    assert {len(bucket["resolution"]) for bucket in buckets} == {3}
    pipe = FAMILIES.get("wan")().load("random:wan:tiny", torch.float32)
    pipe.load_lora_weights(str(path), adapter_name="clips")
    loaded = dict(pipe.transformer.named_parameters())
    weights = load_file(path)
    ours = weights["lora_unet_blocks_0_self_attn_q.lora_up.weight"]
    scale = float(weights["lora_unet_blocks_0_self_attn_q.alpha"]) / 2
    theirs = loaded["blocks.0.attn1.to_q.lora_B.clips.weight"] @ loaded["blocks.0.attn1.to_q.lora_A.clips.weight"]
    expected = scale * ours @ weights["lora_unet_blocks_0_self_attn_q.lora_down.weight"]
    torch.testing.assert_close(theirs * pipe.transformer.blocks[0].attn1.to_q.scaling["clips"], expected)


@pytest.mark.parametrize("name", [name for name in VIDEO_FAMILIES if name != "wan"])
def test_every_family_of_videos_is_trained_on_clips_with_and_without_caches(name, tmp_path):
    for number in range(2):
        clip = write_clip(tmp_path / "clips" / f"{number}.mp4", 30, 24, (96, 64), shade=80 * number)
        clip.with_suffix(".txt").write_text(f'clip {number}, moving "LETTERS"', encoding="utf-8")
        for control in range(FAMILY_FACTS[name].control.num_images[1]):  # another rate, fewer frames
            write_clip(tmp_path / "controls" / f"{number}_{control}.mp4", 9, 16, (96, 64), shade=50 + 60 * control)
    controls = f"control_directory = '{tmp_path / 'controls'}'" if FAMILY_FACTS[name].control.num_images[1] else ""
    (tmp_path / "set.toml").write_text(
        f"""
[[datasets]]
resolution = 64
batch_size = 1
caption_extension = ".txt"
[[datasets.subsets]]
video_dir = '{tmp_path / "clips"}'
target_frames = [1, 17]
{controls}
"""
    )
    sections = ("--latent_window_size", "4") if FAMILY_FACTS[name].has_sections else ()  # of 16 frames
    files = []
    for folder, options in (("cached", CACHED), ("uncached", ())):
        flags = (
            "--pretrained_model_name_or_path",
            f"random:{name}:tiny",
            *sections,
            *build_run_flags(tmp_path / folder, *options),
        )
        run_on_ranks(1, train, "--dataset_config", str(tmp_path / "set.toml"), "--max_train_steps", "2", *flags)
        paths = sorted((tmp_path / folder).glob("lora*.safetensors"))  # of two experts, two files
        files.append({f"{path.name} {key}": value for path in paths for key, value in load_file(path).items()})
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    assert any(value.any() for key, value in files[0].items() if "up" in key or "lora_B" in key)


SPLIT = [
    ("hunyuan_video15", "--cp_size 2"),
    ("hunyuan_video15", "--tp_size 2"),
    ("hunyuan_video15_i2v", "--cp_size 2"),
    ("wan", "--tp_size 2"),
    ("wan_i2v", "--cp_size 2"),
    ("wan_flf2v", "--pp_size 2"),
    ("hunyuan_video_i2v", "--pp_size 2"),
    ("framepack", "--cp_size 2 --f1 --latent_window_size 1"),
    ("ltx_video095", "--cp_size 2"),
    ("ltx_video095", "--fsdp --image_to_video"),
    ("wan22_ti2v", "--cp_size 2 --image_to_video"),
    ("kandinsky5_i2v", "--fsdp"),
    ("kandinsky5_i2v", "--cp_size 2"),
    ("kandinsky5_video", "--tp_size 2"),
    ("ltx2", "--pp_size 2"),
    ("ltx2", "--cp_size 2 --image_to_video"),
]


@pytest.mark.parametrize(("name", "layout"), SPLIT)
def test_clips_that_two_ranks_split_train_the_same_as_whole_ones(name, layout, dataset, tmp_path):
    model, optimizer = ("--pretrained_model_name_or_path", f"random:{name}:tiny"), ("--optimizer_type", "SGD")
    common = ("--image_to_video",) if "image" in layout else ()
    common += ("--f1", "--latent_window_size", "1") if "f1" in layout else ()
    parts = ("--gradient_accumulation_steps", "2") if "fsdp" in layout else ()
    files = []
    for ranks, own in ((1, (*parts, *common)), (2, layout.split())):
        flags = build_flags(dataset, tmp_path / str(ranks), *optimizer, *own)
        run_on_ranks(ranks, train, *flags, *model, "--max_train_steps", "2")
        files.append(load_file(tmp_path / str(ranks) / "lora.safetensors"))
    ups = [key for key in files[0] if "lora_up" in key or "lora_B" in key]
    largest = max(float(files[0][key].abs().max()) for key in ups)
    assert ups and largest > 0
    assert max(float((files[1][key] - files[0][key]).abs().max()) for key in ups) < 1e-5 * largest


def test_two_ranks_preview_a_model_whose_pipeline_gives_each_token_a_time_as_one_does(dataset, tmp_path):
    model = ("--pretrained_model_name_or_path", "random:wan22_ti2v:tiny", "--max_train_steps", "1", "--sample_at_first")
    prompts = ("--sample_prompts", "a red circle --w 96 --h 64 --f 5 --s 2 --d 7")
    clips = []
    for ranks in (1, 2):
        flags = build_flags(dataset, tmp_path / str(ranks), *prompts, *(("--cp_size", "2") if ranks > 1 else ()))
        run_on_ranks(ranks, train, *flags, *model)
        (path,) = tmp_path.glob(f"{ranks}/**/*.webp")  # a preview that fails is skipped with a warning
        frames, _ = decode_animation(path.read_bytes())
        clips.append(np.stack([np.asarray(frame) for frame in frames]).astype(int))
    assert np.abs(clips[0] - clips[1]).max() <= 2


def test_two_ranks_train_the_same_as_one(dataset, tmp_path):
    files = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        run_on_ranks(
            ranks, train, *build_flags(dataset, folder, *CACHED, "--gradient_accumulation_steps", str(2 // ranks))
        )
        files.append(load_file(folder / "lora.safetensors"))
    for key, value in files[0].items():
        torch.testing.assert_close(files[1][key], value, rtol=1e-3, atol=1e-4)
