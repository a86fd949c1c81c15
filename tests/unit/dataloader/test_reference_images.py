"""Reference images of clips are found among their control files, and fitted into the clip on white."""

from pathlib import Path

import numpy as np
import pytest
from clip_files import write_clip
from PIL import Image
from problem_lines import format_lines

from library.cache.keys import build_latent_keys
from library.config.schema import TrainConfig
from library.config.schema_data import DataConfig
from library.dataloader.loader import MicroBatchDataset
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataloader.sample_prompts import load_prompts
from library.dataset.clip_windows import FrameRule
from library.dataset.controls import GREY, match_control_clips
from library.dataset.image_ref import ImageRef
from library.errors import FileError
from library.models.detect import build_control_limits, detect_model
from library.models.validate_options import validate_prompts

RULE = FrameRule(stride=4, fps=16.0)
SETTINGS = """[[datasets]]
resolution = 64
enable_bucket = true
min_bucket_reso = 16
bucket_reso_steps = 16
[[datasets.subsets]]
video_dir = 'clips'
caption_extension = '.txt'
control_directory = 'control'
target_frames = [1, 5]
"""


def save_clips(folder: Path, *names: str) -> None:
    for name in names:
        path = write_clip(folder / "clips" / f"{name}.mp4", 9, size=(64, 64))
        path.with_suffix(".txt").write_text("a clip", encoding="utf-8")


