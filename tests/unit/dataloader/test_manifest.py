"""Every listed image is trained, with its caption and repeats, or reported."""

import gc
import io
import json
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from problem_lines import format_lines

from library.config.schema import TrainConfig
from library.config.schema_data import DataConfig
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataset import image_inspection, scan
from library.dataset.validate import validate_dataset_config
from library.errors import ConfigError


def save(path: Path, width: int = 80, height: int = 70, caption: str | None = None, ending: str = ".txt", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(sum(map(ord, path.name))).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path, **options)
    if caption is not None:
        path.with_suffix(ending).write_text(caption, encoding="utf-8")


def config(folder: Path, *subsets: str, head: str = "", **options) -> DataConfig:
    body = "".join(f"[[datasets.subsets]]\n{subset}\n" for subset in subsets)
    folder.mkdir(parents=True, exist_ok=True)
    text = f"[[datasets]]\nresolution = 64\nenable_bucket = true\nmin_bucket_reso = 64\n{head}\n{body}"
    (folder / "set.toml").write_text(text, encoding="utf-8")
    return DataConfig(dataset_config=str(folder / "set.toml"), **options)


def made(*arguments, **options) -> PreparedData:
    return prepare_data(config(*arguments, **options), 8)


def captions(prepared: PreparedData) -> dict[str, str]:
    return {sample.key: sample.caption for sample in prepared.manifest.samples}


def test_images_are_listed_by_name_with_captions_from_files_or_class_tokens(tmp_path):
    save(tmp_path / "a" / "b.png", caption="bee\nsecond", ending=".caption")
    save(tmp_path / "a" / "a.jpg", caption="ay")  # with another extension
    save(tmp_path / "a" / "猫 🐈.WEBP", caption="cat", ending=".caption")
    save(tmp_path / "a" / "face_1_2_3_4.png")
    (tmp_path / "a" / "face.caption").write_text("a face", encoding="utf-8")
    save(tmp_path / "a" / "below" / "c.png")
    (tmp_path / "a" / "._b.png").write_bytes(b"left behind by macOS")
    prepared = made(tmp_path, "image_dir = 'a'\nclass_tokens = 'thing'\nnum_repeats = 3")
    assert captions(prepared) == {
        "a/a.jpg": "thing",
        "a/b.png": "bee",
        "a/face_1_2_3_4.png": "a face",
        "a/猫 🐈.WEBP": "cat",
    }
    assert {(sample.repeats, sample.loss_weight, sample.is_reg) for sample in prepared.manifest.samples} == {
        (3, 1.0, False)
    }
    assert prepared.manifest.notes == (
        f"{tmp_path}/a: images in subfolders are not used; set recursive = true to use them: below/",
        f"{tmp_path}/a: 1 caption with several lines: only the first line is used; set enable_wildcard = true to pick a"
        " random one each time",
        f"{tmp_path}/a: no .caption file for 1 of 4 images, using the caption 'thing': a.jpg",
        f"{tmp_path}/a: there are .txt files for 1 of the images without a caption; use them with caption_extension ="
        " ['.caption', '.txt']",
    )


def test_captions_fall_back_to_txt_files_with_a_notice(tmp_path):
    save(tmp_path / "a" / "a.png", caption="one\n\ntwo")
    prepared = made(tmp_path, "image_dir = 'a'\nenable_wildcard = true")
    assert captions(prepared) == {"a/a.png": "one\ntwo"}
    assert prepared.manifest.notes == (f"{tmp_path}/a: no .caption files; captions are read from .txt files",)


def test_keys_without_effect_are_noted(tmp_path):
    save(tmp_path / "a" / "1.png", caption="x", ending=".caption")
    head = "bucket_no_upscale = true\nbucket_reso_steps = 8"
    assert made(tmp_path, "image_dir = 'a'", head=head).manifest.notes == (
        f"{tmp_path}/set.toml:4: min_bucket_reso: not used, because bucket_no_upscale is set",
    )
    text = (tmp_path / "set.toml").read_text().replace("enable_bucket = true", "enable_bucket = false")
    (tmp_path / "set.toml").write_text(text)
    prepared = prepare_data(DataConfig(dataset_config=str(tmp_path / "set.toml")), 8)
    assert sorted(note.split(":")[1:3] for note in prepared.manifest.notes) == [
        ["4", " min_bucket_reso"],
        ["5", " bucket_no_upscale"],
        ["6", " bucket_reso_steps"],
    ]


