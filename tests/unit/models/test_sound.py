"""Spectrograms and resampling of sound have their closed forms."""

import math

import numpy as np
import pytest
import torch

from library.models.sound import (
    FFT_SIZE,
    MEL_FLOOR,
    build_mel_filters,
    compute_log_mel,
    convert_hertz_to_mels,
    convert_mels_to_hertz,
    resample,
)

RATE, HOP, BANDS = 16000, 160, 64


def draw_sine(hertz: float, rate: int, count: int) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(count, dtype=torch.float64) / rate).float()


@pytest.mark.parametrize("rate", [48000, 44100, 22050, 8000])
def test_a_tone_is_the_same_tone_after_resampling(rate):
    """One below half of both rates stays, one above half of the new rate goes."""
    resampled = resample(draw_sine(1234.5, rate, rate).expand(2, -1), rate, RATE)
    assert resampled.shape == (2, RATE)
    inner = slice(RATE // 10, -RATE // 10)
    assert (resampled[0] - draw_sine(1234.5, RATE, RATE))[inner].abs().max() < 5e-3
    if rate > 20000:
        gone = resample(draw_sine(10000.0, rate, rate), rate, RATE)
        assert gone[inner].abs().max() < 2e-2
    assert torch.equal(resample(resampled, RATE, RATE), resampled)


def test_the_mel_scale_is_slaneys():
    hertz = torch.tensor([0.0, 500.0, 1000.0, 6400.0], dtype=torch.float64)
    mels = torch.tensor([0.0, 7.5, 15.0, 42.0], dtype=torch.float64)
    torch.testing.assert_close(convert_hertz_to_mels(hertz), mels)
    torch.testing.assert_close(convert_mels_to_hertz(mels), hertz)


def test_each_mel_band_has_area_one():
    """Slaney's triangles integrate to 1 over the frequencies, where these are close enough to see them."""
    areas = build_mel_filters(RATE, BANDS).sum(0) * (RATE / FFT_SIZE)
    assert build_mel_filters(RATE, BANDS).shape == (FFT_SIZE // 2 + 1, BANDS)
    torch.testing.assert_close(areas[20:], torch.ones(BANDS - 20), rtol=0.02, atol=0)


def test_the_spectrogram_of_a_tone_is_the_transform_of_its_window():
    """A sine on a frequency of the transform has half of the window's sum there, and half of that on both sides."""
    bin_index, amplitude = 100, 0.5
    tone = amplitude * draw_sine(bin_index * RATE / FFT_SIZE, RATE, 4 * FFT_SIZE)
    mel = compute_log_mel(tone, RATE, HOP, BANDS)
    assert mel.shape == (4 * FFT_SIZE // HOP + 1, BANDS)
    magnitudes = torch.zeros(FFT_SIZE // 2 + 1)
    magnitudes[bin_index] = amplitude * FFT_SIZE / 4
    magnitudes[[bin_index - 1, bin_index + 1]] = amplitude * FFT_SIZE / 8
    expected = (magnitudes @ build_mel_filters(RATE, BANDS)).clamp(min=MEL_FLOOR).log()
    loud = expected > -4
    assert 0 < int(loud.sum()) < 6
    torch.testing.assert_close(mel[12][loud], expected[loud], rtol=0, atol=2e-3)


def test_silence_is_the_floor_and_short_sound_has_frames():
    mel = compute_log_mel(torch.zeros(2, 300), RATE, HOP, BANDS)
    assert mel.shape[0] == 2 and mel.shape[1] >= 300 // HOP + 1
    assert np.allclose(mel.numpy(), math.log(MEL_FLOOR))
