"""What flows from the loader to the loss."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

Cond = dict[str, Tensor | list[Tensor]]
"""The text side, with a family's own keys; a list where lengths differ from sample to sample."""


@dataclass(frozen=True)
class BadSample:
    """A picture that was fine when it was looked at, and cannot be used now."""

    name: str
    problem: str


@dataclass(frozen=True)
class PixelBatch:
    """Pictures of one bucket as the loader hands them out, before the VAE and the text encoders.

    Pixels and masks are bytes until they are on the device, a quarter of what the same numbers would be in floats.
    """

    pixels: Tensor  # (B, 3, height, width), 0..255
    captions: tuple[str, ...]
    frame: Tensor  # (B, 6): original height, width; crop top, left; target height, width; in pixels
    weight: Tensor  # (B,): weight of each sample's loss; 0 for padding
    places: tuple[int, ...]  # of each sample in the whole optimizer step, over all ranks
    ids: tuple[str, ...]  # names of the samples, for messages
    mask: Tensor | None = None  # (B, 1, height, width), 0..255: 255 where the loss counts in full
    problems: tuple[BadSample, ...] = ()  # of pictures in whose places others stand, with weight 0

    def __len__(self) -> int:
        return len(self.ids)

    def pin_memory(self) -> "PixelBatch":
        """In memory from which an accelerator copies by itself; torch's DataLoader calls this."""
        return self._with_tensors(Tensor.pin_memory)

    def share_memory(self) -> "PixelBatch":
        """In memory that other processes see, too; ``RuntimeError`` when there is no more of it."""
        return self._with_tensors(Tensor.share_memory_)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "PixelBatch":
        values = [(item.name, getattr(self, item.name)) for item in fields(self)]
        changed: dict[str, Any] = {name: change(value) for name, value in values if isinstance(value, Tensor)}
        return replace(self, **changed)


def as_model_input(pixels: Tensor) -> Tensor:
    """Bytes as numbers from -1 to 1, the same to the bit on every device.

    The divisor is a tensor, because on CUDA torch multiplies by the inverse of a plain number and rounds differently.
    """
    return pixels.float().div(torch.full((), 127.5, device=pixels.device)).sub(1)


@dataclass(frozen=True)
class Batch:
    """What the denoiser is trained on; all the rest is as in ``PixelBatch``."""

    latents: Tensor  # (B, C, H, W), in the model's latent space
    cond: Cond
    frame: Tensor
    weight: Tensor
    places: tuple[int, ...]
    ids: tuple[str, ...]
    mask: Tensor | None = None  # (B, 1, H, W), 0..1: how much of the loss counts

    def __len__(self) -> int:
        return len(self.ids)
