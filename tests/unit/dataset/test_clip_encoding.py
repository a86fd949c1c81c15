"""Frames become MP4, WebP and GIF files that have all of them, in their colors, at their rate."""

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from clip_files import draw_frame, read_numbers
from PIL import Image

from library.dataset import clip_encoding
from library.dataset.clip_decoding import convert_frame
from library.dataset.clip_encoding import decode_animation, encode_gif, encode_mp4, encode_webp, join_frames


def draw_frames(count: int, size=(96, 64)) -> list[Image.Image]:
    """Frames whose numbers are three apart: lossy compression may change them by one."""
    return [Image.fromarray(draw_frame(3 * number, size, 60)) for number in range(count)]


def read_indices(frames) -> list[int]:
    return [round(number / 3) for number in read_numbers(map(np.asarray, frames))]


@pytest.mark.parametrize("encoder", ["libx264", "mpeg4"])
def test_an_mp4_file_has_the_frames_their_rate_and_their_colors(encoder, monkeypatch):
    others = clip_encoding._ENCODERS.keys() - {encoder}
    monkeypatch.setattr(av, "codecs_available", av.codecs_available - others)
    data = encode_mp4(draw_frames(17), 24.0)
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        assert (stream.average_rate, stream.duration * stream.time_base) == (24, Fraction(17, 24))
        assert stream.codec_context.name == {"libx264": "h264"}.get(encoder, encoder)
        frames = [np.asarray(convert_frame(frame)) for frame in container.decode(video=0)]
    assert read_indices(frames) == list(range(17))
    assert all(np.abs(frame[-8:, -8:, 2].astype(int) - 60).max() <= 8 for frame in frames), "blue is the shade"


def test_rates_and_sizes_that_are_not_whole_are_taken():
    data = encode_mp4(draw_frames(3, (33, 17)), 23.976)
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        assert float(stream.average_rate) == pytest.approx(24000 / 1001, rel=1e-4)
        assert (stream.width, stream.height) == (32, 16)


@pytest.mark.parametrize(("encode", "fps"), [(encode_webp, 16.0), (encode_webp, 24.0), (encode_gif, 16.0)])
def test_an_animated_image_has_the_frames_and_their_rate(encode, fps):
    frames, found = decode_animation(encode(draw_frames(17), fps))
    assert read_indices(frames) == list(range(17))
    assert found == pytest.approx(fps, rel=0.02)


@pytest.mark.parametrize(
    ("encode", "fps"), [(encode_webp, 16.0), (encode_webp, 24.0), (encode_webp, 240.0), (encode_gif, 16.0)]
)
def test_equal_frames_that_are_stored_as_one_are_decoded_as_often_as_they_were_encoded(encode, fps):
    first, *others = draw_frames(6)
    data = encode([*[first] * 20, *others[:4], *[others[4]] * 3], fps)
    assert Image.open(io.BytesIO(data)).n_frames == 6
    frames, found = decode_animation(data)
    assert read_indices(frames) == [*[0] * 20, 1, 2, 3, 4, *[5] * 3]
    assert found == pytest.approx(fps, rel=0.02)
    strip = np.asarray(join_frames(frames, gap=0))
    assert read_indices(strip[:, start : start + 96] for start in (0, 96, 192)) == [0, 0, 5]


def test_the_frames_of_a_sheet_are_the_first_the_middle_one_and_the_last():
    strip = np.asarray(join_frames(draw_frames(9), gap=0))
    assert strip.shape == (64, 3 * 96, 3)
    assert read_indices(strip[:, start : start + 96] for start in (0, 96, 192)) == [0, 4, 8]
    assert join_frames(draw_frames(1)).size == (96, 64)
