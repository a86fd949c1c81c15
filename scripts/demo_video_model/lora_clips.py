"""The clips of ``make demo-video``: loops, which the video model does not know, and the motions that it does.

And the first frames of its previews.
"""

from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from library.dataset.clip_encoding import encode_mp4
from library.randomness import derive_rng

from .clips import (
    BASE_MOTIONS,
    FPS,
    LOOP_STARTS,
    NEW_MOTION,
    SUBJECTS,
    UNSEEN_SUBJECTS,
    Motion,
    Pose,
    draw_clip,
    load_emoji,
    loop,
)

TRAINED, HELD_OUT = SUBJECTS[:4], (*SUBJECTS[4:6], *UNSEEN_SUBJECTS)
"""The emoji of the clips, and those that only previews show; the last two were not shown to the model either."""
LOOP_START, LEFT_START = Pose(28, 52), Pose(12, 52)
"""Where an emoji is in the first frames of previews."""
FIRST_FRAMES_DIR = "demo_video_frames"


def write_lora_clips(directory: Path, seed: int) -> None:
    """Write clips, MP4 files with captions, and first frames to folders in ``directory``."""
    (directory / FIRST_FRAMES_DIR).mkdir(parents=True, exist_ok=True)
    for subject in (*TRAINED, *HELD_OUT):
        for side, pose in (("", LOOP_START), ("_left", LEFT_START)):
            [frame] = draw_clip(load_emoji(subject), [pose])
            Image.fromarray(frame).save(directory / FIRST_FRAMES_DIR / f"{subject}{side}.png", optimize=True)
    for subject in TRAINED:
        loops = [loop(*start) for start in LOOP_STARTS]
        known = [draw(derive_rng(seed, f"demo_video/known/{subject}/{name}")) for name, draw in BASE_MOTIONS.items()]
        _write(directory / "demo_video", subject, {f"{NEW_MOTION}_{n}": each for n, each in enumerate(loops)})
        _write(directory / "demo_video_regularisation", subject, dict(zip(BASE_MOTIONS, known, strict=True)))


def _write(folder: Path, subject: str, motions: Mapping[str, Motion]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, motion in motions.items():
        frames = [Image.fromarray(frame) for frame in draw_clip(load_emoji(subject), motion.track)]
        path = folder / f"{subject}_{name}.mp4"
        path.write_bytes(encode_mp4(frames, FPS))
        path.with_suffix(".txt").write_text(f"a {subject} {motion.words}\n", encoding="utf-8")
