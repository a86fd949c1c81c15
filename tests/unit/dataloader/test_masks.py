"""Masks get the crop and flip of their images; unusable masks are reported."""

import tarfile
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from problem_lines import format_lines

from library.config.schema import TrainConfig
from library.config.schema_data import DataConfig
from library.dataloader.batch import PixelBatch
from library.dataloader.buckets import BucketAssignment
from library.dataloader.images import load_resized_mask, resize_mask
from library.dataloader.loader import LoadedImage, MicroBatchDataset
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataset import image_inspection, mask_files, scan
from library.dataset.image_ref import ImageRef
from library.dataset.mask_files import Mask, load_image_and_mask, match_masks
from library.dataset.validate import validate_dataset_config
from library.errors import ConfigError


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([width, height, seed]).integers(0, 256, (height, width, channels), np.uint8)


def save(path: Path, pixels: np.ndarray, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.squeeze()).save(path, **options)


def dataset(*subsets: str, head: str = "") -> str:
    body = "".join(f"[[datasets.subsets]]\n{subset}\n" for subset in subsets)
    buckets = "enable_bucket = true\nmin_bucket_reso = 32\nbucket_reso_steps = 16"
    return f"[[datasets]]\nresolution = 64\n{buckets}\n{head}\n{body}"


def config(folder: Path, *datasets: str, **options) -> DataConfig:
    (folder / "set.toml").write_text("".join(datasets), encoding="utf-8")
    return DataConfig(dataset_config=str(folder / "set.toml"), **options)


def batches(prepared: PreparedData, epochs: int = 6, **settings) -> list[PixelBatch]:
    plan = prepared.build_batch_plan(1, TrainConfig(seed=3, **settings))
    reader = MicroBatchDataset(prepared.manifest, prepared.assignments, plan, 0, 3, 100)
    return [reader[position] for position in range(epochs * plan.micro_batches_per_epoch)]


FOLDER = "image_dir = 'p'\nconditioning_data_dir = 'm'"


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ([(150, 100), (90, 151), (200, 77)], ""),  # made smaller
        ([(50, 40), (33, 61), (20, 60)], "resize_interpolation = 'bilinear'"),  # made larger
        ([(64, 64), (80, 48)], ""),  # as they are
    ],
)
def test_a_mask_equal_to_its_image_stays_equal_through_random_crops_and_flips(tmp_path, sizes, settings):
    for number, (width, height) in enumerate(sizes):
        gray = noise(width, height, 1)
        save(tmp_path / "p" / f"{number}.png", gray.repeat(3, axis=2))
        save(tmp_path / "m" / f"{number}.png", gray)
    text = dataset(f"{FOLDER}\nrandom_crop = true\nflip_aug = true\n{settings}", head="batch_size = 2")
    if sizes[0] != (64, 64):  # crops much more than buckets do
        text = text.replace("enable_bucket = true", "enable_bucket = false")
    actual = batches(prepare_data(config(tmp_path, text, masked_loss=True), 8), epochs=12)
    for batch in actual:
        assert batch.mask.dtype == torch.uint8 and batch.mask.shape == (2, 1, *batch.pixels.shape[-2:])
        assert torch.equal(batch.mask[:, 0], batch.pixels[:, 0])
    if sizes[0] != (64, 64):
        corners = {tuple(frame[2:4].tolist()) for batch in actual for frame in batch.size_conditioning}
        assert all(len({corner[axis] for corner in corners}) > 4 for axis in (0, 1))


def test_color_augmentation_does_not_change_masks(tmp_path):
    gray = noise(90, 70, 1)
    save(tmp_path / "p" / "1.png", noise(90, 70))
    save(tmp_path / "m" / "1.png", gray)
    prepared = prepare_data(config(tmp_path, dataset(f"{FOLDER}\ncolor_aug = true"), masked_loss=True), 8)
    actual = batches(prepared, epochs=20)
    assert len({batch.pixels.numpy().tobytes() for batch in actual}) > 3
    assert len({batch.mask.numpy().tobytes() for batch in actual}) == 1


