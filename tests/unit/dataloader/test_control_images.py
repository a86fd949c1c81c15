"""Control images: matched by name, sized and flipped like their pictures, in every batch, cached or not."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from problem_lines import format_lines

from library.config.schema_data import DataConfig
from library.dataloader.batch_plan import BatchPlan
from library.dataloader.prepare import prepare_data
from library.dataloader.sample_prompts import Prompt
from library.dataset.controls import ControlLimits
from library.errors import ConfigError, FileError
from library.models.families import FAMILIES
from library.models.families.channel_inputs import load_preview_control

ANY_NUMBER = ControlLimits(0, 9, "any model", "")


def draw(path: Path, size: tuple[int, int], color: int, mark: bool = True) -> None:
    """An image of one color with a white corner, in which a flip shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, (color, color, color))
    if mark:
        image.paste((255, 255, 255), (0, 0, size[0] // 4, size[1] // 4))
    image.save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four pictures of two shapes, the last two with two control images each."""
    for number, (size, color) in enumerate([((64, 64), 10), ((64, 64), 20), ((96, 64), 30), ((96, 64), 40)]):
        draw(tmp_path / "p" / f"a{number}.png", size, color)
        (tmp_path / "p" / f"a{number}.txt").write_text(f"picture {number}")
        names = [f"a{number}"] if number < 2 else [f"a{number}_0", f"a{number}_1"]
        for place, name in enumerate(names):
            draw(tmp_path / "c" / f"{name}.png", size, color + 100 + place)
    return tmp_path


SUBSET = "image_dir = 'p'\ncontrol_directory = 'c'"


def write(folder: Path, subset: str = SUBSET, head: str = "") -> str:
    text = f"[[datasets]]\nresolution = 64\nbatch_size = 2\nenable_bucket = true\nbucket_reso_steps = 16\n{head}\n"
    (folder / "set.toml").write_text(f"{text}[[datasets.subsets]]\n{subset}\n")
    return str(folder / "set.toml")


def prepare(folder: Path, subset: str = SUBSET, head: str = "", limits: ControlLimits = ANY_NUMBER, **options):
    config = DataConfig(dataset_config=write(folder, subset, head), min_bucket_reso=16, **options)
    return prepare_data(config, 16, control_limits=limits)


def read_batches(prepared, epochs: int = 1):
    """The batches of some epochs, by the keys of their samples."""
    plan = BatchPlan(prepared.buckets, 1, 1, 0)
    loader = prepared.build_image_loader(plan, 0, total_steps=9, pin_memory=False)
    return [loader.dataset[position] for position in range(epochs * plan.micro_batches_per_epoch)]


def test_control_images_come_in_batches_with_their_pictures(folder):
    prepared = prepare(folder)
    assert [bucket.control_resolutions for bucket in prepared.buckets] == [((64, 64),), ((80, 48),) * 2]
    for batch in read_batches(prepared):
        assert len(batch.control_pixels) == (1 if batch.sample_keys[0] in ("p/a0.png", "p/a1.png") else 2)
        for place, pixels in enumerate(batch.control_pixels):
            assert pixels.shape == batch.pixels.shape
            middle = batch.pixels[:, :, 32:, 40:].float().mean((1, 2, 3))
            assert (pixels[:, :, 32:, 40:].float().mean((1, 2, 3)) - middle - 100 - place).abs().max() < 1


def test_a_flipped_picture_has_flipped_control_images(folder):
    seen = set()
    for batch in read_batches(prepare(folder, f"{SUBSET}\nflip_aug = true"), epochs=6):
        for row in range(len(batch)):
            corners = [image[row, 0, 0, 0] > 200 for image in (batch.pixels, *batch.control_pixels)]
            assert len(set(map(bool, corners))) == 1
            seen.add(bool(corners[0]))
    assert seen == {False, True}


def test_random_crops_of_pictures_and_control_images_are_the_same(folder):
    noise = np.random.default_rng(0).integers(0, 255, (64, 150, 3), np.uint8)
    for name in ("p/a0", "c/a0"):
        Image.fromarray(noise).save(folder / f"{name}.png")
    batches = read_batches(prepare(folder, f"{SUBSET}\nrandom_crop = true"), epochs=3)
    rows = [(b, b.sample_keys.index("p/a0.png")) for b in batches if "p/a0.png" in b.sample_keys]
    crops = {batch.pixels[row].numpy().tobytes() for batch, row in rows}
    assert len(crops) > 1
    assert all(bool((batch.pixels[row] == batch.control_pixels[0][row]).all()) for batch, row in rows)


@pytest.mark.parametrize(
    "head, sizes",
    [
        ("control_resolution = 32", {((32, 32),), ((32, 32),) * 2}),
        ("no_resize_control = true", {((64, 64),), ((96, 64),) * 2}),
        ("no_resize_control = true\ncontrol_resolution = 64", {((64, 64),), ((80, 48),) * 2}),
        ("qwen_image_edit_control_resolution = [32, 32]", {((32, 32),), ((32, 32),) * 2}),
    ],
)
def test_control_images_have_sizes_of_their_own(folder, head, sizes):
    prepared = prepare(folder, head=head)
    assert {bucket.control_resolutions for bucket in prepared.buckets} == sizes
    for batch in read_batches(prepared):
        assert tuple((image.shape[3], image.shape[2]) for image in batch.control_pixels) in sizes


def test_pictures_of_one_size_with_control_images_of_several_are_in_several_buckets(folder):
    draw(folder / "c" / "a1.png", (32, 48), 5)
    resolutions = [bucket.control_resolutions for bucket in prepare(folder, head="no_resize_control = true").buckets]
    assert resolutions[:2] == [((32, 48),), ((64, 64),)]


def test_a_control_image_of_another_shape_is_cropped_to_its_picture_with_a_note(folder):
    draw(folder / "c" / "a0.png", (64, 32), 110)
    prepared = prepare(folder)
    assert any("with control images of another shape" in note and "a0.png" in note for note in prepared.manifest.notes)
    assert all(image.shape == batch.pixels.shape for batch in read_batches(prepared) for image in batch.control_pixels)
    with pytest.raises(FileError, match=r"its control image .*a0\.png is 64x32 pixels, the image 64x64"):
        prepare(folder, f"{SUBSET}\nrandom_crop = true")


def test_sd_scripts_key_is_a_folder_of_control_images_without_masked_loss(folder):
    (folder / "c" / "a2_1.png").unlink()
    (folder / "c" / "a3_1.png").unlink()
    ours = prepare(folder).manifest
    theirs = prepare(folder, "image_dir = 'p'\nconditioning_data_dir = 'c'").manifest
    assert [sample.controls for sample in theirs.samples] == [sample.controls for sample in ours.samples]
    for name in ("a2", "a3"):
        (folder / "c" / f"{name}_0.png").rename(folder / "c" / f"{name}.png")
    masked = prepare(folder, "image_dir = 'p'\nconditioning_data_dir = 'c'", masked_loss=True).manifest
    assert all(sample.mask and not sample.controls for sample in masked.samples)


def test_musubi_tuner_datasets_have_control_images(folder):
    text = "[general]\nresolution = 64\n[[datasets]]\nimage_directory = 'p'\ncontrol_directory = 'c'\n"
    (folder / "set.toml").write_text(text)
    manifest = prepare_data(DataConfig(dataset_config=str(folder / "set.toml")), 16).manifest
    assert [len(sample.controls) for sample in manifest.samples] == [1, 1, 2, 2]


def test_metadata_files_list_control_images(folder):
    rows = [
        {"image_path": "p/a0.png", "caption": "one", "control_path": "c/a0.png"},
        {"image_path": "p/a2.png", "caption": "two", "control_path_1": "c/a2_1.png", "control_path_0": "c/a2_0.png"},
    ]
    (folder / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    samples = prepare(folder, "metadata_file = 'set.jsonl'").manifest.samples
    assert [[each.image.name for each in sample.controls] for sample in samples] == [
        ["a0.png"],
        ["a2_0.png", "a2_1.png"],
    ]
    rows[0]["control_path"] = "c/none.png"
    rows[1] = {"image_path": "p/a2.png", "caption": "two"}
    (folder / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(FileError) as caught:
        prepare(folder, "metadata_file = 'set.jsonl'")
    assert any(
        "set.jsonl:1: 'p/a0.png': control_path: 'c/none.png' not found" in line
        for line in format_lines(caught.value.problems)
    )
    assert any(
        "set.jsonl:2: 'p/a2.png': no control_path, which other" in line for line in format_lines(caught.value.problems)
    )


def test_all_problems_of_control_images_are_reported_at_once(folder):
    (folder / "c" / "a0.png").unlink()
    (folder / "c" / "a1.png").write_bytes(b"no image")
    draw(folder / "c" / "a2_00.png", (96, 64), 5)
    draw(folder / "c" / "other.png", (96, 64), 5)
    with pytest.raises(FileError) as caught:
        prepare(folder)
    text = "\n".join(format_lines(caught.value.problems))
    for expected in (
        "a0.png: has no control image: no a0.png, a0_0.png",
        "a1.png: its control image",
        "a2.png: has several control images of one number",
        "1 control image without an image of the same name",
    ):
        assert expected in text
    skipped = prepare(folder, on_invalid_images="skip").manifest
    assert [sample.key for sample in skipped.samples] == ["p/a3.png"]


def test_settings_that_control_images_do_not_allow_are_errors(folder):
    with pytest.raises(FileError, match=r"set\.toml:\d+: color_aug: recolors the picture"):
        prepare(folder, f"{SUBSET}\ncolor_aug = true")
    with pytest.raises(FileError, match=r"random_crop: control images with control_resolution"):
        prepare(folder, f"{SUBSET}\nrandom_crop = true", "control_resolution = 64")
    with pytest.raises(ConfigError, match=r"control_directory: is the same folder as image_dir"):
        prepare(folder, "image_dir = 'p'\ncontrol_directory = 'p'")
    with pytest.raises(ConfigError, match=r"conditioning_data_dir: control_directory is set too"):
        prepare(folder, f"{SUBSET}\nconditioning_data_dir = 'c'")
    (note,) = [
        each
        for each in prepare(folder, "image_dir = 'p'", "control_resolution = 64").manifest.notes
        if "not used" in each
    ]
    assert note.endswith("control_resolution: not used, because no subset here has control images")


def test_the_number_of_control_images_fits_the_model(folder):
    with pytest.raises(FileError, match=r"M takes at most 1 control image for a picture, not 2: a2.png, a3.png"):
        prepare(folder, limits=ControlLimits(0, 1, "M", "K"))
    with pytest.raises(FileError, match=r"M takes no control images; K do"):
        prepare(folder, limits=ControlLimits(0, 0, "M", "K"))
    with pytest.raises(FileError, match=r"M needs 2 control images for each picture, not 1: a0.png, a1.png"):
        prepare(folder, limits=ControlLimits(2, 3, "M", "K"))


def test_transparent_parts_of_masks_are_black_and_those_of_other_control_images_white(folder):
    for path in (folder / "c").glob("*.png"):
        mask = Image.new("RGBA", Image.open(path).size, (255, 255, 255, 0))
        mask.paste((255, 255, 255, 255), (0, 0, 16, 16))
        mask.save(path)
    masks = replace(ANY_NUMBER, are_masks=True)
    prepared, keys = {}, {}
    for limits in (ANY_NUMBER, masks):
        found = prepare(folder, limits=limits, validation_split=0.25)
        prepared[limits] = found
        keys[limits] = {found.build_static_augmenter().get_control_key(0, is_flipped=False)}
        assert found.validation is not None
        for part in (found, found.validation):
            assert all(each.is_mask == limits.are_masks for sample in part.manifest.samples for each in sample.controls)
    assert not keys[ANY_NUMBER] & keys[masks], "cached latents of the one are not those of the other"
    for batch in read_batches(prepared[masks]):
        for pixels in batch.control_pixels:
            white = pixels.float().mean(1) > 0
            assert white[:, :8, :8].all() and not white[:, 24:].any() and not white[..., 24:].any()
    for batch in read_batches(prepared[ANY_NUMBER]):
        assert all((pixels == pixels.max()).all() for pixels in batch.control_pixels)


def test_a_transparent_mask_of_a_preview_is_read_as_in_training(folder):
    mask = Image.new("RGBA", (64, 64), (255, 255, 255, 0))
    mask.paste((255, 255, 255, 255), (0, 0, 16, 16))
    mask.save(folder / "mask.png")
    prompt = Prompt("a", width=64, height=64, control_images=(folder / "mask.png",))
    for name, painted in (("flux_fill", 256), ("sd1_inpainting", 256), ("flux_control", 64 * 64)):
        pixels = np.asarray(load_preview_control(FAMILIES.get(name)(), prompt))
        assert (pixels > 127).all(-1).sum() == painted, name


def test_other_control_images_are_another_dataset(folder):
    before = prepare(folder).manifest.compute_fingerprint()
    plain = prepare(folder, "image_dir = 'p'").manifest.compute_fingerprint()
    draw(folder / "c" / "a0.png", (64, 64), 77)
    after = prepare(folder).manifest.compute_fingerprint()
    own_size = prepare(folder, head="control_resolution = 32").manifest.compute_fingerprint()
    assert len({before, plain, after, own_size}) == 4


def test_the_contact_sheet_shows_control_images_beside_their_pictures(folder):
    prepared = prepare(folder)
    plan = BatchPlan(prepared.buckets, 1, 1, 0)
    prepared.write_contact_sheet(plan, folder / "sheet.png", 9)
    colors = {color for _, color in Image.open(folder / "sheet.png").convert("RGB").getcolors(10**6)}
    assert {(10,) * 3, (110,) * 3, (40,) * 3, (140,) * 3, (141,) * 3} <= colors
    assert ", control images 6" in prepared.format_summary(plan, 4)
    assert "80x48 + 80x48 + 80x48" in prepared.format_summary(plan, 4)
