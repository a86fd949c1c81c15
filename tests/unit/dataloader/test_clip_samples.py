"""From clips in a dataset file to batches of their windows: shapes, frames, buckets, masks, controls and messages."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_files import read_numbers, write_clip
from PIL import Image
from problem_lines import format_lines

from library.cache.keys import build_latent_keys, collect_run_captions, get_cached_crop
from library.config.schema import TrainConfig
from library.config.schema_data import DataConfig
from library.dataloader.batch import Moments
from library.dataloader.images import load_first_pixels, load_sample_pixels
from library.dataloader.loader import MicroBatchDataset
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataset.clip_windows import FrameRule
from library.dataset.controls import ControlLimits, match_control_clips
from library.dataset.image_ref import ImageRef
from library.errors import ConfigError, FileError
from library.models.detect import build_control_limits, detect_model
from library.training.trial_steps import BatchShape

RULE = FrameRule(stride=4, fps=16.0)
HEAD = "[[datasets]]\nresolution = 64\nenable_bucket = true\nmin_bucket_reso = 16\nbucket_reso_steps = 16\n"
CLIPS = "[[datasets.subsets]]\nvideo_dir = 'clips'\ncaption_extension = '.txt'\n"
MUSUBI = "[general]\nresolution = [64, 64]\nenable_bucket = true\ncaption_extension = '.txt'\n[[datasets]]\n"


def save_clip(folder: Path, name: str, *arguments, caption: str = "a clip", **options) -> Path:
    path = write_clip(folder / "clips" / name, *arguments, **options)
    path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def prepare(
    folder: Path, text: str, rule: FrameRule | None = RULE, control_limits: ControlLimits | None = None, **options
) -> PreparedData:
    (folder / "set.toml").write_text(text, encoding="utf-8")
    data = DataConfig(dataset_config=str(folder / "set.toml"), **options)
    return prepare_data(data, 16, frame_rule=rule, control_limits=control_limits)


def load_epoch(prepared: PreparedData):
    plan = prepared.build_batch_plan(1, TrainConfig(seed=3))
    reader = MicroBatchDataset(prepared.manifest, prepared.assignments, plan, 0, 3, 100)
    return [reader[position] for position in range(plan.micro_batches_per_epoch)]


def load_numbers(prepared: PreparedData) -> dict[str, list[int]]:
    """The numbers of the frames of each sample, read from their pixels."""
    numbers = {}
    for batch in load_epoch(prepared):
        assert not batch.bad_samples
        for key, clip in zip(batch.sample_keys, batch.pixels.numpy(), strict=True):
            numbers[key] = read_numbers(clip.transpose(1, 2, 3, 0))
    return numbers


def test_batches_have_the_frames_of_their_windows(tmp_path):
    for name, size in (("wide.mp4", (96, 64)), ("high.mp4", (64, 96))):
        save_clip(tmp_path, name, 24, 16, size, caption=name)
    prepared = prepare(tmp_path, f"{HEAD}batch_size = 2\n{CLIPS}target_frames = [6, 9]\nframe_extraction = 'chunk'\n")
    shapes = {tuple(batch.pixels.shape) for batch in load_epoch(prepared)}
    assert shapes == {(2, 3, 5, 48, 80), (2, 3, 5, 80, 48), (2, 3, 9, 48, 80), (2, 3, 9, 80, 48)}
    numbers = load_numbers(prepared)
    starts = {5: [0, 5, 10, 15], 9: [0, 9]}
    assert numbers == {
        f"clips/{name}.mp4 frame {start} to {start + length - 1}": list(range(start, start + length))
        for name in ("wide", "high")
        for length in starts
        for start in starts[length]
    }
    by_caption = {sample.key.split(" ")[0]: sample.caption for sample in prepared.manifest.samples}
    assert by_caption == {"clips/wide.mp4": "wide.mp4", "clips/high.mp4": "high.mp4"}


def test_our_files_take_the_true_rate_and_musubi_tuners_the_one_they_name_or_none(tmp_path):
    save_clip(tmp_path, "a.mp4", 32, 32)
    first = "clips/a.mp4 frame 0 to 4"
    own = prepare(tmp_path, f"{HEAD}{CLIPS}target_frames = [5]\n")
    assert load_numbers(own) == {first: [0, 2, 4, 6, 8]}
    as_they_are = prepare(tmp_path, f"{MUSUBI}video_directory = 'clips'\ntarget_frames = [5]\n")
    assert load_numbers(as_they_are) == {first: [0, 1, 2, 3, 4]}
    counted = prepare(tmp_path, f"{MUSUBI}video_directory = 'clips'\ntarget_frames = [5]\nsource_fps = 24.0\n")
    assert load_numbers(counted) == {first: [0, 2, 3, 5, 7]}, "the sums are those of floats"
    fingerprints = {each.manifest.compute_fingerprint() for each in (own, as_they_are, counted)}
    assert len(fingerprints) == 3
    keys = [
        bytes(build_latent_keys(each.build_static_augmenter(), "vae").keys[0]) for each in (own, as_they_are, counted)
    ]
    assert len(set(keys)) == 3, "the rate is part of the key of cached latents"


def test_images_and_clips_in_one_file_are_in_buckets_of_their_own(tmp_path):
    save_clip(tmp_path, "a.mp4", 12)
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 48), (10, 20, 30)).save(tmp_path / "images" / "a.png")
    images = "[[datasets.subsets]]\nimage_dir = 'images'\nclass_tokens = 'x'\n"
    prepared = prepare(tmp_path, f"{HEAD}{images}{CLIPS}target_frames = [1, 9]\n")
    assert [(bucket.num_frames, len(bucket.sample_indices)) for bucket in prepared.buckets] == [(1, 2), (9, 1)]
    assert {tuple(batch.pixels.shape[2:-2]) for batch in load_epoch(prepared)} == {(), (9,)}


def test_a_table_lists_clips_and_folders_of_images(tmp_path):
    write_clip(tmp_path / "a.mp4", 9)
    (tmp_path / "walk").mkdir()
    for number in range(9):
        Image.new("RGB", (64, 48), (5 * number, 5 * number, 0)).save(tmp_path / "walk" / f"{number}.png")
    rows = [{"video_path": str(tmp_path / name), "caption": name} for name in ("a.mp4", "walk")]
    (tmp_path / "clips.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    table = str(tmp_path / "clips.jsonl")
    prepared = prepare(tmp_path, f"{MUSUBI}video_jsonl_file = '{table}'\ntarget_frames = [9]\n")
    assert list(load_numbers(prepared).values()) == [list(range(9))] * 2
    assert [sample.caption for sample in prepared.manifest.samples] == ["a.mp4", "walk"]
    own = prepare(tmp_path, f"{HEAD}[[datasets.subsets]]\nmetadata_file = '{table}'\ntarget_frames = [5]\n")
    assert len(own.manifest.samples) == 2
    with pytest.raises(ConfigError, match=r"target_frames: missing; set the lengths of windows"):
        prepare(tmp_path, f"{HEAD}[[datasets.subsets]]\nmetadata_file = '{table}'\n")


def test_flips_and_masks_are_those_of_all_frames(tmp_path):
    save_clip(tmp_path, "a.mp4", 9, 16, (64, 64))
    (tmp_path / "masks").mkdir()
    mask = np.zeros((64, 64), np.uint8)
    mask[:, :20] = 255
    Image.fromarray(mask).save(tmp_path / "masks" / "a.png")
    subset = f"{CLIPS}target_frames = [5, 9]\nflip_aug = true\nconditioning_data_dir = 'masks'\nnum_repeats = 6\n"
    prepared = prepare(tmp_path, f"{HEAD}{subset}", masked_loss=True)
    sides = set()
    for batch in load_epoch(prepared):
        assert batch.mask.shape == (1, 1, 64, 64)
        clip, is_left = batch.pixels[0], bool(batch.mask[0, 0, 0, 0] > 0)
        corners = clip[:, :, 2, 2] if is_left else clip[:, :, 2, -3]
        assert bool((corners > 200).all()), "the white corner of every frame is on the side of the mask"
        sides.add(is_left)
    assert sides == {True, False}


def test_a_control_clip_is_cut_or_its_last_frame_repeated(tmp_path):
    for name in ("long", "short", "folder"):
        save_clip(tmp_path, f"{name}.mp4", 9)
    write_clip(tmp_path / "control" / "long.mp4", 30)
    write_clip(tmp_path / "control" / "short.mov", 4)
    (tmp_path / "control" / "folder").mkdir()
    for number in range(9):
        Image.new("RGB", (64, 48), (5 * number, 5 * number, 0)).save(tmp_path / "control" / "folder" / f"{number}.png")
    prepared = prepare(tmp_path, f"{HEAD}{CLIPS}target_frames = [9]\ncontrol_directory = 'control'\n")
    found = {}
    for batch in load_epoch(prepared):
        (control,) = batch.control_pixels
        assert control.shape == batch.pixels.shape
        found[batch.sample_keys[0].split()[0]] = read_numbers(control[0].numpy().transpose(1, 2, 3, 0))
    assert found == {
        "clips/long.mp4": list(range(9)),
        "clips/short.mp4": [0, 1, 2, 3, 3, 3, 3, 3, 3],
        "clips/folder.mp4": list(range(9)),
    }
    save_clip(tmp_path, "alone.mp4", 9)
    with pytest.raises(ConfigError, match=r"alone.mp4: has no control clip: no alone.mp4, no folder alone"):
        prepare(tmp_path, f"{HEAD}{CLIPS}target_frames = [9]\ncontrol_directory = 'control'\n")


def test_a_square_control_clip_has_its_own_size_and_is_not_said_to_be_cropped(tmp_path):
    """Such as the face of Wan 2.2 Animate, beside poses in the size of the clip."""
    square = replace(RULE, control_sides=(0, 32))
    for number in range(2):
        save_clip(tmp_path, f"{number}.mp4", 9, 16, (96, 64))
        write_clip(tmp_path / "control" / f"{number}_0.mp4", 9, 16, (96, 64))
        write_clip(tmp_path / "control" / f"{number}_1.mp4", 9, 16, (64, 48))
    text = f"{HEAD}{CLIPS}target_frames = [9]\ncontrol_directory = 'control'\nflip_aug = true\n"
    prepared = prepare(tmp_path, text, square)
    for batch in load_epoch(prepared):
        poses, face = batch.control_pixels
        assert (poses.shape, face.shape) == (batch.pixels.shape, (1, 3, 9, 32, 32))
    shapes = {bucket.control_resolutions for bucket in prepared.buckets}
    assert shapes == {(prepared.assignments[0].bucket_resolution, (32, 32))}
    assert not any("another shape" in note for note in prepared.manifest.notes)
    assert any("another shape" in note for note in prepare(tmp_path, text).manifest.notes), "without a side of its own"
    prepare(tmp_path, f"{text}random_crop = true\n", square)
    with pytest.raises(ConfigError, match="cannot be cropped alike"):
        prepare(tmp_path, f"{text}random_crop = true\n")


def test_control_clips_in_pairs_are_no_odd_number(tmp_path):
    save_clip(tmp_path, "a.mp4", 9)
    text = f"{HEAD}{CLIPS}target_frames = [9]\ncontrol_directory = 'control'\n"
    limits = build_control_limits(detect_model("random:wan_animate:tiny"))
    for number in range(4):
        write_clip(tmp_path / "control" / f"a_{number}.mp4", 9)
        if number % 2:
            prepare(tmp_path, text, control_limits=limits)
            continue
        with pytest.raises(FileError, match=r"takes 2 or 4 control clips for a clip, not 3|needs 2 control clips"):
            prepare(tmp_path, text, control_limits=limits)


def test_numbered_control_clips_belong_to_the_clip_of_the_longest_name(tmp_path):
    def match(*names):
        clips, controls = tmp_path / "clips", tmp_path / "control"
        for name in names:
            (controls / name).parent.mkdir(exist_ok=True)
            (controls / name).touch()
        refs = [ImageRef(clips, name) for name in ("walk.mp4", "walk_0.mp4")]
        found = match_control_clips(refs, clips, controls)
        return {ref.name: [each.name for each in own] for ref, own in found.controls.items()}, list(found.missing)

    own = {"walk_0.mp4": ["walk_0.mp4"]}
    assert match("walk_0.mp4") == (own, [ImageRef(tmp_path / "clips", "walk.mp4")])
    assert match("walk_2.MP4", "walk_10.mp4") == ({"walk.mp4": ["walk_2.MP4", "walk_10.mp4"], **own}, [])
    # A clip with a mask beside it.
    assert match("walk.mp4")[0] == {"walk.mp4": ["walk.mp4", "walk_2.MP4", "walk_10.mp4"], **own}
    assert match("walk_2.webm")[1] == [ImageRef(tmp_path / "clips", "walk.mp4")]  # two of one number


def test_all_windows_of_a_clip_are_on_one_side_of_the_validation_split(tmp_path):
    for number in range(6):
        save_clip(tmp_path, f"{number}.mp4", 20, shade=30 * number)
    text = f"{HEAD}{CLIPS}target_frames = [5]\nframe_extraction = 'chunk'\nvalidation_split = 0.4\n"
    prepared = prepare(tmp_path, text)
    train = {sample.content_hash for sample in prepared.manifest.samples}
    held = [sample.content_hash for sample in prepared.validation.manifest.samples]
    assert held and len(held) == 4 * len(set(held)) and not train & set(held)
    assert len(train) + len(set(held)) == 6


def test_each_window_has_a_key_of_its_own_in_the_cache(tmp_path):
    save_clip(tmp_path, "a.mp4", 24)
    prepared = prepare(tmp_path, f"{HEAD}{CLIPS}target_frames = [5, 9]\nframe_extraction = 'chunk'\n")
    keys = build_latent_keys(prepared.build_static_augmenter(), "vae").keys
    assert len(set(map(bytes, keys))) == len(keys) == 6
    other = prepare(tmp_path, f"{HEAD}{CLIPS}target_frames = [5]\nframe_extraction = 'chunk'\n")
    assert set(map(bytes, build_latent_keys(other.build_static_augmenter(), "vae").keys)) < set(map(bytes, keys))


def test_texts_that_are_read_with_a_first_frame_have_a_key_for_each_first_frame(tmp_path):
    save_clip(tmp_path, "a.mp4", 24)
    frames = "target_frames = [5, 9]\nframe_extraction = 'chunk'\nflip_aug = true\n"
    prepared = prepare(tmp_path, f"{HEAD}{CLIPS}{frames}")
    augmenter, plan = prepared.build_static_augmenter(), prepared.build_batch_plan(1, TrainConfig(seed=3))
    firsts = {sample.window.start for sample in prepared.manifest.samples}
    assert len(firsts) == 5 < len(prepared.manifest.samples)
    texts = collect_run_captions(augmenter, plan, 10, text_images="first frame")
    assert len(texts) == 2 * len(firsts), "one for each first frame, and one for its mirror image"
    assert len(collect_run_captions(augmenter, plan, 10)) == 2, "the caption and the empty one"
    for text, source in texts.items():
        sample, index = prepared.manifest.samples[source.sample_index], source.sample_index
        crop = get_cached_crop(augmenter, index, is_flipped=source.is_flipped)
        (pixels,) = load_first_pixels(sample, augmenter.assignments[index], crop)
        whole, _ = load_sample_pixels(sample, augmenter.assignments[index], crop)
        assert text.control_key and np.array_equal(pixels, whole[0])
    for batch in load_epoch(prepared):
        known = {text.control_key for text in texts}
        assert set(batch.frame_keys) <= known and len(batch.frame_keys) == len(batch.sample_keys)


def test_a_model_of_clips_alone_names_images_before_training(tmp_path):
    save_clip(tmp_path, "a.mp4", 24)
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "images" / "b.png")
    images = "[[datasets.subsets]]\nimage_dir = 'images'\nclass_tokens = 'b'\n"
    with pytest.raises(FileError, match=r"b.png.*is an image; the model is trained on clips of at least 5 frames"):
        prepare(tmp_path, f"{HEAD}{CLIPS}target_frames = 5\n{images}", replace(RULE, least=5))


def test_the_first_frame_of_a_transparent_image_has_the_colors_that_are_trained(tmp_path):
    for folder in ("opaque", "masked"):
        (tmp_path / folder).mkdir()
        image = Image.new("RGBA", (64, 64), (200, 30, 60, 0))
        image.paste((10, 20, 30, 255), (0, 0, 32, 64))
        image.save(tmp_path / folder / "a.png")
    masked = "[[datasets.subsets]]\nimage_dir = 'masked'\nclass_tokens = 'x'\nalpha_mask = true\n"
    prepared = prepare(
        tmp_path, f"{HEAD}{masked}[[datasets.subsets]]\nimage_dir = 'opaque'\nclass_tokens = 'x'\n", masked_loss=True
    )
    augmenter, keys = prepared.build_static_augmenter(), set()
    for index, sample in enumerate(prepared.manifest.samples):
        assignment, crop = augmenter.assignments[index], get_cached_crop(augmenter, index, is_flipped=False)
        (pixels,) = load_first_pixels(sample, assignment, crop)
        assert np.array_equal(pixels, load_sample_pixels(sample, assignment, crop)[0])
        keys.add((augmenter.get_text_image_key(index, "first frame", is_flipped=False), pixels.tobytes()))
    assert len({key for key, _ in keys}) == len({pixels for _, pixels in keys}) == 2


def test_windows_below_those_of_a_model_are_named(tmp_path):
    save_clip(tmp_path, "a.mp4", 24)
    text, rule = f"{HEAD}{CLIPS}target_frames = ", replace(RULE, least=5)
    left_out = "target_frames [1, 4] left out: the model is trained on at least 5 frames"
    notes = "\n".join(prepare(tmp_path, f"{text}[1, 4, 9]\n", rule).manifest.notes)
    assert left_out in notes and "too short" not in notes
    assert "left out" not in "\n".join(prepare(tmp_path, f"{text}[1, 4, 9]\n").manifest.notes)
    with pytest.raises(ConfigError, match="no images left to train on") as caught:
        prepare(tmp_path, f"{text}[1, 4]\n", rule)
    assert left_out in str(caught.value) and "shorter" not in str(caught.value)
    reason = "no images left to train on: 1 clip of at most 24 frames at 16 per second, and the shortest window of the"
    assert f"{reason} model has 5; set target_frames = [21]" in str(caught.value)
    with pytest.raises(ConfigError, match=r"model has 37; use clips of at least 2.3 s \(37 frames\)"):
        prepare(tmp_path, f"{text}[1, 4]\n", replace(RULE, stride=36, least=37))


def test_windows_that_become_single_frames_are_named(tmp_path):
    save_clip(tmp_path, "a.mp4", 24)
    text, rule = f"{HEAD}{CLIPS}target_frames = ", replace(RULE, stride=17, shortest=22)
    told = "target_frames [21] trained as single frames: the model's shortest clip has 22 frames"
    assert told in "\n".join(prepare(tmp_path, f"{text}[1, 21, 22]\n", rule).manifest.notes)
    assert "single frames" not in "\n".join(prepare(tmp_path, f"{text}[1, 22]\n", rule).manifest.notes)


def test_clips_that_cannot_be_used_are_named_before_training(tmp_path):
    save_clip(tmp_path, "good.mp4", 9)
    save_clip(tmp_path, "short.mp4", 4)
    save_clip(tmp_path, "slow.mp4", 9, 8, shade=90)
    (tmp_path / "clips" / "broken.mp4").write_bytes(b"nothing")
    (tmp_path / "clips" / "broken.txt").write_text("x")
    text = f"{HEAD}{CLIPS}target_frames = [9]\n"
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path, text)
    lines = format_lines(caught.value.problems)
    assert lines[0].startswith(f"{tmp_path}/clips/broken.mp4: cannot be opened as a video")
    notes = "\n".join(prepare(tmp_path, text, on_invalid_images="skip").manifest.notes)
    assert "1 clip too short for any window, and not trained" in notes
    assert "clips/short.mp4 (4 frames; the shortest window has 9)" in notes
    assert (
        "1 clip with fewer frames per second than the model's 16: frames are shown again: clips/slow.mp4 (8)" in notes
    )
    with pytest.raises(ConfigError, match=r"no images left to train on") as caught:
        prepare(tmp_path, text.replace("[9]", "[81]"), on_invalid_images="skip")
    assert "too short for any window" in str(caught.value)
    assert "window asked for has 81; set a shorter target_frames, or use clips of at least 5.1 s" in str(caught.value)


def test_what_clips_do_not_support_is_named(tmp_path):
    save_clip(tmp_path, "a.mp4", 9)
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path, f"{HEAD}{CLIPS}alpha_mask = true\ncolor_aug = true\n")
    lines = [line.removeprefix(f"{tmp_path}/") for line in format_lines(caught.value.problems)]
    assert [line.split(": ")[1] for line in lines] == ["alpha_mask", "color_aug", "target_frames"]
    with pytest.raises(ConfigError, match=r"video_dir: this model makes images, not videos; choose a model of videos"):
        prepare(tmp_path, f"{HEAD}{CLIPS}target_frames = [9]\n", rule=None)


def test_the_plan_is_the_same_in_another_folder_and_after_a_rename_of_it(tmp_path):
    """Clips are found by their content, and nothing depends on where they are."""
    plans = []
    for folder in ("one", "two"):
        for number in range(3):
            save_clip(tmp_path / folder, f"{number}.mp4", 20, shade=40 * number)
        prepared = prepare(tmp_path / folder, f"{HEAD}{CLIPS}target_frames = [5, 9]\n")
        plan = prepared.build_batch_plan(2, TrainConfig(seed=5))
        plans.append(([plan.get_step(step) for step in range(9)], prepared.manifest.compute_fingerprint()))
    assert plans[0] == plans[1]


def test_dummy_batches_have_the_frames_of_their_bucket(tmp_path):
    save_clip(tmp_path, "a.mp4", 9)
    (batch,) = load_epoch(prepare(tmp_path, f"{HEAD}{CLIPS}target_frames = [9]\n"))
    assert batch.frame_shape == (9,)
    assert batch.build_dummy_batch((32, 16), 2, num_frames=5).pixels.shape == (2, 3, 5, 16, 32)
    assert batch.build_dummy_batch((32, 16), 2).pixels.shape == (2, 3, 16, 32)
    crop = batch.crop_first_image(16)
    assert torch.equal(crop.pixels[0], batch.pixels[0, :, 0, :16, :16])
    height, width = batch.pixels.shape[-2:]
    latents = torch.arange(2 * 4 * 3 * height * width // 64, dtype=torch.float32)
    latents = latents.view(1, 2, 4, 3, height // 8, width // 8)
    cached = replace(batch, pixels=None, moments=Moments(latents))
    dummy = cached.build_dummy_batch((32, 16), 2, num_frames=13, frame_rule=FrameRule(stride=4))
    assert cached.frame_shape == (3,) and dummy.moments.mean_and_std.shape == (2, 2, 4, 4, 2, 4)
    assert torch.equal(cached.crop_first_image(16).moments.mean_and_std, latents[..., :1, :2, :2])
    given = {"latents": latents[:, 0], "images": torch.arange(1.0, 13).view(1, 1, 3, 4)}
    found = replace(cached, frame_cond=given).crop_first_image(16).frame_cond
    assert torch.equal(found["latents"], latents[:, 0, :, :1, :2, :2])
    assert torch.equal(found["images"], given["images"]), "zeros would give its projections no gradient"


def test_dummy_batches_have_the_cached_controls_of_their_bucket(tmp_path):
    """Buckets may have fewer controls than the first batch, or more, of which only reference images are known."""
    save_clip(tmp_path, "a.mp4", 9)
    (batch,) = load_epoch(prepare(tmp_path, f"{HEAD}{CLIPS}target_frames = [9]\n"))
    height, width = (side // 8 for side in batch.pixels.shape[-2:])
    controls = tuple(torch.ones(1, count, 3, height, width) for count in (8, 64))
    moments = Moments(torch.ones(1, 2, 4, 3, height, width))
    cached = replace(batch, pixels=None, moments=moments, control_latents=controls)
    for num_controls, num_references, channels in ((1, 0, [8]), (2, 0, [8, 64]), (1, 2, [8, 4, 4]), (2, 1, [8, 64, 4])):
        sizes = [(32, 16)] * len(channels)
        shape = BatchShape((32, 16), 1, tuple(sizes), 9, FrameRule(stride=4), num_references)
        dummy = cached.build_dummy_batch(*shape)
        assert shape.can_be_built_from(cached) and [each.shape[1] for each in dummy.control_latents] == channels
        lengths = [each.shape[2] for each in dummy.control_latents]
        assert lengths == [3] * num_controls + [1] * num_references
    assert not shape._replace(num_references=0).can_be_built_from(cached)
    assert shape._replace(num_references=0).can_be_built_from(batch)


def test_keys_of_other_ways_to_cut_clips_are_named_as_unused(tmp_path):
    save_clip(tmp_path, "a.mp4", 9)
    keys = "target_frames = [5]\nframe_extraction = 'full'\nframe_stride = 3\nframe_sample = 2\n"
    notes = prepare(tmp_path, f"{HEAD}{CLIPS}{keys}").manifest.notes
    unused = [note.split(": ")[1] for note in notes if ": not used, because" in note]
    assert unused == ["target_frames", "frame_stride", "frame_sample"]
    images = "[[datasets.subsets]]\nimage_dir = 'images'\nclass_tokens = 'x'\nmax_frames = 5\n"
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 48)).save(tmp_path / "images" / "a.png")
    (note,) = [note for note in prepare(tmp_path, f"{HEAD}{images}").manifest.notes if "max_frames" in note]
    assert note.endswith("max_frames: not used, because no subset here has clips")
