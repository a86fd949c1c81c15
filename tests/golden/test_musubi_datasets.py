"""Images and videos get musubi-tuner's buckets, sizes and frames, and dataset files written for it are read."""

import json
import shutil
from pathlib import Path

import pytest
from clip_files import write_clip
from PIL import Image
from problem_lines import format_lines

from library.config.schema_data import DataConfig
from library.dataloader.buckets import build_bucket_assigner
from library.dataloader.prepare import prepare_data
from library.dataset.clip_windows import FrameRule, FrameSettings, list_frame_windows, select_frames
from library.dataset.dataset_config import parse_dataset_config
from library.dataset.musubi_format import set_musubi_bucket_steps
from library.dataset.schema import DatasetConfig, collect_flag_defaults
from library.dataset.validate import validate_dataset_config

DATA = Path(__file__).resolve().parents[1] / "data"
GOLDEN = json.loads((DATA / "musubi_buckets_and_windows.json").read_text(encoding="utf-8"))
FILES = sorted((DATA / "musubi_datasets").glob("*.toml"))
SIZE_MULTIPLES = {"hidream_o1": 32, "wan": 8, "hunyuan_video": 8}
"""The sizes that the patches and the VAE of a model need, where that is not 16."""


def read_dataset(folder: Path, row: dict) -> DatasetConfig:
    path = folder / "set.toml"
    path.write_text(
        f"[general]\nresolution = {row['resolution']}\nenable_bucket = {str(row['enable_bucket']).lower()}\n"
        f"bucket_no_upscale = {str(row['bucket_no_upscale']).lower()}\n"
        "[[datasets]]\nimage_directory = 'a'\ncaption_extension = '.txt'\n",
        encoding="utf-8",
    )
    datasets = parse_dataset_config(path, collect_flag_defaults(DataConfig())).require_valid()
    return set_musubi_bucket_steps(datasets, SIZE_MULTIPLES.get(row["model"], 16))[0]


def test_every_golden_image_gets_the_bucket_and_the_size_of_musubi_tuner(tmp_path):
    assert len(GOLDEN["buckets"]) == 160
    for row in GOLDEN["buckets"]:
        assignment = build_bucket_assigner(read_dataset(tmp_path, row))(*row["image"])
        found = [list(assignment.bucket_resolution), list(assignment.resized_size)]
        assert found == [row["bucket"], row["resized"]], row
        trims = [side - bucket for side, bucket in zip(row["resized"], row["bucket"], strict=True)]
        assert assignment.crop_left_top == (trims[0] // 2, trims[1] // 2)


def test_every_golden_video_gets_the_windows_of_musubi_tuner():
    assert len(GOLDEN["windows"]) == 80
    for row in GOLDEN["windows"]:
        settings = FrameSettings(**{name: row[name] for name in FrameSettings.__dataclass_fields__})
        assert list(map(list, list_frame_windows(row["frames"], settings))) == row["windows"], row


@pytest.mark.parametrize("row", GOLDEN["rates"], ids=lambda row: f"{row['source_fps']}-{row['target_fps']}")
def test_every_golden_frame_rate_keeps_the_frames_of_musubi_tuner(row):
    frames = select_frames(row["frames"], row["source_fps"], row["target_fps"])
    assert list(map(list, frames)) == row["kept_frame_and_index"]


def prepare_folder(folder: Path, file: Path) -> DataConfig:
    """Copy a dataset file next to the images that it names: 3:2, 1:3, and one without a caption."""
    for name in ("big", "ctl"):
        (folder / "data" / "mus" / name).mkdir(parents=True)
        for number, size in enumerate([(1500, 1000), (500, 1500), (640, 640)]):
            Image.new("RGB", size, (40 * number, 90, 30)).save(folder / "data" / "mus" / name / f"{number}.jpg")
            if number < 2:
                (folder / "data" / "mus" / name / f"{number}.txt").write_text("a bird", encoding="utf-8")
    shutil.copy(file, folder / "set.toml")
    return DataConfig(dataset_config=str(folder / "set.toml"))


VIDEO_FILES = [file for file in FILES if "video" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("file", VIDEO_FILES, ids=lambda file: file.stem)
def test_published_files_of_videos_have_musubi_tuners_windows_and_buckets(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = prepare_folder(tmp_path, file)
    text = file.read_text(encoding="utf-8").replace("/data/videos", str(tmp_path / "clips"))
    (tmp_path / "set.toml").write_text(text, encoding="utf-8")
    for name, num_frames in (("long", 90), ("short", 11)):
        write_clip(tmp_path / "clips" / f"{name}.mp4", num_frames, 24, (192, 108))
        (tmp_path / "clips" / f"{name}.txt").write_text("a bird", encoding="utf-8")
    assert format_lines(validate_dataset_config(config)) == []
    prepared = prepare_data(config, 16, frame_rule=FrameRule())
    clips = [
        (sample.image.name, sample.window.start, sample.num_frames, assignment.bucket_resolution, sample.repeats)
        for sample, assignment in zip(prepared.manifest.samples, prepared.assignments, strict=True)
        if sample.window is not None
    ]
    # "full" is the whole clip up to max_frames, rounded down; buckets have the area of the resolution
    bucket, repeats = ((832, 480), 4) if file.stem.startswith("qinglong") else ((384, 224), 1)
    assert clips == [("long.mp4", 0, 81, bucket, repeats), ("short.mp4", 0, 9, bucket, repeats)]


@pytest.mark.parametrize("file", [file for file in FILES if file not in VIDEO_FILES], ids=lambda file: file.stem)
def test_published_files_have_musubi_tuners_buckets(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = prepare_folder(tmp_path, file)
    assert format_lines(validate_dataset_config(config)) == []
    prepared = prepare_data(config, 16)
    sizes = {each.image.name: item for each, item in zip(prepared.manifest.samples, prepared.assignments, strict=True)}
    assert {name: item.bucket_resolution for name, item in sizes.items()} == {
        "0.jpg": (1248, 832),
        "1.jpg": (592, 1760),
    }
    assert [each.repeats for each in prepared.manifest.samples] == [4, 4]
    notes = "\n".join(prepared.manifest.notes)
    assert "cache_directory: this program keeps its own caches there" in notes and "1 image without a caption" in notes