def test_a_mask_of_half_the_size_gives_the_same_result(tmp_path):
    small = noise(80, 48, 1)
    large = small.repeat(2, axis=0).repeat(2, axis=1)
    save(tmp_path / "p" / "1.png", large.repeat(3, axis=2))
    save(tmp_path / "m" / "1.jpg.png", small)  # of no image, since it is named 1.jpg
    save(tmp_path / "m" / "1.bmp", small)
    prepared = prepare_data(config(tmp_path, dataset(FOLDER), masked_loss=True, on_invalid_images="skip"), 8)
    (batch,) = batches(prepared, epochs=1)
    assert torch.equal(batch.mask[:, 0], batch.pixels[:, 0])


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=60)
def test_resized_masks_keep_their_mean_and_range(width, height, new_width, new_height):
    flat = np.full((height, width), 77, np.uint8)
    assert (resize_mask(flat, (new_width, new_height)) == 77).all()
    hard = np.where(noise(width, height, 1)[..., 0] > 127, 200, 50).astype(np.uint8)
    actual = resize_mask(hard, (new_width, new_height))
    assert actual.shape == (new_height, new_width) and actual.min() >= 50 and actual.max() <= 200


def test_the_mask_of_a_sample_loads_without_torch_or_a_batch(tmp_path):
    values = noise(40, 30, 1)
    save(tmp_path / "1.png", values)
    mask = Mask(ImageRef(tmp_path, "1.png"), False, (40, 30), "", 0.5)
    placement = BucketAssignment((32, 16), (40, 30), (4, 7))
    actual = load_resized_mask(mask, placement, (5, 2), is_flipped=False)
    assert actual.dtype == np.uint8 and (actual == values[2:18, 5:37, 0]).all()
    assert (load_resized_mask(mask, placement, (5, 2), is_flipped=True) == actual[:, ::-1]).all()
    save(tmp_path / "1.png", noise(40, 31, 1))
    with pytest.raises(ValueError, match=r"the mask .*1\.png was \(40, 30\) at the start of the run, is"):
        load_resized_mask(mask, placement, (5, 2), is_flipped=False)


def transparent(width: int, height: int) -> Image.Image:
    return Image.fromarray(noise(width, height, 4), "RGBA")


def test_alpha_is_the_mask_and_the_colors_below_it_are_trained(tmp_path):
    (tmp_path / "p").mkdir()
    rgba = transparent(80, 48)
    rgba.save(tmp_path / "p" / "1.png")
    palette = Image.new("P", (64, 64), 1)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.paste(0, (0, 0, 20, 64))
    palette.save(tmp_path / "p" / "2.png", transparency=0)
    text = dataset("image_dir = 'p'\nalpha_mask = true")
    first, second = sorted(
        batches(prepare_data(config(tmp_path, text), 8), epochs=1), key=lambda batch: batch.sample_keys
    )
    assert (first.pixels[0].permute(1, 2, 0).numpy() == np.asarray(rgba)[..., :3]).all()
    assert (first.mask[0, 0].numpy() == np.asarray(rgba)[..., 3]).all()
    assert second.pixels[0, :, 0, 0].tolist() == [255, 0, 0] and second.pixels[0, :, 0, 30].tolist() == [0, 0, 255]
    assert second.mask[0, 0, 5, 18:22].tolist() == [0, 0, 255, 255]


def test_without_alpha_mask_transparent_pixels_are_white_and_unmasked(tmp_path):
    (tmp_path / "p").mkdir()
    clear = Image.new("RGBA", (64, 64), (9, 9, 9, 0))
    clear.save(tmp_path / "p" / "1.png")
    (batch,) = batches(prepare_data(config(tmp_path, dataset("image_dir = 'p'")), 8), epochs=1)
    assert batch.mask is None and (batch.pixels == 255).all()


def test_exif_rotation_applies_to_alpha_and_masks_have_their_own(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "p").mkdir()
    rgba = transparent(48, 80)
    rgba.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "p" / "1.png", exif=exif)
    text = dataset("image_dir = 'p'\nalpha_mask = true")
    (batch,) = batches(prepare_data(config(tmp_path, text), 8), epochs=1)
    assert (batch.mask[0, 0].numpy() == np.asarray(rgba)[..., 3]).all()
    save(tmp_path / "m" / "1.png", np.asarray(rgba)[..., 3])
    text = dataset(FOLDER)
    (batch,) = batches(prepare_data(config(tmp_path, text, masked_loss=True), 8), epochs=1)
    assert (batch.mask[0, 0].numpy() == np.asarray(rgba)[..., 3]).all()


