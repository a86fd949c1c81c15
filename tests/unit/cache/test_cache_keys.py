"""Only changed entries are encoded again: by image, crop, flip, VAE, precision or caption."""

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cache_family import CachedRun, EncodedNames, write_dataset_file
from PIL import Image
from rank_processes import run_on_ranks
from safetensors.torch import load_file, save_file

from library.cache.latent_cache import LatentEncoder
from library.dataloader.images import resize_and_crop
from library.dataset.image_decoding import load_rgb_image
from library.models.detect import detect_model, get_config_reader
from library.models.families import FAMILY_FACTS
from library.models.model_configs import read_encoded_sizes

ALL = ["images/0.png", "images/1.png", "images/2.png"]
SIZES = [(96, 64), (64, 64), (64, 100)]


def draw(path: Path, number: int) -> None:
    noise = np.random.default_rng(number).integers(0, 256, (*SIZES[number % 3][::-1], 3), np.uint8)
    Image.fromarray(noise).save(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "images").mkdir()
    for number in range(3):
        draw(tmp_path / "images" / f"{number}.png", number)
        (tmp_path / "images" / f"{number}.txt").write_text(f"number {number}")
    return tmp_path


def encoded_after_each_change(folder: str) -> dict[str, list[str]]:
    """Apply changes to one dataset with one cache; return the names encoded after each change."""
    import tiny_sd1

    from library.models.families.sd1_sd2 import StableDiffusion1

    root, images = Path(folder), Path(folder) / "images"
    model = root / "model"
    tiny_sd1.build_pipeline().save_pretrained(model)
    encoded, strategy = EncodedNames(), None
    seen: dict[str, list[str]] = {}

    def look(change: str, *flags: str, **settings: str) -> None:
        nonlocal strategy
        words = [
            "--dataset_config",
            write_dataset_file(root, **settings),
            "--pretrained_model_name_or_path",
            str(model),
            "--cache_latents_to_disk",
            "--cache_text_encoder_outputs_to_disk",
            *flags,
        ]
        cached_run = CachedRun(StableDiffusion1(), *words, strategy=strategy)
        strategy = cached_run.strategy
        seen[change] = encoded.take()

    look("the first time")
    look("nothing")
    draw(images / "1.png", 4)
    look("another image under the same name")
    (images / "0.png").rename(images / "z.png")
    (images / "0.txt").rename(images / "z.txt")
    look("another name")
    (images / "z.png").rename(images / "0.png")
    (images / "z.txt").rename(images / "0.txt")
    image = Image.open(images / "0.png")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(images / "0.png", exif=exif)
    look("turned")
    (images / "2.txt").write_text("number 2, and more")
    look("another caption")
    look("more repeats, another seed", "--dataset_repeats", "3", "--seed", "7")
    look("another resolution", resolution="80")
    look("back again")
    look("flipped", "--flip_aug")
    look("not flipped")
    look("another filter", "--resize_interpolation", "nearest")
    look("half precision", "--cache_precision", "fp16")
    weights = load_file(model / "vae" / "diffusion_pytorch_model.safetensors")
    weights["encoder.conv_in.weight"] *= 1.001
    save_file(weights, model / "vae" / "diffusion_pytorch_model.safetensors")
    look("another VAE")
    settings = json.loads((model / "vae" / "config.json").read_text())
    (model / "vae" / "config.json").write_text(json.dumps(settings | {"scaling_factor": 3.0}))
    look("another scale of the VAE")
    weights = load_file(model / "text_encoder" / "model.safetensors")
    weights[min(weights)] += 1e-3
    save_file(weights, model / "text_encoder" / "model.safetensors", {"format": "pt"})
    look("another text encoder")
    weights = load_file(model / "unet" / "diffusion_pytorch_model.safetensors")
    save_file(
        {name: weight * 2 for name, weight in weights.items()}, model / "unet" / "diffusion_pytorch_model.safetensors"
    )
    shutil.copytree(model, root / "elsewhere")
    look("another UNet, and the model elsewhere", "--pretrained_model_name_or_path", str(root / "elsewhere"))
    return seen


