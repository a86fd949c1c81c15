"""Masks in the loss: pure functions on tensors; 1 where the loss counts in full."""

import torch.nn.functional as F
from torch import Tensor


def resize_mask_to_latents(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks of pixels (B, 1, height, width) in bytes, as shares (B, 1, H, W) of what each latent covers."""
    return F.interpolate(mask.float() / 255, size=size, mode="area")


def reduce_loss_per_sample(loss: Tensor, mask: Tensor | None, *, normalize_by_area: bool = False) -> Tensor:
    """One number for each sample (B,) of an elementwise loss (B, C, H, W).

    As in sd-scripts the mean is over all elements, so that a picture of which a mask leaves a quarter weighs a quarter.
    ``by_area`` divides by the area of the mask instead, so that each picture weighs the same; one of which nothing is
    left weighs nothing.
    """
    if mask is None:
        return loss.flatten(1).mean(1)
    means = (loss * mask).flatten(1).mean(1)
    if not normalize_by_area:
        return means
    area = mask.flatten(1).mean(1)
    return means / area.where(area > 0, 1)