def test_images_without_a_mask_have_full_weight_next_to_masked_ones(tmp_path):
    (tmp_path / "p").mkdir()
    transparent(64, 64).save(tmp_path / "p" / "1.png")
    for name in ("p/2", "p/3", "plain/1"):
        save(tmp_path / f"{name}.png", noise(64, 64))
    plain = dataset("image_dir = 'plain'")
    text = dataset("image_dir = 'p'\nalpha_mask = true", head="batch_size = 2")
    prepared = prepare_data(config(tmp_path, text, plain), 8)
    actual = batches(prepared, epochs=5)
    assert {batch.loss_weights.tolist()[1] for batch in actual if len(batch) == 2} == {
        0.0,
        1.0,
    }  # three images in batches of two
    masked = 0
    for batch in actual:
        names = set(batch.sample_keys)
        assert (batch.mask is not None) == ("p/1.png" in names)
        for name, mask in zip(batch.sample_keys, batch.mask if batch.mask is not None else (), strict=False):
            assert (mask.min() < 255) == (name == "p/1.png")
            masked += name == "p/1.png"
    assert masked >= 5
    assert any(
        "p: alpha_mask: 2 of 3 images without transparent parts, so that the whole image is trained: 2.png, 3." in note
        for note in prepared.manifest.notes
    )


def test_an_image_is_read_once_for_color_and_alpha(tmp_path, monkeypatch):
    transparent(20, 10).save(tmp_path / "1.png")
    reads = []
    monkeypatch.setattr(ImageRef, "read_bytes", lambda self: reads.append(self) or self.path.read_bytes())
    image = ImageRef(tmp_path, "1.png")
    picture_image, values = load_image_and_mask(image, Mask(image, True, (20, 10), "", 0.5))
    assert picture_image.size == (20, 10) and values.shape == (10, 20) and len(reads) == 1


def names_of(matched) -> dict[str, str]:
    return {str(image.path): str(mask.path) for image, mask in matched.masks.items()}


