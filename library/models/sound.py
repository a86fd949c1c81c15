"""Sound of clips: resampling, mel spectrograms, and the latents that an audio VAE of diffusers makes of them.

The spectrogram is that with which the VAE of LTX-2 was trained: magnitudes of windows of 1024 samples, in Slaney's mel
bands, as logarithms.  torchaudio computes the same, and needs libraries of its own for each release of torch.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .vae import disable_autocast

FFT_SIZE = 1024
"""The samples of a window, which the VAE's config in diffusers leaves out."""
MEL_FLOOR = 1e-5
"""Magnitudes below this are as good as silence."""

_ZERO_CROSSINGS, _ROLLOFF = 6, 0.99
"""The width of the low-pass filter of resampling, and its cutoff as a part of the lower Nyquist frequency."""

_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0
"""Slaney's mel scale is linear up to here, and logarithmic from here on."""
_LOG_STEP = math.log(6.4) / 27


def resample(samples: Tensor, rate: int, target_rate: int) -> Tensor:
    """Resample sound (..., samples) with a windowed sinc filter, to the same duration rounded up."""
    divisor = math.gcd(rate, target_rate)
    old, new = rate // divisor, target_rate // divisor
    if old == new:
        return samples
    kernels, width = _build_resampling_kernels(old, new)
    length = samples.shape[-1]
    rows = functional.pad(samples.reshape(-1, 1, length), (width, width + old))
    phases = functional.conv1d(rows, kernels.to(samples), stride=old)
    resampled = phases.transpose(1, 2).reshape(*samples.shape[:-1], -1)
    return resampled[..., : math.ceil(new * length / old)]