def test_keys_that_have_no_effect_on_any_subset_of_their_table_are_noted(tmp_path):
    for name in "ab":
        save(tmp_path / name / "1.png", caption="x", ending=".caption")
    text = """
[general]
keep_tokens = 2
validation_seed = 3
control_resolution = 64
bucket_max_crop = 0.5
[[datasets]]
resolution = 64
  [[datasets.subsets]]
  image_dir = "a"
  token_warmup_min = 2
  validation_split = 0.0
  [[datasets.subsets]]
  image_dir = "b"
"""
    path = tmp_path / "set.toml"

    def list_notes(text):
        path.write_text(text)
        notes = prepare_data(DataConfig(dataset_config=str(path)), 8).manifest.notes
        return {note.split(": ")[1]: note.split("not used, because ")[1] for note in notes if "not used" in note}

    assert list_notes(text) == {
        "keep_tokens": "tags are neither shuffled nor dropped",
        "validation_seed": "validation_split is 0",
        "control_resolution": "no subset here has control images",
        "bucket_max_crop": "only for bucket_mode symmetric",
        "token_warmup_min": "token_warmup_step is 0",
    }
    save(tmp_path / "a" / "2.png", caption="y", ending=".caption")
    text = text.replace("token_warmup_min = 2", "token_warmup_min = 2\n  token_warmup_step = 5")
    text = text.replace("validation_split = 0.0", "validation_split = 0.5")
    assert list_notes(text).keys() == {"control_resolution", "bucket_max_crop"}, "one subset uses the others"


def test_sample_keys_are_unique_across_extensions_folders_and_datasets(tmp_path):
    for name in ("x/a/1.png", "x/a/1.jpg", "y/a/1.png"):
        save(tmp_path / name, caption=name)
    settings = config(tmp_path, "image_dir = 'x/a'", "image_dir = 'y/a'")
    second = "[[datasets]]\nresolution = 128\n[[datasets.subsets]]\nimage_dir = 'x/a'\n"
    path = Path(str(settings.dataset_config))
    path.write_text(path.read_text() + second)
    keys = [sample.key for sample in prepare_data(settings, 8).manifest.samples]
    assert keys == ["a/1.jpg", "a/1.png", "a/1.png#2", "a/1.jpg#2", "a/1.png#3"]


