"""Runs with control images: one result with every strategy, from caches, and after a resume; previews; rejections."""

import pytest
import torch
from PIL import Image, ImageChops
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library.config import parse_config
from library.errors import ConfigError
from library.models.preflight import validate_model_options

MODEL = ("--pretrained_model_name_or_path", "random:flux_kontext:tiny", "--network_train_unet_only")
SGD = ("--optimizer_type", "SGD", "--learning_rate", "0.1", "--network_alpha", "4")


@pytest.fixture
def data(tmp_path):
    """Two buckets, each picture with a control image of the same shape."""
    path = write_images(tmp_path, {(96, 64): 8, (64, 96): 4})
    for number, image in enumerate(sorted((tmp_path / "images").glob("*.png"))):
        (tmp_path / "controls").mkdir(exist_ok=True)
        flipped = Image.open(image).transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        flipped.point(lambda value, shift=number: (value + 9 * shift) % 256).save(tmp_path / "controls" / image.name)
    text = path.read_text()
    line = next(line for line in text.splitlines() if "image_dir" in line)
    path.write_text(text.replace(line, f"{line}\ncontrol_directory = '{tmp_path / 'controls'}'"))
    return path


def run(data, folder, name, *flags, ranks=1):
    words = (*MODEL, *SGD, "--dataset_config", str(data), "--output_dir", str(folder), "--output_name", name)
    words += ("--max_train_steps", "4", "--network_dim", "4", "--seed", "3", *flags)
    if ranks == 1:
        train(*words)
    else:
        run_on_ranks(ranks, train, *words)
    return load_file(folder / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ("--train_batch_size", "2")),
        (2, ("--train_batch_size", "2", "--fsdp")),
        (2, ("--train_batch_size", "4", "--tp_size", "2")),
        (2, ("--train_batch_size", "4", "--cp_size", "2")),
        (2, ("--train_batch_size", "1", "--gradient_accumulation_steps", "4", "--pp_size", "2")),
    ],
    ids=["DDP", "FSDP", "TP", "CP", "PP"],
)
def test_every_strategy_trains_the_adapter_of_one_process(data, tmp_path, ranks, flags):
    one = run(data, tmp_path, "one", "--train_batch_size", "4")
    assert max_relative_difference(one, run(data, tmp_path, "more", *flags, ranks=ranks)) < 1e-5


def test_cached_control_images_train_the_same_adapter_and_others_another_one(data, tmp_path):
    plain = run(data, tmp_path, "plain")
    assert max_relative_difference(plain, run(data, tmp_path, "memory", "--cache_latents")) < 1e-5
    assert max_relative_difference(plain, run(data, tmp_path, "disk", "--cache_latents_to_disk")) < 1e-5
    for image in (tmp_path / "controls").glob("*.png"):
        ImageChops.invert(Image.open(image)).save(image)
    others = run(data, tmp_path, "others", "--cache_latents_to_disk")
    assert max_relative_difference(plain, others) > 1e-3
    assert max_relative_difference(run(data, tmp_path, "uncached"), others) < 1e-5


def test_a_resumed_run_is_exact_and_not_resumed_with_other_control_images(data, tmp_path):
    through = run(data, tmp_path, "through", "--flip_aug")
    flags = ("--flip_aug", "--save_state", "--save_every_n_steps", "2")
    run(data, tmp_path, "half", *flags)
    state = tmp_path / "half-step00000002-state"
    resumed = run(data, tmp_path, "resumed", "--flip_aug", "--resume", str(state))
    assert all(torch.equal(through[name], resumed[name]) for name in through)
    for image in (tmp_path / "controls").glob("*.png"):
        ImageChops.invert(Image.open(image)).save(image)
    with pytest.raises(ConfigError, match="images"):
        run(data, tmp_path, "other", "--flip_aug", "--resume", str(state))


def test_previews_show_their_control_images(data, tmp_path):
    control = next((tmp_path / "controls").glob("*.png"))
    lines = [f"a --w 64 --h 64 --s 1 --d 1{end}" for end in ("", f" --ci {control}")]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    run(data, tmp_path, "p", "--sample_prompts", str(tmp_path / "prompts.txt"), "--sample_every_n_steps", "4")
    first, second = (image.read_bytes() for image in sorted((tmp_path / "sample").glob("p_*.png")))
    assert first != second


@pytest.mark.parametrize("key", ["control_directory", "conditioning_data_dir"])
def test_models_that_take_no_control_images_reject_them(data, tmp_path, key):
    data.write_text(data.read_text().replace("control_directory", key))
    words = ["--pretrained_model_name_or_path", "random:flux:tiny", "--dataset_config", str(data)]
    (problem,) = validate_model_options(parse_config(words).require_valid(), {})
    assert f": {key}: FLUX.1 takes no control images; FLUX.1 Kontext" in problem
    assert ("if these are masks, set --masked_loss" in problem) == (key == "conditioning_data_dir")