def _build_resampling_kernels(old: int, new: int) -> tuple[Tensor, int]:
    """Build a filter for each of the ``new`` phases in ``old`` samples, and the samples that it needs on both sides."""
    cutoff = min(old, new) * _ROLLOFF
    width = math.ceil(_ZERO_CROSSINGS * old / cutoff)
    samples = torch.arange(-width, width + old, dtype=torch.float64) / old
    phases = torch.arange(0, -new, -1, dtype=torch.float64)[:, None, None] / new
    times = ((phases + samples) * cutoff).clamp(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
    window = torch.cos(times * math.pi / _ZERO_CROSSINGS / 2) ** 2
    return (torch.sinc(times) * window * cutoff / old).float(), width


def convert_hertz_to_mels(hertz: Tensor) -> Tensor:
    """Convert frequencies to Slaney's mel scale."""
    linear = hertz * (_LINEAR_MELS / _LINEAR_HERTZ)
    return torch.where(
        hertz < _LINEAR_HERTZ, linear, _LINEAR_MELS + (hertz / _LINEAR_HERTZ).clamp(min=1).log() / _LOG_STEP
    )


def convert_mels_to_hertz(mels: Tensor) -> Tensor:
    """Convert Slaney's mel scale to frequencies."""
    linear = mels * (_LINEAR_HERTZ / _LINEAR_MELS)
    return torch.where(mels < _LINEAR_MELS, linear, _LINEAR_HERTZ * ((mels - _LINEAR_MELS) * _LOG_STEP).exp())


def build_mel_filters(rate: int, num_bands: int) -> Tensor:
    """Build the triangles (frequencies, bands) of a mel spectrogram from 0 to half of the rate, each of area 1."""
    frequencies = torch.linspace(0, rate / 2, FFT_SIZE // 2 + 1, dtype=torch.float64)[:, None]
    highest = convert_hertz_to_mels(torch.tensor(rate / 2, dtype=torch.float64))
    edges = convert_mels_to_hertz(torch.linspace(0, float(highest), num_bands + 2, dtype=torch.float64))
    low, peak, high = edges[:-2], edges[1:-1], edges[2:]
    triangles = torch.minimum((frequencies - low) / (peak - low), (high - frequencies) / (high - peak)).clamp(min=0)
    return (triangles * (2 / (high - low))).float()


def compute_log_mel(samples: Tensor, rate: int, hop: int, num_bands: int) -> Tensor:
    """Compute the mel spectrogram (..., frames, bands) of sound (..., samples), as logarithms of magnitudes."""
    window = torch.hann_window(FFT_SIZE, device=samples.device)
    rows = samples.reshape(-1, samples.shape[-1])
    if rows.shape[-1] <= FFT_SIZE // 2:  # too short to be reflected at its ends
        rows = functional.pad(rows, (0, FFT_SIZE // 2 + 1 - rows.shape[-1]))
    spectrum = torch.stft(rows, FFT_SIZE, hop, window=window, center=True, pad_mode="reflect", return_complex=True)
    bands = spectrum.abs().transpose(1, 2) @ build_mel_filters(rate, num_bands).to(samples)
    return bands.clamp(min=MEL_FLOOR).log().reshape(*samples.shape[:-1], *bands.shape[1:])


@torch.no_grad()
def encode_sound_latents(vae: Any, samples: Tensor, num_latents: int) -> Tensor:
    """Encode stereo sound (2, samples) at the VAE's rate to latents (latents, channels), normalized as the pipeline's.

    Spectrograms are computed where the samples are, on the host: devices round convolutions to few bits by default.
    The VAE is causal, so latents beyond ``num_latents`` are left out with the frames of the spectrogram that they need.
    """
    config, factor = vae.config, vae.temporal_compression_ratio
    mel = compute_log_mel(samples, config.sample_rate, config.mel_hop_length, config.mel_bins)
    num_frames = (num_latents - 1) * factor + 1
    missing = num_frames - mel.shape[1]
    if missing > 0:
        mel = functional.pad(mel, (0, 0, 0, missing), value=math.log(MEL_FLOOR))
    with disable_autocast(vae):
        latents = vae.encode(mel[None, :, :num_frames].to(vae.device, vae.dtype)).latent_dist.mode()
    tokens = latents[0].transpose(0, 1).flatten(1)
    normalized: Tensor = (tokens - vae.latents_mean.to(tokens)) / vae.latents_std.to(tokens)
    return normalized


@torch.no_grad()
def decode_sound_latents(vae: Any, vocoder: Any, latents: Tensor) -> Tensor:
    """Decode latents (B, channels, latents, bands), as a pipeline returns them, to stereo sound (B, 2, samples)."""
    with disable_autocast(vae):
        mel = vae.decode(latents.to(vae.device, vae.dtype), return_dict=False)[0]
        sound: Tensor = vocoder(mel)
    return sound.float()


@torch.no_grad()
def encode_mmaudio_latents(vae: Any, samples: Tensor, num_latents: int) -> Tensor:
    """Encode stereo sound (2, samples) at the VAE's rate to latents (latents, channels), scaled as the pipeline's.

    MMAudio's VAE hears one channel: the mean of both.  The spectrogram is computed where the samples are, on the host.
    """
    from diffusers.models.autoencoders.autoencoder_mmaudio import MMAudioMelSpectrogram

    config, length = vae.config, num_latents * vae.latent_hop_length
    convert: Any = MMAudioMelSpectrogram(config.sample_rate, config.n_fft, config.mel_bins, config.hop_length)
    mono = functional.pad(samples.mean(0), (0, max(0, length - samples.shape[1])))[:length]
    mel = convert(mono[None]).to(vae.device, vae.dtype)
    with disable_autocast(vae):
        mean, _ = vae.vae.encode(mel).chunk(2, dim=1)
    latents: Tensor = mean[0].transpose(0, 1) * config.scaling_factor
    return latents


@torch.no_grad()
def decode_mmaudio_latents(vae: Any, vocoder: Any, latents: Tensor) -> Tensor:
    """Decode latents (B, channels, latents), as a pipeline returns them, to sound (B, 2, samples) of equal channels."""
    with disable_autocast(vae):
        mel = vae.decode(latents.to(vae.device, vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]
        sound: Tensor = vocoder(mel.to(vocoder.dtype), return_dict=False)[0]
    return sound.float().expand(-1, 2, -1)
