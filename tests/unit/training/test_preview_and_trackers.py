"""Previews and trackers do not change the trained weights, and their failures do not end a run."""

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from nan_runs import train_and_read_log
from PIL import Image
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images, write_prompts

from library.config.schema_output import PreviewConfig
from library.dataset.clip_encoding import decode_animation
from library.dataset.clip_windows import FrameRule
from library.trackers import Trackers
from library.training.preview import Preview, encode_preview

METRIC_PREFIXES = {
    "loss/current",
    "loss/average",
    "loss/timestep/",
    "loss/bucket/",
    "loss/dataset/",
    "gradient_norm",
    "lr/unet",
    "update/norm",
    "speed/samples_per_second",
    "data_wait_seconds",
    "memory/peak_gb",
    "epoch",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"), {(96, 64): 3, (64, 96): 3})


def build_flags(data: Path, folder: Path, *more: str) -> list[str]:
    return [
        "--dataset_config",
        str(data),
        "--output_dir",
        str(folder),
        *"--max_train_steps 3 --learning_rate 0.02".split(),
        *more,
    ]


@pytest.fixture(scope="module")
def run_with_previews(data, tmp_path_factory):
    """The folder of a run of two ranks with a tracker, and previews by a sampler that draws random noise."""
    folder = tmp_path_factory.mktemp("with")
    run_on_ranks(
        2,
        train,
        *build_flags(
            data,
            folder,
            "--sample_prompts",
            write_prompts(folder),
            *"--sample_every_n_steps 2 --sample_at_first --sample_sampler euler_a".split(),
            "--logging_dir",
            str(folder / "logs"),
        ),
    )
    return folder


def read_tracker_events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(next((folder / "logs").rglob("events.*")).parent))
    accumulator.Reload()
    return accumulator


@pytest.mark.slow
def test_previews_and_trackers_do_not_change_the_trained_weights(run_with_previews, data, tmp_path):
    run_on_ranks(2, train, *build_flags(data, tmp_path))

    plain, with_previews = (load_file(folder / "lora.safetensors") for folder in (tmp_path, run_with_previews))
    assert max_relative_difference(plain, with_previews) == 0.0


@pytest.mark.slow
def test_the_tracker_gets_the_images_of_all_ranks(run_with_previews):
    tracker = read_tracker_events(run_with_previews)

    assert sorted(tracker.Tags()["images"]) == ["preview/00", "preview/01"]
    for index in (0, 1):
        image_events = tracker.Images(f"preview/{index:02d}")
        assert [event.step for event in image_events] == [0, 2]
        for event in image_events:
            (path,) = (run_with_previews / "sample").glob(f"lora_{event.step:06d}_{index:02d}_*.png")
            logged_image = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
            assert (logged_image == np.asarray(Image.open(path))).all()


