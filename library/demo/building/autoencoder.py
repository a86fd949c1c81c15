"""The built-in model's VAE: made, trained on emoji of three styles on many grounds, and reduced to few channels."""

import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn

from ...randomness import seed_for

logger = logging.getLogger(__name__)

CHANNELS, KEPT = 8, 4
"""Of the latents while the encoder learns, and then."""
KL_WEIGHT = 1e-4
BATCH = 6


def make(seed: int, channels: int = CHANNELS) -> Any:
    """Untrained; eight pixels become one latent."""
    cls: Any = AutoencoderKL
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "demo/vae"))
        return cls(
            block_out_channels=(16, 32, 64, 64),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            norm_num_groups=8,
            latent_channels=channels,
            mid_block_add_attention=False,
            scaling_factor=1.0,
            force_upcast=False,
        )


def train(vae: Any, pictures: Tensor, steps: int, seed: int, *, whole: bool = True, peak: float = 2e-3,
          save: Callable[[], None] | None = None) -> None:  # fmt: skip
    """Train on uint8 pictures (N, 3, height, width): the decoder alone unless it is ``whole``."""
    draw = random.Random(seed_for(seed, "demo/vae-batches"))
    noise = torch.Generator().manual_seed(seed_for(seed, "demo/vae-noise"))
    vae.train()
    vae.encoder.requires_grad_(whole)
    vae.quant_conv.requires_grad_(whole)
    optimizer = torch.optim.AdamW([p for p in vae.parameters() if p.requires_grad], betas=(0.9, 0.98), weight_decay=0)
    started, shown = time.time(), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / 100) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        side = 64 if step < 0.6 * steps else pictures.shape[-1]
        batch = _crops(pictures, BATCH * 2 if side == 64 else BATCH, side, draw)
        with torch.autocast(batch.device.type, torch.bfloat16):
            spread = vae.encode(batch).latent_dist
            latents = spread.mean + spread.std * torch.randn(spread.mean.shape, generator=noise)
            back = vae.decode(latents if whole else latents.detach()).sample
        loss = distance(back.float(), batch) + (KL_WEIGHT * spread.kl().mean() / latents[0].numel() if whole else 0)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        shown = loss.item() if not step else 0.98 * shown + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            logger.info("vae step %d of %d, loss %.4f, %.2f s a step", step + 1, steps, shown,
                        (time.time() - started) / (step + 1))  # fmt: skip
        if save is not None and ((step + 1) % 250 == 0 or step + 1 == steps):
            save()
    vae.eval()


def distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """Absolute difference of pixels and of edges, at three scales."""
    total = torch.zeros(())
    for _ in range(3):
        total = total + F.l1_loss(ours, theirs)
        for axis in (-1, -2):
            total = total + F.l1_loss(ours.diff(dim=axis), theirs.diff(dim=axis))
        ours, theirs = F.avg_pool2d(ours, 2), F.avg_pool2d(theirs, 2)
    return total


@torch.no_grad()
def reduced(vae: Any, pictures: Tensor) -> Any:
    """A VAE with the four principal directions of the latents, of mean 0 and together of spread 1.

    Training uses four directions strongly and the others hardly at all; what these hold, the decoder can learn to do
    without.
    """
    means = torch.cat([vae.encode(part / 127.5 - 1).latent_dist.mean for part in torch.split(pictures, 32)])
    rows = means.permute(0, 2, 3, 1).reshape(-1, CHANNELS).double()
    centre = rows.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov((rows - centre).T))
    values, vectors = values[-KEPT:], vectors[:, -KEPT:]
    # The square root of the spread: half way between all directions alike and all as they are.
    scale = values.sqrt().sqrt()
    scale = scale * (values.sqrt() / scale).square().mean().sqrt()
    into, back = (vectors / scale).T, vectors * scale

    small = make(0, KEPT)
    held = {name: weight for name, weight in vae.state_dict().items() if name in small.state_dict()
            and weight.shape == small.state_dict()[name].shape}  # fmt: skip
    small.load_state_dict(held, strict=False)
    inner, first = into @ vae.quant_conv.weight[:CHANNELS, :, 0, 0].double(), vae.encoder.conv_out
    bias = inner @ first.bias.double() + into @ (vae.quant_conv.bias[:CHANNELS].double() - centre)
    for part, weights, offset in (
        # The encoder's own noise is made small; the 1x1 layers do nothing any more.
        (small.encoder.conv_out, torch.cat([_through(inner, first.weight), torch.zeros_like(first.weight[:KEPT])]),
         torch.cat([bias, torch.full((KEPT,), -9.0)])),
        (small.quant_conv, torch.eye(2 * KEPT)[..., None, None], torch.zeros(2 * KEPT)),
        (small.post_quant_conv, torch.eye(KEPT)[..., None, None], torch.zeros(KEPT)),
    ):  # fmt: skip
        part.weight.copy_(weights)
        part.bias.copy_(offset)
    last, post = vae.decoder.conv_in, vae.post_quant_conv
    outer = post.weight[:, :, 0, 0].double()
    small.decoder.conv_in.weight.copy_(torch.einsum("oikl,ij->ojkl", last.weight.double(), outer @ back))
    offset = outer @ centre + post.bias.double()
    small.decoder.conv_in.bias.copy_(last.bias + torch.einsum("oikl,i->o", last.weight.double(), offset))
    return small.eval()


def _through(matrix: Tensor, weight: Tensor) -> Tensor:
    """The weight of a convolution whose outputs go through a matrix."""
    return torch.einsum("po,oikl->pikl", matrix, weight.double())


def _crops(pictures: Tensor, count: int, side: int, draw: random.Random) -> Tensor:
    room = pictures.shape[-1] - side
    cut = []
    for _ in range(count):
        index, top, left = draw.randrange(len(pictures)), draw.randint(0, room), draw.randint(0, room)
        cut.append(pictures[index, :, top : top + side, left : left + side])
    return torch.stack(cut) / 127.5 - 1
