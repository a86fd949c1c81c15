"""Reference images of clips: the denoiser gets them, and previews show them, as in diffusers' pipeline."""

from dataclasses import replace

import pytest
import torch
from family_cases import ForwardOnlyWrapper, Recorder, build_case, make_generators
from PIL import Image, ImageChops
from tiny_pipelines import HEIGHT, WIDTH, draw_control_clips, draw_frame_image, encode_control_clips, shrink_references

from library.dataloader.sample_prompts import Prompt
from library.models.families import FAMILY_FACTS

__all__ = ["build_case"]  # a fixture
FAMILIES_WITH_REFERENCES = [name for name, facts in FAMILY_FACTS.items() if facts.control.most_references]
FRAMES = 5


def draw_references():
    """Two images of the size of the clip, which differ from all of its frames."""
    return [draw_frame_image(number).transpose(Image.Transpose.FLIP_TOP_BOTTOM) for number in (11, 12)]


def encode_references(family, pipe):
    pixels = [pipe.video_processor.preprocess(image, HEIGHT, WIDTH).unsqueeze(2) for image in draw_references()]
    pixels = [each.expand(2, *each.shape[1:]) for each in pixels]
    return family.encode_references(pipe, pixels)


@pytest.fixture(autouse=True)
def clean_texts(monkeypatch):
    shrink_references(monkeypatch)


@torch.no_grad()
@pytest.mark.parametrize("num_clips", [1, 2])
@pytest.mark.parametrize("name", FAMILIES_WITH_REFERENCES)
def test_the_denoiser_gets_reference_images_as_from_the_diffusers_pipeline(name, num_clips, build_case):
    family, tiny = build_case(name)
    pipe = tiny.pipe
    clips = torch.rand(2, 3, FRAMES, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(7)) * 2 - 1
    latents = family.encode_moments(pipe, clips).sample(make_generators())
    controls = draw_control_clips(num_clips, FRAMES)
    encoded = encode_control_clips(family, pipe, controls)
    references = encode_references(family, pipe)
    mask = torch.zeros(2, 1, *latents.shape[-2:])
    batch = replace(tiny.batch, latents=latents, control_latents=(*encoded, *references), mask=mask)

    batch = family.arrange_batch(batch)

    assert batch.latents.shape[2] == 2 + latents.shape[2]
    for number, each in enumerate(references):
        assert torch.equal(batch.latents[:, :, number : number + 1], each), "the first one is first"
    assert batch.mask[0, 0, :, 0, 0].tolist() == [1, 1, *[0] * latents.shape[2]], "the mask is that of the clip"
    record, t = Recorder(pipe.transformer), torch.full((2,), float(pipe.scheduler.timesteps[0]))
    pipe(
        **{
            **{**tiny.call, tiny.scale: tiny.guidance_off},
            **family.build_control_clip_kwargs(pipe, controls),
            **family.build_reference_kwargs(pipe, draw_references()),
            **{"num_frames": FRAMES, "height": HEIGHT, "width": WIDTH, "num_inference_steps": 2},
        },
        latents=batch.latents,
        output_type="latent",
    )
    family.predict(pipe, ForwardOnlyWrapper(pipe.transformer), batch.latents, t, batch)
    for given in ("hidden_states", "control_hidden_states"):
        inputs = [record.calls[number][given] for number in (-1, 0)]
        torch.testing.assert_close(*inputs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(record.outputs[-1], record.outputs[0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("has_clip", [True, False])
@pytest.mark.parametrize("name", FAMILIES_WITH_REFERENCES)
def test_a_preview_with_reference_images_is_the_clip_that_the_diffusers_pipeline_samples(
    name, has_clip, build_case, tmp_path
):
    family, tiny = build_case(name)
    grey = [Image.new("RGB", (WIDTH, HEIGHT), (128, 128, 128))] * FRAMES
    (clip,) = draw_control_clips(1, FRAMES) if has_clip else [grey]
    theirs = tiny.pipe(
        prompt="a red circle",
        **tiny.build_negative(tiny.pipe, "blue"),
        **{
            **tiny.texts,
            **family.build_control_clip_kwargs(tiny.pipe, [clip]),
            **family.build_reference_kwargs(tiny.pipe, draw_references()),
            **{"num_frames": FRAMES, "height": HEIGHT, "width": WIDTH, "num_inference_steps": 2, tiny.scale: 3.0},
        },
        generator=torch.Generator().manual_seed(1),
        output_type="pil",
    ).frames[0]
    (tmp_path / "clip").mkdir()
    for number, frame in enumerate(clip):
        frame.save(tmp_path / "clip" / f"{number}.png")
    paths = [tmp_path / "first.png", tmp_path / "second.png"]
    for path, image in zip(paths, draw_references(), strict=True):
        image.save(path)
    settings = {"num_frames": FRAMES, "width": WIDTH, "height": HEIGHT, "num_inference_steps": 2, "cfg_scale": 3.0}
    clips = (tmp_path / "clip",) if has_clip else ()
    previews = []
    for images in (tuple(paths), ()) if has_clip else (tuple(paths),):
        prompt = Prompt("a red circle", "blue", **settings, control_images=images, control_clips=clips)
        cond = tiny.encode_prompts(family, tiny.pipe, [prompt.text])
        negative = tiny.encode_negative_prompts(family, tiny.pipe, [prompt.negative_prompt])
        generator = torch.Generator().manual_seed(1)
        previews.append(family.generate_frames(tiny.pipe, prompt, cond, negative, generator, None))
    assert len(previews[0]) == len(theirs) == FRAMES
    for mine, expected in zip(previews[0], theirs, strict=True):
        assert max(high for _, high in ImageChops.difference(mine, expected).getextrema()) <= 1
    assert not has_clip or previews[0][0].tobytes() != previews[1][0].tobytes()
