"""The demo video model's VAE: Wan's class, with weights that are computed and not trained.

A latent stands for 8x8 pixels of one frame: their principal components.  Wan's VAE has no linear way from its input to
its output, but its layers have weights with which they are linear, up to a small error:

- convolutions of 3x3x3 use the middle of their kernel, in time the last part of it;
- a residual block whose second convolution is zero, and an attention whose projection is zero, change nothing;
- the RMS norm divides by the norm of all channels, which hardly changes, as one channel is constant and large;
- SiLU(x) - SiLU(-x) is x, so each component has two channels, with either sign.
"""

import math
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify
from torch import Tensor, nn

from library.randomness import derive_rng, derive_seed

from .clips import SUBJECTS, draw_clip, load_emoji, turn, walk_right

LATENT_CHANNELS, PATCH = 16, 8
CHANNELS = 2 * LATENT_CHANNELS + 4
"""Each component with both signs, the constant channel, and three that are zero, for a number divisible by 4."""
CONSTANT = 2 * LATENT_CHANNELS
LARGE = 300.0
"""The constant channel; the others are of the order of 1."""
NUM_CLIPS = 160


def build_vae(seed: int) -> Any:
    """Build the VAE with random weights."""
    cls: Any = AutoencoderKLWan
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "demo_video/vae"))
        return cls(
            base_dim=CHANNELS,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1],
            num_res_blocks=0,
            temperal_downsample=[],
            patch_size=PATCH,
            in_channels=3 * PATCH**2,
            out_channels=3 * PATCH**2,
            scale_factor_spatial=PATCH,
            scale_factor_temporal=1,
            latents_mean=[0.0] * LATENT_CHANNELS,
            latents_std=[1.0] * LATENT_CHANNELS,
        ).eval()


def draw_mixed_clips(count: int, seed: int) -> Tensor:
    """Draw clips (N, 3, frames, height, width) of all emoji as bytes: half of them turn, the others walk."""
    emoji = [load_emoji(subject) for subject in SUBJECTS]
    clips = []
    for number in range(count):
        rng = derive_rng(seed, "demo_video/vae_clips", number)
        motion = turn(rng) if number % 2 else walk_right(rng)
        clips.append(torch.from_numpy(np.ascontiguousarray(draw_clip(emoji[number // 2 % len(emoji)], motion.track))))
    return torch.stack(clips).permute(0, 4, 1, 2, 3).contiguous()


@torch.no_grad()
def set_linear_weights(vae: Any, clips: Tensor) -> None:
    """Set the weights so that latents are the principal components of the clips' patches."""
    project, restore, center = compute_components(clips)
    for part in (vae.encoder, vae.decoder):
        _let_blocks_change_nothing(part)
        part.norm_out.gamma.fill_(LARGE / math.sqrt(CHANNELS))
    both = torch.cat([torch.eye(LATENT_CHANNELS), -torch.eye(LATENT_CHANNELS)]).double()
    _set_middle(vae.encoder.conv_in, both @ project, -both @ project @ center)
    _set_middle(vae.encoder.conv_out, both.T, torch.zeros(LATENT_CHANNELS))
    # The encoder's own variance is negligible.
    vae.encoder.conv_out.bias[LATENT_CHANNELS:].fill_(-9.0)
    for layer in (vae.quant_conv, vae.post_quant_conv):
        size = layer.weight.shape[0]
        _set_middle(layer, torch.eye(size), torch.zeros(size))
    _set_middle(vae.decoder.conv_in, both, torch.zeros(len(both)))
    _set_middle(vae.decoder.conv_out, restore @ both.T, center)
    for part in (vae.encoder, vae.decoder):
        part.conv_in.bias[CONSTANT] = LARGE


def compute_components(clips: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the projection onto the principal components, its inverse, and the mean, of patches as bytes are scaled.

    Components have mean 0 and a mean variance of 1, half way between equal variances and those of the pixels.
    """
    split: Any = patchify
    batches = torch.split(clips, 16)
    rows = torch.cat([split(batch / 127.5 - 1, PATCH).transpose(0, 1).flatten(1).T for batch in batches])
    rows = rows.double()
    center = rows.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov((rows - center).T))
    values, vectors = values[-LATENT_CHANNELS:].flip(0), vectors[:, -LATENT_CHANNELS:].flip(1)
    scale = values.sqrt().sqrt()
    scale = scale * (values.sqrt() / scale).square().mean().sqrt()
    return (vectors / scale).T, vectors * scale, center


def _set_middle(layer: Any, weight: Tensor, bias: Tensor) -> None:
    """Set a convolution to a matrix at each place; what is beyond its rows and columns gets zero."""
    layer.weight.zero_()
    layer.bias.zero_()
    middle = layer.weight.shape[-1] // 2
    layer.weight[: weight.shape[0], : weight.shape[1], -1, middle, middle] = weight.to(layer.weight)
    layer.bias[: len(bias)] = bias.to(layer.bias)


def _let_blocks_change_nothing(part: nn.Module) -> None:
    for module in part.modules():
        match type(module).__name__:
            case "WanResidualBlock":
                block: Any = module
                block.conv2.weight.zero_()
                block.conv2.bias.zero_()
            case "WanAttentionBlock":
                attention: Any = module
                attention.proj.weight.zero_()
                attention.proj.bias.zero_()


@torch.no_grad()
def encode_clips(vae: Any, clips: Tensor) -> Tensor:
    """Encode clips of bytes to the means of their latents."""
    return torch.cat([vae.encode(batch / 127.5 - 1).latent_dist.mean for batch in torch.split(clips, 16)])