@pytest.mark.slow
def test_only_changed_entries_are_encoded_again(folder):
    (seen,) = run_on_ranks(1, encoded_after_each_change, str(folder))

    captions = ["", "number 0", "number 1", "number 2"]
    assert seen == {
        "the first time": [*sorted([*captions, *ALL])],
        "nothing": [],
        "another image under the same name": ["images/1.png"],
        "another name": [],
        "turned": ["images/0.png"],
        "another caption": ["number 2, and more"],
        "more repeats, another seed": [],
        "another resolution": ALL,
        "back again": [],
        "flipped": [f"{name} flipped" for name in ALL],
        "not flipped": [],
        "another filter": ALL,
        "half precision": ALL,
        "another VAE": ALL,
        "another scale of the VAE": ALL,
        "another text encoder": ["", "number 0", "number 1", "number 2, and more"],
        "another UNet, and the model elsewhere": [],
    }
    # No temporary files are left; hashes are cached only of files that are at least two seconds old.
    names = {path.name for path in (folder / "images" / ".cache-lorikeet").iterdir()}
    assert names - {"files.json"} == {"latents", "scan", "texts"}


def encoded_in_both_precisions(folder: str, precision: str) -> list[str]:
    from library.models.families.sd1_sd2 import StableDiffusion1

    encoded = EncodedNames()
    CachedRun(
        StableDiffusion1(),
        "--dataset_config",
        write_dataset_file(Path(folder)),
        "--cache_latents_to_disk",
        "--cache_text_encoder_outputs_to_disk",
        "--mixed_precision",
        precision,
    )
    return encoded.take()


@pytest.mark.slow
def test_text_outputs_are_cached_per_precision_and_latents_in_float32(folder):
    first = run_on_ranks(1, encoded_in_both_precisions, str(folder), "no")[0]
    other = run_on_ranks(1, encoded_in_both_precisions, str(folder), "bf16")[0]
    second = run_on_ranks(1, encoded_in_both_precisions, str(folder), "no")[0]
    assert (len(first), other, second) == (7, ["", "number 0", "number 1", "number 2"], [])


def find_kind_of_cached_texts(folder: str, name: str) -> list[str]:
    """For the same text as a prompt and as a negative prompt: as what each was encoded."""
    import torch

    from library.dataloader.sample_prompts import Prompt
    from library.models.families import FAMILIES

    family, model, text = FAMILIES.get(name)(), f"random:{name}:tiny", "a red circle"
    flags = "--dataset_config", write_dataset_file(Path(folder)), "--pretrained_model_name_or_path", model
    texts = CachedRun(family, *flags, "--cache_text_encoder_outputs", prompts=[Prompt(text, text)]).texts
    pipe = family.load(model, torch.float32, family.facts.text.components)
    with torch.no_grad():
        kinds = {
            kind: encode(pipe, [text])["embeds"][0]
            for kind, encode in (("caption", family.encode_prompts), ("negative", family.encode_negative_prompts))
        }
    cached = [texts.read_cond([text], is_negative=is_negative)["embeds"][0] for is_negative in (False, True)]
    return [
        next((kind for kind, embeds in kinds.items() if embeds.shape == row.shape and embeds.allclose(row)), "neither")
        for row in cached
    ]


@pytest.mark.parametrize("name", ["sana", pytest.param("lumina2", marks=pytest.mark.slow)])
def test_negative_prompts_have_entries_of_their_own_where_they_are_encoded_in_another_way(folder, name):
    assert run_on_ranks(1, find_kind_of_cached_texts, str(folder), name) == [["caption", "negative"]]


def encoded_among_others(folder: str) -> list[list[str]]:
    from cache_family import AveragePoolFamily

    root, rounds, encoded = Path(folder), [], EncodedNames()
    shutil.copytree(root / "images", root / "more")
    (root / "more" / "2.png").unlink()
    draw(root / "more" / "5.png", 5)
    file = Path(write_dataset_file(root))
    both = file.read_text() + f"  [[datasets.subsets]]\n  image_dir = '{root / 'more'}'\n"
    strategy = None
    for change in (lambda: None, lambda: (root / "more" / "5.png").rename(root / "images" / "5.png")):
        change()
        file.write_text(both)
        cached_run = CachedRun(
            AveragePoolFamily(), "--dataset_config", str(file), "--cache_latents_to_disk", strategy=strategy
        )
        strategy = cached_run.strategy
        rounds.append(encoded.take())
    return rounds


def test_identical_files_share_an_entry_and_an_image_may_be_moved(folder):
    (rounds,) = run_on_ranks(1, encoded_among_others, str(folder))
    assert rounds == [[*ALL, "more/5.png"], []]


