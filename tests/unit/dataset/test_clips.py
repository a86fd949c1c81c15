"""Clips are listed, inspected and decoded: windows by seeking are those of the whole clip; what is wrong is named."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from clip_files import Sound, decode_clip, draw_tone, read_numbers, write_clip
from PIL import Image

from library.dataset.clip_decoding import ClipError, convert_frame, read_clip_frames
from library.dataset.clip_inspection import build_clip_inspector, hash_clip, inspect_clip
from library.dataset.clip_windows import (
    ClipFrames,
    FrameRule,
    FrameSettings,
    RateConversion,
    list_frame_windows,
)
from library.dataset.image_ref import ImageRef

OPEN_GROUPS = {"x264-params": "open-gop=1:keyint=10:bframes=4"}
MP3 = Sound(draw_tone(1.5, 44100), 44100, "mp3")
"""With which an AVI file has a piece without data after the first frame, which is then shown twice."""

FORMATS = {
    "h264.mp4": {},
    "open.mkv": {"options": OPEN_GROUPS},
    "open.mp4": {"options": OPEN_GROUPS},
    "open.ts": {"options": OPEN_GROUPS},
    "open265.mp4": {"codec": "libx265", "options": {"x265-params": "open-gop=1:keyint=8:bframes=4:log-level=none"}},
    "vp9.webm": {"codec": "libvpx-vp9"},
    "mpeg4.avi": {"codec": "mpeg4"},
    "mp3.avi": {"codec": "mpeg4", "sound": MP3},
    "mpeg2.mpg": {"codec": "mpeg2video", "rate": 25},
    "prores.mov": {"codec": "prores", "pixel_format": "yuv422p10le"},
    "variable.mp4": {"times": [number * 40 + number % 3 * 15 for number in range(24)], "rate": 25},
    "rotated.mp4": {"rotation": -90},
}


def refer(path: Path) -> ImageRef:
    return ImageRef(path.parent, path.name)


def inspect(path: Path):
    return inspect_clip(refer(path), hash_clip(refer(path)))


@pytest.mark.parametrize("name", FORMATS)
def test_windows_read_by_seeking_are_those_of_the_whole_clip(name, tmp_path):
    path = write_clip(tmp_path / name, **{"num_frames": 24, **FORMATS[name]})
    clip = inspect(path)
    assert clip.problem is None and clip.frames.num_frames == 24
    whole = decode_clip(path)
    for start in range(22):
        found = [np.asarray(frame) for frame in read_clip_frames(refer(path), clip.frames, start, 3)]
        assert all(np.array_equal(*pair) for pair in zip(found, whole[start : start + 3], strict=False))
        assert len(found) == 3
    assert len({frame.tobytes() for frame in whole}) == 24, "a wrong frame would be seen"


def test_rate_size_and_traits_of_clips_are_found(tmp_path):
    plain = inspect(write_clip(tmp_path / "a.mp4", 30, Fraction(30000, 1001), (96, 64)))
    assert (plain.size, plain.frames.rate, plain.traits) == ((96, 64), Fraction(30000, 1001), ())
    assert plain.frames.duration == 30 / Fraction(30000, 1001)
    rounded = inspect(write_clip(tmp_path / "b.webm", 20, 30, codec="libvpx-vp9"))
    assert rounded.frames.rate == 30, "timestamps in milliseconds have the rate that they were rounded from"
    times = [0, 40, 150, 160, 300]
    varying = inspect(write_clip(tmp_path / "c.mp4", 5, 25, times=times))
    assert varying.frames.rate is None and "variable" in varying.traits
    turned = inspect(write_clip(tmp_path / "d.mp4", 3, size=(96, 64), rotation=90))
    assert turned.size == (64, 96)
    (frame,) = read_clip_frames(refer(tmp_path / "d.mp4"), turned.frames, 0, 1)
    corner = np.asarray(frame)[-10:, :6].mean()
    assert corner > 240, "turned counterclockwise, the upper left corner is the lower left one"
    assert "deep" in inspect(write_clip(tmp_path / "e.mp4", 3, pixel_format="yuv420p10le")).traits


def test_the_result_of_an_inspection_survives_the_scan_cache(tmp_path):
    inspector = build_clip_inspector()
    for name, options in (("a.mp4", {}), ("b.mp4", {"times": [0, 40, 150, 160], "rate": 25})):
        clip = inspect(write_clip(tmp_path / name, 4, **{"rate": 16, **options}))
        assert inspector.unpack(inspector.pack(clip), clip.content_hash) == clip


def test_what_is_wrong_with_a_clip_is_said(tmp_path):
    good = write_clip(tmp_path / "good.mkv", 60, options={"g": "5"}).read_bytes()
    (tmp_path / "cut.mkv").write_bytes(good[: len(good) // 2])
    heard = write_clip(tmp_path / "heard.avi", codec="mpeg4", sound=MP3).read_bytes()
    (tmp_path / "cut.avi").write_bytes(heard[: len(heard) * 2 // 3])
    (tmp_path / "text.mp4").write_bytes(b"no video at all" * 20)
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 44100
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    problems = {
        name: inspect(tmp_path / name).problem or ""
        for name in ("cut.mkv", "cut.avi", "text.mp4", "empty.mp4", "sound.mp4")
    }
    assert problems["cut.mkv"].startswith("is truncated: it ends after")
    assert problems["cut.avi"].startswith("is truncated: it has 1")
    assert problems["text.mp4"].startswith("cannot be opened as a video: Invalid data")
    assert problems["empty.mp4"].startswith("is empty") and problems["sound.mp4"].startswith("has no video")
    assert inspect(tmp_path / "folder").problem.startswith("has no images")


def test_damage_in_the_middle_is_an_error_when_it_is_read(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 40, options={"x264-params": "keyint=40:bframes=0"})
    clip, data = inspect(path), bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        start = packets[20].pos
    data[start : start + 300] = bytes(300)
    path.write_bytes(data)
    with pytest.raises(ClipError, match=r"damaged|cannot be decoded|ends before"):
        list(read_clip_frames(refer(path), clip.frames, 18, 8))


def test_a_folder_of_images_is_a_clip(tmp_path):
    folder = tmp_path / "walk"
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (40, 30), (5 * number, 5 * number, 0)).save(folder / f"{number:03d}.png")
    clip = inspect(folder)
    assert (clip.size, clip.frames.num_frames, clip.frames.rate) == ((40, 30), 6, None)
    frames = read_clip_frames(refer(folder), clip.frames, 2, 3)
    assert read_numbers(map(np.asarray, frames)) == [2, 3, 4]
    before = hash_clip(refer(folder))
    Image.new("RGB", (40, 32)).save(folder / "003.png")
    assert hash_clip(refer(folder)) != before
    assert "003.png is 40x32 pixels, the first 40x30" in inspect(folder).problem


def test_colors_are_those_that_the_file_names(tmp_path):
    """BT.709, or BT.601 where the matrix says so; large frames that say nothing are BT.709."""
    for matrix, height, tag in ((1, 48, 1), (5, 48, 5), (5, 48, 2), (1, 720, 2)):
        path = tmp_path / f"{matrix}-{height}-{tag}.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=10, options={"crf": "1"})
            stream.width, stream.height, stream.pix_fmt = 64, height, "yuv420p"
            stream.codec_context.colorspace = tag
            pixels = np.full((height, 64, 3), (200, 40, 90), np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p", dst_colorspace=matrix)
            for packet in [*stream.encode(frame), *stream.encode(None)]:
                container.mux(packet)
        with av.open(str(path)) as container:
            color = np.asarray(convert_frame(next(container.decode(video=0))))[20, 20].astype(int)
        assert np.abs(color - (200, 40, 90)).max() <= 3, (matrix, height, tag, color)


RULES = [(4, [5, 9, 13], [5, 9, 13]), (8, [5, 9, 13, 17], [1, 9, 17]), (6, [7, 12, 13], [7, 13])]


@pytest.mark.parametrize(("stride", "targets", "lengths"), RULES)
def test_lengths_are_rounded_down_to_the_rule_of_the_model(stride, targets, lengths):
    settings, rule = FrameSettings(targets), FrameRule(stride)
    assert [length for _, length in list_frame_windows(40, settings, rule)] == lengths
    full = FrameSettings(frame_extraction="full", max_frames=30)
    assert list_frame_windows(100, full, rule) == [(0, (30 - 1) // stride * stride + 1)]


def build_frames(num_frames, rate, target=16.0, source=None, duration=None):
    rate = None if rate is None else Fraction(rate)
    duration = num_frames / rate if rate else Fraction(duration or 0)
    return ClipFrames(num_frames, duration, rate, 0, RateConversion(target, source))


def test_frames_by_their_times_are_those_shown_in_the_middle_of_each_interval():
    chunk = FrameSettings((9,), "chunk")
    assert build_frames(48, 16).count_frames(chunk) == 48
    assert build_frames(48, 16).list_source_frames(5, 4) == [5, 6, 7, 8]
    assert build_frames(90, 30).count_frames(chunk) == 48
    assert build_frames(90, 30).list_source_frames(0, 5) == [0, 2, 4, 6, 8]
    assert build_frames(24, 8).list_source_frames(0, 6) == [0, 0, 1, 1, 2, 2], "a slower clip shows frames again"
    film = build_frames(240, Fraction(24000, 1001), 24.0)
    assert film.list_source_frames(0, 240) == list(range(240)), "23.976 is no reason to drop or repeat"
    times = [Fraction(number, 1000) for number in (0, 10, 20, 200, 400)]
    assert build_frames(5, None, 10.0, duration=Fraction(1, 2)).list_source_frames(0, 5, times) == [2, 2, 3, 3, 4]


def test_frames_by_a_given_rate_are_counted_as_in_musubi_tuner():
    chunk = FrameSettings((9,), "chunk")
    counted = build_frames(48, 30, 16.0, 24.0)  # what the file says does not count
    assert counted.count_frames(chunk) == 32
    assert counted.list_source_frames(0, 4) == [0, 2, 3, 5]
    everything = ClipFrames(48, Fraction(2), Fraction(24))
    assert everything.count_frames(chunk) == 48 and everything.list_source_frames(40, 3) == [40, 41, 42]
    slow, head = build_frames(48, 12, 24.0, 12.0), FrameSettings((9, 17))
    assert slow.count_frames(head) == 9, "of head, only frames with a number below the longest target are read"
    assert slow.count_frames(chunk) == 48


def test_past_the_end_of_a_control_clip_its_last_frame_is_repeated():
    assert build_frames(4, 16).list_source_frames(2, 4) == [2, 3, 3, 3]
    assert ClipFrames(4, Fraction(0), None).list_source_frames(2, 4) == [2, 3, 3, 3]


@pytest.mark.parametrize(
    ("field", "value", "trait"), [("color_trc", 18, "HDR"), ("sample_aspect_ratio", 2, "anamorphic")]
)
def test_colors_and_pixels_that_are_not_as_usual_are_told(field, value, trait, tmp_path):
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        setattr(stream.codec_context, field, value)
        frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    assert trait in inspect(tmp_path / "a.mp4").traits
