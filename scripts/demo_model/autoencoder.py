"""The demo model's VAE: built, trained on emoji of three styles on many backgrounds, and reduced to few channels."""

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

from library.randomness import derive_seed

logger = logging.getLogger(__name__)

TRAINING_CHANNELS, LATENT_CHANNELS = 8, 4
"""Of the latents while the encoder is trained, and of the reduced VAE."""
KL_WEIGHT = 1e-4
BATCH_SIZE = 6


def build_vae(seed: int, channels: int = TRAINING_CHANNELS) -> Any:
    """Build an untrained VAE; a latent stands for 8x8 pixels."""
    cls: Any = AutoencoderKL
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "demo/vae"))
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


def train_vae(
    vae: Any,
    images: Tensor,
    steps: int,
    seed: int,
    *,
    decoder_only: bool = False,
    peak_lr: float = 2e-3,
    save: Callable[[], None] | None = None,
) -> None:
    """Train on uint8 images (N, 3, height, width)."""
    rng = random.Random(derive_seed(seed, "demo/vae-batches"))
    noise = torch.Generator().manual_seed(derive_seed(seed, "demo/vae-noise"))
    vae.train()
    vae.encoder.requires_grad_(not decoder_only)
    vae.quant_conv.requires_grad_(not decoder_only)
    optimizer = torch.optim.AdamW([p for p in vae.parameters() if p.requires_grad], betas=(0.9, 0.98), weight_decay=0)
    start, average = time.time(), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = (
                peak_lr * min(1, (step + 1) / 100) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
            )
        side = 64 if step < 0.6 * steps else images.shape[-1]
        batch = _sample_crops(images, BATCH_SIZE * 2 if side == 64 else BATCH_SIZE, side, rng)
        with torch.autocast(batch.device.type, torch.bfloat16):
            posterior = vae.encode(batch).latent_dist
            latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=noise)
            decoded = vae.decode(latents.detach() if decoder_only else latents).sample
        loss = compute_reconstruction_loss(decoded.float(), batch)
        if not decoder_only:
            loss = loss + KL_WEIGHT * posterior.kl().mean() / latents[0].numel()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average = loss.item() if not step else 0.98 * average + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            seconds = (time.time() - start) / (step + 1)
            logger.info("vae step %d of %d, loss %.4f, %.2f s/step", step + 1, steps, average, seconds)
        if save is not None and ((step + 1) % 250 == 0 or step + 1 == steps):
            save()
    vae.eval()


def compute_reconstruction_loss(decoded: Tensor, target: Tensor) -> Tensor:
    """Compute the L1 loss of pixels and of edges, at three scales."""
    total = torch.zeros(())
    for _ in range(3):
        total = total + F.l1_loss(decoded, target)
        for axis in (-1, -2):
            total = total + F.l1_loss(decoded.diff(dim=axis), target.diff(dim=axis))
        decoded, target = F.avg_pool2d(decoded, 2), F.avg_pool2d(target, 2)
    return total


@torch.no_grad()
def reduce_channels(vae: Any, images: Tensor) -> Any:
    """Project the latents onto their four principal directions, with mean 0 and a mean variance of 1.

    Training uses four directions strongly and the others hardly at all; the decoder can be trained to do without those.
    """
    means = torch.cat([vae.encode(batch / 127.5 - 1).latent_dist.mean for batch in torch.split(images, 32)])
    rows = means.permute(0, 2, 3, 1).reshape(-1, TRAINING_CHANNELS).double()
    center = rows.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov((rows - center).T))
    values, vectors = values[-LATENT_CHANNELS:], vectors[:, -LATENT_CHANNELS:]
    # The square root of the standard deviation: half way between equal variances and the original ones.
    scale = values.sqrt().sqrt()
    scale = scale * (values.sqrt() / scale).square().mean().sqrt()
    project, restore = (vectors / scale).T, vectors * scale

    small = build_vae(0, LATENT_CHANNELS)
    shapes = {name: weight.shape for name, weight in small.state_dict().items()}
    same = {name: weight for name, weight in vae.state_dict().items() if shapes.get(name) == weight.shape}
    small.load_state_dict(same, strict=False)
    first, last, quant, post = vae.encoder.conv_out, vae.decoder.conv_in, vae.quant_conv, vae.post_quant_conv
    inner = project @ quant.weight[:TRAINING_CHANNELS, :, 0, 0].double()
    bias = inner @ first.bias.double() + project @ (quant.bias[:TRAINING_CHANNELS].double() - center)
    weight = torch.einsum("po,oikl->pikl", inner, first.weight.double())
    # The encoder's own variance becomes negligible (log -9); the 1x1 convolutions become the identity.
    small.encoder.conv_out.weight.copy_(torch.cat([weight, torch.zeros_like(first.weight[:LATENT_CHANNELS])]))
    small.encoder.conv_out.bias.copy_(torch.cat([bias, torch.full((LATENT_CHANNELS,), -9.0)]))
    for layer, channels in ((small.quant_conv, 2 * LATENT_CHANNELS), (small.post_quant_conv, LATENT_CHANNELS)):
        layer.weight.copy_(torch.eye(channels)[..., None, None])
        layer.bias.zero_()
    outer = post.weight[:, :, 0, 0].double()
    small.decoder.conv_in.weight.copy_(torch.einsum("oikl,ij->ojkl", last.weight.double(), outer @ restore))
    offset = outer @ center + post.bias.double()
    small.decoder.conv_in.bias.copy_(last.bias + torch.einsum("oikl,i->o", last.weight.double(), offset))
    return small.eval()


def _sample_crops(images: Tensor, count: int, side: int, rng: random.Random) -> Tensor:
    margin = images.shape[-1] - side
    crops = []
    for _ in range(count):
        index, top, left = rng.randrange(len(images)), rng.randint(0, margin), rng.randint(0, margin)
        crops.append(images[index, :, top : top + side, left : left + side])
    return torch.stack(crops) / 127.5 - 1
