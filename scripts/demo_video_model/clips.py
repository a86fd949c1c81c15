"""Clips of an emoji that moves over a white ground: the motions, their captions, and how a clip is drawn.

The pictures are those of ``dataset_configs/demo_regularisation``, so that nothing has to be downloaded.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from library.demo import DEMO_CONFIG_DIR

SUBJECTS = (
    *("fox", "frog", "car", "star", "penguin", "dolphin", "banana", "butterfly", "dog", "ghost", "heart", "house"),
    *("lion", "pineapple", "smiling face", "tulip", "turtle", "pine tree"),
)
UNSEEN_SUBJECTS = ("owl", "rocket")
"""The model is never shown these."""
SIDE, EMOJI_SIDE, NUM_FRAMES, FPS = 64, 24, 9, 24.0
LOW, HIGH = 12.0, 52.0
"""Between these pixels is the center of an emoji, so that it is never cut."""
STEP = 8
"""Positions differ by whole latents: shifted by less, the same drawing would be another one to the denoiser."""
DISTANCE = 32.0
"""How far an emoji moves in a clip, or how high."""
FINER = 2
"""Frames are drawn this many times larger, and then reduced."""
PICTURES_DIR = DEMO_CONFIG_DIR / "demo_regularisation"
PLACES = tuple(float(place) for place in range(int(LOW), int(HIGH) + 1, STEP))
"""Of a center, across or down."""
NEAR, FAR = PLACES[:2], PLACES[-2:]
"""From where it can move by the distance to the right or down, and to the left or up."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Pose:
    """Where the emoji is in a frame, and how wide it looks: negative values show it mirrored."""

    x: float
    y: float
    width: float = 1.0


Track = Sequence[Pose]


@dataclass(frozen=True)
class Motion:
    """A track and the words of a caption that name it."""

    words: str
    track: Track


def walk_right(rng: random.Random) -> Motion:
    """Draw a walk from the left side to the right one."""
    x, ground = rng.choice(NEAR), _choose_ground(rng)
    return Motion("walks to the right", [Pose(x + DISTANCE * t, ground) for t in _times()])


def walk_left(rng: random.Random) -> Motion:
    """Draw a walk from the right side to the left one."""
    x, ground = rng.choice(FAR), _choose_ground(rng)
    return Motion("walks to the left", [Pose(x - DISTANCE * t, ground) for t in _times()])


def jump(rng: random.Random) -> Motion:
    """Draw a jump: from the ground up and down again, a parabola."""
    x, ground = rng.choice(PLACES), rng.choice(FAR)
    return Motion("jumps", [Pose(x, ground - DISTANCE * 4 * t * (1 - t)) for t in _times()])


def turn(rng: random.Random) -> Motion:
    """Draw a turn: once around the vertical axis, like a coin."""
    x, y = rng.choice(PLACES), _choose_ground(rng)
    return Motion("turns", [Pose(x, y, math.cos(2 * math.pi * t)) for t in _times()])


def loop(x: float, ground: float) -> Motion:
    """Make a loop: once around, clockwise, from its lowest point.  The base model is never shown one."""
    radius, angles = DISTANCE / 2, [2 * math.pi * t for t in _times()]
    return Motion("loops", [Pose(x - radius * math.sin(a), ground - radius * (1 - math.cos(a))) for a in angles])


def _choose_ground(rng: random.Random) -> float:
    """Choose a height, mostly one from which an emoji could also jump."""
    return rng.choice(FAR if rng.random() < 0.5 else PLACES)


BASE_MOTIONS: Mapping[str, Callable[[random.Random], Motion]] = {
    "right": walk_right,
    "left": walk_left,
    "jumps": jump,
    "turns": turn,
}
"""By the word that tells each from the others."""
NEW_MOTION = "loops"
LOOP_STARTS = tuple((x, ground) for x in PLACES[2:4] for ground in FAR)


def _times() -> Iterator[float]:
    return (frame / (NUM_FRAMES - 1) for frame in range(NUM_FRAMES))


def load_emoji(subject: str) -> Image.Image:
    """Load the picture of a subject, without the ground around it and in the size in which clips are drawn."""
    with Image.open(PICTURES_DIR / f"{subject.replace(' ', '_')}.png") as file:
        picture = file.convert("RGB")
    margin = 8
    square = picture.crop((margin, margin, picture.width - margin, picture.height - margin))
    return square.resize((EMOJI_SIDE * FINER, EMOJI_SIDE * FINER), Image.Resampling.LANCZOS)


def draw_clip(emoji: Image.Image, track: Track) -> Pixels:
    """Draw the frames of a clip: (frames, height, width, 3)."""
    return np.stack([np.asarray(_draw_frame(emoji, pose)) for pose in track])


def _draw_frame(emoji: Image.Image, pose: Pose) -> Image.Image:
    left, top = (_snap(middle) for middle in (pose.x, pose.y))
    side, half = SIDE * FINER, EMOJI_SIDE * FINER / 2
    narrow = math.copysign(max(abs(pose.width), 0.06), pose.width)
    # From a pixel of the frame to one of the emoji.
    affine = (1 / narrow, 0.0, half - left * FINER / narrow, 0.0, 1.0, half - top * FINER)
    large = emoji.transform(
        (side, side), Image.Transform.AFFINE, affine, Image.Resampling.BICUBIC, fillcolor=(255, 255, 255)
    )
    return large.resize((SIDE, SIDE), Image.Resampling.BOX)


def _snap(center: float) -> float:
    return LOW + STEP * round((center - LOW) / STEP)


def find_centers(frames: Pixels) -> NDArray[np.float64]:
    """Find where the emoji is in each frame: the mean of x and y over the pixels, by how far these are from white."""
    darkness = np.clip(230.0 - frames.min(axis=-1), 0, None)
    total = np.maximum(darkness.sum(axis=(1, 2)), 1e-9)
    y, x = np.mgrid[: frames.shape[1], : frames.shape[2]]
    return np.stack([(darkness * axis).sum(axis=(1, 2)) / total for axis in (x, y)], axis=1)


def correlate_tracks(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Correlate two tracks (frames, 2), wherever they are: both coordinates together, each without its mean."""
    first, second = (track - track.mean(axis=0) for track in (one, other))
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / scale if scale > 1e-9 else 0.0


def list_positions(track: Track) -> NDArray[np.float64]:
    """List x and y of each frame of a track."""
    return np.array([(pose.x, pose.y) for pose in track])
