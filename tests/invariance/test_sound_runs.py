"""Clips with sound and without are trained together: one result on any ranks, exact resume, files, previews."""

from dataclasses import replace
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

from library.config import RunConfig
from library.errors import UserError
from library.models.families import FAMILIES, SOUND_FAMILIES
from library.tools.plan import run_plan
from library.training.validate_model import validate_sound

pytestmark = pytest.mark.slow
STEPS, KILLED_AT = 6, 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Four clips of a second with sound, of several rates and numbers of channels, and two without."""
    folder = tmp_path_factory.mktemp("mixed")
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
target_frames = [17]
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
    assert "x17 with sound" in text
    assert "sound" not in run_plan(flags)[0]


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


LAYOUTS = {
    "DDP": (),
    "FSDP": ("--fsdp",),
    "TP": "--tp_size 2 --gradient_accumulation_steps 2".split(),
    "CP": "--cp_size 2 --gradient_accumulation_steps 2 --gradient_checkpointing".split(),
    "PP": "--pp_size 2 --gradient_accumulation_steps 2".split(),
}
# Layers without a gradient are not decayed, and not moved by their momentum.
OPTIMIZER = "--optimizer_type SGD --optimizer_args momentum=0.9 weight_decay=0.1".split()


@pytest.fixture(scope="module")
def single(dataset, tmp_path_factory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("single")
    run_on_ranks(1, train, *build_flags(dataset, folder, *OPTIMIZER, "--gradient_accumulation_steps", "2"))
    return load_file(folder / "lora.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_sound_as_one_does(layout, single, dataset, tmp_path):
    run_on_ranks(2, train, *build_flags(dataset, tmp_path, *OPTIMIZER, *LAYOUTS[layout]))
    split = load_file(tmp_path / "lora.safetensors")
    ups = [key for key in single if "lora_B" in key]
    largest = max(float(single[key].abs().max()) for key in ups if "audio" in key)
    assert ups and largest > 0
    assert max(float((split[key] - single[key]).abs().max()) for key in ups) < 1e-5 * largest


def test_what_cannot_train_sound_is_refused():
    family = FAMILIES.get(SOUND_FAMILIES["ltx2"])()
    config = RunConfig()
    (problem,) = validate_sound(config, family, "")
    assert problem.option == "train_audio" and "--cache_latents" in str(problem)
    cached = replace(config, cache=replace(config.cache, cache_latents=True))
    assert not [*validate_sound(cached, family, "")]
    assert "steps of clips without sound" in " ".join(map(str, validate_sound(cached, family, "DeepSpeed")))
    preserved = replace(cached, preservation=replace(cached.preservation, blank_prompt_preservation_multiplier=1.0))
    assert "for frames alone" in " ".join(map(str, validate_sound(preserved, family, "")))
    assert {"pp", "cp", "tp"} < {*family.facts.blocks.list_strategies()}
    assert not [*validate_sound(config, FAMILIES.get("ltx2")(), "DeepSpeed")]


def test_clips_without_any_sound_or_without_times_are_refused(dataset, tmp_path):
    changes = {
        "silent": ("target_frames", "include = ['4*', '5*']\ntarget_frames", "no window that is trained has sound"),
        "counted": ("target_frames", "source_fps = 24\ntarget_frames", "frames are counted, not timed"),
    }
    for name, (old, new, reason) in changes.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(dataset.read_text().replace(old, new))
        flags = ["--dataset_config", str(path), "--pretrained_model_name_or_path", "random:ltx2:tiny", "--train_audio"]
        with pytest.raises(UserError, match=reason):
            run_plan([*flags, "--cache_latents"])
