"""Pictures for experiment trackers, of which each wants them in its own way."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image


def log_images_to_tracker(tracker: Any, images: Mapping[str, bytes], step: int) -> None:
    """Give PNG files to one of accelerate's trackers; those that take no pictures are passed by."""
    if not hasattr(tracker, "log_images"):
        return
    opened = {name: Image.open(io.BytesIO(data)).convert("RGB") for name, data in images.items()}
    if tracker.name == "tensorboard":
        batches = {name: np.asarray(picture)[None] for name, picture in opened.items()}
        tracker.log_images(batches, step=step, dataformats="NHWC")
    elif tracker.name == "aim":
        tracker.log_images(opened, step=step)
    else:
        tracker.log_images({name: [picture] for name, picture in opened.items()}, step=step)
