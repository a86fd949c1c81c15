"""Decode frames of clips: of a video file through PyAV, by seeking to the frames that are asked for; or of a folder of
images.  Never more than one frame is in memory here."""

import itertools
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from .clip_windows import ClipFrames
from .image_decoding import load_rgb_image
from .image_ref import ImageRef
from .listing import is_image_file

if TYPE_CHECKING:
    from PIL.Image import Image

VIDEO_EXTENSIONS = (".mp4", ".webm", ".avi", ".mkv", ".mov", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg")
"""The extensions of video files: those of musubi-tuner."""

_SEEK_MARGINS_SECONDS = (0, 2, 10, 60)
"""How far before a frame to seek, in turn, until there is a key frame at or before it; then from the beginning."""

_LEAST_HD_HEIGHT = 720
"""Frames of this height and more have BT.709 colors where a file does not say, smaller ones BT.601."""

_BT709, _UNSPECIFIED_MATRIX = 1, 2
_KNOWN_MATRICES = (1, 4, 5, 6, 7, 9)
"""The color matrices that swscale converts; it takes others, such as that of RGB, for BT.601."""


class ClipError(ValueError):
    """The error of a clip that cannot be decoded; its text completes the name of the clip to a message."""


def is_video_file(name: str) -> bool:
    """Whether a file has the extension of a video."""
    return name.lower().endswith(VIDEO_EXTENSIONS)


def list_frame_files(folder: str | os.PathLike[str]) -> list[str]:
    """List the images of a folder that is a clip, in order."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_image_file(entry.name) and not entry.name.startswith("."))


@contextmanager
def open_video(image: ImageRef) -> Iterator[tuple[Any, Any]]:
    """Open a video file; yield its container and its first stream of video.

    ``ClipError`` says why the file cannot be opened.
    """
    import av

    path = str(image.path)
    try:
        container: Any = av.open(path, metadata_errors="ignore")
    except av.error.FFmpegError as error:
        raise ClipError(f"cannot be opened as a video: {error.strerror}; copy it again, or convert it to mp4") from None
    with container:
        streams = [each for each in container.streams.video if not is_cover_picture(each)]
        if not streams:
            raise ClipError("has no video, only other streams; remove it")
        if streams[0].codec_context is None:
            raise ClipError(f"has a codec that FFmpeg {av.__version__} cannot decode; convert it to H.264 in mp4")
        yield container, streams[0]


def is_cover_picture(stream: Any) -> bool:
    """Whether a stream is the cover picture of a file of music."""
    import av

    return bool(stream.disposition & av.stream.Disposition.attached_pic)


@dataclass(frozen=True)
class Timeline:
    """The mapping between timestamps of a stream and the numbers of its frames."""

    first_pts: int
    time_base: Fraction
    rate: Fraction | None
    timestamps: Sequence[int] = ()  # of all frames in ascending order, where the rate varies

    def get_pts(self, number: int) -> int:
        """Return the timestamp of a frame."""
        if self.rate is None:
            return self.timestamps[number]
        return self.first_pts + round(number / self.rate / self.time_base)

    def get_number(self, pts: int) -> int:
        """Return the number of the frame with this timestamp; the nearest one where timestamps are rounded."""
        if self.rate is not None:
            return round((pts - self.first_pts) * self.time_base * self.rate)
        number = bisect_left(self.timestamps, pts)
        return number if number < len(self.timestamps) and self.timestamps[number] == pts else -1

    @property
    def times(self) -> list[Fraction]:
        """The times of all frames since the first, in seconds."""
        return [(pts - self.first_pts) * self.time_base for pts in self.timestamps]


def get_timestamp(item: Any) -> int | None:
    """Return the timestamp of a packet or frame; formats such as AVI have only that of decoding, which is the same."""
    pts: int | None = item.pts if item.pts is not None else item.dts
    return pts


def read_timestamps(container: Any, stream: Any) -> list[int]:
    """Read the timestamps of all frames, which decodes nothing; those that the file says to leave out are not listed.

    ``ClipError`` if frames have none.
    """
    found = list[int]()
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        pts = get_timestamp(packet)
        if pts is None:
            raise ClipError("has frames without timestamps; remux it: ffmpeg -i FILE -c copy NEW.mp4")
        found.append(pts)
    return sorted(found)


def read_clip_frames(image: ImageRef, clip: ClipFrames, start: int, length: int) -> "Iterator[Image]":
    """Yield the RGB frames of a window at the rate of training, upright; past the end the last one again.

    ``ClipError`` if one cannot be decoded.
    """
    if image.path.is_dir():
        yield from _read_frames_of_folder(image, clip, start, length)
        return
    with open_video(image) as (container, stream):
        timestamps: Sequence[int] = ()
        if clip.rate is None:
            timestamps = read_timestamps(container, stream)
            if len(timestamps) != clip.num_frames:
                raise ClipError(f"had {clip.num_frames} frames at the start of the run, has {len(timestamps)} now")
        timeline = Timeline(clip.first_pts, stream.time_base, clip.rate, timestamps)
        numbers = clip.list_source_frames(start, length, timeline.times)
        is_at_start = clip.rate is not None and numbers[0] == 0
        yield from _repeat_frames(_decode_from(container, stream, timeline, numbers[0], is_at_start), numbers)


def _read_frames_of_folder(image: ImageRef, clip: ClipFrames, start: int, length: int) -> "Iterator[Image]":
    names = list_frame_files(image.path)
    if len(names) != clip.num_frames:
        raise ClipError(f"had {clip.num_frames} images at the start of the run, has {len(names)} now")
    for number in clip.list_source_frames(start, length):
        yield load_rgb_image(image.path / names[number])


def _repeat_frames(decoded: Iterator[tuple[int, Any]], numbers: Sequence[int]) -> "Iterator[Image]":
    """Yield the frame of each number, in ascending order; a number may occur again."""
    position = 0
    for number, frame in decoded:
        if number > numbers[position]:
            raise ClipError(f"frame {numbers[position]} cannot be decoded; convert the clip again")
        if number < numbers[position]:
            continue
        picture = convert_frame(frame)
        while numbers[position] == number:
            yield picture
            position += 1
            if position == len(numbers):
                return
    raise ClipError(f"ends before frame {numbers[position]}; copy it again")


def _decode_from(
    container: Any, stream: Any, timeline: Timeline, first: int, is_at_start: bool
) -> Iterator[tuple[int, Any]]:
    """Yield the frames with their numbers from a key frame at or before ``first`` on."""
    import av

    try:
        packets = container.demux(stream) if is_at_start else _seek(container, stream, timeline, first)
        for packet in packets:
            for frame in packet.decode():
                pts = get_timestamp(frame)
                if pts is None:
                    raise ClipError("has frames without timestamps; remux it: ffmpeg -i FILE -c copy NEW.mp4")
                if frame.is_corrupt:
                    raise ClipError(f"frame {timeline.get_number(pts)} is damaged; copy the file again")
                yield timeline.get_number(pts), frame
    except av.error.FFmpegError as error:
        raise ClipError(f"cannot be decoded from frame {first} on: {error.strerror}; copy it again") from None


def _seek(container: Any, stream: Any, timeline: Timeline, number: int) -> Iterator[Any]:
    """Seek to a key frame that is shown no later than the frame; return the packets from there on.

    Containers seek by the time of decoding, after which the key frame may be shown too late, and formats with few index
    entries may end up anywhere; so it is checked, and tried again from further back.
    """
    wanted = timeline.get_pts(number)
    margins = [round(seconds / stream.time_base) for seconds in _SEEK_MARGINS_SECONDS]
    for margin in [margin for margin in margins if margin <= wanted - timeline.first_pts]:
        container.seek(wanted - margin, stream=stream, backward=True)
        packets = container.demux(stream)
        packet = next(packets, None)
        pts = None if packet is None or packet.size == 0 else get_timestamp(packet)
        if packet is not None and pts is not None and packet.is_keyframe and pts <= wanted:
            return itertools.chain([packet], packets)
    container.seek(min(timeline.first_pts, 0), stream=stream, backward=True)
    rewound: Iterator[Any] = container.demux(stream)
    return rewound


def convert_frame(frame: Any) -> "Image":
    """Convert a frame to RGB with 8 bits, in the colors that the file names, and turn it upright."""
    import numpy as np
    from PIL import Image

    matrix = frame.colorspace if frame.colorspace in _KNOWN_MATRICES else _UNSPECIFIED_MATRIX
    if frame.colorspace == _UNSPECIFIED_MATRIX and frame.height >= _LEAST_HD_HEIGHT:
        matrix = _BT709
    pixels = frame.reformat(format="rgb24", src_colorspace=matrix).to_ndarray()
    turns = round(frame.rotation / 90) % 4
    return Image.fromarray(np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels)
