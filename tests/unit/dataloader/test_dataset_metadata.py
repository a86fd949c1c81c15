"""Dataset metadata of LoRA files: the keys and values of sd-scripts, without paths."""

import json

from PIL import Image

from library.config.schema_data import DataConfig
from library.dataloader.dataset_metadata import build_dataset_metadata
from library.dataloader.prepare import prepare_data


def prepared(folder, more=""):
    for name, count, caption in (("cats", 3, "Cat, red"), ("private/cats", 2, "cat, blue,"), ("reg", 1, "dog")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (64 if number else 96, 64), (40 * number, 9 * count, 7)).save(
                folder / name / f"{number}.png"
            )
            (folder / name / f"{number}.txt").write_text(caption, encoding="utf-8")
    path = folder / "set.toml"
    path.write_text(
        f"""
[general]
enable_bucket = true
min_bucket_reso = 32
bucket_reso_steps = 32
caption_extension = ".txt"
[[datasets]]
resolution = 64
batch_size = 2
  [[datasets.subsets]]
  image_dir = '{folder / "cats"}'
  num_repeats = 2
  [[datasets.subsets]]
  image_dir = '{folder / "private/cats"}'
  [[datasets.subsets]]
  image_dir = '{folder / "reg"}'
  is_reg = true
{more}
""",
        encoding="utf-8",
    )
    return prepare_data(DataConfig(dataset_config=str(path)), 8)


def test_images_tags_and_buckets_are_written_as_in_sd_scripts(tmp_path):
    ready = prepared(tmp_path)
    actual = build_dataset_metadata(ready.manifest, ready.assignments, dp_size=3)
    assert json.loads(actual["ss_dataset_dirs"]) == {
        "cats": {"n_repeats": 2, "img_count": 3},
        "cats (2)": {"n_repeats": 1, "img_count": 2},
    }
    assert json.loads(actual["ss_reg_dataset_dirs"]) == {"reg": {"n_repeats": 1, "img_count": 1}}
    assert json.loads(actual["ss_tag_frequency"]) == {"cats": {"blue": 2, "cat": 5, "red": 3}, "reg": {"dog": 1}}
    buckets = json.loads(actual["ss_bucket_info"])
    shown = {tuple(each["resolution"]): each["count"] for each in buckets["buckets"].values()}
    assert shown == {bucket.resolution: round(sum(bucket.repeats)) for bucket in ready.buckets}
    assert buckets["mean_img_ar_error"] >= 0
    assert actual["ss_batch_size_per_device"] == "2" and actual["ss_total_batch_size"] == "6"
    common = {key: actual[f"ss_{key}"] for key in ("color_aug", "flip_aug", "random_crop", "shuffle_caption")}
    assert set(common.values()) == {"False"} and actual["ss_keep_tokens"] == "0"
    (dataset,) = json.loads(actual["ss_datasets"])
    assert dataset["num_train_images"] == 8 and dataset["resolution"] == [64, 64]
    assert [each["image_dir"] for each in dataset["subsets"]] == ["cats", "cats", "reg"]
    assert str(tmp_path) not in str(actual) and "private" not in str(actual)
    assert all(type(value) is str for value in actual.values())


def test_each_of_two_datasets_has_its_own_metadata(tmp_path):
    ready = prepared(
        tmp_path,
        f"""
[[datasets]]
resolution = 32
  [[datasets.subsets]]
  image_dir = '{tmp_path / "cats"}'
""",
    )
    actual = build_dataset_metadata(ready.manifest, ready.assignments, dp_size=1)
    assert [each["resolution"] for each in json.loads(actual["ss_datasets"])] == [[64, 64], [32, 32]]
    assert list(json.loads(actual["ss_dataset_dirs"])) == ["cats", "cats (2)", "cats (3)"]
    assert "ss_bucket_info" not in actual
