"""The frames of a clip that become training samples, by musubi-tuner's rules: frame rates, windows and lengths."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

FrameExtraction = Literal["head", "chunk", "slide", "uniform", "full"]
"""The ways to cut a clip: its beginning, consecutive pieces, overlapping or evenly spread pieces, or as a whole."""

FRAME_EXTRACTIONS: tuple[FrameExtraction, ...] = get_args(FrameExtraction)
TextImages = Literal["none", "controls", "first frame"]
"""The images that a text encoder reads together with a caption: those of editing models, or of a clip its first frame,
so that its outputs belong to a window and not to a caption alone."""
FIXED_PREFIX = "fixed_"
"""The beginning of the keys of text conditioning that a longer caption does not make longer."""

VAE_FRAME_STRIDE = 4
"""Most video autoencoders make one latent frame of the first frame, and one of each four that follow."""

DEFAULT_MAX_FRAMES = 129


@dataclass(frozen=True, order=True)
class FrameRule:
    """What a model asks of the frames of a clip."""

    stride: int = VAE_FRAME_STRIDE
    """A clip has a multiple of this more frames than the shortest, so that its latent frames are whole."""
    fps: float = 16.0
    """The frames per second of the model's clips: 16 for Wan, 24 for HunyuanVideo, 30 for FramePack."""
    shortest: int = 1
    """The frames of the shortest clip; if it has several, one frame alone is an image, of one latent frame."""
    latents_per_stride: int = 1
    """The latent frames of so many frames as ``stride``."""
    shortest_latents: int = 1
    """The latent frames of the shortest clip; copies of the first, which make whole patches, count with them."""
    sound_rate: float = 0.0
    """The latents of sound per second of a model that is trained on the sound of clips, too; 0: on frames alone."""
    sound_channels: int = 0
    """The channels of a latent of sound."""
    rounds_sound_up: bool = False
    """Whether the last latent of sound may end after the last frame; else their number is the nearest."""
    least: int = 1
    """The fewest frames of a clip; above 1, the model is trained on no images, and on no shorter windows."""
    control_sides: tuple[int, ...] = ()
    """The sides in pixels of control clips that are square, by their numbers; 0: they have the size of their clip."""

    def get_control_side(self, number: int) -> int:
        """Return the side of a control clip that is square; 0: it has the size of its clip."""
        return self.control_sides[number] if number < len(self.control_sides) else 0

    def round_down(self, length: int) -> int:
        """Round a number of frames down to one that the model takes."""
        if length < self.shortest:
            return 1
        return (length - self.shortest) // self.stride * self.stride + self.shortest

    def round_up(self, length: int) -> int:
        """Round a number of frames up to one that the model takes."""
        below = self.round_down(length)
        if below == length:
            return length
        return self.shortest if length < self.shortest else below + self.stride

    def describe_lengths(self) -> str:
        """Describe the numbers of frames that the model takes."""
        return f"{self.stride} x N + {self.shortest % self.stride}"

    def count_latent_frames(self, length: int) -> int:
        """Count the latent frames of a clip of this length."""
        if length < self.shortest:
            return 1
        return (length - self.shortest) // self.stride * self.latents_per_stride + self.shortest_latents

    def count_sound_latents(self, length: int) -> int:
        """Count the latents of the sound of a clip of this length."""
        latents = length / self.fps * self.sound_rate
        return math.ceil(latents) if self.rounds_sound_up else round(latents)

    def select_sound(self, *, has_sound: bool) -> "FrameRule":
        """Return the rule for clips with sound or without."""
        return self if has_sound else replace(self, sound_rate=0.0)


@dataclass(frozen=True)
class FrameSettings:
    """The keys of a video dataset that choose its frames."""

    target_frames: Sequence[int] = (1,)
    frame_extraction: FrameExtraction = "head"
    frame_stride: int = 1
    frame_sample: int = 1
    max_frames: int = DEFAULT_MAX_FRAMES

    @property
    def reads_head_only(self) -> bool:
        """Whether all windows begin with the first frame; ``uniform`` with one sample is ``head``."""
        return self.frame_extraction == "head" or (self.frame_extraction == "uniform" and self.frame_sample == 1)

    def round_target_frames(self, rule: FrameRule) -> tuple[int, ...]:
        """Return the lengths of windows, rounded down to what the model takes, each once, in ascending order."""
        lengths = {rule.round_down(length) for length in self.target_frames}
        return tuple(sorted(length for length in lengths if length >= rule.least))


DEFAULT_FRAME_RULE = FrameRule()


