"""Previews and trackers change nothing in a run, and their failures do not end it."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from nan_runs import train_and_read_log
from PIL import Image
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images, write_prompts

TOLD = {
    "loss/current",
    "loss/average",
    "loss/time/",
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


def flags(data: Path, folder: Path, *more: str) -> list[str]:
    return [
        "--dataset_config",
        str(data),
        "--output_dir",
        str(folder),
        "--max_train_steps",
        "3",
        "--learning_rate",
        "0.02",
        *more,
    ]


@pytest.fixture(scope="module")
def accompanied(data, tmp_path_factory):
    """A run of two processes with previews by a sampler that draws noise of its own, and a tracker."""
    folder = tmp_path_factory.mktemp("with")
    run_on_ranks(
        2,
        train,
        *flags(
            data,
            folder,
            "--sample_prompts",
            write_prompts(folder),
            "--sample_every_n_steps",
            "2",
            "--sample_at_first",
            "--sample_sampler",
            "euler_a",
            "--logging_dir",
            str(folder / "logs"),
        ),
    )
    return folder


def events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(next((folder / "logs").rglob("events.*")).parent))
    found.Reload()
    return found


@pytest.mark.slow
def test_previews_and_trackers_do_not_change_the_trained_weights(accompanied, data, tmp_path):
    run_on_ranks(2, train, *flags(data, tmp_path))

    alone, together = (load_file(folder / "lora.safetensors") for folder in (tmp_path, accompanied))
    assert max_relative_difference(alone, together) == 0.0


def test_the_tracker_gets_the_images_of_all_ranks(accompanied):
    tracker = events(accompanied)

    assert sorted(tracker.Tags()["images"]) == ["preview/00", "preview/01"]
    for index in (0, 1):
        shown = tracker.Images(f"preview/{index:02d}")
        assert [event.step for event in shown] == [0, 2]
        for event in shown:
            (path,) = (accompanied / "sample").glob(f"lora_{event.step:06d}_{index:02d}_*.png")
            seen = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
            assert (seen == np.asarray(Image.open(path))).all()


def test_the_tracker_and_the_metrics_file_get_every_metric(accompanied):
    tags = events(accompanied).Tags()["scalars"]
    lines = [json.loads(line) for line in (accompanied / "lora.metrics.jsonl").read_text().splitlines()]
    written = {name for line in lines for name in line}

    for wanted in TOLD:
        assert any(tag.startswith(wanted) for tag in tags), wanted
        assert any(name.startswith(wanted) for name in written), wanted
    assert lines[-1]["update/dead_layers"] == 0


def dying(method: str, *rest) -> str:
    """The messages of a run whose tracker fails in one of its methods."""
    from accelerate import Accelerator
    from accelerate.tracking import TensorBoardTracker

    def gone(*_, **__):
        raise ConnectionError("the tracker is gone")

    setattr(Accelerator if hasattr(Accelerator, method) else TensorBoardTracker, method, gone)
    return train_and_read_log(*rest)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["log", "log_images", "end_training"])
def test_a_failing_tracker_is_reported_once_and_training_continues(method, data, tmp_path):
    (said,) = run_on_ranks(
        1,
        dying,
        method,
        tmp_path,
        *flags(
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

    assert said.count("the tracker is gone") == 1
    assert "LoRA file: " in said and (tmp_path / "lora.safetensors").is_file()
    lines = (tmp_path / "lora.metrics.jsonl").read_text().splitlines()
    assert sum("loss/current" in line for line in lines) == 3