def test_masks_are_matched_by_name_across_extensions_folders_and_unicode_forms(tmp_path):
    accent = unicodedata.normalize("NFC", "é")
    decomposed = unicodedata.normalize("NFD", accent)
    for name in (
        "p/a.png",
        "p/sub/a.png",
        f"p/{decomposed}.jpg",
        *"p/b.jpg p/b.png p/none.png p/two.webp p/unused.png m/a.bmp m/sub/a.webp".split(),
        f"m/{accent}.png",
        *"m/b.png m/b.jpg m/two.png m/two.jpg m/unused.png m/stray.png m/a.txt m/.hidden.png".split(),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    p, m = tmp_path / "p", tmp_path / "m"
    files = [path.relative_to(p) for path in sorted(p.rglob("*.*")) if path.name != "unused.png"]
    matched = match_masks([ImageRef(p, str(path)) for path in files], p, m)
    relative = {
        str(Path(image).relative_to(p)): str(Path(mask).relative_to(m)) for image, mask in names_of(matched).items()
    }
    assert {
        unicodedata.normalize("NFC", one): unicodedata.normalize("NFC", other) for one, other in relative.items()
    } == {
        "a.png": "a.bmp",
        "sub/a.png": "sub/a.webp",
        f"{accent}.jpg": f"{accent}.png",
        "b.jpg": "b.jpg",
        "b.png": "b.png",
    }
    assert {image.name: why for image, why in matched.missing.items()} == {
        "none.png": f"has no mask: no none.png, or with another image extension, in {m}",
        "two.webp": f"has several masks in {m}: two.jpg, two.png; keep one of them",
    }
    assert matched.unmatched == [m / "stray.png"]


@pytest.fixture
def zoo(tmp_path) -> Path:
    """Images of which only one has a valid mask."""
    for name in ("good", "missing", "shape", "broken", "black", "clear", "turned"):
        save(tmp_path / "p" / f"{name}.png", noise(120, 80))
    for name in ("good", "stray"):
        save(tmp_path / "m" / f"{name}.png", noise(60, 40, 1))
    save(tmp_path / "m" / "shape.png", noise(80, 80, 1))
    (tmp_path / "m" / "broken.png").write_bytes((tmp_path / "m" / "good.png").read_bytes()[:-900])
    save(tmp_path / "m" / "black.png", np.zeros((80, 120), np.uint8))
    transparent(120, 80).save(tmp_path / "m" / "clear.png")
    save(tmp_path / "m" / "turned.png", noise(80, 120, 1))
    return tmp_path


def test_all_unusable_masks_are_in_one_report(zoo):
    with pytest.raises(ConfigError) as caught:
        prepare_data(config(zoo, dataset(FOLDER), masked_loss=True), 8)
    actual = [problem.replace(f"{zoo}/", "") for problem in format_lines(caught.value.problems)]
    assert actual[:3] + actual[4:] == [
        "p/black.png: its mask m/black.png is black everywhere, so that nothing of the image would be trained",
        actual[1],
        "p/clear.png: its mask m/clear.png has transparent parts, but its brightness is the mask; save it without"
        " transparency",
        "p/shape.png: its mask m/shape.png is 80x80 pixels, the image 120x80",
        "p/turned.png: its mask m/turned.png is 80x120 pixels, the image 120x80; it is rotated, as if made"
        " without applying the EXIF orientation of the image",
        "m: 1 mask without an image of the same name in p: stray.png; remove them, or ignore them with"
        " --on_invalid_images skip",
        "6 of 7 images cannot be used; fix or remove them, or skip them with --on_invalid_images skip",
    ]
    assert actual[1].startswith("p/broken.png: its mask m/broken.png is truncated: ")
    assert actual[3] == "p/missing.png: has no mask: no missing.png, or with another image extension, in m"


def test_images_without_a_valid_mask_are_skipped_with_a_note_if_set(zoo):
    prepared = prepare_data(config(zoo, dataset(FOLDER), masked_loss=True, on_invalid_images="skip"), 8)
    assert [sample.key for sample in prepared.manifest.samples] == ["p/good.png"]
    notes = "\n".join(prepared.manifest.notes)
    assert "6 images skipped (6 mask)" in notes and "1 mask without an image of the same name" in notes


def test_a_run_with_mask_settings_fails_without_any_mask(zoo):
    (zoo / "m" / "good.png").unlink()
    save(zoo / "q" / "1.png", noise(64, 64))
    settings = config(zoo, dataset(FOLDER), dataset("image_dir = 'q'"), masked_loss=True, on_invalid_images="skip")
    with pytest.raises(ConfigError) as caught:
        prepare_data(settings, 8)
    message = f"{zoo}/set.toml:9: conditioning_data_dir: none of the usable images has a mask"
    assert format_lines(caught.value.problems)[-1] == message and len(caught.value.problems) == 8


def test_images_in_a_tar_have_their_masks_in_the_tar(tmp_path):
    rgba = transparent(64, 64)
    (tmp_path / "p").mkdir()
    rgba.save(tmp_path / "p" / "1.png")
    save(tmp_path / "p" / "2.png", noise(64, 64))
    with tarfile.open(tmp_path / "s.tar", "w") as shard:
        for name in ("1.png", "2.png"):
            shard.add(tmp_path / "p" / name, name)
    prepared = prepare_data(config(tmp_path, dataset("webdataset = 's.tar'\nalpha_mask = true")), 8)
    (batch,) = [batch for batch in batches(prepared, epochs=1) if batch.mask is not None]
    assert (batch.mask[0, 0].numpy() == np.asarray(rgba)[..., 3]).all()
    assert (batch.pixels[0].permute(1, 2, 0).numpy() == np.asarray(rgba)[..., :3]).all()
    assert any("s.tar: alpha_mask: 1 of 2 images without transparent parts" in note for note in prepared.manifest.notes)


def test_a_color_mask_is_read_by_its_red_channel_with_a_notice(tmp_path):
    save(tmp_path / "p" / "1.png", noise(64, 64))
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:, :32] = (255, 0, 255)
    pixels[:, 32:] = (0, 255, 255)
    save(tmp_path / "m" / "1.png", pixels)
    prepared = prepare_data(config(tmp_path, dataset(FOLDER), masked_loss=True), 8)
    (batch,) = batches(prepared, epochs=1)
    assert (batch.mask[..., :32] == 255).all() and (batch.mask[..., 32:] == 0).all()
    assert "m: 1 mask in color, of which only the red channel is used, as in sd-scripts: 1.png" in "\n".join(
        prepared.manifest.notes
    )


def test_a_gray_jpeg_mask_is_not_reported_as_colored(tmp_path):
    save(tmp_path / "p" / "1.png", noise(64, 64))
    save(tmp_path / "m" / "1.jpg", noise(64, 64, 1).repeat(3, axis=2), quality=60)
    prepared = prepare_data(config(tmp_path, dataset(FOLDER), masked_loss=True), 8)
    assert not any("in color" in note for note in prepared.manifest.notes)


