"""A family of videos handles clips of several frames as the pipeline of diffusers does, and images as single frames."""

from dataclasses import replace

import pytest
import torch
from family_cases import ForwardOnlyWrapper, Recorder, assert_same_call, build_case, make_generators, take_rows
from tiny_pipelines import HEIGHT, WIDTH, draw_control_clips, encode_control_clips, shrink_references

from library.models.families import FAMILY_FACTS, IMAGE_TO_VIDEO_FAMILIES

__all__ = ["build_case"]  # a fixture
VIDEO_FAMILIES = [name for name, facts in FAMILY_FACTS.items() if facts.pipeline.frames is not None]
VARIANTS = [f"{name}_from_image" for name in IMAGE_TO_VIDEO_FAMILIES]
QUICK = ("wan", "ltx_video")
CASES = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in (*VIDEO_FAMILIES, *VARIANTS)]


@pytest.fixture(params=CASES)
def video_case(request, build_case, monkeypatch):
    shrink_references(monkeypatch)
    return build_case(request.param)


def count_frames(rule):
    return rule.round_up(max(2, rule.shortest))


def make_clips(family, count=2):
    """Two clips with the fewest frames that make two latent frames; no two frames are alike."""
    num_frames = count_frames(family.facts.pipeline.frames)
    generator = torch.Generator().manual_seed(7)
    return torch.rand(count, 3, num_frames, HEIGHT, WIDTH, generator=generator) * 2 - 1


def test_the_kind_of_a_family_with_a_rule_for_frames_is_video():
    assert {name for name, facts in FAMILY_FACTS.items() if facts.pipeline.kind == "video"} == set(VIDEO_FAMILIES)


@torch.no_grad()
def test_clips_are_encoded_to_a_latent_frame_for_the_first_and_for_each_stride(video_case):
    family, tiny = video_case
    moments, rule = family.encode_moments(tiny.pipe, make_clips(family)), family.facts.pipeline.frames
    num_frames = rule.count_latent_frames(count_frames(rule))
    assert moments.mean_and_std.shape[3:] == (num_frames, *tiny.batch.latents.shape[-2:])
    alone = family.encode_moments(tiny.pipe, make_clips(family)[1:])
    torch.testing.assert_close(moments.mean_and_std[1:], alone.mean_and_std)
    single = family.encode_moments(tiny.pipe, make_clips(family)[:, :, 0])
    assert single.mean_and_std.shape[3] == rule.count_latent_frames(1)
    if not any(isinstance(module, torch.nn.GroupNorm) for module in tiny.pipe.vae.modules()):  # it sees all frames
        first = slice(single.mean_and_std.shape[3])
        torch.testing.assert_close(
            single.mean_and_std[:, :, :, first], moments.mean_and_std[:, :, :, first], rtol=1e-4, atol=1e-4
        )
    torch.testing.assert_close(moments.mean_and_std[:, 0], tiny.encode_clips(tiny.pipe, make_clips(family)))


def encode_frame_images(family, tiny):
    """Encode clips that begin and end with the images of the case, and have other frames in between."""
    clips, images = make_clips(family), tiny.frame_images
    for number, image in zip((0, -1), images, strict=False):
        clips[:, :, number] = tiny.pipe.video_processor.preprocess(image, HEIGHT, WIDTH)
    return family.encode_frame_cond(tiny.pipe, clips, family.encode_moments(tiny.pipe, clips))


@torch.no_grad()
def test_the_denoiser_gets_clips_as_from_the_diffusers_pipeline_and_latents_are_decoded_as_there(video_case):
    family, tiny = video_case
    pipe, frames = tiny.pipe, count_frames(family.facts.pipeline.frames)
    rows = tiny.max_rows
    latents = family.encode_moments(pipe, make_clips(family)[:rows]).sample(make_generators()[:rows])
    controls = draw_control_clips(family.facts.control.num_images[1], frames)
    batch = replace(take_rows(tiny.batch, rows), latents=latents, frame_cond=encode_frame_images(family, tiny))
    if controls:  # all that the model takes, such as a mask over time
        batch = replace(batch, control_latents=encode_control_clips(family, pipe, controls))
    batch = family.select_section(family.arrange_batch(batch), 0.0)
    latents, denoiser = batch.latents, getattr(pipe, family.facts.denoiser_name)
    record, options = Recorder(denoiser), {**tiny.call, "num_frames": frames, "height": HEIGHT, "width": WIDTH}
    if controls:
        options |= family.build_control_clip_kwargs(pipe, controls)
    if family.facts.has_sections:  # the pipeline draws the latents of the first frame
        options["image_latents"] = batch.frame_cond["clean"][:, :, :1]
    options |= {tiny.scale: tiny.guidance_off, "num_inference_steps": 2}
    theirs = pipe(**options, latents=tiny.pack_latents(latents), output_type="pt").frames
    t = tiny.convert_timesteps(torch.full((rows,), float(pipe.scheduler.timesteps[0])))

    ours = family.predict(pipe, ForwardOnlyWrapper(denoiser), latents, t, batch)

    assert ours.shape == latents.shape
    simplify = tiny.simplify_call
    if tiny.frame_images or controls:  # whose latents the pipeline multiplies by what they are divided by here
        for name in {"hidden_states", "control_hidden_states"} & record.calls[0].keys():
            inputs = [record.calls[number][name] for number in (-1, 0)]
            torch.testing.assert_close(*inputs, rtol=1e-4, atol=1e-4)
    else:
        assert_same_call(simplify(record.calls[-1]), simplify(record.calls[0]))
    torch.testing.assert_close(record.outputs[-1], record.outputs[0], rtol=1e-3, atol=1e-4)
    final = pipe(**options, latents=tiny.pack_latents(latents), output_type="latent").frames
    decoded = family.decode_latents(pipe, tiny.unpack_latents(final)).transpose(1, 2)[:, tiny.dropped_frames :]
    assert decoded.shape[1] == frames - tiny.dropped_frames
    tolerance = max(2e-4, tiny.decoding_tolerance)
    torch.testing.assert_close((decoded / 2 + 0.5).clamp(0, 1), theirs, rtol=1e-5, atol=tolerance)
