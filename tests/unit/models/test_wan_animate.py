"""Wan 2.2 Animate is trained on segments of clips as the pipeline of diffusers samples them, one kind a step."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from diffusers import WanAnimateTransformer3DModel
from family_cases import Recorder
from tiny_pipelines import HEIGHT, WIDTH, draw_control_clips, draw_frame_image

from library.config.schema import ModelConfig
from library.models.families.wan_animate import (
    KNOWN_FRAMES,
    SEGMENT_FRAMES,
    WanAnimate,
    choose_segment_frames,
    fold_face,
    unfold_face,
)
from library.models.wan_animate_transformer import attend_to_faces
from library.randomness import Purpose, derive_rng
from library.tools.family_check.cases import build_batch, find_call_differences

MODEL = "random:wan_animate:tiny"
TEXTS = {"prompt_embeds": torch.zeros(1, 512, 16)}
TEXTS["prompt_embeds"][:, :9] = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(3))
NAMES = ("pose_video", "face_video", "background_video", "mask_video")
DRAWS = {0: 0.49, 1: 0.5, 5: 0.75}
"""Draws of a step by the frames that are known with them."""


def build_family():
    return WanAnimate(ModelConfig(MODEL))


def to_pixels(pipe, clip):
    return pipe.video_processor.preprocess_video(list(clip), *clip[0].size[::-1])


def sample(pipe, clips, length, known, **options):
    """Sample a clip in segments of this length with the pipeline of diffusers."""
    modes = {"mode": "animate" if len(clips) == 2 else "replace", "prev_segment_conditioning_frames": known}
    steps = {"num_inference_steps": 1, "generator": torch.Generator().manual_seed(1), "segment_frame_length": length}
    size = {"height": HEIGHT, "width": WIDTH, "image": draw_frame_image(2)}
    return pipe(**TEXTS, **dict(zip(NAMES, clips, strict=False)), **modes, **steps, **size, **options)


def encode(family, pipe, pixels, controls):
    """Encode a clip and its control clips as a batch of one, as training does."""
    moments = family.encode_moments(pipe, pixels)
    cond = {"embeds": [TEXTS["prompt_embeds"][0, :9]]}
    batch = build_batch(moments.mean_and_std[:, 0], cond)
    frame_cond = family.encode_frame_cond(pipe, pixels, moments)
    return replace(batch, frame_cond=frame_cond, control_latents=family.encode_controls(pipe, controls, pixels))


def record_decoded(pipe):
    """Record the clips that the VAE decodes, which are not clamped."""
    decoded, decode = [], pipe.vae.decode

    def record(latents, **options):
        decoded.append(decode(latents, **options)[0])
        return decoded[-1:]

    pipe.vae.decode = record
    return decoded


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("num_clips", [2, 4])
@pytest.mark.parametrize("known", [1, 5])
def test_a_segment_is_trained_with_what_the_pipeline_samples_it_with(known, num_clips):
    """What the pipeline has sampled before are the first frames of the next segment."""
    family, length = build_family(), 13
    pipe = family.load(MODEL, torch.float32)
    record, decoded, num_frames = Recorder(pipe.transformer), record_decoded(pipe), 2 * length - known
    clips = draw_control_clips(4, num_frames)[:num_clips]
    sample(pipe, clips, length, known, output_type="pt")
    video = torch.cat([decoded[0], decoded[1][:, :, known:]], dim=2)
    calls, outputs = list(record.calls), list(record.outputs)
    assert len(calls) == 2 and video.shape[2] == num_frames
    reference = pipe.video_processor.preprocess(draw_frame_image(2), HEIGHT, WIDTH)[:, :, None]
    for number, (call, output) in enumerate(zip(calls, outputs, strict=True)):
        start = number * (length - known)
        own = video[:, :, start : start + length]
        controls = [to_pixels(pipe, clip[start : start + length]) for clip in clips]
        batch = encode(family, pipe, own, controls)
        moments = family.encode_moments(pipe, reference)
        first = family.encode_frame_cond(pipe, reference, moments)  # of the picture, which is not in the clip
        batch = replace(
            batch, frame_cond={**batch.frame_cond, **{name: first[name] for name in ("reference", "images")}}
        )
        batch = family.select_section(family.arrange_batch(batch), DRAWS[known if number else 0])
        torch.testing.assert_close(batch.latents[:, :, :1], first["reference"])
        noisy = call["hidden_states"][:, : batch.latents.shape[1]]
        family.predict(pipe, pipe.transformer, noisy, call["timestep"], batch)
        ours, theirs = record.calls[-1], call
        # Latents are divided by a deviation here and multiplied by its inverse there.
        for name in ("hidden_states", "pose_hidden_states", "face_pixel_values"):
            torch.testing.assert_close(ours.pop(name), theirs.pop(name), rtol=1e-4, atol=1e-4)
        assert list(find_call_differences(ours, theirs)) == []
        torch.testing.assert_close(record.outputs[-1], output, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("num_clips", [2, 4])
def test_a_preview_of_several_segments_is_that_of_the_pipeline(num_clips, monkeypatch):
    monkeypatch.setattr("library.models.families.wan_animate.SEGMENT_FRAMES", 9)
    family = build_family()
    pipe = family.load(MODEL, torch.float32)
    clips = draw_control_clips(4, 13)[:num_clips]
    assert choose_segment_frames(13) == 9
    expected = sample(pipe, clips, 9, 1, output_type="pt").frames
    given = {"height": HEIGHT, "width": WIDTH, "image": draw_frame_image(2), "num_inference_steps": 1}
    kwargs = {**TEXTS, **given, **family.build_control_clip_kwargs(pipe, clips)}
    generator = torch.Generator().manual_seed(1)
    latents = pipe(**kwargs, num_frames=13, generator=generator, output_type="latent").frames
    assert latents.shape[2] == 2 * (1 + 3)
    decoded = family.decode_sampled_latents(pipe, latents, HEIGHT, WIDTH).transpose(1, 2)
    torch.testing.assert_close(decoded / 2 + 0.5, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_transformer_whose_blocks_attend_to_the_face_is_that_of_diffusers():
    """On all tokens to the bit, and on some of them as far as sums round."""
    model = build_family().load(MODEL, torch.float32).transformer
    make = torch.Generator().manual_seed(4)
    sizes = {"hidden_states": (2, 12, 4, 6, 4), "pose_hidden_states": (2, 4, 3, 6, 4)}
    sizes |= {"face_pixel_values": (2, 3, 9, 16, 16), "encoder_hidden_states": (2, 512, 16)}
    inputs = {name: torch.randn(size, generator=make) for name, size in sizes.items()}
    inputs |= {"encoder_hidden_states_image": torch.randn(2, 5, 16, generator=make)}
    inputs |= {"timestep": torch.tensor([700.0, 20.0]), "return_dict": False}
    record = Recorder(model.blocks[1])
    (ours,), (theirs,) = model(**inputs), WanAnimateTransformer3DModel.forward(model, **inputs)
    assert type(model) is not WanAnimateTransformer3DModel
    assert torch.equal(ours, theirs)
    without, whole = record.calls[1], record.calls[0]
    assert "motion" not in without and not torch.equal(record.outputs[0], record.outputs[1])
    tokens, motion, frames = record.outputs[0], whole["motion"], whole["token_frames"]
    expected = model.face_adapter[1](tokens, motion)
    for part in (slice(0, 5), slice(7, 19)):
        found = attend_to_faces(model.face_adapter[1], tokens[:, part], motion, frames[part])
        torch.testing.assert_close(found, expected[:, part])


def test_previews_have_the_fewest_segments_of_equal_length():
    lengths = {5: 5, 49: 49, 77: 77, 81: 41, 153: 77, 157: 53}
    assert {frames: choose_segment_frames(frames) for frames in lengths} == lengths
    for frames in range(5, 400, 4):
        segment = choose_segment_frames(frames)
        assert segment <= SEGMENT_FRAMES and segment % 4 == 1


def test_the_kinds_of_segments_of_all_steps_are_drawn_alike():
    family, kinds = build_family(), Counter()
    every = torch.arange(3.0).view(1, 3, 1, 1, 1).expand(1, 3, 4, 1, 1)
    batch = replace(build_batch(torch.zeros(1, 1, 5, 1, 1), {}), frame_cond={"given": every})
    for step in range(600):
        segment = family.select_section(batch, derive_rng(42, Purpose.SECTION, step).random()).frame_cond["segment"]
        known = KNOWN_FRAMES[int(segment[0, -1, 0])]
        assert segment[0, :-1].amax((0, 2, 3)).tolist() == [known > 0, known > 1, 0, 0]
        kinds[known] += 1
    assert 250 < kinds[0] < 350
    assert all(110 < kinds[known] < 190 for known in (1, 5))


def test_frames_that_would_leave_nothing_to_make_are_not_known():
    family = build_family()
    every = torch.arange(3.0).view(1, 3, 1, 1, 1).expand(1, 3, 2, 1, 1)
    batch = replace(build_batch(torch.zeros(1, 1, 3, 1, 1), {}), frame_cond={"given": every})
    assert {int(family.select_section(batch, draw).frame_cond["segment"][0, -1, 0]) for draw in (0.5, 0.75, 1.0)} == {1}


def test_the_frame_of_the_character_has_no_loss():
    family = build_family()
    loss = torch.arange(4.0).view(1, 1, 4, 1, 1)
    assert family.select_trained_frames(loss, build_batch(loss, {})).flatten().tolist() == [1, 2, 3]


def test_a_face_is_folded_to_latents_and_back():
    face = torch.randint(0, 256, (2, 3, 9, 16, 24), generator=torch.Generator().manual_seed(1))[..., :16]
    pixels = face / 127.5 - 1
    folded = fold_face(pixels)
    assert folded.shape == (2, 3 * 4 * 64, 3, 2, 2) and folded.dtype == torch.uint8
    torch.testing.assert_close(unfold_face(folded.float()), pixels)


def test_a_model_whose_weights_are_partitioned_can_be_printed_as_deepspeed_does():
    family = build_family()
    denoiser = family.load(MODEL, torch.float32).transformer
    for weight in denoiser.parameters():
        weight.data = torch.empty(0)
    assert "WanAnimateTransformer3DModel()" in repr(torch.nn.Sequential(denoiser))
