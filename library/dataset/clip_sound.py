"""Decode the sound of a window of a clip: for exactly its time, as two channels at the rate of the file."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .clip_decoding import ClipError, open_video
from .clip_windows import FrameWindow
from .image_ref import ImageRef

Samples = NDArray[np.float32]

_SEEK_MARGINS_SECONDS = (0, 10)
"""How far before the sound that is asked for to seek, in turn, until a packet begins there; then from the beginning."""

_CENTER = 0.707
"""The share of the center and of the channels beside and behind of 5.1 and 7.1 in either side."""
_SURROUND_SIDES = {
    6: ({0: 1.0, 2: _CENTER, 4: _CENTER}, {1: 1.0, 2: _CENTER, 5: _CENTER}),
    8: ({0: 1.0, 2: _CENTER, 4: _CENTER, 6: _CENTER}, {1: 1.0, 2: _CENTER, 5: _CENTER, 7: _CENTER}),
}
"""The channels of 5.1 and 7.1 that make up left and right, in FFmpeg's order; shares are divided by their sum."""


@dataclass(frozen=True)
class Waveform:
    """The sound of a window, with a second before and after it, by which it can be resampled without edges."""

    samples: Samples  # (2, samples), in -1..1
    rate: int  # samples per second

    @property
    def context(self) -> int:
        """The number of samples before the window, and of those after it."""
        return self.rate

    @property
    def num_samples(self) -> int:
        """The number of samples of the window itself."""
        return int(self.samples.shape[1]) - 2 * self.context


def read_window_sound(image: ImageRef, window: FrameWindow) -> Waveform:
    """Read the sound of the time in which the frames of a window are shown; what is missing in it is silence.

    ``ClipError`` if it cannot be decoded.
    """
    start, end = window.get_times()
    with open_video(image) as (container, video):
        stream = find_sound(container)
        if stream is None:
            raise ClipError("had sound at the start of the run, has none now")
        rate = int(stream.codec_context.sample_rate)
        first = window.clip.first_pts * video.time_base + start
        begin, length = round(first * rate) - rate, round((end - start) * rate) + 2 * rate
        samples = np.zeros((2, length), np.float32)
        for position, part in _decode_from(container, stream, begin, rate):
            if position >= begin + length:
                break
            _copy_part(part, samples, position - begin)
    if not np.isfinite(samples).all():
        raise ClipError("its sound has samples that are no numbers; convert it again")
    return Waveform(samples, rate)


def find_sound(container: Any) -> Any:
    """Return the first stream of sound that can be decoded; None without one."""
    return next((each for each in container.streams.audio if each.codec_context is not None), None)


def _copy_part(part: Samples, samples: Samples, offset: int) -> None:
    """Copy decoded sound to its place; what lies outside is left out."""
    first, last = max(offset, 0), min(offset + part.shape[1], samples.shape[1])
    if first < last:
        samples[:, first:last] = part[:, first - offset : last - offset]


def _decode_from(container: Any, stream: Any, begin: int, rate: int) -> Iterator[tuple[int, Samples]]:
    """Yield decoded sound with the number of its first sample since time 0, from ``begin`` or earlier on."""
    import av

    try:
        position = None
        for frame in _seek(container, stream, Fraction(begin, rate)):
            if frame.sample_rate != rate:
                raise ClipError(f"its sound changes from {rate} to {frame.sample_rate} samples per second; convert it")
            if frame.pts is not None:
                # Timestamps of some containers are rounded to milliseconds: what follows on without a gap stays so.
                exact = round(frame.pts * frame.time_base * rate)
                position = exact if position is None or abs(exact - position) > rate // 100 else position
            if position is None:
                raise ClipError("has sound without timestamps; remux it: ffmpeg -i FILE -c copy NEW.mp4")
            yield position, mix_to_stereo(convert_samples(frame))
            position += frame.samples
    except av.error.FFmpegError as error:
        raise ClipError(f"its sound cannot be decoded: {error.strerror}; copy it again") from None


def _seek(container: Any, stream: Any, wanted: Fraction) -> Iterator[Any]:
    """Yield the frames of sound from a time at or before the one wanted, in seconds."""
    start = (stream.start_time or 0) * stream.time_base
    for margin in _SEEK_MARGINS_SECONDS:
        if wanted - margin <= start:
            break
        container.seek(int((wanted - margin) / stream.time_base), stream=stream, backward=True)
        frames = container.decode(stream)
        frame = next(frames, None)
        if frame is not None and frame.pts is not None and frame.pts * frame.time_base <= wanted:
            yield frame
            yield from frames
            return
    container.seek(min(stream.start_time or 0, 0), stream=stream, backward=True)
    yield from container.decode(stream)


def convert_samples(frame: Any) -> Samples:
    """Convert a frame of sound to floats (channels, samples) in -1..1."""
    values = frame.to_ndarray()
    if not frame.format.is_planar:
        values = values.reshape(-1, frame.layout.nb_channels).T
    offset, scale = 0.0, 1.0
    if values.dtype == np.uint8:
        offset = scale = 128.0
    elif np.issubdtype(values.dtype, np.integer):
        scale = -float(np.iinfo(values.dtype).min)
    converted: Samples = ((values - offset) / scale).astype(np.float32)
    return converted


def mix_to_stereo(channels: Samples) -> Samples:
    """Mix channels to left and right, as Lightricks' trainer does.

    One channel is both sides; of a number of channels that has no usual order, both sides are the mean.
    """
    count = len(channels)
    if count == 2:
        return channels
    sides = _SURROUND_SIDES.get(count, (dict.fromkeys(range(count), 1.0),) * 2)
    mixed = [sum(share * channels[index] for index, share in side.items()) / sum(side.values()) for side in sides]
    return np.stack(mixed).astype(np.float32)
