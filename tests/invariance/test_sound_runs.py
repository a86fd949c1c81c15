"""Clips with sound and without are trained together: one result on any ranks, exact resume, files, previews."""

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from clip_files import Sound, draw_tone, write_clip
from killed_runs import compare, train_and_kill
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import train

from library.errors import UserError
from library.models.families import FAMILIES, SOUND_FAMILIES
from library.tools.plan import run_plan

pytestmark = pytest.mark.slow
STEPS, KILLED_AT = 4, 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Four clips of a second with sound, of several rates and numbers of channels, and two without; and an image."""
    folder = tmp_path_factory.mktemp("sound")
    for number in range(6):
        rate, channels = (48000, 2) if number % 2 else (44100, 1)
        tone = Sound(
            draw_tone(1.2, rate, 200.0 * (number + 1), channels), rate, layout="stereo" if channels == 2 else "mono"
        )
        clip = write_clip(
            folder / "clips" / f"{number}.mp4", 30, 24, (96, 64), shade=30 * number, sound=tone if number < 4 else None
        )
        clip.with_suffix(".txt").write_text(f"clip {number}, moving", encoding="utf-8")
    (folder / "set.toml").write_text(
        f"""
[[datasets]]
resolution = 64
batch_size = 1
caption_extension = ".txt"
[[datasets.subsets]]
video_dir = '{folder / "clips"}'
target_frames = [1, 17]
"""
    )
    (folder / "prompts.txt").write_text("a walk --n still --w 96 --h 64 --f 9 --s 2 --d 1\n", encoding="utf-8")
    return folder / "set.toml"


def build_flags(data: Path, folder: Path, *more: str) -> tuple[str, ...]:
    return (
        *("--pretrained_model_name_or_path", "random:ltx2:tiny", "--dataset_config", str(data), "--train_audio"),
        *("--max_train_steps", str(STEPS), "--cache_latents_to_disk", "--cache_text_encoder_outputs"),
        *"--network_dim 2 --learning_rate 1e-2 --seed 3 --mixed_precision no".split(),
        *("--output_dir", str(folder), *more),
    )


def build_saving_flags(data: Path, folder: Path) -> tuple[str, ...]:
    previews = ("--sample_prompts", str(data.with_name("prompts.txt")), "--sample_every_n_steps", str(STEPS))
    saving = "--save_every_n_steps 2 --save_state --auto_resume --ema_decay 0.9".split()
    return build_flags(data, folder, *saving, *previews)


@pytest.fixture(scope="module")
def whole_run(dataset, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_on_ranks(1, train, *build_saving_flags(dataset, folder))
    return folder


def test_the_plan_tells_which_clips_have_sound(dataset):
    flags = ["--dataset_config", str(dataset), "--pretrained_model_name_or_path", "random:ltx2:tiny"]
    text, _ = run_plan([*flags, "--train_audio", "--cache_latents"])
    assert "sound: 4 of 6 windows have sound" in text
    assert "2 clips with windows that have no sound" in text and "clips/4.mp4 (1 window)" in text
    assert "96x64x17 with sound" in text or "x17 with sound" in text
    assert "sound" not in run_plan(flags)[0].replace(str(dataset.parent), "").replace("sound0/", "")


def test_a_killed_run_with_sound_resumes_to_the_same_bits(dataset, whole_run, tmp_path):
    with pytest.raises(AssertionError):
        run_on_ranks(1, train_and_kill, (0,), KILLED_AT, *build_saving_flags(dataset, tmp_path))
    run_on_ranks(1, train, *build_saving_flags(dataset, tmp_path))
    assert compare(whole_run, tmp_path) == (0.0, True, True)


def test_the_file_has_the_layers_of_sound_and_diffusers_loads_them(whole_run):
    path = whole_run / "lora.safetensors"
    weights = load_file(path)
    assert any("audio_to_video_attn" in key for key in weights) and any("audio_ff" in key for key in weights)
    trained = {key for key, value in weights.items() if "lora_B" in key and value.any()}
    assert {key for key in weights if "lora_B" in key} == trained
    pipe = FAMILIES.get(SOUND_FAMILIES["ltx2"])().load("random:ltx2:tiny", torch.float32)
    pipe.load_lora_weights(str(path), adapter_name="sound")
    loaded = {name for name, _ in pipe.transformer.named_parameters() if "lora_B.sound" in name}
    assert len(loaded) == len(trained)


def test_previews_have_sound_as_long_as_their_frames(whole_run):
    (path,) = (whole_run / "sample").glob("*.mp4")
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert audio.codec_context.name == "aac"
        frames = [frame.to_ndarray() for frame in container.decode(audio)]
        seconds = sum(frame.shape[1] for frame in frames) / audio.rate
        assert abs(seconds - 9 / 24) < 0.1 and video.frames == 9
    assert np.abs(np.concatenate(frames, axis=1)).max() > 0


LAYOUTS = ["", "--fsdp"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_sound_as_one_does(layout, dataset, tmp_path):
    files = []
    for ranks, more in ((1, ("--gradient_accumulation_steps", "2")), (2, tuple(layout.split()))):
        flags = build_flags(dataset, tmp_path / str(ranks), "--optimizer_type", "SGD", *more)
        run_on_ranks(ranks, train, *flags)
        files.append(load_file(tmp_path / str(ranks) / "lora.safetensors"))
    ups = [key for key in files[0] if "lora_B" in key]
    largest = max(float(files[0][key].abs().max()) for key in ups if "audio" in key)
    assert ups and largest > 0
    assert max(float((files[1][key] - files[0][key]).abs().max()) for key in ups) < 1e-5 * largest


REFUSED = [
    ((), "train_audio", "--cache_latents"),
    (("--cache_latents", "--pp_size", "2"), "pp_size", "steps of clips without sound"),
    (("--cache_latents", "--torch_compile"), "torch_compile", "steps of clips without sound"),
]


@pytest.mark.parametrize(("more", "option", "reason"), REFUSED)
def test_what_cannot_train_sound_is_refused(more, option, reason, dataset, tmp_path):
    flags = [flag for flag in build_flags(dataset, tmp_path) if flag != "--cache_latents_to_disk"]
    with pytest.raises(UserError, match=option) as caught:
        train(*flags, "--dry_run", *more)
    assert reason in str(caught.value)


def test_clips_without_any_sound_or_without_times_are_refused(dataset, tmp_path):
    text = dataset.read_text().replace("target_frames", "include = ['4*', '5*']\ntarget_frames")
    (tmp_path / "silent.toml").write_text(text)
    with pytest.raises(UserError, match="no window that is trained has sound"):
        train(*build_flags(tmp_path / "silent.toml", tmp_path), "--dry_run")
    (tmp_path / "counted.toml").write_text(dataset.read_text() + "source_fps = 24\n")
    with pytest.raises(UserError, match=r"source_fps.*counted, not timed"):
        train(*build_flags(tmp_path / "counted.toml", tmp_path), "--dry_run")
