"""Encode frames to files that can be looked at: MP4 through PyAV, animated WebP and GIF through Pillow.

Sound of a clip is a second stream of the MP4 file; animated images have none.
"""

import io
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

_ENCODERS = {"libx264": {"crf": "17"}, "mpeg4": {"qmin": "2", "qmax": "3"}}
"""The encoders of MP4 files and their quality: the first that the FFmpeg of PyAV has.

PyAV's wheels have both.  MPEG-4 part 2, which FFmpeg encodes without another library, is not played by browsers.
"""
_COLOR_MATRICES = {"libx264": 1, "mpeg4": 5}
"""The matrix of colors: BT.709, or BT.601 where the file cannot name one."""

SOUND_RATE, SOUND_BITS_PER_SECOND = 48_000, 192_000
"""The samples and bits per second of sound, which is AAC: FFmpeg encodes it itself, and all browsers play it."""

_MILLISECONDS = 1000
WEBP_QUALITY = 85


@dataclass(frozen=True)
class SoundTrack:
    """The sound of a clip."""

    samples: "NDArray[np.float32]"  # (2, samples), in -1..1
    rate: int  # samples per second

    def change_speed(self, factor: float) -> "SoundTrack":
        """Return the same sound played faster, and higher, by a factor."""
        return SoundTrack(self.samples, round(self.rate * factor))


def encode_mp4(frames: Sequence["Image"], fps: float, sound: SoundTrack | None = None) -> bytes:
    """Encode frames of one size to an MP4 file at so many per second, with their sound if there is any."""
    import av

    name = next(name for name in _ENCODERS if name in av.codecs_available)
    width, height = frames[0].size
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as container:
        stream: Any = container.add_stream(name, rate=Fraction(fps).limit_denominator(1001), options=_ENCODERS[name])
        # Colors of a pixel each have half the size of the frame, so odd sizes are cut by a line.
        stream.width, stream.height, stream.pix_fmt = max(2, width - width % 2), max(2, height - height % 2), "yuv420p"
        stream.codec_context.colorspace = _COLOR_MATRICES[name]
        heard: Any = None
        if sound is not None:
            heard = container.add_stream("aac", rate=SOUND_RATE, layout="stereo")
            heard.bit_rate = SOUND_BITS_PER_SECOND
        for packet in _encode_packets(stream, frames, _COLOR_MATRICES[name]):
            container.mux(packet)
        if sound is not None:
            for packet in _encode_sound(heard, sound):
                container.mux(packet)
    return data.getvalue()


def _encode_sound(stream: Any, sound: SoundTrack) -> Iterator[Any]:
    """Encode sound of any rate; it is resampled to that of the stream."""
    import av
    import numpy as np

    samples = np.ascontiguousarray(sound.samples.clip(-1, 1), np.float32)
    frame: Any = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
    frame.sample_rate, frame.pts, frame.time_base = sound.rate, 0, Fraction(1, sound.rate)
    resampler = av.AudioResampler("fltp", "stereo", SOUND_RATE, frame_size=stream.frame_size)
    for part in [*resampler.resample(frame), *resampler.resample(None)]:
        yield from stream.encode(part)
    yield from stream.encode(None)


def _encode_packets(stream: Any, frames: Sequence["Image"], matrix: int) -> Iterator[Any]:
    import av

    build_frame: Any = av.VideoFrame.from_image
    for image in frames:
        cut = image.convert("RGB").crop((0, 0, stream.width, stream.height))
        yield from stream.encode(build_frame(cut).reformat(format="yuv420p", dst_colorspace=matrix))
    yield from stream.encode(None)


def encode_webp(frames: Sequence["Image"], fps: float, quality: int = WEBP_QUALITY) -> bytes:
    """Encode frames to a WebP image that repeats for ever."""
    colored = [frame.convert("RGB") for frame in frames]
    return _encode_animation(colored, "WEBP", _list_durations(len(frames), fps, 1), quality=quality, method=2)


def encode_gif(frames: Sequence["Image"], fps: float) -> bytes:
    """Encode frames to a GIF image that repeats for ever; it counts time in hundredths of a second."""
    # Pillow's own choice of colors would take a second for each large frame.
    reduced = [frame.convert("RGB").quantize(method=2) for frame in frames]  # by a fast octree
    return _encode_animation(reduced, "GIF", _list_durations(len(frames), fps, 10), optimize=False)


def _encode_animation(frames: Sequence["Image"], name: str, durations: list[int], **options: Any) -> bytes:
    data = io.BytesIO()
    first, *others = frames
    first.save(data, name, save_all=True, append_images=others, duration=durations, loop=0, **options)
    return data.getvalue()


def _list_durations(num_frames: int, fps: float, unit: int) -> list[int]:
    """List how many milliseconds each frame is shown, in multiples of ``unit`` whose sum is that of the clip."""
    ends = [round(number * _MILLISECONDS / fps / unit) * unit for number in range(num_frames + 1)]
    return [max(unit, end - start) for start, end in itertools.pairwise(ends)]


def decode_animation(data: bytes) -> tuple[list["Image"], float]:
    """Decode the frames of an animated image, and their number per second.

    Encoders store equal consecutive frames as one that is shown longer; it is repeated here, as the same object.
    """
    from PIL import Image, ImageSequence

    stored, durations = list["Image.Image"](), list[float]()
    with Image.open(io.BytesIO(data)) as file:
        for frame in ImageSequence.Iterator(file):
            stored.append(frame.convert("RGB"))
            durations.append(file.info.get("duration", 0))
    counts = _count_repeats(durations)
    frames = [frame for frame, count in zip(stored, counts, strict=True) for _ in range(count)]
    return frames, len(frames) * _MILLISECONDS / max(sum(durations), 1.0)


def _count_repeats(durations: Sequence[float]) -> list[int]:
    """Count the frames of the clip in each stored frame; single ones differ by the rounding of their ends."""
    shortest = max(1.0, min(durations))
    single = statistics.fmean(max(1.0, duration) for duration in durations if duration < 1.5 * shortest)
    return [max(1, round(duration / single)) for duration in durations]


def select_spread_frames(frames: Sequence["Image"], count: int) -> list["Image"]:
    """Select at most ``count`` frames: the first, the last and evenly spaced ones in between."""
    if len(frames) <= count:
        return list(frames)
    return [frames[round(number * (len(frames) - 1) / (count - 1))] for number in range(count)]


def join_frames(frames: Sequence["Image"], gap: int = 2) -> "Image":
    """Join the first frame, the middle one and the last one side by side."""
    from PIL import Image

    shown = select_spread_frames(frames, 3)
    width, height = shown[0].size
    strip = Image.new("RGB", (len(shown) * (width + gap) - gap, height), "white")
    for number, frame in enumerate(shown):
        strip.paste(frame, (number * (width + gap), 0))
    return strip
