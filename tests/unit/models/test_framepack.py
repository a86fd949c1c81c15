"""FramePack is trained on sections of clips as the pipeline of diffusers samples them, one section a step."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from diffusers import HunyuanVideoFramepackPipeline
from family_cases import Recorder
from model_layouts import write_separate_files
from problem_lines import format_lines
from tiny_pipelines import draw_frame_image

from library.config.schema import ModelConfig
from library.dataset.clip_windows import FrameRule, FrameSettings, list_frame_windows
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families.framepack import FramePack
from library.randomness import Purpose, derive_rng
from library.tools.family_check.cases import build_batch, find_call_differences

MODEL = "random:framepack:tiny"
SIZE = {"height": 32, "width": 48}
TEXTS = {"prompt_embeds": torch.randn(1, 7, 24), "pooled_prompt_embeds": torch.randn(1, 16)}
MASK = {"prompt_attention_mask": torch.ones(1, 7, dtype=torch.long)}


def build_family(**options):
    return FramePack(ModelConfig(MODEL, **options))


def sample(pipe, num_sections, window, **options):
    """Sample a clip of some sections with the pipeline of diffusers, as its authors call it."""
    frames = {"num_frames": 4 * window * num_sections + 1}
    draws = {"generator": torch.Generator().manual_seed(1), "num_inference_steps": 1}
    image = {"image": draw_frame_image(0).resize((48, 32)), "guidance_scale": 1.0}
    return pipe(**TEXTS, **MASK, **SIZE, **frames, **draws, **image, **options).frames


SECTIONS = [
    *((is_f1, 2) for is_f1 in (False, True)),
    *(pytest.param(is_f1, count, marks=pytest.mark.slow) for count in (1, 4, 6) for is_f1 in (False, True)),
]


@torch.no_grad()
@pytest.mark.parametrize(("is_f1", "count"), SECTIONS)
def test_a_section_is_trained_with_what_the_pipeline_samples_it_with(is_f1, count):
    """What the pipeline has sampled before is the rest of the clip."""
    window = 4
    family = build_family(latent_window_size=window, f1=is_f1)
    pipe = family.load(MODEL, torch.float32)
    record = Recorder(pipe.transformer)
    clip = sample(pipe, count, window, output_type="latent")
    calls, outputs = list(record.calls), list(record.outputs)
    assert clip.shape[2] == 1 + count * window and len(calls) == count
    images = {"images": calls[0]["image_embeds"]}
    cond = {"embeds": [*TEXTS["prompt_embeds"]], "pooled": TEXTS["pooled_prompt_embeds"]}
    batch = replace(build_batch(clip, cond), frame_cond=images)
    for number, (call, output) in enumerate(zip(calls, outputs, strict=True)):
        section = number if is_f1 else count - 1 - number
        selected = family.select_section(batch, (section + 0.5) / count)
        assert torch.equal(selected.latents, clip[:, :, 1 + section * window :][:, :, :window])
        family.predict(pipe, pipe.transformer, call["hidden_states"], call["timestep"], selected)
        assert list(find_call_differences(record.calls[-1], call)) == []
        assert torch.equal(record.outputs[-1], output)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("is_f1", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_preview_is_decoded_as_by_the_pipeline(is_f1, count):
    family = build_family(latent_window_size=2, f1=is_f1)
    pipe = family.load(MODEL, torch.float32)
    latents, expected = (sample(pipe, count, 2, output_type=kind) for kind in ("latent", "pt"))
    decoded = family.decode_sampled_latents(pipe, latents, **SIZE).transpose(1, 2)
    assert expected.shape[1] == 8 * count + 1
    torch.testing.assert_close((decoded / 2 + 0.5).clamp(0, 1), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_siglip_sees_the_first_frame_as_in_the_pipeline():
    family = build_family()
    pipe = family.load(MODEL, torch.float32)
    assert isinstance(pipe, HunyuanVideoFramepackPipeline)
    pixels = pipe.video_processor.preprocess(draw_frame_image(0), 64, 96)
    ours = family.encode_frame_cond(pipe, pixels, None)["images"]
    theirs = HunyuanVideoFramepackPipeline.encode_image(pipe, pixels, device=torch.device("cpu"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2)


def test_the_sections_of_all_steps_are_drawn_alike():
    family, clip = build_family(latent_window_size=2), torch.arange(13.0).view(1, 1, 13, 1, 1)
    starts = Counter()
    for step in range(600):
        draw = derive_rng(42, Purpose.SECTION, step).random()
        starts[int(family.select_section(build_batch(clip, {}), draw).latents[0, 0, 0])] += 1
    assert starts.keys() == {1, 3, 5, 7, 9, 11}
    assert all(70 < count < 130 for count in starts.values())
    assert family.select_section(build_batch(clip, {}), 1.0).latents.flatten().tolist() == [11, 12]


def test_windows_are_whole_sections_after_a_first_frame():
    assert build_family().frame_rule == FramePack.facts.pipeline.frames
    rule = build_family(latent_window_size=5).frame_rule
    assert rule == FrameRule(stride=20, fps=30.0, frames_per_latent=4, least=21)
    assert detect_model(ModelConfig(MODEL, latent_window_size=5)).frame_rule == rule
    assert list_frame_windows(100, FrameSettings(frame_extraction="full"), rule) == [(0, 81)]
    assert list_frame_windows(100, FrameSettings(target_frames=(1, 20, 21, 45, 50)), rule) == [(0, 21), (0, 41)]
    assert (rule.count_latent_frames(21), rule.count_latent_frames(81)) == (6, 21)


NAMES = {
    "FramePack_F1_I2V_HY_20250503_fp8.safetensors": True,
    "framepack-f1.safetensors": True,
    "FramePackI2V_HY_bf16.safetensors": False,
    "framepack_of1.safetensors": False,
    "FramePack_F1_I2V_HY_20250503/model.safetensors": True,
    "races in f1/model.safetensors": False,
}
"""Files and whether they are named as those of FramePack F1."""


def test_a_file_that_is_named_f1_is_not_trained_as_the_other_model(tmp_path):
    options = write_separate_files("framepack", build_family().load(MODEL, torch.float32), tmp_path)
    path = tmp_path / "transformer.safetensors"
    for name, is_f1 in NAMES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        path = path.rename(tmp_path / name)
        named = replace(options, pretrained_model_name_or_path=str(path))
        assert detect_model(replace(named, f1=True)).family == "framepack"
        if is_f1:
            with pytest.raises(ConfigError) as error:
                detect_model(named)
            assert any("add --f1" in line for line in format_lines(error.value.problems))
        else:
            assert detect_model(named).family == "framepack"
