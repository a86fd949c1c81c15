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

SUBJECTS = ("fox", "frog", "car", "star", "penguin", "dolphin")
SIDE, EMOJI_SIDE, NUM_FRAMES, FPS = 64, 32, 9, 16.0
LOW, HIGH = 16.0, 48.0
"""Between these pixels is the center of an emoji, so that it is never cut."""
LATENT_PIXELS = 16
"""Positions differ by whole latents: shifted by less, the same drawing would be another one to the denoiser."""
FINER = 2
"""Frames are drawn this many times larger, and then reduced."""
PICTURES_DIR = DEMO_CONFIG_DIR / "demo_regularisation"
PLACES = (16.0, 32.0, 48.0)
"""Of a center that is not moved, across or down."""

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
    ground = rng.choice(PLACES)
    return Motion("walks to the right", [Pose(LOW + (HIGH - LOW) * t, ground) for t in _times()])


def walk_left(rng: random.Random) -> Motion:
    """Draw a walk from the right side to the left one."""
    ground = rng.choice(PLACES)
    return Motion("walks to the left", [Pose(HIGH - (HIGH - LOW) * t, ground) for t in _times()])


def jump(rng: random.Random) -> Motion:
    """Draw a jump: from the ground up and down again, a parabola, with a moment on the ground before or after."""
    x = rng.choice(PLACES)
    first, last = rng.choice(((0, 8), (0, 7), (1, 8)))
    shares = [min(1.0, max(0.0, (frame - first) / (last - first))) for frame in range(NUM_FRAMES)]
    return Motion("jumps", [Pose(x, HIGH - (HIGH - LOW) * 4 * t * (1 - t)) for t in shares])


def turn(rng: random.Random) -> Motion:
    """Draw a turn: once around the vertical axis, like a coin."""
    x, y = rng.choice(PLACES), rng.choice(PLACES)
    return Motion("turns", [Pose(x, y, math.cos(2 * math.pi * t)) for t in _times()])


def loop(rng: random.Random) -> Motion:
    """Draw a loop: once around the picture, clockwise, from its lowest point.  The base model is never shown one."""
    middle, radius, late = (LOW + HIGH) / 2, (HIGH - LOW) / 2, rng.uniform(-0.1, 0.1)
    angles = [2 * math.pi * t + late for t in _times()]
    return Motion("loops", [Pose(middle - radius * math.sin(a), middle + radius * math.cos(a)) for a in angles])


BASE_MOTIONS: Mapping[str, Callable[[random.Random], Motion]] = {
    "right": walk_right,
    "left": walk_left,
    "jumps": jump,
    "turns": turn,
}
"""By the word that tells each from the others."""
NEW_MOTION = "loops"


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
    """Move a center so that the edges of the emoji are edges of latents."""
    return LOW + LATENT_PIXELS * round((center - LOW) / LATENT_PIXELS)


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