def save_image(path: Path, size: tuple[int, int], color: int) -> None:
    """An image whose left third is darker than the rest, in which a flip shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, (color,) * 3)
    image.paste((color // 2,) * 3, (0, 0, size[0] // 3, size[1]))
    image.save(path)


def prepare(folder: Path, more: str = "", model: str = "wan_vace") -> PreparedData:
    (folder / "set.toml").write_text(SETTINGS + more, encoding="utf-8")
    config = DataConfig(dataset_config=str(folder / "set.toml"))
    limits = build_control_limits(detect_model(f"random:{model}:tiny"))
    return prepare_data(config, 16, control_limits=limits, frame_rule=RULE)


def load_epoch(prepared: PreparedData):
    plan = prepared.build_batch_plan(1, TrainConfig(seed=3))
    reader = MicroBatchDataset(prepared.manifest, prepared.assignments, plan, 0, 3, 100)
    return [reader[position] for position in range(plan.micro_batches_per_epoch)]


def test_images_among_control_clips_are_references_of_the_clip_of_the_longest_name(tmp_path):
    clips, controls = tmp_path / "clips", tmp_path / "control"
    controls.mkdir()
    for name in ("walk.mp4", "walk_0.mp4", "walk_1.mp4", "walk.png", "walk_10.jpg", "walk_2.png", "walk_0.png"):
        (controls / name).touch()
    refs = [ImageRef(clips, name) for name in ("walk.mp4", "walk_0.mp4", "alone.mp4")]
    found = match_control_clips(refs, clips, controls)
    assert {ref.name: [each.name for each in own] for ref, own in found.controls.items()} == {
        "walk.mp4": ["walk.mp4", "walk_1.mp4", "walk.png", "walk_2.png", "walk_10.jpg"],
        "walk_0.mp4": ["walk_0.mp4", "walk_0.png"],
    }
    assert list(found.missing) == refs[2:]
    (controls / "walk_2.webp").touch()
    assert "several control clips of one number" in match_control_clips(refs, clips, controls).missing[refs[0]]


def test_references_fill_a_white_image_of_the_size_of_the_clip_without_being_cropped(tmp_path):
    save_clips(tmp_path, "a", "b")
    for name in ("a", "b"):
        write_clip(tmp_path / "control" / f"{name}.mp4", 9, size=(64, 64))
    save_image(tmp_path / "control" / "a_0.png", (128, 64), 100)
    save_image(tmp_path / "control" / "a_1.png", (20, 40), 160)
    prepared = prepare(tmp_path)
    counts = {bucket.num_references: len(bucket.control_resolutions) for bucket in prepared.buckets}
    assert counts == {2: 3, 0: 1}, "a clip with references is in no batch with one without"
    for batch in load_epoch(prepared):
        if batch.sample_keys[0].startswith("clips/b"):
            assert batch.num_references == 0 and len(batch.control_pixels) == 1
            continue
        control, wide, high = batch.control_pixels
        assert control.shape == batch.pixels.shape and batch.num_references == 2
        assert wide.shape == high.shape == (1, 3, 1, 64, 64)
        assert wide[0, 0, 0, :, 40].tolist() == [255] * 16 + [100] * 32 + [255] * 16
        assert high[0, 0, 0, 32].tolist() == [255] * 16 + high[0, 0, 0, 32, 16:48].tolist() + [255] * 16
        assert high[0, 0, 0, 0, 20] < 90 and high[0, 0, 0, 63, 45] == 160


def test_a_flipped_clip_has_flipped_references(tmp_path):
    save_clips(tmp_path, "a")
    save_image(tmp_path / "control" / "a.png", (64, 64), 200)
    prepared, seen = prepare(tmp_path, "flip_aug = true\nnum_repeats = 8\n"), set()
    for batch in load_epoch(prepared):
        left, right = (int(batch.control_pixels[1][0, 0, 0, 32, column]) for column in (4, 60))
        assert {left, right} == {100, 200}
        seen.add(left < right)
    assert seen == {False, True}


def test_a_clip_with_references_alone_has_a_grey_control_clip(tmp_path):
    save_clips(tmp_path, "a")
    save_image(tmp_path / "control" / "a.png", (64, 64), 200)
    prepared = prepare(tmp_path)
    assert [[each.made for each in sample.controls] for sample in prepared.manifest.samples] == [[GREY, ""]] * 2
    shapes = set()
    for batch in load_epoch(prepared):
        grey, _ = batch.control_pixels
        assert grey.shape == batch.pixels.shape and bool((grey == 128).all())
        shapes.add(grey.ndim)
    assert shapes == {4, 5}, "windows of one frame are images"


def test_the_cache_knows_references_and_how_they_are_placed(tmp_path):
    save_clips(tmp_path, "a")
    write_clip(tmp_path / "control" / "a.mp4", 9, size=(64, 64))
    keys = []
    for name, size in (("", (1, 1)), ("a_0.png", (64, 64)), ("a_0.png", (64, 32)), ("a_1.png", (64, 32))):
        if name:
            save_image(tmp_path / "control" / name, size, 90)
        keys.append({*map(bytes, build_latent_keys(prepare(tmp_path).build_static_augmenter(), "vae").keys)})
    assert len(set.union(*keys)) == 8


def test_references_beyond_those_that_the_model_takes_are_named_with_their_clips(tmp_path):
    save_clips(tmp_path, "a", "b")
    for number in range(5):
        save_image(tmp_path / "control" / f"a_{number}.png", (64, 64), 200)
    save_image(tmp_path / "control" / "b.png", (64, 64), 200)
    with pytest.raises(FileError) as caught:
        prepare(tmp_path)
    (line,) = str(caught.value).splitlines()
    assert "Wan 2.1 VACE takes at most 4 reference images, not 5: a.mp4" in line
    for name in ("a", "b"):
        write_clip(tmp_path / "control" / f"{name}.mp4", 9, size=(64, 64))
    with pytest.raises(FileError, match=r"Fun-Control takes no reference images beside control clips; Wan 2.1 V"):
        prepare(tmp_path, model="wan_fun_control")


def test_a_reference_that_cannot_be_read_is_a_problem_of_its_clip(tmp_path):
    save_clips(tmp_path, "a")
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "a.png").write_bytes(b"nothing")
    with pytest.raises(FileError, match=r"a.mp4: its control clip .*a.png "):
        prepare(tmp_path)


def test_previews_of_vace_take_reference_images_with_and_without_a_control_clip(tmp_path):
    write_clip(tmp_path / "pose.mp4", 12, 24, (32, 32))
    save_image(tmp_path / "cat.png", (64, 64), 200)
    texts = ["a --ci cat.png", "b --ci cat.png --cn pose.mp4", f"c{' --ci cat.png' * 5}", "d"]
    (tmp_path / "p.txt").write_text("\n".join(texts), encoding="utf-8")
    problems = format_lines(validate_prompts(load_prompts(tmp_path / "p.txt"), detect_model("random:wan_vace:tiny")))
    assert [line.partition("p.txt:")[2] for line in problems] == [
        "3: --ci: Wan 2.1 VACE takes at most 4 reference images, not 5",
        "4: --cn: Wan 2.1 VACE needs 1 control clip for each clip, not 0",
    ]


def test_a_reference_in_a_preview_is_placed_as_in_training(tmp_path):
    from library.dataloader.images import load_reference_images

    save_clips(tmp_path, "a")
    save_image(tmp_path / "control" / "a.png", (50, 96), 200)
    trained = load_epoch(prepare(tmp_path))[0].control_pixels[1][0, :, 0].permute(1, 2, 0).numpy()
    (tmp_path / "p.txt").write_text("a --ci control/a.png", encoding="utf-8")
    (prompt,) = load_prompts(tmp_path / "p.txt")
    (image,) = load_reference_images(prompt, (64, 64))
    assert np.array_equal(np.asarray(image), trained)