@pytest.mark.parametrize(
    ("image", "mask", "size", "is_doubtful"),
    [
        (3, 1, (64, 48), True),
        (2, 1, (64, 48), True),
        (6, 1, (64, 64), True),
        (3, 3, (64, 48), False),
        (6, 1, (64, 48), False),
        (1, 1, (64, 64), False),
    ],
)
def test_a_mask_with_ambiguous_exif_orientation_is_noted(tmp_path, image, mask, size, is_doubtful):
    for folder, orientation in (("p", image), ("m", mask)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = size[::-1] if orientation == 6 else size
        save(tmp_path / folder / "1.png", noise(*stored), exif=exif)
    notes = prepare_data(config(tmp_path, dataset(FOLDER), masked_loss=True), 8).manifest.notes
    expected = "m: 1 mask without an EXIF orientation for images that have one, assumed to be upright already"
    assert any(expected in note for note in notes) == is_doubtful


def test_images_with_alpha_that_is_not_used_as_a_mask_are_reported(tmp_path):
    (tmp_path / "p").mkdir()
    Image.new("RGBA", (64, 64), (9, 9, 9, 255)).save(tmp_path / "p" / "opaque.png")
    settings = config(tmp_path, dataset("image_dir = 'p'\nalpha_mask = true"))
    (note,) = [note for note in prepare_data(settings, 8).manifest.notes if "alpha_mask" in note]
    assert "1 of 1 image without transparent parts, so that the whole image is trained: opaque.png" in note
    Image.new("RGBA", (64, 64), (9, 9, 9, 0)).save(tmp_path / "p" / "clear.png")
    with pytest.raises(ConfigError, match=r"clear\.png: is transparent everywhere, so that nothing of it would be"):
        prepare_data(settings, 8)


def test_the_fingerprint_changes_with_masks(tmp_path):
    (tmp_path / "p").mkdir()
    transparent(64, 64).save(tmp_path / "p" / "1.png")
    save(tmp_path / "m" / "1.png", noise(64, 64, 1))

    def fingerprint(subset: str, **options) -> str:
        return prepare_data(config(tmp_path, dataset(subset), **options), 8).manifest.compute_fingerprint()

    plain, alpha = fingerprint("image_dir = 'p'"), fingerprint("image_dir = 'p'\nalpha_mask = true")
    first = fingerprint(FOLDER, masked_loss=True)
    save(tmp_path / "m" / "1.png", noise(64, 64, 1, seed=1))
    second = fingerprint(FOLDER, masked_loss=True)
    assert len({plain, alpha, first, second}) == 4
    (tmp_path / "m" / "1.png").rename(tmp_path / "m" / "1.PNG")  # the same mask
    assert fingerprint(FOLDER, masked_loss=True) == second


@pytest.mark.parametrize(
    ("subset", "options", "expected"),
    [
        (
            FOLDER.replace("'m'", "'./p'"),
            {"masked_loss": True},
            "set.toml:9: conditioning_data_dir: is the same",
        ),
        (
            FOLDER.replace("'m'", "'p/m'") + "\nrecursive = true",
            {"masked_loss": True},
            "set.toml:9: conditioning_data_dir: is inside image_dir, so that recursive lists the masks as images",
        ),
        (FOLDER.replace("'m'", "'q'"), {"masked_loss": True}, "set.toml:9: conditioning_data_dir: 'q' not found"),
        (FOLDER + "\nalpha_mask = true", {"masked_loss": True}, "set.toml:10: alpha_mask: not supported with"),
    ],
)
def test_mask_folders_that_cannot_be_are_rejected_before_images_are_read(tmp_path, subset, options, expected):
    for name in ("p/m", "m"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "p" / "1.png").write_bytes(b"would be told, too")
    (actual,) = format_lines(validate_dataset_config(config(tmp_path, dataset(subset), **options)))
    assert actual.replace(f"{tmp_path}/", "").startswith(expected)


@pytest.mark.parametrize(
    ("subset", "options"),
    [
        (FOLDER, {"masked_loss": True, "masked_loss_normalize": True}),
        ("image_dir = 'p'\nalpha_mask = true", {"masked_loss": True}),
        ("image_dir = 'p'", {"alpha_mask": True}),
    ],
)
def test_compatible_mask_settings_are_accepted(tmp_path, subset, options):
    for name in ("p", "m"):
        (tmp_path / name).mkdir()
    assert format_lines(validate_dataset_config(config(tmp_path, dataset(subset), **options))) == []


def test_a_mask_deleted_during_the_run_is_a_bad_sample(tmp_path):
    save(tmp_path / "p" / "1.png", noise(64, 64))
    save(tmp_path / "m" / "1.png", noise(64, 64, 1))
    prepared = prepare_data(config(tmp_path, dataset(FOLDER), masked_loss=True), 8)
    plan = prepared.build_batch_plan(1, TrainConfig())
    reader = MicroBatchDataset(prepared.manifest, prepared.assignments, plan, 0, 3, 100)
    assert isinstance(reader.load_image(0, 0, 0), LoadedImage)
    (tmp_path / "m" / "1.png").unlink()
    (batch,) = [reader[0]]
    assert batch.loss_weights.tolist() == [0] and "m/1.png" in batch.bad_samples[0].problem
    (tmp_path / "m" / "1.png").write_bytes(b"no picture")
    assert f"its mask {tmp_path}/m/1.png: cannot identify image" in reader[0].bad_samples[0].problem


def test_masks_inside_the_image_folder_work_if_excluded_from_the_images(tmp_path):
    for name in ("1", "deep/1"):
        save(tmp_path / "p" / f"{name}.png", noise(64, 64))
        save(tmp_path / "p" / "m" / f"{name}.png", noise(64, 64, 1, seed=len(name)))
    subset = "image_dir = 'p'\nconditioning_data_dir = 'p/m'\nrecursive = true\nexclude = ['m/**']"
    actual = batches(prepare_data(config(tmp_path, dataset(subset), masked_loss=True), 8), epochs=1)
    assert len(actual) == 2
    for batch in actual:
        name = batch.sample_keys[0].removeprefix("p/").removesuffix(".png")
        assert (batch.mask[0, 0].numpy() == noise(64, 64, 1, seed=len(name))[..., 0]).all(), batch.sample_keys


def test_plan_shows_how_many_images_have_masks(tmp_path):
    (tmp_path / "p").mkdir()
    transparent(64, 64).save(tmp_path / "p" / "1.png")
    save(tmp_path / "p" / "2.png", noise(64, 64))
    prepared = prepare_data(config(tmp_path, dataset("image_dir = 'p'\nalpha_mask = true")), 8)
    plan = prepared.build_batch_plan(1, TrainConfig())
    assert prepared.format_summary(plan, 9).splitlines()[0].endswith(", captions found 0/2 (.caption), masks 1/2")
    first, second = prepared.to_json(plan)[0]["samples"]
    share = float(np.asarray(Image.open(tmp_path / "p" / "1.png"))[..., 3].mean()) / 255
    assert first["mask"] == {"image": str(tmp_path / "p" / "1.png"), "is_alpha": True, "coverage": pytest.approx(share)}
    assert second["mask"] is None


def test_mask_scans_are_cached_and_updated_when_masks_change(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "SETTLED_AFTER_NS", -(10**15))
    for number in range(3):
        save(tmp_path / "p" / f"{number}.png", noise(80, 70, seed=number))
        save(tmp_path / "m" / f"{number}.png", noise(80, 70, 1, seed=number))
        transparent(80, 70).save(tmp_path / "m" / f"alpha_{number}.png")
    (tmp_path / "alpha").mkdir()
    for number in range(2):
        (tmp_path / "m" / f"alpha_{number}.png").rename(tmp_path / "alpha" / f"{number}.png")
    (tmp_path / "m" / "alpha_2.png").unlink()
    settings = config(tmp_path, dataset(FOLDER), dataset("image_dir = 'alpha'\nalpha_mask = true"), masked_loss=True)
    looked: list[str] = []
    for module, name in (
        (mask_files, "inspect_mask"),
        (mask_files, "inspect_alpha_mask"),
        (image_inspection, "inspect_bytes"),
    ):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, real=real, name=name: (looked.append(name), real(*given))[1])

    def again() -> tuple[PreparedData, Counter]:
        looked.clear()
        return prepare_data(settings, 8), Counter(looked)

    first, work = again()
    assert work["inspect_mask"] == 3 and work["inspect_alpha_mask"] == 2
    second, work = again()
    assert second == first and not work
    save(tmp_path / "m" / "1.png", noise(80, 70, 1, seed=9))
    third, work = again()
    assert work == {"inspect_mask": 1, "inspect_bytes": 1}
    hashes = [[sample.mask.content_hash for sample in ready.manifest.samples] for ready in (second, third)]
    assert [one == other for one, other in zip(*hashes, strict=True)] == [True, False, True, True, True]
    assert not any("trained as white" in note for note in third.manifest.notes)
