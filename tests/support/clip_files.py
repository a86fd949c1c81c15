"""Tiny video files, made with PyAV: each frame has its number in its brightness, so that a test knows which it sees."""

from collections.abc import Iterable, Sequence
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
        for packet in stream_packets(stream, num_frames, size, times, shade):
            container.mux(packet)
    return path


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
