"""The sound of a window is that of exactly its time, whatever the rates, containers and channels are."""

from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
from clip_files import Sound, draw_tone, write_clip

from library.dataset.clip_decoding import ClipError
from library.dataset.clip_inspection import _pack_clip, _unpack_clip, inspect_clip
from library.dataset.clip_sound import mix_to_stereo, read_window_sound
from library.dataset.clip_windows import FrameWindow, RateConversion
from library.dataset.image_ref import ImageRef


def refer(path) -> ImageRef:
    return ImageRef(path.parent, path.name)


def cut(path, start: int, length: int, fps: float = 24.0) -> FrameWindow:
    clip = inspect_clip(refer(path), "hash")
    assert clip.defect is None, clip.defect
    return FrameWindow(start, length, replace(clip.frames, conversion=RateConversion(fps)))


CONTAINERS = [
    ("a.mkv", "pcm_s16le", 48000),
    ("a.mp4", "aac", 44100),
    ("a.webm", "libopus", 48000),
    ("a.ts", "aac", 48000),
]


@pytest.mark.parametrize(("name", "codec", "rate"), CONTAINERS)
def test_the_sound_of_a_window_is_that_of_its_time(name, codec, rate, tmp_path):
    """The loudness of the tone tells the time; frames at 30 per second are brought to 24, sound is not."""
    sound = draw_tone(6, rate)
    picture = "libvpx" if name.endswith("webm") else "libx264"
    path = write_clip(
        tmp_path / name, 180, 30, codec=picture, options={"g": "15", "crf": "10"}, sound=Sound(sound, rate, codec)
    )
    for start, length in ((0, 25), (60, 49), (131, 9)):
        found = read_window_sound(refer(path), cut(path, start, length))
        first, count = round(Fraction(start, 24) * rate), round(Fraction(length, 24) * rate)
        assert (found.rate, found.num_samples) == (rate, count)
        edge = rate // 50 if start == 0 else 0  # encoders begin softly
        expected = sound[:, first + edge : first + count]
        # WebM rounds times to milliseconds.
        errors = [
            np.abs(found.samples[:, place + edge : place + count] - expected).max()
            for place in range(found.context - rate // 1000, found.context + rate // 1000 + 1)
        ]
        limit = 1e-4 if codec.startswith("pcm") else 0.06
        assert (min(errors) if name.endswith("webm") else errors[rate // 1000]) < limit, start


def test_a_window_has_sound_where_its_file_has_some_for_half_of_its_time(tmp_path):
    silent = write_clip(tmp_path / "silent.mp4", 48, 24)
    assert not cut(silent, 0, 25).is_heard()
    with pytest.raises(ClipError, match="has none now"):
        read_window_sound(refer(silent), cut(silent, 0, 25))
    path = write_clip(tmp_path / "a.mkv", 96, 24, sound=Sound(draw_tone(2), codec="pcm_s16le"))
    heard = {start: cut(path, start, 25).is_heard() for start in (0, 35, 37, 60)}
    assert heard == {0: True, 35: True, 37: False, 60: False}
    assert not cut(path, 0, 1).is_heard(), "one frame is an image"
    frames = cut(path, 0, 25).clip
    counted = FrameWindow(0, 25, replace(frames, conversion=RateConversion(24.0, 30.0)))
    assert not counted.is_heard(), "frames that are counted have no times"
    late = read_window_sound(refer(path), cut(path, 35, 25))
    rest = late.samples[:, late.context + round(13 / 24 * late.rate) + 100 :]
    assert late.samples[:, late.context : late.context + 1000].any() and not rest.any()


def test_what_is_known_of_sound_is_kept_with_the_scan(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 24, 24, sound=Sound(draw_tone(1, 44100), 44100))
    clip = inspect_clip(refer(path), "hash")
    assert clip.frames.sound is not None and abs(clip.frames.sound[1] - 1) < 0.05
    assert _unpack_clip(_pack_clip(clip), "hash") == clip
    facts = FrameWindow(0, 9, clip.frames).list_facts()
    assert FrameWindow(0, 9, clip.frames, has_sound=True).list_facts() == (*facts, "sound")


def test_channels_are_mixed_to_two_sides():
    channels = np.eye(8, dtype=np.float32)
    assert np.array_equal(mix_to_stereo(channels[:1]), channels[[0, 0]])
    assert np.array_equal(mix_to_stereo(channels[:2]), channels[:2])
    left, right = mix_to_stereo(channels[:6])
    assert left[[0, 2, 4]] == pytest.approx(np.array([1, 0.707, 0.707]) / 2.414) and not left[[1, 3, 5]].any()
    assert right[[1, 2, 5]] == pytest.approx(np.array([1, 0.707, 0.707]) / 2.414) and not right[[0, 3, 4]].any()
    assert mix_to_stereo(channels)[1][[1, 2, 5, 7]] == pytest.approx(np.array([1, 0.707, 0.707, 0.707]) / 3.121)
    assert mix_to_stereo(channels[:3]) == pytest.approx(np.full((2, 8), 1 / 3) * (np.arange(8) < 3))


def test_sound_in_mono_is_heard_on_both_sides(tmp_path):
    mono = Sound(draw_tone(1, 22050, channels=1), 22050, "pcm_s16le", "mono")
    path = write_clip(tmp_path / "a.mkv", 24, 24, sound=mono)
    found = read_window_sound(refer(path), cut(path, 0, 24))
    own = found.samples[:, found.context : found.context + found.num_samples]
    assert np.abs(own - mono.samples[:, : own.shape[1]]).max() < 1e-4
    with av.open(str(path)) as container:
        assert container.streams.audio[0].codec_context.layout.nb_channels == 1


def test_samples_that_are_no_numbers_are_an_error(tmp_path):
    tone = draw_tone(1)
    tone[:, 20000:20010] = np.nan
    path = write_clip(tmp_path / "a.mkv", 24, 24, sound=Sound(tone, 48000, "pcm_f32le"))
    with pytest.raises(ClipError, match="no numbers"):
        read_window_sound(refer(path), cut(path, 0, 24))
