"""The web application on folders of a test, and clients that ask it as browsers do."""

import json
import time
from pathlib import Path

import numpy as np
from PIL import Image
from starlette.testclient import TestClient

from library.dataset.clip_encoding import SoundTrack, encode_mp4, encode_webp
from library.report.page import RunSummary
from library.web.app import build_app
from library.web.folders import OpenedFolders
from library.web.guard import HostNames
from library.web.login_sessions import Sessions

ORIGIN = "http://127.0.0.1"


def open_page(*folders: Path, sessions: Sessions | None = None, host: str = "127.0.0.1") -> TestClient:
    """A client of the page on these folders; its posts come from the page itself."""
    app = build_app(OpenedFolders.open([*map(str, folders)]), sessions or Sessions(None), HostNames.build(host, []))
    return TestClient(app, base_url=ORIGIN, headers={"Origin": ORIGIN}, follow_redirects=False)


def write_preview_clip(folder: Path, name: str, number: int, step: int, *, has_sound: bool = False) -> Path:
    """Write a clip of a second and a half as the preview of a run; return its MP4 file."""
    path = folder / "sample" / f"{name}_{step:06d}_{number:02d}_20260101000000_1.webp"
    path.parent.mkdir(exist_ok=True)
    frames = [Image.new("RGB", (32, 16), (step * 10, 20 * frame, 0)) for frame in range(12)]
    path.write_bytes(encode_webp(frames, 8))
    sound = (
        SoundTrack(np.sin(np.arange(2 * 24_000, dtype=np.float32)).reshape(2, -1) / 2, 16_000) if has_sound else None
    )
    path.with_suffix(".mp4").write_bytes(encode_mp4(frames, 8, sound))
    return path.with_suffix(".mp4")


def write_run(folder: Path, name: str, *, steps: int = 20, of: int = 20, previews: int = 0, **settings: object) -> Path:
    """Write the files of a run; return its metrics file."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [f"prompt <b>{number}</b>" for number in range(previews)]
    summary = RunSummary(name, of, "one epoch: 3 images", {}, time.time() - 60, 1, "bf16", prompts, settings)
    summary.write(folder / f"{name}.run.json")
    metrics = folder / f"{name}.metrics.jsonl"
    with metrics.open("w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "loss/current": 1 / step, "loss/average": 2 / step, "lr/unet": 1e-4}
            file.write(json.dumps(line | {"speed/steps_per_second": 2.0}) + "\n")
    for number in range(previews):
        for step in (0, 10, 20):
            path = folder / "sample" / f"{name}_{step:06d}_{number:02d}_20260101000000_1.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (16, 16), (step * 10, 80 * number % 256, 0)).save(path)
    return metrics
