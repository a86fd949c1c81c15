"""Runs of GLM-Image: image tokens from caches of every precision, previews after a picture, and an exact resume."""

import pytest
import torch
from PIL import Image
from problem_lines import format_lines
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library.config import parse_config
from library.models.validate_options import validate_model_options

MODEL = ("--pretrained_model_name_or_path", "random:glm_image:tiny", "--caption_dropout_rate", "0.3", "--flip_aug")


@pytest.fixture
def data(tmp_path):
    path = write_images(tmp_path, {(96, 64): 4, (64, 96): 4})
    path.write_text(path.read_text().replace("bucket_reso_steps = 16", "bucket_reso_steps = 32"))
    return path


def run(data, folder, name, *flags):
    words = (*MODEL, "--optimizer_type", "SGD", "--learning_rate", "0.5", "--network_alpha", "4", "--network_dim", "4")
    words += ("--dataset_config", str(data), "--output_dir", str(folder), "--output_name", name, "--seed", "3")
    train(*words, "--max_train_steps", "4", "--train_batch_size", "2", *flags)
    return load_file(folder / f"{name}.safetensors")


@pytest.mark.slow
def test_cached_image_tokens_train_the_same_adapter_and_a_resume_is_exact(data, tmp_path):
    plain = run(data, tmp_path, "plain")
    caches = ("--cache_latents", "--cache_text_encoder_outputs", "--cache_precision", "float")
    assert max_relative_difference(plain, run(data, tmp_path, "cached", *caches)) < 1e-5
    run(data, tmp_path, "half", *caches, "--save_state", "--save_every_n_steps", "2")
    resumed = run(data, tmp_path, "resumed", *caches, "--resume", str(tmp_path / "half-step00000002-state"))
    cached = load_file(tmp_path / "cached.safetensors")
    assert all(torch.equal(cached[name], resumed[name]) for name in cached)


@pytest.mark.slow
def test_previews_draw_the_image_tokens_of_the_picture_of_their_prompt(data, tmp_path):
    pictures = sorted((tmp_path / "images").glob("*.png"))[:2]
    Image.linear_gradient("L").convert("RGB").save(pictures[1])
    lines = [f"a 'sign' --w 64 --h 64 --s 2 --d 1 --i {picture}" for picture in (pictures[0], *pictures)]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    flags = ("--sample_prompts", str(tmp_path / "prompts.txt"), "--sample_every_n_steps", "4", "--cache_latents")
    run(data, tmp_path, "p", *flags)
    first, same, other = (image.read_bytes() for image in sorted((tmp_path / "sample").glob("p_*.png")))
    assert first == same != other


def test_a_preview_without_a_picture_is_reported(data):
    words = [*MODEL, "--dataset_config", str(data), "--sample_prompts", "a red circle --w 64 --h 64"]
    (problem,) = format_lines(validate_model_options(parse_config(words).require_valid(), {}))
    assert "a preview of GLM-Image is made after an image; give one with --i" in problem
