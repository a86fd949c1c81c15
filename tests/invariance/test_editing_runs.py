"""Runs with control images: one result with every strategy, from caches, and after a resume; previews; rejections."""

import json

import pytest
import torch
from PIL import Image, ImageChops
from problem_lines import format_lines
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from tiny_pipelines import shrink_references
from training_runs import max_relative_difference, train, write_images

from library.config import parse_config
from library.errors import ConfigError
from library.estimate.dry_run import build_dry_run
from library.models.validate_options import validate_model_options

MODEL = ("--pretrained_model_name_or_path", "random:flux_kontext:tiny", "--network_train_unet_only")
EDIT = ("--pretrained_model_name_or_path", "random:qwen_image_edit_plus:2511:tiny")
LONGCAT = ("--pretrained_model_name_or_path", "random:longcat_image_edit:tiny")
JOYIMAGE = ("--pretrained_model_name_or_path", "random:joyimage_edit:tiny")
OMNI = ("--pretrained_model_name_or_path", "random:z_image_omni:tiny")
CACHES = ("--cache_latents", "--cache_text_encoder_outputs")
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


@pytest.mark.parametrize("model", [MODEL, (*EDIT, *CACHES)], ids=["flux_kontext", "qwen_image_edit_plus"])
def test_a_resumed_run_is_exact_and_not_resumed_with_other_control_images(data, tmp_path, model):
    through = run(data, tmp_path, "through", *model, "--flip_aug")
    flags = (*model, "--flip_aug", "--save_state", "--save_every_n_steps", "2")
    run(data, tmp_path, "half", *flags)
    state = tmp_path / "half-step00000002-state"
    resumed = run(data, tmp_path, "resumed", *model, "--flip_aug", "--resume", str(state))
    assert all(torch.equal(through[name], resumed[name]) for name in through)
    for image in (tmp_path / "controls").glob("*.png"):
        ImageChops.invert(Image.open(image)).save(image)
    with pytest.raises(ConfigError, match="images"):
        run(data, tmp_path, "other", *model, "--flip_aug", "--resume", str(state))


def test_previews_show_their_control_images(data, tmp_path):
    control = next((tmp_path / "controls").glob("*.png"))
    lines = [f"a --w 64 --h 64 --s 1 --d 1{end}" for end in ("", f" --ci {control}")]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    run(data, tmp_path, "p", "--sample_prompts", str(tmp_path / "prompts.txt"), "--sample_every_n_steps", "4")
    first, second = (image.read_bytes() for image in sorted((tmp_path / "sample").glob("p_*.png")))
    assert first != second


@pytest.mark.parametrize(
    ("model", "size", "count"),
    [(EDIT, " --w 64 --h 64", 2), (OMNI, " --w 64 --h 64", 2), (LONGCAT, "", 1)],
    ids=["qwen_image_edit_plus", "z_image_omni", "longcat"],
)
def test_captions_are_cached_together_with_the_control_images_that_the_text_encoder_reads(
    data, tmp_path, monkeypatch, model, size, count
):
    """All captions are the same, so only the control images, flipped or not, tell their embeddings apart."""
    shrink_references(monkeypatch)
    for caption in (tmp_path / "images").glob("*.txt"):
        caption.write_text("make it red")
    control = next((tmp_path / "controls").glob("*.png"))
    (tmp_path / "prompts.txt").write_text(f"make it red{size} --s 2 --d 1 --l 3{f' --ci {control}' * count} --cf canny")
    previews = ("--sample_prompts", str(tmp_path / "prompts.txt"), "--sample_every_n_steps", "4")
    flags = (*model, "--flip_aug", "--validation_split", "0.2", *previews)

    plain = run(data, tmp_path / "plain", "p", *flags)
    on_disk = [f"{cache}_to_disk" for cache in CACHES]
    for name, caches in {"texts": CACHES[1:], "disk": on_disk}.items():
        assert max_relative_difference(plain, run(data, tmp_path / name, "p", *flags, *caches)) < 1e-5
    pictures = [Image.open(path) for path in tmp_path.glob("*/sample/p_*.png")]
    differences = [max(high for _, high in ImageChops.difference(each, pictures[0]).getextrema()) for each in pictures]
    losses = [read_validation_losses(tmp_path / name) for name in ("plain", "texts", "disk")]
    assert losses[0] and losses == [losses[0]] * 3 and len(pictures) == 3
    assert max(differences) <= (1 if model is OMNI else 0)  # of 255, after adapters that rounding tells apart
    for image in (tmp_path / "controls").glob("*.png"):
        ImageChops.invert(Image.open(image)).save(image)
    others = run(data, tmp_path / "others", "p", *flags, *on_disk)
    assert max_relative_difference(plain, others) > 1e-3


