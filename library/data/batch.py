"""What flows from the loader to the loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..diffusion.noise import copy_async
from .images import BadSample

EXTRA_TEXT_TOKENS = 64
"""Rows of a text: more than models fill up to."""


EXTRA_TEXT = " ".join(["a picture of things, of which nobody knows the name,"] * 4)


TextLength = Literal["same", "longer", "shorter"]


Cond = dict[str, Tensor | list[Tensor]]
"""The text side, with a family's own keys; a list where lengths differ from sample to sample."""


@dataclass(frozen=True)
class Moments:
    """What a VAE says of pictures: each latent lies around its mean, as far off as its standard deviation says."""

    mean_and_std: Tensor  # (B, 2, C, H, W): mean and standard deviation, in the model's latent space

    @classmethod
    def from_mean_and_std(cls, mean: Tensor, std: Tensor) -> "Moments":
        """Both as (B, C, H, W)."""
        return cls(torch.stack([mean, std], dim=1))

    def sample(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Latents (B, C, H, W), of each sample by its own generator, so that none depends on the others."""
        mean, std = self.mean_and_std.float().unbind(1)
        noise = [torch.randn(mean.shape[1:], generator=each, device=each.device) for each in generators]
        return mean + std * copy_async(torch.stack(noise), mean)


@dataclass(frozen=True)
class PixelBatch:
    """Pictures of one bucket as the loader hands them out, before the VAE and the text encoders.

    Pixels and masks are bytes until they are on the device, a quarter of what the same numbers would be in floats.
    What was kept takes the place of what it was made from: ``moments`` of ``pixels``, ``latent_mask`` of ``mask``, and
    ``cond`` stands beside the captions.
    """

    pixels: Tensor | None  # (B, 3, height, width), 0..255
    captions: tuple[str, ...]
    size_conditioning: Tensor  # (B, 6): original height, width; crop top, left; target height, width; in pixels
    loss_weights: Tensor  # (B,): weight of each sample's loss; 0 for padding
    global_positions: tuple[int, ...]  # of each sample in the whole optimizer step, over all ranks
    sample_keys: tuple[str, ...]  # names of the samples, for messages
    mask: Tensor | None = None  # (B, 1, height, width), 0..255: 255 where the loss counts in full
    bad_samples: tuple[BadSample, ...] = ()  # of pictures in whose places others stand, with weight 0
    moments: Moments | None = None
    latent_mask: Tensor | None = None  # (B, 1, H, W), 0..1: the mask of what was kept, as a share of each latent
    cond: Cond | None = None

    def __len__(self) -> int:
        return len(self.sample_keys)

    def pin_memory(self) -> "PixelBatch":
        """In memory from which an accelerator copies by itself; torch's DataLoader calls this."""
        return self._map_tensors(Tensor.pin_memory)

    def share_memory(self) -> "PixelBatch":
        """In memory that other processes see, too; ``RuntimeError`` when there is no more of it."""
        return self._map_tensors(Tensor.share_memory_)

    def split(self, batch_size: int) -> list["PixelBatch"]:
        """The same samples in batches of at most ``size``."""
        return [self._slice(slice(first, first + batch_size)) for first in range(0, len(self), batch_size)]

    def build_dummy_batch(self, image_size: tuple[int, int], batch_size: int) -> "PixelBatch":
        """So many of the same samples, with black pictures of this width and height and without masks."""
        width, height = image_size
        rows = [number % len(self) for number in range(batch_size)]
        frame = self.size_conditioning[rows]
        before = frame[0, 4:].int().tolist()
        frame[:, 4:] = frame.new_tensor([height, width])
        pixels = None if self.pixels is None else self.pixels.new_zeros(batch_size, 3, height, width)
        moments = None
        if self.moments is not None:
            both = self.moments.mean_and_std
            sides = [side * new // old for side, new, old in zip(both.shape[-2:], (height, width), before, strict=True)]
            moments = Moments(both.new_zeros(batch_size, *both.shape[1:3], *sides))
        cond = None if self.cond is None else {name: _select_rows(value, rows) for name, value in self.cond.items()}
        captions, ids = (tuple(names[row] for row in rows) for names in (self.captions, self.sample_keys))
        return PixelBatch(
            pixels, captions, frame, torch.ones(batch_size), tuple(range(batch_size)), ids, moments=moments, cond=cond
        )

    def vary_text_lengths(self, lengths: Sequence[TextLength]) -> "PixelBatch":
        """The first text for all samples: as it is, longer or shorter for each, where texts differ in length at all."""
        cond = (
            None
            if self.cond is None
            else {
                name: [_resize_text(value[0], length) for length in lengths] if isinstance(value, list) else value
                for name, value in self.cond.items()
            }
        )
        captions = {"same": self.captions[0], "longer": f"{self.captions[0]} {EXTRA_TEXT}", "shorter": "a"}
        return replace(self, cond=cond, captions=tuple(captions[length] for length in lengths))

    def _slice(self, rows: slice) -> "PixelBatch":
        part = self._map_tensors(lambda tensor: tensor[rows])
        cond = None if self.cond is None else {name: value[rows] for name, value in self.cond.items()}
        return replace(
            part,
            cond=cond,
            captions=self.captions[rows],
            global_positions=self.global_positions[rows],
            sample_keys=self.sample_keys[rows],
            bad_samples=self.bad_samples if rows.start == 0 else (),
        )

    def _map_tensors(self, fn: Callable[[Tensor], Tensor]) -> "PixelBatch":
        values = [(item.name, getattr(self, item.name)) for item in fields(self)]
        changed: dict[str, Any] = {name: fn(value) for name, value in values if isinstance(value, Tensor)}
        moments = None if self.moments is None else Moments(fn(self.moments.mean_and_std))
        cond = None if self.cond is None else map_cond_tensors(self.cond, fn)
        return replace(self, moments=moments, cond=cond, **changed)


def _resize_text(text: Tensor, length: TextLength) -> Tensor:
    if length == "longer":
        return torch.cat([text, text[:1].expand(EXTRA_TEXT_TOKENS, *text.shape[1:])])
    return text[:2] if length == "shorter" else text


def _select_rows(value: Tensor | list[Tensor], rows: Sequence[int]) -> Tensor | list[Tensor]:
    return [value[row] for row in rows] if isinstance(value, list) else value[list(rows)]


def normalize_pixels(pixels: Tensor) -> Tensor:
    """Bytes as numbers from -1 to 1, the same to the bit on every device.

    The divisor is a tensor, because on CUDA torch multiplies by the inverse of a plain number and rounds differently.
    """
    return pixels.float().div(torch.full((), 127.5, device=pixels.device)).sub(1)


def concatenate_cond(conds: Sequence[Cond]) -> Cond:
    """The conditioning of several lists of captions as that of all of them."""
    if len(conds) == 1:
        return conds[0]
    whole: Cond = {}
    for name, first in conds[0].items():
        values = [part[name] for part in conds]
        if isinstance(first, list):
            whole[name] = [item for value in values for item in value]
        else:
            whole[name] = torch.cat([value for value in values if isinstance(value, Tensor)])
    return whole


def map_cond_tensors(cond: Cond, fn: Callable[[Tensor], Tensor]) -> Cond:
    """``cond`` with ``change`` done to every tensor in it."""
    return {
        name: [fn(item) for item in value] if isinstance(value, list) else fn(value) for name, value in cond.items()
    }


@dataclass(frozen=True)
class Batch:
    """What the denoiser is trained on; all the rest is as in ``PixelBatch``."""

    latents: Tensor  # (B, C, H, W), in the model's latent space
    cond: Cond
    size_conditioning: Tensor
    loss_weights: Tensor
    global_positions: tuple[int, ...]
    sample_keys: tuple[str, ...]
    mask: Tensor | None = None  # (B, 1, H, W), 0..1: how much of the loss counts
    text_pad_multiple: int = 1  # texts that vary in length are filled up to a multiple of so many tokens, and masked

    def __len__(self) -> int:
        return len(self.sample_keys)
