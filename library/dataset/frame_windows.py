"""The frames of a video that become training samples, by musubi-tuner's rules: frame rates, windows and lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

FrameExtraction = Literal["head", "chunk", "slide", "uniform", "full"]
"""The ways to cut a video: its beginning, consecutive pieces, overlapping or evenly spread pieces, or as a whole."""

FRAME_EXTRACTIONS: tuple[FrameExtraction, ...] = get_args(FrameExtraction)
VAE_FRAME_STRIDE = 4
"""Video autoencoders make one latent frame of the first frame, and one of each four that follow."""


@dataclass(frozen=True)
class FrameSettings:
    """The keys of a video dataset that choose its frames."""

    target_frames: Sequence[int] = (1,)
    frame_extraction: FrameExtraction = "head"
    frame_stride: int = 1
    frame_sample: int = 1
    max_frames: int = 129

    @property
    def rounded_target_frames(self) -> tuple[int, ...]:
        """The lengths of windows, rounded down to what the autoencoder takes, each once, in ascending order."""
        return tuple(sorted({round_to_latent_frames(length) for length in self.target_frames}))


def round_to_latent_frames(length: int) -> int:
    """Round a number of frames down to a multiple of four plus one."""
    return (length - 1) // VAE_FRAME_STRIDE * VAE_FRAME_STRIDE + 1


def list_frame_windows(num_frames: int, settings: FrameSettings) -> list[tuple[int, int]]:
    """List the windows of a video, each as its first frame and its length; a window longer than the video is left out.

    The frames are those left by ``select_frames``.
    """
    if settings.frame_extraction == "full":
        return [(0, round_to_latent_frames(min(num_frames, settings.max_frames)))] if num_frames else []
    return [
        (start, length)
        for length in settings.rounded_target_frames
        if length <= num_frames
        for start in _iter_starts(num_frames, length, settings)
    ]


def _iter_starts(num_frames: int, length: int, settings: FrameSettings) -> Sequence[int]:
    last = num_frames - length
    if settings.frame_extraction == "chunk":
        return range(0, last + 1, length)
    if settings.frame_extraction == "slide":
        return range(0, last + 1, settings.frame_stride)
    if settings.frame_extraction == "uniform" and settings.frame_sample > 1:
        spacing = last / (settings.frame_sample - 1)
        return [*(int(index * spacing) for index in range(settings.frame_sample - 1)), last]
    return [0]


def select_frames(num_frames: int, source_fps: float, target_fps: float) -> list[tuple[int, int]]:
    """Drop frames of a video that has more per second than the model; return those kept, with their numbers afterwards.

    A video with fewer frames per second keeps all of them, and its numbers skip.
    """
    kept, position, previous = list[tuple[int, int]](), 0.0, -1
    for frame in range(num_frames):
        number = int(position)
        position += target_fps / source_fps
        if number != previous:
            kept.append((frame, number))
            previous = number
    return kept
