"""Experiment trackers (``--log_with``: wandb, TensorBoard): start, metrics, previews, and the settings they get."""

import io
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .config import RunConfig
from .config.options import iter_options
from .config.schema_output import LogConfig
from .config.toml_positions import read_toml_with_lines
from .config.types import parse_env_bool
from .dataset.clip_encoding import decode_animation, encode_gif, join_frames
from .errors import UserError
from .problems import Problem

logger = logging.getLogger(__name__)
TENSORBOARD_SIDE = 512
"""The longest side of clips in TensorBoard, which are GIF images: these are large."""


def log_images_to_tracker(tracker: Any, images: Mapping[str, bytes], step: int) -> None:
    """Log PNG files to one of accelerate's trackers, each of which takes images in a format of its own."""
    if not hasattr(tracker, "log_images"):
        return
    opened = {name: Image.open(io.BytesIO(data)).convert("RGB") for name, data in images.items()}
    if tracker.name == "tensorboard":
        batches = {name: np.asarray(image)[None] for name, image in opened.items()}
        tracker.log_images(batches, step=step, dataformats="NHWC")
    elif tracker.name == "aim":
        tracker.log_images(opened, step=step)
    else:
        tracker.log_images({name: [image] for name, image in opened.items()}, step=step)


def log_clips_to_tracker(tracker: Any, clips: Mapping[str, Mapping[str, bytes]], step: int) -> None:
    """Log clips, as MP4 and WebP files, to one of accelerate's trackers.

    Trackers that take no clips get the first, the middle and the last frame as an image.
    """
    if tracker.name == "wandb":
        import wandb

        videos = {name: wandb.Video(io.BytesIO(files[".mp4"]), format="mp4") for name, files in clips.items()}
        tracker.log(videos, step=step)
        return
    decoded = {name: decode_animation(files[".webp"]) for name, files in clips.items()}
    if tracker.name == "tensorboard":
        for name, (frames, fps) in decoded.items():
            for frame in frames:
                frame.thumbnail((TENSORBOARD_SIDE, TENSORBOARD_SIDE))
            _write_tensorboard_gif(tracker.writer, name, encode_gif(frames, fps), frames[0].size, step)
        return
    strips = dict[str, bytes]()
    for name, (frames, _) in decoded.items():
        data = io.BytesIO()
        join_frames(frames).save(data, "PNG")
        strips[name] = data.getvalue()
    log_images_to_tracker(tracker, strips, step)


def _write_tensorboard_gif(writer: Any, name: str, gif: bytes, size: tuple[int, int], step: int) -> None:
    """Write an animated GIF as an image, which TensorBoard plays; torch's ``add_video`` does so with moviepy only."""
    from tensorboard.compat.proto import summary_pb2  # type: ignore[import-untyped]

    image = summary_pb2.Summary.Image(width=size[0], height=size[1], colorspace=3, encoded_image_string=gif)
    summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=name, image=image)])
    writer._get_file_writer().add_summary(summary, step)


def resolve_tracker(log: LogConfig) -> str | None:
    """Return ``--log_with``, or tensorboard if only ``--logging_dir`` is set."""
    if log.log_with is None:
        return "tensorboard" if log.logging_dir is not None else None
    return None if log.log_with == "none" else log.log_with


def resolve_tracker_dir(log: LogConfig, started_at: str) -> str | None:
    """Return the run's own directory: ``<logging_dir>/<log_prefix><YYYYmmddHHMMSS>``."""
    if log.logging_dir is None or resolve_tracker(log) is None:
        return None
    return str(Path(log.logging_dir) / f"{log.log_prefix or ''}{started_at}")


def is_wandb_ready(environment: Mapping[str, str]) -> bool:
    """Whether wandb can start without prompting for a login."""
    mode = environment.get("WANDB_MODE", "online").lower()
    if mode in ("offline", "disabled", "dryrun") or parse_env_bool(environment.get("WANDB_DISABLED")):
        return True
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    return bool(wandb.login(prompt=False, verify=False))  # verifying would need the network


def create_tracker_dir(directory: str | None, log: LogConfig) -> list[Problem]:
    """Create the run's directory and direct wandb to it; return problems."""
    if directory is None:
        return []
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"cannot create the directory: {error.strerror}"
        return [Problem("logging_dir", text, value=str(log.logging_dir))]
    if resolve_tracker(log) in ("wandb", "all"):
        os.environ["WANDB_DIR"] = directory
    return []


class Trackers:
    """The experiment trackers (``--log_with``) of a run; accelerate runs them on the main process.

    A tracker that fails does not stop the run: it is disabled, and training continues.
    """

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self._disabled = set[str]()

    @property
    def has_trackers(self) -> bool:
        """Whether any tracker is set; all ranks have the same answer."""
        return bool(self.accelerator.log_with)

    def init_trackers(self, log: LogConfig, options: Mapping[str, Any]) -> None:
        """Start the trackers, on the main process; they get the run's ``options`` only with ``--log_config``."""
        settings = collect_shareable_settings(options) if log.log_config else {}
        init_kwargs: dict[str, Any] = (
            read_toml_with_lines(Path(log.log_tracker_config))[0] if log.log_tracker_config else {}
        )
        wandb = init_kwargs.setdefault("wandb", {})
        wandb["settings"] = WANDB_PRIVATE_SETTINGS | wandb.get("settings", {})
        if log.wandb_run_name:
            wandb.setdefault("name", log.wandb_run_name)
        try:
            self.accelerator.init_trackers(log.log_tracker_name or "network_train", settings, init_kwargs)
        except Exception as error:  # each tracker has exception types of its own
            raise UserError(f"--log_with: the tracker could not start: {type(error).__name__}: {error}") from error

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        """Log the metrics of a step."""
        self._call_each(lambda tracker: tracker.log(values, step=step))

    def log_previews(self, previews: Mapping[str, Mapping[str, bytes]], step: int) -> None:
        """Log images, given as PNG files, and clips, given as MP4 and WebP files; the keys are the extensions."""
        images = {name: files[".png"] for name, files in previews.items() if ".png" in files}
        clips = {name: files for name, files in previews.items() if ".png" not in files}
        if images:
            self._call_each(lambda tracker: log_images_to_tracker(tracker, images, step))
        if clips:
            self._call_each(lambda tracker: log_clips_to_tracker(tracker, clips, step))

    def end_training(self) -> None:
        """Close the trackers, when all ranks have logged their last values."""
        try:
            self.accelerator.end_training()
        except Exception as error:  # all files are written by now
            logger.warning("a tracker could not be closed: %s", error)

    def _call_each(self, function: Callable[[Any], None]) -> None:
        for tracker in self.accelerator.trackers:
            if tracker.name in self._disabled:
                continue
            try:
                function(tracker)
            except Exception as error:
                self._disabled.add(tracker.name)
                logger.warning("%s failed and is disabled; training continues: %s", tracker.name, error)


WANDB_PRIVATE_SETTINGS = {
    "x_disable_meta": True,
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "console": "off",
}
"""Settings that keep wandb from uploading command line, program path, git remote and terminal output, its default."""


def collect_shareable_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Select numbers, switches, choices and public texts, which hold nothing private, in types that trackers accept."""
    names = [option.name for option in iter_options(RunConfig) if option.value_type is not str or option.is_public]
    plain = (bool, int, float, str)
    return {
        name: options[name] if isinstance(options[name], plain) else str(options[name])
        for name in names
        if options[name] is not None
    }
