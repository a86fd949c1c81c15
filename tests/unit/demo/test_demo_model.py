"""The built-in model: small, a regular diffusers folder, and its samples match their captions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

from library.dataloader.sample_prompts import load_prompts
from library.demo import BUILT_IN_MODEL_DIR
from library.models.detect import detect_model
from library.models.families import FAMILIES
from scripts.demo_model.subjects import SUBJECTS

PROMPTS = Path(__file__).resolve().parents[3] / "dataset_configs" / "demo_prompts.txt"


@pytest.fixture(scope="module")
def theirs():
    """The model, loaded with diffusers."""
    pipe = StableDiffusionPipeline.from_pretrained(BUILT_IN_MODEL_DIR)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(pipe, prompts, size=(96, 96), seed=0):
    """Generate an image for each prompt, (B, height, width, 3) in 0..1."""
    return pipe(
        prompts,
        width=size[0],
        height=size[1],
        num_inference_steps=15,
        guidance_scale=3.0,
        output_type="np",
        generator=torch.Generator().manual_seed(seed),
    ).images


def test_the_built_in_model_is_small():
    assert sum(path.stat().st_size for path in BUILT_IN_MODEL_DIR.rglob("*") if path.is_file()) < 12_000_000


def test_the_model_card_lists_every_subject():
    card = (BUILT_IN_MODEL_DIR / "README.md").read_text(encoding="utf-8")
    assert not [name for name in SUBJECTS if name not in card]
    assert len(SUBJECTS) == len(set(SUBJECTS.values())) == 64


def test_the_built_in_model_is_detected_as_a_diffusers_folder():
    ours, as_folder = detect_model(None), detect_model(str(BUILT_IN_MODEL_DIR))
    assert (ours.family, ours.size_multiple) == (as_folder.family, as_folder.size_multiple) == ("sd1", 16)


@pytest.mark.slow
def test_previews_equal_the_images_of_the_diffusers_pipeline(theirs):
    family = FAMILIES.get("sd1")()
    pipe = family.load(None, torch.float32)
    for prompt in load_prompts(PROMPTS)[::2]:
        cond, negative = (family.encode_prompts(pipe, [text]) for text in (prompt.text, prompt.negative_prompt))
        ours = family.generate_image(pipe, prompt, cond, negative, torch.Generator().manual_seed(prompt.seed), "ddim")
        expected = theirs(
            prompt.text,
            negative_prompt=prompt.negative_prompt,
            width=prompt.width,
            height=prompt.height,
            num_inference_steps=prompt.num_inference_steps,
            guidance_scale=prompt.cfg_scale,
            generator=torch.Generator().manual_seed(prompt.seed),
        ).images[0]
        assert ours.size == expected.size == (prompt.width, prompt.height)
        # Rounding to bytes may differ by one.
        assert np.abs(np.asarray(ours, int) - np.asarray(expected, int)).max() <= 1


COLORS = {
    "a heart": (0.94, 0.29, 0.24),
    "a pine tree": (0.06, 0.61, 0.24),
    "eggplant": (0.6, 0.37, 0.57),
    "a star": (0.99, 0.85, 0.23),
    "a basketball": (0.8, 0.38, 0.2),
    "a dolphin": (0.22, 0.69, 0.86),
}
"""The mean color of its training images, without white."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [(96, 96), (128, 64), (80, 112)])
def test_samples_have_the_color_of_their_caption_on_a_white_background(theirs, size):
    images = drawn(theirs, list(COLORS), size)
    border = np.concatenate([part.reshape(len(images), -1) for part in (images[:, :3], images[:, -3:])], 1)
    assert np.median(border, 1).min() > 0.97
    for text, image in zip(COLORS, images, strict=True):
        inked = image[image.min(-1) < 0.75]
        assert 0.05 < len(inked) / image[..., 0].size < 0.9, text
        distances = {other: np.abs(inked.mean(0) - color).sum() for other, color in COLORS.items()}
        assert min(distances, key=distances.get) == text


def test_unknown_words_in_a_prompt_do_not_change_the_subject(theirs):
    plain, dressed = drawn(theirs, ["a heart"]), drawn(theirs, ["a heart, holographic style"])
    assert np.abs(plain - dressed).mean() < 0.1
