"""Runs on pictures with layers: matched, with their alpha, from caches and on two ranks, resumed; and previews."""

import numpy as np
import pytest
import torch
from PIL import Image
from problem_lines import format_lines
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library.config import parse_config
from library.config.schema_data import DataConfig
from library.dataloader.prepare import prepare_data
from library.dataset.controls import ControlLimits, match_layers
from library.models.families import qwen_image_layered
from library.models.validate_options import validate_model_options

MODEL = ("--pretrained_model_name_or_path", "random:qwen_image_layered:tiny")
SGD = ("--optimizer_type", "SGD", "--learning_rate", "0.1", "--network_alpha", "4")


@pytest.fixture
def data(tmp_path):
    """Pictures of two shapes; the first have two layers, the others one."""
    path = write_images(tmp_path, {(96, 64): 4, (64, 96): 4})
    for number, image in enumerate(sorted((tmp_path / "images").glob("*.png"))):
        picture = Image.open(image).convert("RGBA")
        for layer in range(2 if number < 4 else 1):
            picture.putalpha(Image.linear_gradient("L").rotate(90 * layer).resize(picture.size))
            picture.save(image.with_name(f"{image.stem}_{layer}.png"))
    text = path.read_text()
    line = next(line for line in text.splitlines() if "image_dir" in line)
    path.write_text(text.replace(line, f"{line}\nmultiple_target = true"))
    return path


def run(data, folder, name, *flags, ranks=1):
    words = (*MODEL, *SGD, "--dataset_config", str(data), "--output_dir", str(folder), "--output_name", name)
    words += ("--max_train_steps", "4", "--network_dim", "4", "--seed", "3", *flags)
    if ranks == 1:
        train(*words)
    else:
        run_on_ranks(ranks, train, *words)
    return load_file(folder / f"{name}.safetensors")


def test_numbered_images_without_captions_are_layers_in_the_order_of_their_numbers():
    names = ["a.png", "a_10.png", "a_2.webp", "b_1.png", "b_1_0.png", "c.png", "c_0.png"]
    layers = match_layers(names, lambda name: name in ("a.png", "c_0.png"))
    assert layers == {"a.png": ("a_2.webp", "a_10.png"), "b_1.png": ("b_1_0.png",), "c.png": (), "c_0.png": ()}
    with pytest.raises(ValueError, match=r"a_2.png and a_2.webp are the same layer"):
        match_layers(["a.png", "a_2.png", "a_2.webp"], lambda name: False)


def test_layers_are_read_with_their_alpha_and_flipped_with_their_picture(data):
    config = DataConfig(dataset_config=str(data), flip_aug=True)
    prepared = prepare_data(config, 16, control_limits=ControlLimits(1, 9, "layers", "", are_layers=True))
    assert len(prepared.manifest.samples) == 8
    assert sorted(len(sample.controls) for sample in prepared.manifest.samples) == [1] * 4 + [2] * 4
    assert all(control.has_alpha for sample in prepared.manifest.samples for control in sample.controls)


def test_cached_layers_train_the_same_adapter_and_every_layer_counts(data, tmp_path):
    plain = run(data, tmp_path, "plain", "--train_batch_size", "4")
    assert (
        max_relative_difference(
            plain, run(data, tmp_path, "disk", "--train_batch_size", "4", "--cache_latents_to_disk")
        )
        < 1e-5
    )
    assert max_relative_difference(plain, run(data, tmp_path, "two", "--train_batch_size", "2", ranks=2)) < 1e-5
    for image in (tmp_path / "images").glob("*_0.png"):
        changed = Image.open(image)
        changed.putalpha(changed.getchannel("A").point(lambda value: 255 - value))
        changed.save(image)
    others = run(data, tmp_path, "others", "--train_batch_size", "4", "--cache_latents_to_disk")
    assert max_relative_difference(plain, others) > 1e-3


def test_a_resumed_run_with_layers_is_exact(data, tmp_path):
    through = run(data, tmp_path, "through", "--flip_aug")
    run(data, tmp_path, "half", "--flip_aug", "--save_state", "--save_every_n_steps", "2")
    state = tmp_path / "half-step00000002-state"
    resumed = run(data, tmp_path, "resumed", "--flip_aug", "--resume", str(state))
    assert all(torch.equal(through[name], resumed[name]) for name in through)


def test_a_preview_is_a_sheet_of_layers_with_alpha(data, tmp_path, monkeypatch):
    monkeypatch.setattr(qwen_image_layered, "RESOLUTION", 640)
    picture = next((tmp_path / "images").glob("*[0-9].png"))
    (tmp_path / "prompts.txt").write_text(f"a --f 2 --s 2 --d 1 --l 1 --ci {picture}")
    monkeypatch.setattr(
        "diffusers.pipelines.qwenimage.pipeline_qwenimage_layered.calculate_dimensions", lambda area, ratio: (96, 64)
    )
    run(data, tmp_path, "p", "--sample_prompts", str(tmp_path / "prompts.txt"), "--sample_every_n_steps", "4")
    (sheet,) = map(Image.open, (tmp_path / "sample").glob("p_*.png"))
    pixels = np.asarray(sheet)
    assert sheet.mode == "RGBA" and sheet.size == (2 * 96, 64)
    assert not np.array_equal(pixels[:, :96], pixels[:, 96:])


def list_problems(data, *flags):
    parsed = parse_config([*MODEL, "--dataset_config", str(data), *flags])
    return format_lines([*parsed.problems, *validate_model_options(parsed.config, {})])


def test_settings_that_layers_do_not_allow_are_refused(data, tmp_path):
    assert list_problems(data) == []
    (problem,) = list_problems(data, "--pretrained_model_name_or_path", "random:flux:tiny")
    assert "FLUX.1 makes no layers; Qwen-Image-Layered does" in problem
    (problem,) = list_problems(data, "--sample_prompts", "a --f 3")
    assert "makes the layers of one image, not 0; use --ci" in problem
