"""Inspect clips: size, number of frames, rate, content hash, and why one cannot be used.

All packets of a video file are read, which decodes nothing, and its first and last frames are decoded.  A folder of
images is a clip, too, each of which is decoded.  ``clip_decoding`` reads the frames of samples.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from .clip_decoding import (
    ClipError,
    list_frame_files,
    open_video,
    read_clip_frames,
)
from .clip_sound import find_sound
from .clip_windows import ClipFrames
from .image_decoding import silence_pillow_warnings
from .image_inspection import InspectedImage, build_inspection_version, inspect_image
from .image_ref import ImageRef
from .scan import ImageDefect, InPlaceInspection, Inspector, describe_read_error, stat_file
from .scan_cache import FileStamp

CLIP_INSPECTION_VERSION = 3
"""The version of the inspection, incremented when it may give another result for the same bytes."""

CLIP_TRAIT_DESCRIPTIONS = {
    "variable": "with a variable frame rate",
    "HDR": "in HDR, whose colors are not mapped to those of a usual screen, so that they look pale; convert to SDR",
    "deep": "with more than 8 bits per channel, of which 8 are used",
    "clip alpha": "with an alpha channel, which is not used",
    "interlaced": "interlaced: moving edges have combs; deinterlace, such as with ffmpeg -vf bwdif",
    "anamorphic": "with pixels that are not square, which are trained as they are stored; scale them beforehand",
    "long": "of more than ten minutes, whose windows are read by seeking",
    "few key frames": "with few key frames, so that reading a window decodes many frames before it",
}
"""Notes about unusual clips; they follow the number of clips."""

LONG_CLIP_SECONDS = 600
MAX_KEY_FRAME_DISTANCE = 600
"""The number of frames between two key frames above which reading by seeking is slow."""

_HASH_CHUNK_BYTES = 2**20
_HDR_TRANSFERS = (16, 18)
"""FFmpeg's numbers of the transfer functions PQ and HLG."""

_MIN_TIMESTAMPS_FOR_RATE = 2


NO_FRAMES = ClipFrames(0, Fraction(0), None)


@dataclass(frozen=True, slots=True)
class InspectedClip(InspectedImage):
    """The result of inspecting one clip; its size is that of its upright first frame."""

    frames: ClipFrames = NO_FRAMES


def build_clip_inspector() -> Inspector[InspectedClip]:
    """Build the inspector of clips, which reads each file in place, however large it is."""
    silence_pillow_warnings()
    return Inspector(
        name="clips",
        version=f"{CLIP_INSPECTION_VERSION} {_describe_decoder()} {build_inspection_version()}",
        inspect=_reject_bytes,
        fail=_build_defective_clip,
        pack=_pack_clip,
        unpack=_unpack_clip,
        in_place=InPlaceInspection(stat_clip, hash_clip, inspect_clip),
    )


def _describe_decoder() -> str:
    import av

    return f"PyAV {av.__version__} {av.library_versions['libavcodec']}"


def _reject_bytes(*arguments: object) -> InspectedClip:
    raise AssertionError("clips are inspected in place")


def _build_defective_clip(defect: ImageDefect) -> InspectedClip:
    return InspectedClip((0, 0), "", defect)


def _pack_clip(clip: InspectedClip) -> list[Any]:
    frames = clip.frames
    rate = None if frames.rate is None else [frames.rate.numerator, frames.rate.denominator]
    duration = [frames.duration.numerator, frames.duration.denominator]
    sound = None if frames.sound is None else [part for time in frames.sound for part in time.as_integer_ratio()]
    defect = [clip.defect.kind, clip.defect.text] if clip.defect else []
    return [
        *clip.size,
        frames.num_frames,
        duration,
        rate,
        frames.first_pts,
        sound,
        " ".join(_mark_spaces(clip.traits)),
        *defect,
    ]


def _mark_spaces(traits: Sequence[str]) -> Iterator[str]:
    yield from (trait.replace(" ", "_") for trait in traits)


def _unpack_clip(facts: list[Any], content_hash: str) -> InspectedClip:
    width, height, num_frames, duration, rate, first_pts, sound, traits, *defect = facts
    exact_rate = None if rate is None else Fraction(*rate)
    times = None if sound is None else (Fraction(*sound[:2]), Fraction(*sound[2:]))
    frames = ClipFrames(num_frames, Fraction(*duration), exact_rate, first_pts, sound=times)
    names = tuple(trait.replace("_", " ") for trait in traits.split())
    return InspectedClip((width, height), content_hash, ImageDefect(*defect) if defect else None, names, frames=frames)


