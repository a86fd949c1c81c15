"""Tiny video files, made with PyAV: each frame has its number in its brightness, so that a test knows which it sees."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

MILLISECOND = Fraction(1, 1000)
BITS_PER_SECOND = 4_000_000
"""The rate of the codecs that know no ``crf``: enough to tell all frames apart."""


def draw_frame(number: int, size: tuple[int, int], shade: int = 0) -> NDArray[np.uint8]:
    """Draw a frame whose red and green are its number (times five), with a white square in the upper left corner."""
    frame = np.full((size[1], size[0], 3), shade, np.uint8)
    frame[..., :2] = 5 * number % 255
    frame[: size[1] // 6, : size[0] // 6] = 255
    return frame


def write_clip(
    path: Path,
    num_frames: int = 24,
    rate: float | Fraction = 16,
    size: tuple[int, int] = (64, 48),
    *,
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    options: dict[str, str] | None = None,
    times: Sequence[int] | None = None,
    rotation: int = 0,
    shade: int = 0,
    sound: "Sound | None" = None,
) -> Path:
    """Write a clip; ``times`` in milliseconds give it a variable rate, ``rotation`` counts counterclockwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exact = Fraction(rate).limit_denominator(1001)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=exact, options={"crf": "1", "threads": "1"} | (options or {}))
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = *size, pixel_format, BITS_PER_SECOND
        if times is not None:
            stream.time_base = stream.codec_context.time_base = MILLISECOND
        if rotation:
            stream.set_display_rotation(rotation)
        heard = None if sound is None else container.add_stream(sound.codec, rate=sound.rate, layout=sound.layout)
        for packet in stream_packets(stream, num_frames, size, times, shade):
            container.mux(packet)
        for packet in [] if heard is None else stream_sound_packets(heard, sound):
            container.mux(packet)
    return path


@dataclass(frozen=True)
class Sound:
    """The sound of a clip: ``samples`` (channels, samples) in -1..1."""

    samples: NDArray[np.float32]
    rate: int = 48000
    codec: str = "aac"
    layout: str = "stereo"


def draw_tone(seconds: float, rate: int = 48000, hertz: float = 440.0, channels: int = 2) -> NDArray[np.float32]:
    """Draw a tone that gets louder from one end to the other, so that a test knows the time by its loudness."""
    times = np.arange(round(seconds * rate)) / rate
    tone = (0.1 + 0.4 * times / seconds) * np.sin(2 * np.pi * hertz * times)
    return np.repeat(tone.astype(np.float32)[None], channels, 0)


def stream_sound_packets(stream, sound: Sound) -> Iterable:
    """Encode sound."""
    values = sound.samples
    if not stream.format.name.startswith("flt"):
        integer = np.int16 if stream.format.name.startswith("s16") else np.int32
        values = np.rint(values.astype(np.float64) * np.iinfo(integer).max).astype(integer)
    values = values if stream.format.is_planar else values.T.reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(values), format=stream.format.name, layout=sound.layout)
    frame.sample_rate, frame.pts, frame.time_base = sound.rate, 0, Fraction(1, sound.rate)
    resampler = av.AudioResampler(stream.format.name, sound.layout, sound.rate, frame_size=stream.frame_size or None)
    for part in [*resampler.resample(frame), *resampler.resample(None)]:
        yield from stream.encode(part)
    yield from stream.encode(None)


def stream_packets(stream, num_frames: int, size: tuple[int, int], times: Sequence[int] | None, shade: int) -> Iterable:
    """Encode the frames."""
    for number in range(num_frames):
        frame = av.VideoFrame.from_ndarray(draw_frame(number, size, shade), format="rgb24")
        if times is not None:
            frame.pts, frame.time_base = times[number], MILLISECOND
        yield from stream.encode(frame)
    yield from stream.encode(None)


def decode_clip(path: Path) -> list[NDArray[np.uint8]]:
    """Decode all frames from the beginning, as stored."""
    from library.dataset.clip_decoding import convert_frame

    with av.open(str(path)) as container:
        return [np.asarray(convert_frame(frame)) for frame in container.decode(video=0)]


def read_numbers(frames: Iterable[NDArray[np.uint8]]) -> list[int]:
    """Read the number of each frame from its red and green."""
    return [round(float(frame[-4:, -4:, :2].astype(float).mean()) / 5) for frame in frames]