def test_all_unusable_images_are_in_one_report(tmp_path):
    save(tmp_path / "a" / "good.png", caption="good")
    save(tmp_path / "a" / "cut.png", caption="cut")
    data = (tmp_path / "a" / "cut.png").read_bytes()
    (tmp_path / "a" / "cut.png").write_bytes(data[: len(data) // 2])
    save(tmp_path / "a" / "empty.png", caption="")
    save(tmp_path / "a" / "latin.png")
    (tmp_path / "a" / "latin.txt").write_bytes(b"caf\xe9")
    save(tmp_path / "a" / "thin.png", 5000, 3, caption="thin")
    settings = config(
        tmp_path, "image_dir = 'a'\ncaption_extension = '.txt'", head="bucket_no_upscale = true\nbucket_reso_steps = 16"
    )
    with pytest.raises(ConfigError) as caught:
        prepare_data(settings, 8)
    start = [problem.replace(f"{tmp_path}/", "")[:46] for problem in format_lines(caught.value.problems)]
    assert start == [
        "a/cut.png: is truncated: the file ends before ",
        "a/empty.txt: is empty; write a caption, or del",
        "a/latin.txt: is not UTF-8 (byte 3); save the f",
        "a/thin.png: 5000x3 pixels leave no bucket with",
        "4 of 5 images cannot be used; fix or remove th",
    ]


def test_bad_images_are_skipped_with_a_note_if_set(tmp_path):
    save(tmp_path / "a" / "good.png", caption="good")
    (tmp_path / "a" / "bad.png").write_bytes(b"bad")
    prepared = made(tmp_path, "image_dir = 'a'\ncaption_extension = 'txt'", on_invalid_images="skip")
    assert [sample.key for sample in prepared.manifest.samples] == ["a/good.png"]
    assert prepared.manifest.notes[-1].startswith("1 image skipped (1 not an image):\n  ")
    assert "bad.png: is not an image" in prepared.manifest.notes[-1]
    (tmp_path / "a" / "good.png").write_bytes(b"bad")
    with pytest.raises(ConfigError, match="no images left to train on"):
        made(tmp_path, "image_dir = 'a'", on_invalid_images="skip")


def test_a_folder_without_images_is_reported_with_its_content_and_a_fix(tmp_path):
    save(tmp_path / "a" / "cat" / "1.png")
    (tmp_path / "a" / "1.txt").write_text("x")
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, "image_dir = 'a'", "image_dir = 'b'")
    assert [problem.replace(f"{tmp_path}/", "") for problem in format_lines(caught.value.problems)] == [
        "set.toml:7: image_dir: no images; a contains 1 .txt, 1 image in cat/; subfolders are not searched: set"
        " recursive = true, or image_dir = 'a/cat'",
        "set.toml:9: image_dir: no images; b contains nothing; image extensions are .png .jpg .jpeg .webp .bmp .avif"
        " .jxl",
    ]


@pytest.mark.parametrize(
    ("train", "reg", "repeats", "expected"),
    [(5, 2, 1, [3, 2]), (4, 2, 1, [2, 2]), (7, 2, 3, [4, 3]), (3, 5, 1, [1, 1, 1]), (3, 5, 2, [2, 2])],
)
def test_regularization_images_are_repeated_up_to_the_number_of_training_images(
    tmp_path, train, reg, repeats, expected
):
    """The expected numbers follow from the loop in sd-scripts' DreamBoothDataset."""
    for number in range(train):
        save(tmp_path / "t" / f"{number}.png")
    for number in range(reg):
        save(tmp_path / "r" / f"{number}.png")
    prepared = made(
        tmp_path, f"image_dir = 'r'\nis_reg = true\nnum_repeats = {repeats}", "image_dir = 't'", prior_loss_weight=0.25
    )
    regularization = [sample for sample in prepared.manifest.samples if sample.is_reg]
    assert [sample.repeats for sample in regularization] == expected
    assert {sample.loss_weight for sample in regularization} == {0.25}
    assert [sample.key for sample in regularization] == [f"r/{number}.png" for number in range(len(expected))]
    assert prepared.images_per_epoch == (train, sum(expected))
    note = prepared.manifest.notes[-1]
    assert ("more are not used" in note) == (reg > len(expected))


def test_metadata_files_list_images_and_captions(tmp_path):
    for name in ("p/a.png", "p/b.jpg", "elsewhere/c.png"):
        save(tmp_path / name)
    entries = {
        "a": {"caption": "ay", "tags": "x, y", "image_size": [1, 1]},
        "b.jpg": {"tags": "z"},
        str(tmp_path / "elsewhere" / "c.png"): {"caption": "see\nsea"},
    }
    (tmp_path / "p" / "m.json").write_text(json.dumps(entries), encoding="utf-8")
    lines = [json.dumps({"image_path": name, **values}) for name, values in entries.items()]
    (tmp_path / "p" / "m.jsonl").write_text("\ufeff" + "\n".join(lines) + "\n\n", encoding="utf-8")
    expected = {"p/a.png": "ay;x, y", "p/b.jpg": "z", "elsewhere/c.png": "see\nsea"}
    for subset in ("image_dir = 'p'\nmetadata_file = 'p/m.json'", "metadata_file = 'p/m.jsonl'"):
        assert captions(made(tmp_path, subset + "\ncaption_separator = ';'")) == expected
    wild = made(tmp_path, "metadata_file = 'p/m.json'\nenable_wildcard = true")
    assert captions(wild)["p/b.jpg"] == "z" and captions(wild)["elsewhere/c.png"] == "see\nsea"


def test_errors_in_metadata_files_are_reported_with_line_numbers(tmp_path):
    save(tmp_path / "a.png")
    rows = [{"image_path": "a.png"}, {"image_path": "b.png", "caption": "x"}, {"image_path": "a.png", "caption": 3}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, "metadata_file = 'm.jsonl'")
    assert [problem.replace(f"{tmp_path}/", "") for problem in format_lines(caught.value.problems)] == [
        f"m.jsonl:2: 'b.png' not found in {Path.cwd()}, {tmp_path}",
        "m.jsonl:1: 'a.png': no caption and no tags",
        "m.jsonl:3: 'a.png': caption is not a string: 3",
        "3 of 3 images cannot be used; fix or remove them, or skip them with --on_invalid_images skip",
    ]
    for text, problem in {"{": "not valid JSON", "[]": "expected an object", "": "no images listed"}.items():
        (tmp_path / "m.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=rf"set.toml:7: metadata_file: .*{problem}"):
            made(tmp_path, "metadata_file = 'm.jsonl'")


def test_the_fingerprint_changes_with_the_training_data(tmp_path):
    save(tmp_path / "a" / "1.png", caption="one")
    save(tmp_path / "a" / "2.png", caption="two")

    def fingerprint(subset: str = "image_dir = 'a'") -> str:
        return made(tmp_path, subset).manifest.compute_fingerprint()

    first = fingerprint()
    assert fingerprint() == first == fingerprint("image_dir = './a'")
    assert fingerprint("image_dir = 'a'\nnum_repeats = 2") != first
    (tmp_path / "a" / "1.txt").write_text("won")
    second = fingerprint()
    Image.new("RGB", (80, 70)).save(tmp_path / "a" / "2.png")
    assert len({first, second, fingerprint()}) == 3


def test_the_fingerprint_depends_on_augmentations_and_not_on_paths(tmp_path):
    for folder in ("here/a", "there/a", "copy"):
        save(tmp_path / folder / "1.png", caption="one")

    def fingerprint(subset: str = "image_dir = 'here/a'", head: str = "", **options) -> str:
        return made(tmp_path, subset, head=head, **options).manifest.compute_fingerprint()

    shown = [
        fingerprint(),
        fingerprint(head="bucket_reso_steps = 8"),
        fingerprint(head="max_bucket_reso = 128"),
        fingerprint(head="bucket_no_upscale = true\nbucket_reso_steps = 16"),
        fingerprint("image_dir = 'here/a'\nflip_aug = true"),
        fingerprint("image_dir = 'here/a'\nrandom_crop = true"),
        fingerprint("image_dir = 'here/a'\nresize_interpolation = 'nearest'"),
        fingerprint("image_dir = 'here/a'\ncaption_prefix = 'x'"),
        fingerprint(flip_aug=True, shuffle_caption=True),
    ]
    assert len(set(shown)) == len(shown)
    assert fingerprint("image_dir = 'there/a'") == fingerprint(head="batch_size = 3") == shown[0]
    assert fingerprint("image_dir = 'copy'") == shown[0]


def test_a_folder_used_by_several_paths_is_scanned_once(tmp_path, monkeypatch):
    """Whatever path was used for the previous scan."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scan, "SETTLED_AFTER_NS", -(10**15))
    save(tmp_path / "a" / "1.png", caption="one")
    save(tmp_path / "a" / "2.png", caption="two")
    (tmp_path / "link").symlink_to("a")
    examined: list[str] = []
    real = image_inspection.inspect_bytes
    monkeypatch.setattr(image_inspection, "inspect_bytes", lambda *given: (examined.append(given[1]), real(*given))[1])
    for _ in range(2):
        settings = config(tmp_path, f"image_dir = '{tmp_path}/a'")
        for way in ("a", "./a", "link", f"{tmp_path}/link"):
            path = Path(str(settings.dataset_config))
            path.write_text(
                path.read_text() + f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{way}'\n"
            )
        assert len(prepare_data(settings, 8).manifest.samples) == 10
    assert len(examined) <= 10  # the first scan by each path
    examined.clear()
    prepare_data(settings, 8)
    assert examined == []
    assert len((tmp_path / "a/.cache-lorikeet/scan/images.json").read_text().splitlines()[1].split("],[")) == 2


@pytest.mark.slow
def test_an_image_takes_less_than_a_kilobyte_of_memory(tmp_path):
    """With a caption of 100 characters, including the bucket assignment and the batch plan."""
    (tmp_path / "a").mkdir()
    data = encoded_sizes()
    for number in range(1500):
        (tmp_path / "a" / f"picture_{number:05}.bmp").write_bytes(data[number % len(data)] + b"%d" % number)
        (tmp_path / "a" / f"picture_{number:05}.txt").write_text(f"{number:05} {'word ' * 19}", encoding="utf-8")
    settings = config(tmp_path, "image_dir = 'a'\ncaption_extension = '.txt'")

    def prepared_and_planned() -> tuple:
        prepared = prepare_data(settings, 8)
        plan = prepared.build_batch_plan(64, TrainConfig())
        plan.get_micro_batch(0)
        return prepared, plan

    prepared_and_planned()  # imports and caches do not count
    gc.collect()
    tracemalloc.start()
    kept = prepared_and_planned()
    gc.collect()
    # the table of interned strings, which pathlib fills, doubles its size at some time
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "*pathlib*")])
    tracemalloc.stop()
    used = sum(trace.size for trace in own.traces)
    assert len(kept[0].manifest.samples) == 1500
    assert used / 1500 < 1000


def encoded_sizes() -> list[bytes]:
    actual = []
    for width in range(60, 100):
        stream = io.BytesIO()
        Image.new("RGB", (width, 70)).save(stream, "BMP")
        actual.append(stream.getvalue())
    return actual


def test_sizes_the_model_does_not_support_are_rejected(tmp_path):
    save(tmp_path / "a" / "1.png")
    with pytest.raises(ConfigError, match=r"set.toml:5: bucket_reso_steps: 32 is not a multiple of 64, .* set 64"):
        prepare_data(config(tmp_path, "image_dir = 'a'", head="bucket_reso_steps = 32"), 64)
    text = "[[datasets]]\nresolution = [72, 64]\n[[datasets.subsets]]\nimage_dir = 'a'\n"
    (tmp_path / "set.toml").write_text(text)
    settings = DataConfig(dataset_config=str(tmp_path / "set.toml"))
    with pytest.raises(ConfigError, match=r"toml:2: resolution: 72,64 is not a multiple of 16.* set .64, 64."):
        prepare_data(settings, 16)
    assert prepare_data(settings, 8).resolution == (72, 64)


def test_validation_reports_all_problems_without_importing_torch_or_pillow(tmp_path):
    (tmp_path / "a").mkdir()
    settings = config(
        tmp_path, "image_dir = 'a'\nface_crop_aug_range = [2.0, 4.0]", "image_dir = 'b'", head="batch_size = 'x'"
    )
    actual = [
        line.replace(f"{tmp_path}/", "").partition(";")[0] for line in format_lines(validate_dataset_config(settings))
    ]
    assert actual == [
        "set.toml:5: batch_size: expected an integer, got 'x'",
        "set.toml:10: image_dir: 'b' not found (also searched next to set.toml)",
    ]
    assert (
        format_lines(validate_dataset_config(DataConfig()))
        == []
        == format_lines(validate_dataset_config(DataConfig(dataset_config="nowhere.toml")))
    )  # reported with the options
    source = (
        "import sys, library.dataloader.prepare\nassert not {'torch', 'PIL'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", source], check=True, cwd=Path(__file__).resolve().parents[3])


def test_the_summary_shows_images_buckets_and_how_steps_are_computed(tmp_path):
    for number in range(5):
        save(tmp_path / "a" / f"{number}.png", 80 + number, 70, caption="x")
    save(tmp_path / "a" / "wide.png", 200, 60, caption="x")
    prepared = made(tmp_path, "image_dir = 'a'\nnum_repeats = 2", head="batch_size = 5\nbucket_reso_steps = 32")
    plan = prepared.build_batch_plan(2, TrainConfig(gradient_accumulation_steps=2, seed=1))
    lines = prepared.format_summary(plan, 9).splitlines()
    assert lines[0] == "dataset 1, a: 6 images x 2 repeats = 12 per epoch, captions found 6/6 (.txt)"
    assert lines[-3].startswith("one epoch: 6 images, with repeats 12, and 8 padding samples")
    assert lines[-3].endswith(": 20")
    assert lines[-2] == "  20 / (batch 5 x 2 processes x accumulation 2) = 1 step"
    assert lines[-1] == "the run: 9 steps = 9 epochs"
    assert prepared.format_summary(plan, 1).splitlines()[-1] == "the run: 1 step = 1 epoch"
    assert plan.count_steps_for_epochs(2) == plan.micro_batches_per_epoch


def symmetric(folder: Path, settings: str = "", **options) -> PreparedData:
    """The subset of the images in folder a; buckets from 32 to 128 pixels in steps of 8."""
    config(folder, "image_dir = 'a'", **options)
    text = (folder / "set.toml").read_text(encoding="utf-8")
    own = f"min_bucket_reso = 32\nmax_bucket_reso = 128\nbucket_mode = 'symmetric'\nbucket_reso_steps = 8\n{settings}"
    (folder / "set.toml").write_text(text.replace("min_bucket_reso = 64", own), encoding="utf-8")
    return prepare_data(DataConfig(dataset_config=str(folder / "set.toml"), **options), 8)


def test_images_that_would_be_cropped_too_much_are_reported_or_skipped(tmp_path):
    save(tmp_path / "a" / "good.png", 80, 70, caption="x")
    save(tmp_path / "a" / "thin.png", 300, 40, caption="x")
    with pytest.raises(ConfigError) as caught:
        symmetric(tmp_path, "bucket_max_crop = 0.3")
    assert len(caught.value.problems) == 2
    assert format_lines(caught.value.problems)[0].startswith(
        f"{tmp_path}/a/thin.png: 300x40 pixels would lose 46.7% in the nearest bucket 128x32, more than bucket_max_crop"
    )
    skipped = symmetric(tmp_path, "bucket_max_crop = 0.3", on_invalid_images="skip")
    assert [sample.key for sample in skipped.manifest.samples] == ["a/good.png"]
    assert "thin.png: 300x40 pixels would lose" in skipped.manifest.notes[-1]
    assert len(symmetric(tmp_path, "bucket_max_crop = 0.47").assignments) == 2


def test_the_bucket_table_shows_crops_and_merged_buckets_are_noted(tmp_path):
    for name, width in {"0": 64, "1": 66, "2": 81, "wide": 128}.items():
        save(tmp_path / "a" / f"{name}.png", width, 64, caption="x")
    plain, joined = symmetric(tmp_path), symmetric(tmp_path, "bucket_min_images = 4")
    assert len(plain.buckets) == 3 and len(plain.manifest.notes) == 1
    (bucket,) = joined.buckets
    assert sorted(bucket.sample_indices) == [0, 1, 2, 3]
    assert [note.partition(" has fewer")[0] for note in joined.manifest.notes[1:]] == [
        "dataset 1: bucket 88x48",
        "dataset 1: bucket 72x56",
    ]
    lines = joined.format_summary(joined.build_batch_plan(1, TrainConfig()), 9).splitlines()
    head, row = next((head, row) for head, row in pairwise(lines) if "worst crop" in head)
    losses = [placement.cropped_fraction for placement in joined.assignments]
    assert head.split()[-6:] == ["mean", "crop", "worst", "crop", "worst", "image"]
    assert row.split()[-3:] == [f"{sum(losses) / 4:.1%}", "50.0%", "a/wide.png"] and max(losses) == 0.5


def test_the_first_image_that_differs_or_is_on_one_side_only_is_named(tmp_path):
    for folder, names in (("all", "abcd"), ("short", "acd"), ("start", "ab"), ("changed", "abcd")):
        for name in names:
            caption = "another" if (folder, name) == ("changed", "c") else name
            save(tmp_path / folder / "images" / f"{name}.png", caption=caption)
    manifests = {path.name: made(path, "image_dir = 'images'").manifest for path in tmp_path.iterdir()}

    def describe(here: str, there: str) -> str:
        text = manifests[here].describe_difference(manifests[there].compute_sample_digests())
        return text.replace(f"{tmp_path / here / 'images'}/", "")

    assert describe("all", "changed") == "the first that differs is c.png, image 3; 4 images here, 4 there"
    assert describe("short", "all") == "missing here: after a.png; 3 images here, 4 there"
    assert describe("start", "all") == "missing here: after b.png; 2 images here, 4 there"
    assert describe("all", "short") == "only here: b.png; 4 images here, 3 there"
    assert describe("all", "start") == "only here: c.png; 4 images here, 2 there"
    assert describe("all", "all") == "the images are the same, their settings are not"