def read_validation_losses(folder):
    lines = [json.loads(line) for line in (folder / "p.metrics.jsonl").read_text("utf-8").splitlines()]
    return tuple(round(line["validation/loss"], 5) for line in lines if "validation/loss" in line)


@pytest.mark.parametrize(
    "flags",
    [
        ("--tp_size", "2"),
        ("--cp_size", "2"),
        ("--pp_size", "2", "--train_batch_size", "2", "--gradient_accumulation_steps", "2"),
    ],
    ids=["TP", "CP", "PP"],
)
def test_references_without_noise_levels_are_distributed(data, tmp_path, flags):
    """Edit-2511's layers get a noise level for each token."""
    one = run(data, tmp_path, "one", *EDIT, *CACHES, "--train_batch_size", "4")
    two = run(data, tmp_path, "two", *EDIT, *CACHES, "--train_batch_size", "4", *flags, ranks=2)
    assert max_relative_difference(one, two) < 1e-5


def test_what_the_text_encoder_cannot_read_is_reported(data, tmp_path):
    words = [*EDIT, "--dataset_config", str(data), "--random_crop", "--sample_prompts", "a red circle"]
    problems = [
        format_lines(validate_model_options(parse_config([*words, *caches]).require_valid(), {}))
        for caches in (CACHES[:1], CACHES[1:])
    ]
    assert "needs the control images, which are not loaded when latents" in problems[0][0]
    assert "random_crop: cannot be used with cache_text_encoder_outputs" in problems[1][0]
    assert all("Qwen-Image-Edit-Plus needs" in lines[-1] for lines in problems)


def test_control_images_of_a_metadata_file_are_not_trained_with_captions_that_do_not_show_them(data, tmp_path):
    """The settings do not tell whether pictures of a file have control images, which the model need not have."""
    rows = [{"file_name": f"{number:02d}.png", "text": "a"} for number in range(1, 13)]
    line = next(line for line in data.read_text().splitlines() if "control_directory" in line)
    data.write_text(data.read_text().replace(line, f"metadata_file = '{tmp_path / 'images' / 'metadata.jsonl'}'"))
    found = []
    for with_control in (False, True):
        if with_control:
            rows = [{**row, "control_path": str(tmp_path / "controls" / row["file_name"])} for row in rows]
        (tmp_path / "images" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
        for caches in (CACHES, CACHES[:1]):
            config = parse_config([*JOYIMAGE, "--dataset_config", str(data), *caches]).require_valid()
            assert list(validate_model_options(config, {})) == []
            try:
                found.append(len(build_dry_run(config, 1).prepared.manifest.samples))
            except ConfigError as error:
                found.append(format_lines(error.problems)[0])
    assert found[:3] == [12] * 3 and "needs the control images, which are not loaded when latents" in found[3]


@pytest.mark.slow
def test_texts_of_pictures_without_control_images_are_encoded_in_the_run_as_for_the_cache(data, tmp_path):
    line = next(line for line in data.read_text().splitlines() if "control_directory" in line)
    data.write_text(data.read_text().replace(line, ""))
    flags = (*JOYIMAGE, "--max_train_steps", "2", "--train_batch_size", "2")
    plain, cached = (run(data, tmp_path, name, *flags, *caches) for name, caches in (("p", ()), ("c", CACHES)))
    assert max_relative_difference(plain, cached) < 1e-5


@pytest.mark.parametrize("key", ["control_directory", "conditioning_data_dir"])
def test_models_that_take_no_control_images_reject_them(data, tmp_path, key):
    data.write_text(data.read_text().replace("control_directory", key))
    words = ["--pretrained_model_name_or_path", "random:flux:tiny", "--dataset_config", str(data)]
    (problem,) = format_lines(validate_model_options(parse_config(words).require_valid(), {}))
    assert f": {key}: FLUX.1 takes no control images; " in problem and "FLUX.1 Kontext, " in problem
    assert ("if these are masks, set --masked_loss" in problem) == (key == "conditioning_data_dir")
