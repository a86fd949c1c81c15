"""Runs of models that read a mask or a control image as channels: resume, caches, processes, previews, rejections."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from problem_lines import format_lines
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from tiny_pipelines import TINY
from training_runs import max_relative_difference, train, write_images

from library.config import parse_config
from library.dataset.validate import validate_dataset_config
from library.models.families import FAMILIES
from library.models.validate_options import validate_model_options

MODELS = ("sd1_inpainting", "sdxl_inpainting", "flux_fill")
SGD = ("--optimizer_type", "SGD", "--learning_rate", "0.1", "--network_alpha", "4", "--network_dim", "4")


def name_model(name):
    return ("--pretrained_model_name_or_path", f"random:{name}:tiny", "--network_train_unet_only")


@pytest.fixture
def data(tmp_path):
    """A dataset whose masks are drawn."""
    path = write_images(tmp_path, {(96, 64): 8, (64, 96): 4})
    path.write_text(path.read_text() + "\ncontrol_from_image = 'mask'\n")
    return path


@pytest.fixture
def data_with_masks(tmp_path):
    """A dataset with a file of each mask."""
    path = write_images(tmp_path, {(96, 64): 8, (64, 96): 4})
    (tmp_path / "masks").mkdir()
    for number, file in enumerate(sorted((tmp_path / "images").glob("*.png"))):
        mask = Image.new("L", Image.open(file).size)
        ImageDraw.Draw(mask).rectangle((5, number, 40, 40), fill=255)
        mask.save(tmp_path / "masks" / file.name)
    path.write_text(path.read_text() + f"\ncontrol_directory = '{tmp_path / 'masks'}'\n")
    return path


def run(data, folder, name, *flags, model="sd1_inpainting", ranks=1):
    words = (*name_model(model), *SGD, "--dataset_config", str(data), "--output_dir", str(folder))
    words += ("--output_name", name, "--max_train_steps", "4", "--seed", "3", *flags)
    if ranks == 1:
        train(*words)
    else:
        run_on_ranks(ranks, train, *words)
    return load_file(folder / f"{name}.safetensors")


@pytest.mark.parametrize("model", MODELS)
def test_a_resumed_run_draws_the_masks_of_the_run_that_went_through(data, tmp_path, model):
    through = run(data, tmp_path, "through", "--flip_aug", model=model)
    run(data, tmp_path, "half", "--flip_aug", "--save_state", "--save_every_n_steps", "2", model=model)
    state = tmp_path / "half-step00000002-state"
    resumed = run(data, tmp_path, "resumed", "--flip_aug", "--resume", str(state), model=model)
    assert all(torch.equal(through[name], resumed[name]) for name in through)


@pytest.mark.parametrize("model", ["sdxl_inpainting", "flux_fill"])
def test_two_processes_train_the_adapter_of_one(data, tmp_path, model):
    one = run(data, tmp_path, "one", "--train_batch_size", "4", model=model)
    two = run(data, tmp_path, "two", "--train_batch_size", "2", model=model, ranks=2)
    assert max_relative_difference(one, two) < 1e-5


@pytest.mark.parametrize("model", ["sd1_inpainting", "flux_fill", "flux_control", "sd1_pix2pix"])
def test_cached_images_of_files_train_the_same_adapter_and_others_another_one(data_with_masks, tmp_path, model):
    plain = run(data_with_masks, tmp_path, "plain", "--flip_aug", model=model)
    cached = run(data_with_masks, tmp_path, "disk", "--flip_aug", "--cache_latents_to_disk", model=model)
    # The VAE encodes pictures in other batches.
    assert max_relative_difference(plain, cached) < 1e-3
    for file in (tmp_path / "masks").glob("*.png"):
        Image.open(file).point(lambda value: 255 - value).save(file)
    others = run(data_with_masks, tmp_path, "others", "--flip_aug", "--cache_latents_to_disk", model=model)
    assert max_relative_difference(plain, others) > 1e-2


def test_previews_paint_into_their_picture(data, tmp_path):
    image = next((tmp_path / "images").glob("*.png"))
    Image.new("L", (96, 64), 255).save(tmp_path / "all.png")
    Image.new("L", (96, 64)).save(tmp_path / "none.png")
    lines = [f"a --w 96 --h 64 --s 2 --d 1 --i {image} --ci {tmp_path / name}.png" for name in ("all", "none")]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    run(data, tmp_path, "p", "--sample_prompts", str(tmp_path / "prompts.txt"), "--sample_every_n_steps", "4")
    first, second = (np.asarray(Image.open(file), int) for file in sorted((tmp_path / "sample").glob("p_*.png")))
    assert first.shape == (64, 96, 3) and np.abs(first - second).max() > 0


def test_previews_of_the_refiner_begin_with_their_picture(data, tmp_path):
    data.write_text(data.read_text().replace("control_from_image = 'mask'", ""))
    first, second = sorted((tmp_path / "images").glob("*.png"))[:2]
    lines = [f"a --w 96 --h 64 --s 4 --d 1 --i {image}" for image in (first, second)]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    flags = ("--sample_prompts", str(tmp_path / "prompts.txt"), "--sample_every_n_steps", "4", "--max_timestep", "200")
    run(data, tmp_path, "p", *flags, model="sdxl_refiner")
    previews = [file.read_bytes() for file in sorted((tmp_path / "sample").glob("p_*.png"))]
    assert len(set(previews)) == 2


@torch.no_grad()
@pytest.mark.quick
def test_what_the_mask_covers_is_not_in_the_input_and_the_rest_is():
    tiny, family = TINY["sd1_inpainting"](), FAMILIES.get("sd1_inpainting")()
    pixels = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    mask = torch.full((1, 3, 64, 96), -1.0)
    mask[..., :48] = 0.2  # gray, which is more than half
    control = family.encode_control(tiny.pipe, mask, pixels)
    other = pixels.clone()
    other[..., :48] = 1 - other[..., :48]
    assert torch.equal(control, family.encode_control(tiny.pipe, mask, other))
    other[..., 60:] = 0
    assert not torch.allclose(control, family.encode_control(tiny.pipe, mask, other))
    assert control[:, 0, :, :6].eq(1).all() and control[:, 0, :, 6:].eq(0).all()
    nothing = family.encode_control(tiny.pipe, torch.full_like(mask, -1), pixels)
    assert torch.equal(nothing[:, 1:], family.encode_moments(tiny.pipe, pixels).mean_and_std[:, 0])


@pytest.mark.quick
def test_what_the_masks_do_not_support_is_refused(data, tmp_path):
    def list_problems(*words, model="sd1_inpainting"):
        parsed = parse_config([*name_model(model), "--dataset_config", str(data), *words])
        config = parsed.config
        problems = [*format_lines(parsed.problems), *format_lines(validate_dataset_config(config.data, config.cache))]
        return "\n".join([*problems, *format_lines(validate_model_options(config, {}))])

    assert list_problems() == ""
    assert "mask cannot be used with cache_latents" in list_problems("--cache_latents")
    assert "FLUX.1 Depth and Canny takes no masks; inpainting models do" in list_problems(model="flux_control")
    assert "control_from_image: Stable Diffusion 1 takes no control images" in list_problems(model="sd1")
    text = data.read_text()
    data.write_text(text.replace("resolution", "control_resolution = 32\nresolution", 1))
    assert (
        "control_resolution: Stable Diffusion 1 inpainting reads a control image, which has the size of the picture"
        in list_problems()
    )
    data.write_text(text.replace("'mask'", "'canny'"))
    assert "Stable Diffusion 1 inpainting gets a mask, and canny makes none; set 'mask'" in list_problems()