@pytest.mark.slow
def test_the_tracker_and_the_metrics_file_get_every_metric(run_with_previews):
    tags = read_tracker_events(run_with_previews).Tags()["scalars"]
    lines = [json.loads(line) for line in (run_with_previews / "lora.metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line}

    for prefix in METRIC_PREFIXES:
        assert any(tag.startswith(prefix) for tag in tags), prefix
        assert any(name.startswith(prefix) for name in names), prefix
    assert lines[-1]["update/dead_layers"] == 0


def train_with_failing_tracker(method: str, *rest) -> str:
    """Train with a tracker that fails in one of its methods; return the log."""
    from accelerate import Accelerator
    from accelerate.tracking import TensorBoardTracker

    def fail(*_, **__):
        raise ConnectionError("the tracker is unreachable")

    setattr(Accelerator if method == "end_training" else TensorBoardTracker, method, fail)
    return train_and_read_log(*rest)


class NamedTracker:
    """A tracker that counts its calls, or fails."""

    def __init__(self, name, fails):
        self.name, self.fails, self.num_calls = name, fails, 0

    def log(self, values, step):
        self.num_calls += 1
        if self.fails:
            raise ConnectionError("unreachable")


@pytest.fixture
def clip_files():
    frames = [Image.new("RGB", (48, 32), (40 * number, 0, 0)) for number in range(5)]
    return encode_preview(frames, 8.0, FrameRule())


def test_a_preview_of_one_frame_is_an_image_and_of_more_a_clip_at_the_rate_of_the_model(clip_files):
    frames = [Image.new("RGB", (48, 32), color) for color in ("red", "blue")]
    assert encode_preview(frames[:1], None, FrameRule()).keys() == {".png"}
    clip = encode_preview(frames, None, FrameRule(fps=24.0))
    assert clip.keys() == clip_files.keys() == {".mp4", ".webp"}
    assert decode_animation(clip[".webp"])[1] == pytest.approx(24, rel=0.03)
    assert decode_animation(clip_files[".webp"])[1] == 8


def test_a_preview_that_is_not_written_to_its_end_leaves_no_file(clip_files, tmp_path, monkeypatch):
    preview = Preview(PreviewConfig(), [], tmp_path / "sample", "mine")
    run = SimpleNamespace(plan=SimpleNamespace(get_epoch_ended_at=lambda step: 0), state=SimpleNamespace(step=3))

    def fail(_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", fail)
        preview._save_files(run, 0, clip_files, 7)
    assert list(preview.output_dir.iterdir()) == [] == preview.saved_paths
    preview._save_files(run, 0, clip_files, 7)
    assert sorted(preview.output_dir.iterdir()) == sorted(preview.saved_paths)
    assert {path.suffix: path.read_bytes() for path in preview.saved_paths} == clip_files


def test_trackers_get_clips_in_the_format_that_they_show(clip_files, tmp_path):
    """Weights and Biases a video, TensorBoard an animated image, others three frames."""
    from torch.utils.tensorboard import SummaryWriter

    board = SimpleNamespace(name="tensorboard", writer=SummaryWriter(tmp_path / "logs"))
    logged = {}
    wandb = SimpleNamespace(name="wandb", log=lambda values, step: logged.update(wandb=(values, step)))
    aim = SimpleNamespace(name="aim", log_images=lambda values, step: logged.update(aim=(values, step)))
    trackers = Trackers(SimpleNamespace(trackers=[board, wandb, aim]))
    trackers.log_previews({"preview/00": clip_files}, 7)
    board.writer.close()
    (event,) = read_tracker_events(tmp_path).Images("preview/00")
    frames, fps = decode_animation(event.encoded_image_string)
    assert (event.step, event.width, event.height, len(frames)) == (7, 48, 32, 5) and fps == pytest.approx(8, rel=0.05)
    (video,), (image,) = (logged[name][0].values() for name in ("wandb", "aim"))
    assert Path(video._path).read_bytes() == clip_files[".mp4"] and type(video).__name__ == "Video"
    assert image.size == (3 * 48 + 4, 32) and logged["wandb"][1] == logged["aim"][1] == 7


def test_a_failing_tracker_is_disabled_and_others_go_on(caplog):
    broken, working = NamedTracker("wandb", fails=True), NamedTracker("tensorboard", fails=False)
    trackers = Trackers(SimpleNamespace(trackers=[broken, working]))
    for step in range(3):
        trackers.log_metrics({"loss": 1.0}, step)
    assert (broken.num_calls, working.num_calls) == (1, 3)
    assert caplog.messages == ["wandb failed and is disabled; training continues: unreachable"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["log", "log_images", "end_training"])
def test_a_failing_tracker_is_reported_once_and_training_continues(method, data, tmp_path):
    (log,) = run_on_ranks(
        1,
        train_with_failing_tracker,
        method,
        tmp_path,
        *build_flags(
            data,
            tmp_path,
            "--logging_dir",
            str(tmp_path / "logs"),
            "--sample_prompts",
            write_prompts(tmp_path),
            "--sample_every_n_steps",
            "1",
        ),
    )

    assert log.count("the tracker is unreachable") == 1
    assert "LoRA file: " in log and (tmp_path / "lora.safetensors").is_file()
    lines = (tmp_path / "lora.metrics.jsonl").read_text().splitlines()
    assert sum("loss/current" in line for line in lines) == 3
