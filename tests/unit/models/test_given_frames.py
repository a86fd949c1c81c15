"""Models that are given the first frame of a clip: it is clean, has no loss, and what is drawn for it changes nothing."""

from dataclasses import replace

import diffusers
import pytest
import torch
from family_cases import build_case

from library.config.schema import ModelConfig
from library.models.clean_first_frame import CleanFirstFrame
from library.models.detect import detect_model
from library.models.families import FAMILIES, IMAGE_TO_VIDEO_FAMILIES

__all__ = ["build_case"]  # a fixture
TEXT_CASES = {
    **{
        f"{name}_from_image": name
        for name, family in IMAGE_TO_VIDEO_FAMILIES.items()
        if issubclass(FAMILIES.get(family), CleanFirstFrame)
    },
    "kandinsky5_i2v": "kandinsky5_video",
}
"""The case of the same model from text alone, by that of the model from the first frame."""
CASES = [*TEXT_CASES]
pytestmark = pytest.mark.slow


def predict(family, tiny, latents, **changes):
    pipe, times = tiny.pipe, torch.full((2,), 700.0)
    return family.predict(pipe, pipe.transformer, latents, times, replace(tiny.batch, **changes))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_noise_of_the_given_frame_changes_nothing_and_the_frame_itself_changes_the_others(name, build_case):
    family, tiny = build_case(name)
    noisy = tiny.batch.latents
    other = noisy.clone()
    other[:, :, 0] += 1
    before = predict(family, tiny, noisy)
    assert torch.equal(before, predict(family, tiny, other))
    frames = {key: value + 1 for key, value in tiny.batch.frame_cond.items()}
    changed = predict(family, tiny, noisy, frame_cond=frames)
    assert not torch.allclose(before[:, :, 1:], changed[:, :, 1:], atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_the_given_frame_has_no_loss(name, build_case):
    family, tiny = build_case(name)
    loss = torch.arange(3.0)[None, None, :, None, None].expand(2, 4, 3, 2, 2)
    assert set(family.select_trained_frames(loss, tiny.batch).unique().tolist()) == {1.0, 2.0}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_an_image_is_trained_as_from_text_alone(name, build_case):
    family, tiny = build_case(name)
    text, plain = build_case(TEXT_CASES[name])
    image = plain.batch.latents
    ours = predict(family, tiny, image)
    theirs = predict(text, plain, image)
    torch.testing.assert_close(ours, theirs)
    loss = torch.ones(2, 4, 1, 2, 2)
    assert family.select_trained_frames(loss, tiny.batch) is loss


@pytest.mark.parametrize("name", IMAGE_TO_VIDEO_FAMILIES)
def test_the_option_chooses_the_family(name):
    assert detect_model(f"random:{name}:tiny").family == name
    options = ModelConfig(f"random:{name}:tiny", image_to_video=True)
    assert detect_model(options).family == IMAGE_TO_VIDEO_FAMILIES[name]


@torch.no_grad()
def test_previews_of_kandinsky_5_are_evened_as_in_diffusers_where_it_makes_no_nan_of_them(build_case):
    """diffusers draws the first four latent frames to the next ones, also where there are none."""
    _, tiny = build_case("kandinsky5_i2v")
    pipe, plain = tiny.pipe, diffusers.Kandinsky5I2VPipeline(**tiny.pipe.components)
    clip = torch.randn(1, 7, 4, 6, 4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(pipe.normalize_first_frame(clip), plain.normalize_first_frame(clip))
    short = clip[:, :4]
    assert plain.normalize_first_frame(short).isnan().any(), "the pipeline of this program needs no method of its own"
    assert pipe.normalize_first_frame(short) is short