def stat_clip(path: str) -> FileStamp | ImageDefect:
    """Return the stamp of a file, or one for all images of a folder together."""
    if not os.path.isdir(path):
        return stat_file(path)
    try:
        names = list_frame_files(path)
    except OSError as error:
        return describe_read_error(error)
    stamps = [stat_file(os.path.join(path, name)) for name in names]
    if defects := [stamp for stamp in stamps if isinstance(stamp, ImageDefect)]:
        return defects[0]
    folder = os.stat(path)
    usable = [stamp for stamp in stamps if not isinstance(stamp, ImageDefect)]
    changed = max([folder.st_mtime_ns, *(stamp[1] for stamp in usable)])
    return sum(stamp[0] for stamp in usable), changed, max([folder.st_ctime_ns, *(stamp[2] for stamp in usable)])


def hash_clip(image: ImageRef) -> str:
    """Compute the content hash of a file piece by piece, or of the images of a folder in order."""
    digest, path = hashlib.blake2b(digest_size=16), image.path
    is_folder = path.is_dir()
    for file in [path / name for name in list_frame_files(path)] if is_folder else [path]:
        if is_folder:
            digest.update(f"{file.stat().st_size} ".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def inspect_clip(image: ImageRef, content_hash: str) -> InspectedClip:
    """Inspect a file or folder; what is wrong with it is in the result."""
    try:
        return (_inspect_folder if image.path.is_dir() else _inspect_video)(image, content_hash)
    except ClipError as error:
        return InspectedClip((0, 0), content_hash, ImageDefect("unreadable clip", str(error)))


def _inspect_folder(image: ImageRef, content_hash: str) -> InspectedClip:
    files = [image.path / name for name in list_frame_files(image.path)]
    if not files:
        raise ClipError("has no images, so it is no clip; remove it")
    first, *others = (inspect_image(Path(file)) for file in files)
    for file, frame in zip(files, (first, *others), strict=True):
        if frame.problem:
            raise ClipError(f"its image {file.name} {frame.problem}")
        if frame.size != first.size:
            sizes = "{}x{} pixels, the first {}x{}".format(*frame.size, *first.size)
            raise ClipError(f"its image {file.name} is {sizes}; make them alike")
    return InspectedClip(first.size, content_hash, frames=ClipFrames(len(files), Fraction(0), None))


def _inspect_video(image: ImageRef, content_hash: str) -> InspectedClip:
    import av

    if not image.path.stat().st_size:
        return InspectedClip((0, 0), content_hash, ImageDefect("empty", "is empty; copy it again, or delete it"))
    with open_video(image) as (container, stream):
        packets = _read_packets(container, stream)
        frames = replace(_measure_frames(packets, stream), sound=packets.get_sound_times(stream))
        declared, length = stream.frames, (container.duration or 0) / av.time_base
        missing = declared - len(packets.timestamps) - packets.num_discarded
        if container.format.name == "avi":
            # Which counts frames that are shown again, in pieces without data, and numbers them.
            missing = declared - packets.timestamps[-1] - 1
    if declared and missing > 0:
        text = f"is truncated: it has {declared - missing} of {declared} frames; copy it again"
        return InspectedClip((0, 0), content_hash, ImageDefect("truncated", text))
    if packets.end + max(1, length / 10) < length:
        text = f"is truncated: it ends after {packets.end:.1f} of {length:.1f} seconds; copy it again"
        return InspectedClip((0, 0), content_hash, ImageDefect("truncated", text))
    first, traits = _decode_first(image)
    (last,) = read_clip_frames(image, frames, frames.num_frames - 1, 1)
    if last.size != first:
        sizes = "{}x{} at the beginning to {}x{} pixels at the end".format(*first, *last.size)
        raise ClipError(f"changes its size from {sizes}; split it")
    if frames.rate is None and frames.num_frames > 1:
        traits.append("variable")
    if frames.duration > LONG_CLIP_SECONDS:
        traits.append("long")
    if packets.max_key_distance > MAX_KEY_FRAME_DISTANCE:
        traits.append("few key frames")
    return InspectedClip(first, content_hash, None, tuple(traits), frames=frames)


@dataclass(frozen=True)
class _Packets:
    timestamps: list[int]
    last_duration: int  # of the frame that is shown last, in units of the stream; 0 if it is unknown
    num_discarded: int
    max_key_distance: int  # the most frames from one key frame to the next
    end: float  # of all streams since the beginning of the file, in seconds
    sound: tuple[Fraction, Fraction] | None  # the times of the file between which there is sound, in seconds

    def get_sound_times(self, stream: Any) -> tuple[Fraction, Fraction] | None:
        """Return the times of the sound in seconds after the first frame."""
        first = self.timestamps[0] * stream.time_base
        return None if self.sound is None else (self.sound[0] - first, self.sound[1] - first)


def _read_packets(container: Any, stream: Any) -> _Packets:
    """Read the timestamps of all packets; ``ClipError`` if there are none or the file cannot be read to its end."""
    import av

    rows, discarded, distance, longest = list[tuple[int, int]](), 0, 0, 0
    ends, sound, heard = dict[int, float](), find_sound(container), list[Fraction]()
    start = (container.start_time or 0) / av.time_base
    try:
        for packet in container.demux():
            if packet.size == 0:
                continue
            if packet.dts is not None:
                ends[packet.stream_index] = float((packet.dts + (packet.duration or 0)) * packet.time_base) - start
            if sound is not None and packet.stream_index == sound.index and packet.pts is not None:
                heard += [packet.pts * packet.time_base, (packet.pts + (packet.duration or 0)) * packet.time_base]
            if packet.stream_index != stream.index:
                continue
            distance = 1 if packet.is_keyframe else distance + 1
            longest = max(longest, distance)
            if packet.is_discard:
                discarded += 1
                continue
            pts = packet.pts if packet.pts is not None else packet.dts
            if pts is None:
                raise ClipError("has frames without timestamps; remux it: ffmpeg -i FILE -c copy NEW.mp4")
            rows.append((pts, packet.duration or 0))
    except av.error.FFmpegError as error:
        raise ClipError(f"is damaged after {len(rows)} frames: {error.strerror}; copy it again") from None
    if not rows:
        raise ClipError("has no frames; copy it again, or delete it")
    rows.sort()
    timestamps = [pts for pts, _ in rows]
    if len(set(timestamps)) < len(timestamps):
        raise ClipError("has several frames with one timestamp; convert it again, such as with ffmpeg -i FILE NEW.mp4")
    times = (min(heard), max(heard)) if heard else None
    end = max(ends.values(), default=0.0)
    return _Packets(timestamps, rows[-1][1], discarded, longest, end=end, sound=times)


def _measure_frames(packets: _Packets, stream: Any) -> ClipFrames:
    """Find the rate that explains all timestamps up to their rounding; without one, the rate varies."""
    timestamps, base = packets.timestamps, stream.time_base
    first, count = timestamps[0], len(timestamps)
    for rate in _list_possible_rates(timestamps, stream):
        offsets = (abs(first + number / rate / base - pts) for number, pts in enumerate(timestamps))
        half = 1 / rate / base / 2  # of a frame, from where on a timestamp is that of another one
        if all(offset <= 1 and offset < half for offset in offsets):
            return ClipFrames(count, count / rate, rate, first)
    spacing = Fraction(timestamps[-1] - first, count - 1) if count > 1 else Fraction(0)
    duration = (timestamps[-1] - first + (packets.last_duration or spacing)) * base
    return ClipFrames(count, Fraction(duration), None, first)


def _list_possible_rates(timestamps: Sequence[int], stream: Any) -> Iterator[Fraction]:
    named = (stream.average_rate, stream.guessed_rate, stream.base_rate)
    yield from (Fraction(rate) for rate in dict.fromkeys(named) if rate)
    if len(timestamps) >= _MIN_TIMESTAMPS_FOR_RATE:
        yield Fraction(len(timestamps) - 1) / ((timestamps[-1] - timestamps[0]) * stream.time_base)


def _decode_first(image: ImageRef) -> tuple[tuple[int, int], list[str]]:
    """Decode the first frame; return its upright size and what is unusual about it."""
    import av

    with open_video(image) as (container, stream):
        try:
            frame = next(iter(container.decode(stream)), None)
        except av.error.FFmpegError as error:
            raise ClipError(f"its first frame cannot be decoded: {error.strerror}; copy it again") from None
        if frame is None:
            raise ClipError("its first frame cannot be decoded; copy it again")
        size = (frame.width, frame.height) if round(frame.rotation / 90) % 2 == 0 else (frame.height, frame.width)
        return size, list(_list_traits(frame, stream))


def _list_traits(frame: Any, stream: Any) -> Iterator[str]:
    components = frame.format.components
    if frame.color_trc in _HDR_TRANSFERS:
        yield "HDR"
    if any(component.bits > 8 for component in components):
        yield "deep"
    if any(component.is_alpha for component in components):
        yield "clip alpha"
    if frame.interlaced_frame:
        yield "interlaced"
    if (stream.sample_aspect_ratio or 1) != 1:
        yield "anamorphic"