def test_the_pixels_behind_the_keys_do_not_change(tmp_path):
    """When this fails because images are processed differently: raise LATENT_KEY_VERSION in cache/keys.py, then
    and update the numbers here.  Otherwise latents cached before would be used for the new pixels."""
    from library.dataloader.buckets import BucketAssignment

    rows = np.arange(40)[:, None, None] * 5 + np.arange(60)[None, :, None] * 1 + np.array([0, 40, -90])
    Image.fromarray((rows % 256).astype(np.uint8)).save(tmp_path / "rgb.png")
    alpha = np.dstack([rows % 256, (np.arange(60)[None] * 4).repeat(40, 0)]).astype(np.uint8)
    Image.fromarray(alpha).save(tmp_path / "alpha.png")
    Image.fromarray((np.arange(2400).reshape(40, 60) * 27).astype(np.uint16)).save(tmp_path / "deep.png")
    actual = []
    for name in ("rgb", "alpha", "deep"):
        image = load_rgb_image(tmp_path / f"{name}.png")
        for placement in (BucketAssignment((32, 24), (36, 24), (3, 0)), BucketAssignment((64, 48), (72, 48), (5, 0))):
            pixels = resize_and_crop(image, placement, placement.crop_left_top, None)
            actual.append(
                [
                    round(float(value), 1)
                    for value in (
                        pixels.mean(),
                        pixels[: len(pixels) // 2].mean(),
                        pixels[:, ::3, 1].mean(),
                        pixels.std(),
                    )
                ]
            )
    assert np.allclose(actual, PIXELS, atol=1), actual


PIXELS = [
    [131.6, 113.9, 149.4, 68.1],
    [131.4, 113.7, 149.3, 68.9],
    [195.5, 186.6, 204.7, 46.9],
    [196.9, 188.2, 204.2, 46.9],
    [126.2, 63.2, 126.1, 72.7],
    [126.1, 63.1, 126.1, 72.8],
]
"""Means of all pixels, of the upper half and of every third green column, and the standard deviation."""


def test_estimated_cache_sizes_are_equal_to_the_written_ones(tmp_path):
    import tiny_sd1
    import torch

    from library.models.families.sd1_sd2 import StableDiffusion1

    pipe = tiny_sd1.build_pipeline()
    pipe.save_pretrained(tmp_path)
    told = read_encoded_sizes(get_config_reader(detect_model(str(tmp_path))))
    moments = StableDiffusion1().encode_moments(pipe, torch.zeros(1, 3, 64, 96))
    assert moments.mean_and_std.numel() == told.count_moment_elements((96, 64))
    embeds = StableDiffusion1().encode_prompts(pipe, ["a"])["embeds"]
    assert embeds.numel() == told.text_elements


@pytest.mark.slow
def test_estimated_cache_sizes_are_those_of_a_video_model_with_text_connectors():
    import torch

    from library.models.families.ltx2 import LTX2

    detected = detect_model("random:ltx2:tiny")
    told, pipe = read_encoded_sizes(get_config_reader(detected)), LTX2().load(detected, torch.float32)
    moments = LTX2().encode_moments(pipe, torch.zeros(1, 3, 64, 96))
    assert moments.mean_and_std.numel() == told.count_moment_elements((96, 64))
    assert sum(each.numel() for each in LTX2().encode_prompts(pipe, ["a"]).values()) == told.text_elements


def test_images_of_one_vae_batch_are_loaded_by_all_threads(monkeypatch):
    barrier = threading.Barrier(4)

    def load_image(_, index):
        barrier.wait(timeout=10)  # fails unless four threads load at the same time
        return (index, None)

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(LatentEncoder, "_load_image", load_image)
    monkeypatch.setattr(LatentEncoder, "_encode_images", lambda _, pipe, images: [*images.items()])
    loader = SimpleNamespace(
        cache=SimpleNamespace(vae_batch_size=8),
        family=SimpleNamespace(facts=FAMILY_FACTS["sd1"]),
        load=lambda *_: None,
        strategy=SimpleNamespace(empty_device_cache=lambda: None),
    )
    batches = [[*range(8)], [8, 9], [*range(10, 16)]]
    encoded = LatentEncoder(loader, None, None, num_threads=4).encode_batches(iter(batches))

    assert [*encoded] == [(len(batch), [(index, (index, None)) for index in batch]) for batch in batches]
