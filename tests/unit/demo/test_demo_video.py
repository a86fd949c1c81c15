"""The built-in video model and the demo that trains a motion on it: what is stored, measured and learned."""

import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from library.config import parse_config
from library.demo import BUILT_IN_VIDEO_MODEL_DIR, DEMO_CONFIG_DIR
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.tools.demo import VIDEO_DEMO, build_demo_command, choose_demo
from scripts.demo_video import build_path, load_first_frame, load_pipeline, make_clips, measure
from scripts.demo_video_model import clips as clip_drawing
from scripts.demo_video_model.autoencoder import build_vae, compute_components, encode_clips, set_linear_weights
from scripts.demo_video_model.denoiser import Denoiser
from scripts.demo_video_model.lora_clips import HELD_OUT, write_lora_clips
from scripts.demo_video_model.text import encode_texts

ROOT = Path(__file__).resolve().parents[3]


def test_the_model_is_small_and_detected_as_one_that_begins_with_a_frame():
    found = detect_model(str(BUILT_IN_VIDEO_MODEL_DIR))

    assert (found.family, found.size_multiple) == ("wan22_ti2v", 16)
    assert sum(path.stat().st_size for path in BUILT_IN_VIDEO_MODEL_DIR.rglob("*") if path.is_file()) < 5_000_000


def test_the_flag_chooses_the_files_of_videos_and_options_override_them():
    demo, rest = choose_demo(["--video", "--max_train_steps", "7"])
    command = build_demo_command(rest, demo)
    config = parse_config(command[command.index("--dataset_config") :]).require_valid()

    assert demo is VIDEO_DEMO and "--video" not in command
    assert config.train.max_train_steps == 7
    assert config.save.output_dir == VIDEO_DEMO.output_dir and config.save.output_name == "demo_video"
    assert Path(config.model.pretrained_model_name_or_path) == BUILT_IN_VIDEO_MODEL_DIR


def test_a_path_is_measured_by_its_form_wherever_it_is():
    loop = clip_drawing.loop(*clip_drawing.LOOP_STARTS[0]).track
    walk = clip_drawing.walk_right(random.Random(0)).track
    fox = clip_drawing.load_emoji("fox")
    loops, walks = (clip_drawing.draw_clip(fox, track)[None] for track in (loop, walk))

    assert measure(loops, "loops")[0] > 0.98
    assert abs(measure(walks, "loops")[0]) < 0.6
    assert measure(loops[:, ::-1], "loops")[0] < 0.5, "counterclockwise is another motion"
    still = np.repeat(loops[:, :1], 9, axis=1)
    assert measure(still, "loops") == [0.0]
    assert build_path("loops")[0, 1] == 1, "it begins at its lowest point"


@torch.no_grad()
def test_the_vae_encodes_the_components_of_each_patch_of_each_frame():
    vae = build_vae(0)
    fox = clip_drawing.load_emoji("fox")
    frames = clip_drawing.draw_clip(fox, clip_drawing.jump(random.Random(1)).track)
    clips = torch.from_numpy(frames).permute(3, 0, 1, 2)[None]
    set_linear_weights(vae, clips)
    latents = encode_clips(vae, clips)
    project, restore, center = compute_components(clips)
    centered = split_into_patches(clips / 127.5 - 1) - center.view(1, -1, 1, 1, 1)
    expected = torch.einsum("zc,bcfhw->bzfhw", project, centered)

    assert latents.shape == (1, 16, 9, 8, 8)
    assert (latents - expected).abs().max() < 1e-2 * expected.abs().max()
    whole = torch.einsum("cz,bzfhw->bcfhw", restore, expected) + center.view(1, -1, 1, 1, 1)
    decoded = split_into_patches(vae.decode(latents).sample)
    assert (decoded - whole.clamp(-1, 1)).abs().max() < 0.05


def split_into_patches(clips: torch.Tensor) -> torch.Tensor:
    """Split clips into patches of 8x8 pixels, as Wan's VAE does: (N, 192, frames, 8, 8)."""
    patches = clips.unfold(3, 8, 8).unfold(4, 8, 8)
    return patches.permute(0, 1, 6, 5, 2, 3, 4).flatten(1, 3).double()


@torch.no_grad()
def test_training_with_one_counted_zero_equals_all_tokens_of_the_text():
    pipe = load_pipeline()
    generator = torch.Generator().manual_seed(0)
    noisy, texts = torch.randn(2, 16, 9, 8, 8, generator=generator), ["a fox walks to the left", ""]
    timesteps = torch.tensor([900.0, 300.0])
    token_times = timesteps[:, None].repeat(1, 9 * 16)
    token_times[:, :16] = 0
    padded = encode_texts(pipe.tokenizer, pipe.text_encoder, texts, 512)
    expected = pipe.transformer(noisy, token_times, padded, return_dict=False)[0][:, :, 1:]
    denoiser = Denoiser(pipe.transformer, pipe.text_encoder)
    short = denoiser(noisy[:, :, :1], noisy, timesteps, pipe.tokenizer, texts)

    torch.testing.assert_close(short, expected, rtol=1e-4, atol=1e-4)
    family = FAMILIES.get("wan22_ti2v")()
    ours = family.encode_prompts(pipe, texts)["embeds"]
    torch.testing.assert_close(ours[0], padded[0, : len(ours[0])], rtol=1e-4, atol=1e-5)


def test_the_words_decide_how_an_emoji_moves_from_the_same_first_frame(caplog):
    pipe = load_pipeline()
    told = logging.getLogger(type(pipe).__module__)
    told.addHandler(caplog.handler)
    frame = load_first_frame("a penguin walks to the right")
    right, jump = ("a penguin walks to the right", "a penguin jumps")
    clips = make_clips(pipe, [right, jump], seeds=(1,), first_frames={right: frame, jump: frame})
    told.removeHandler(caplog.handler)

    assert not caplog.messages, "each clip was followed by a line on numbers of frames that are right"
    assert measure(clips[right], "walks")[0] > 0.9 > 0.5 > abs(measure(clips[right], "jumps")[0])
    assert measure(clips[jump], "jumps")[0] > 0.8 > 0.5 > abs(measure(clips[jump], "walks")[0])


@pytest.mark.slow
def test_the_demo_runs_in_any_folder_and_makes_clips_that_begin_with_their_first_frames(tmp_path):
    words = "--video --max_train_steps 2 --sample_every_n_steps 2 --max_data_loader_n_workers 0".split()
    result = subprocess.run(
        [sys.executable, "-m", "library", "demo", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )

    assert result.returncode == 0, result.stderr
    assert "Rounding" not in result.stdout + result.stderr
    assert (tmp_path / "output/demo_video/demo_video.safetensors").is_file()
    [clip] = (tmp_path / "output/demo_video/sample").glob("demo_video_000002_02_*.webp")
    with Image.open(clip) as file:
        assert file.n_frames == 9
        first = np.asarray(file.convert("RGB")).astype(int)
    assert np.abs(first - np.asarray(load_first_frame("a penguin loops"))).mean() < 5


def test_the_clips_of_the_demo_are_those_that_the_script_writes(tmp_path):
    write_lora_clips(tmp_path, 0)
    for folder in ("demo_video", "demo_video_regularisation"):
        stored, written = (
            {path.stem: path.read_text("utf-8") for path in (parent / folder).glob("*.txt")}
            for parent in (DEMO_CONFIG_DIR, tmp_path)
        )
        assert stored == written
        assert len(list((DEMO_CONFIG_DIR / folder).glob("*.mp4"))) == len(stored) == 16
        assert not any(name in text for name in HELD_OUT for text in stored.values())
