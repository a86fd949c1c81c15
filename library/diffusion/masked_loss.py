"""Masked loss: masks at the resolution of the latents, and the mean of an elementwise loss per sample."""

import torch.nn.functional as F
from torch import Tensor


def resize_mask_to_latents(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Average pixel masks (B, 1, height, width) in 0..255 to latent resolution (B, 1, H, W) in 0..1."""
    return F.interpolate(mask.float() / 255, size=size, mode="area")


def reduce_loss_per_sample(loss: Tensor, mask: Tensor | None, *, normalize_by_area: bool = False) -> Tensor:
    """Reduce an elementwise loss (B, C, H, W) to the mean per sample (B,).

    The mask of a clip, whose loss is (B, C, F, H, W), is that of all frames.
    As in sd-scripts the mean is over all elements, so an image whose mask covers a quarter has a quarter of the loss.
    ``normalize_by_area`` divides by the mask's area instead, so every image counts the same; empty masks give 0.
    """
    if mask is None:
        return loss.flatten(1).mean(1)
    if loss.ndim > mask.ndim:
        mask = mask.unsqueeze(2)
    means = (loss * mask).flatten(1).mean(1)
    if not normalize_by_area:
        return means
    area = mask.flatten(1).mean(1)
    return means / area.where(area > 0, 1)