def list_frame_windows(
    num_frames: int, settings: FrameSettings, rule: FrameRule = DEFAULT_FRAME_RULE
) -> list[tuple[int, int]]:
    """List the windows of a clip, each as its first frame and its length; a window longer than the clip is left out.

    The frames are those at the rate of training: see ``RateConversion``.
    """
    if settings.frame_extraction == "full":
        length = rule.round_down(min(num_frames, settings.max_frames))
        return [(0, length)] if num_frames and length >= rule.least else []
    return [
        (start, length)
        for length in settings.round_target_frames(rule)
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
    """Drop frames of a clip that has more per second than the model; return those kept, with their numbers afterwards.

    A clip with fewer frames per second keeps all of them, and its numbers skip.
    """
    kept, position, previous = list[tuple[int, int]](), 0.0, -1
    for frame in range(num_frames):
        number = int(position)
        position += target_fps / source_fps
        if number != previous:
            kept.append((frame, number))
            previous = number
    return kept


@dataclass(frozen=True)
class RateConversion:
    """How the frames of a clip become frames at the rate of training.

    Without ``target_fps`` all frames are kept, as musubi-tuner does without ``source_fps``.  With ``source_fps`` they
    are counted as musubi-tuner counts them, whatever the rate of the file is.  Otherwise their times count: each frame
    of training is the one that the clip shows in the middle of its interval, so that a slower clip repeats frames.
    """

    target_fps: float | None = None
    source_fps: float | None = None

    def describe(self) -> str:
        """Describe the conversion, as a part of cache keys."""
        if self.target_fps is None:
            return "all frames"
        return f"{self.source_fps or 'timed'} to {self.target_fps}"


@dataclass(frozen=True, slots=True)
class ClipFrames:
    """The frames of a clip: those of the file, and how they are converted; shared by all windows of the clip."""

    num_frames: int
    duration: Fraction  # in seconds; 0 for a folder of images, which has no times
    rate: Fraction | None  # frames per second; None if it varies, or for a folder of images
    first_pts: int = 0  # the timestamp of the first frame, in units of the stream
    conversion: RateConversion = RateConversion()
    sound: tuple[Fraction, Fraction] | None = None  # when sound begins and ends, in seconds after the first frame

    @property
    def is_timed(self) -> bool:
        """Whether frames are chosen by their times."""
        return self.conversion.target_fps is not None and self.conversion.source_fps is None and self.duration > 0

    def count_frames(self, settings: FrameSettings, rule: FrameRule = DEFAULT_FRAME_RULE) -> int:
        """Count the frames at the rate of training; of ``head``, no more than the longest window has."""
        limit = max(settings.round_target_frames(rule), default=0) if settings.reads_head_only else None
        if self.is_timed:
            count = max(1, math.ceil(self.duration * Fraction(self.conversion.target_fps or 1) - Fraction(1, 2)))
            return count if limit is None else min(count, limit)
        if limit is None:
            return len(self._list_kept())
        return sum(number < limit for _, number in self._list_kept())

    def _list_kept(self) -> Sequence[tuple[int, int]]:
        source, target = self.conversion.source_fps, self.conversion.target_fps
        if source is None or target is None:
            return [(frame, frame) for frame in range(self.num_frames)]
        return select_frames(self.num_frames, source, target)

    def list_source_frames(self, start: int, length: int, times: Sequence[Fraction] = ()) -> list[int]:
        """List the frames of the file that are shown at ``length`` frames of training from ``start`` on.

        ``times`` are those of all frames since the first, in seconds, if the rate of the clip varies.  Past the end the
        last frame is repeated.
        """
        numbers, last = range(start, start + length), self.num_frames - 1
        if not self.is_timed:
            kept = self._list_kept()
            return [kept[min(number, len(kept) - 1)][0] for number in numbers]
        middles = [(number + Fraction(1, 2)) / Fraction(self.conversion.target_fps or 1) for number in numbers]
        if self.rate is not None:
            return [min(math.ceil(middle * self.rate) - 1, last) for middle in middles]
        return [max(_find_last_before(times, middle), 0) for middle in middles]


def _find_last_before(times: Sequence[Fraction], moment: Fraction) -> int:
    return bisect_left(times, moment) - 1


@dataclass(frozen=True, slots=True)
class FrameWindow:
    """The frames of a clip that are one sample, among those at the rate of training."""

    start: int
    length: int
    clip: ClipFrames
    has_sound: bool = False  # which is trained together with the frames

    @property
    def last(self) -> int:
        return self.start + self.length - 1

    def get_times(self) -> tuple[Fraction, Fraction]:
        """Return when the first frame appears and when the last one ends, in seconds after the first of the file.

        Only the frames of a clip that is timed have times.
        """
        rate = Fraction(self.clip.conversion.target_fps or 1)
        return self.start / rate, (self.start + self.length) / rate

    def is_heard(self) -> bool:
        """Whether the file has sound in at least half of the time of the window; one frame alone is an image."""
        if self.length == 1 or self.clip.sound is None or not self.clip.is_timed:
            return False
        (start, end), (begins, ends) = self.get_times(), self.clip.sound
        return 2 * (min(end, ends) - max(start, begins)) >= end - start

    def list_facts(self) -> tuple[str | int, ...]:
        """List all that decides the frames of a given file, and their sound."""
        sound = ("sound",) if self.has_sound else ()
        return ("frames", self.start, self.length, self.clip.conversion.describe(), *sound)
