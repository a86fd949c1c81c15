"""Batches: ``PixelBatch`` from the loader, ``Batch`` for the denoiser, VAE ``Moments``, text conditioning ``Cond``."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..dataset.clip_windows import FIXED_PREFIX, FrameRule
from ..diffusion.noise import copy_async
from .images import BadSample

EXTRA_TEXT_TOKENS = 64
"""Tokens that a lengthened text gains: more than models pad to."""

PROBED_SOUND_LATENTS = 4
"""Latents of sound of a trial batch: attention over a single one gives queries and keys no gradient."""

EXTRA_TEXT = " ".join(["a picture of things, of which nobody knows the name,"] * 4)
TextLength = Literal["same", "longer", "shorter"]
Cond = dict[str, Tensor | list[Tensor]]
"""Text conditioning, with the family's own keys; a list where lengths differ between samples."""


@dataclass(frozen=True)
class Moments:
    """The distribution of latents that the VAE returns: mean and standard deviation."""

    mean_and_std: Tensor  # (B, 2, C, H, W), in the model's latent space; of models of videos (B, 2, C, F, H, W)

    @classmethod
    def from_mean_and_std(cls, mean: Tensor, std: Tensor) -> "Moments":
        """Stack two tensors (B, C, H, W), or (B, C, F, H, W)."""
        return cls(torch.stack([mean, std], dim=1))

    def sample(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Draw latents like the mean; each sample has its own generator, and does not depend on its neighbors."""
        mean, std = self.mean_and_std.float().unbind(1)
        noise = [torch.randn(mean.shape[1:], generator=each, device=each.device) for each in generators]
        return mean + std * copy_async(torch.stack(noise), mean)


@dataclass(frozen=True)
class PixelBatch:
    """Images or windows of clips of one bucket from the loader, before the VAE and the text encoders.

    Pixels and masks are uint8 until they are on the device, a quarter of the size of float32.  From a cache come
    ``moments`` instead of ``pixels``, ``latent_mask`` instead of ``mask``, and ``cond`` next to the captions.
    """

    pixels: Tensor | None  # (B, 3, height, width), 0..255; with several frames (B, 3, frames, height, width)
    captions: tuple[str, ...]
    size_conditioning: Tensor  # (B, 6): original height, width; crop top, left; target height, width; in pixels
    loss_weights: Tensor  # (B,): weight of each sample's loss; 0 for padding
    global_positions: tuple[int, ...]  # the position of each sample in the optimizer step, over all ranks
    sample_keys: tuple[str, ...]  # the names of the samples in messages
    mask: Tensor | None = None  # (B, 1, height, width), 0..255: 255 where the loss counts in full
    bad_samples: tuple[BadSample, ...] = ()  # images replaced by others, with weight 0
    moments: Moments | None = None
    latent_mask: Tensor | None = None  # (B, 1, H, W), 0..1: the cached mask at latent resolution
    cond: Cond | None = None
    control_pixels: tuple[Tensor, ...] = ()  # one tensor for each control image, as ``pixels``
    control_latents: tuple[Tensor, ...] = ()  # cached ones, instead: (B, C, H, W), or (B, C, F, H, W)
    num_references: int = 0  # of these, the last ones: reference images of clips, which have one frame
    control_keys: tuple[str, ...] = ()  # a text for each sample that identifies its control images
    frame_keys: tuple[str, ...] = ()  # a text for each sample that identifies its first frame, without random crop
    frame_cond: dict[str, Tensor] | None = None  # cached ``Batch.frame_cond``
    sound: Tensor | None = None  # (B, latents, channels): cached latents of sound; None where the samples have none
    network_multiplier: float = 1.0  # the strength of the LoRA while the batch is trained

    def __len__(self) -> int:
        return len(self.sample_keys)

    def pin_memory(self) -> "PixelBatch":
        """Copy to pinned memory; torch's DataLoader calls this."""
        return self._map_tensors(Tensor.pin_memory)

    def share_memory(self) -> "PixelBatch":
        """Move to shared memory; ``RuntimeError`` if there is not enough."""
        return self._map_tensors(Tensor.share_memory_)

    def split(self, batch_size: int) -> list["PixelBatch"]:
        """Split into batches of at most ``batch_size`` samples."""
        return [self._slice(slice(first, first + batch_size)) for first in range(0, len(self), batch_size)]

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """The number of frames of pixels or of latents as a shape, which is empty where they have no such axis."""
        if self.moments is not None:
            return tuple(self.moments.mean_and_std.shape[3:-2])
        return () if self.pixels is None else tuple(self.pixels.shape[2:-2])

    def build_dummy_batch(
        self,
        image_size: tuple[int, int],
        batch_size: int,
        control_sizes: Sequence[tuple[int, int]] = (),
        num_frames: int = 1,
        frame_rule: FrameRule | None = None,
        num_references: int | None = None,
    ) -> "PixelBatch":
        """Build a batch of black images of this (width, height), without masks, with these captions repeated.

        With ``num_frames``, they are clips, whose latent frames ``frame_rule``, that of the model, counts; they have
        sound if it counts latents of sound.  The last ``num_references`` control images, by default as many as these
        have, are reference images.
        """
        num_references = self.num_references if num_references is None else num_references
        width, height = image_size
        rows = [number % len(self) for number in range(batch_size)]
        size_conditioning = self.size_conditioning[rows]
        old_sides = size_conditioning[0, 4:].int().tolist()
        size_conditioning[:, 4:] = size_conditioning.new_tensor([height, width])
        frames = (num_frames,) if num_frames > 1 else ()
        if self.moments is not None:
            num_latents = num_frames if frame_rule is None else frame_rule.count_latent_frames(num_frames)
            frames = (num_latents,) if self.frame_shape else ()
        pixels = None if self.pixels is None else self.pixels.new_zeros(batch_size, 3, *frames, height, width)
        moments = self._build_dummy_moments(batch_size, frames, (height, width), old_sides)
        black = self.pixels if self.moments is None else self.moments.mean_and_std[:, 0]
        if black is None:
            raise AssertionError("a batch has pixels or moments")
        factor = 1 if self.moments is None else old_sides[0] // black.shape[-2]
        sizes = [(high // factor, wide // factor) for wide, high in control_sizes]
        num_controls = len(sizes) - num_references
        axes = [*[frames] * num_controls, *[(1,)] * num_references]
        controls = self._build_dummy_controls(black, batch_size, axes, sizes, num_controls)
        cond = None if self.cond is None else {name: _select_rows(value, rows) for name, value in self.cond.items()}
        frame_cond = None
        if self.frame_cond is not None and moments is not None:
            size = moments.mean_and_std.shape[3:]
            frame_cond = {name: _build_zeros(value, batch_size, size) for name, value in self.frame_cond.items()}
        return PixelBatch(
            pixels=pixels,
            captions=tuple(self.captions[row] for row in rows),
            size_conditioning=size_conditioning,
            loss_weights=torch.ones(batch_size),
            global_positions=tuple(range(batch_size)),
            sample_keys=tuple(self.sample_keys[row] for row in rows),
            moments=moments,
            cond=cond,
            control_pixels=controls if self.moments is None else (),
            control_latents=() if self.moments is None else controls,
            num_references=num_references,
            frame_cond=frame_cond,
            sound=None if frame_rule is None else _build_silence(frame_rule, batch_size, num_frames),
            network_multiplier=self.network_multiplier,
        )

    def _build_dummy_moments(
        self, batch_size: int, frames: tuple[int, ...], sides: tuple[int, int], old_sides: Sequence[int]
    ) -> Moments | None:
        """Build zeros for the moments of pictures of these (height, width), where these have some of ``old_sides``."""
        if self.moments is None:
            return None
        latents = self.moments.mean_and_std
        shape = [side * new // old for side, new, old in zip(latents.shape[-2:], sides, old_sides, strict=True)]
        return Moments(latents.new_zeros(batch_size, *latents.shape[1:3], *frames, *shape))

    def _build_dummy_controls(
        self,
        black: Tensor,
        batch_size: int,
        axes: Sequence[tuple[int, ...]],
        sizes: Sequence[tuple[int, int]],
        num_controls: int,
    ) -> tuple[Tensor, ...]:
        """Build black control images, or zeros for their latents; ``axes`` are the frames of each, if it has some.

        Behind ``num_controls`` are reference images, whose latents are like those of the picture.
        """
        channels = [each.shape[1] for each in self.control_latents[: self.num_known_controls]]
        channels = [*channels[:num_controls], *[black.shape[1]] * (len(sizes) - min(num_controls, len(channels)))]
        return tuple(
            black.new_zeros(batch_size, count, *axis, *size)
            for axis, count, size in zip(axes, channels, sizes, strict=True)
        )

    @property
    def num_known_controls(self) -> int:
        """How many controls have cached latents here, whose channels tell those of another batch."""
        return len(self.control_latents) - self.num_references if self.control_latents else 0

    def can_build_controls(self, num_controls: int) -> bool:
        """Whether the channels of so many controls are known, without reference images."""
        return not self.control_latents or num_controls <= self.num_known_controls

    def crop_first_image(self, max_size: int, frame_rule: FrameRule | None = None) -> "PixelBatch":
        """The first image, or the fewest frames that the model takes, without mask and at most ``max_size`` wide and
        high.

        Of a model that is trained on sound, it has some silence, whether the batch has sound or not.
        """
        height, width = self.size_conditioning[0, 4:].int().tolist()
        factor = 1 if self.moments is None else height // self.moments.mean_and_std.shape[-2]
        controls = self.control_pixels or self.control_latents
        control_sizes = [(image.shape[-1] * factor, image.shape[-2] * factor) for image in controls]
        smaller = [(min(width, max_size), min(height, max_size)) for width, height in [(width, height), *control_sizes]]
        least = 1 if frame_rule is None else frame_rule.least
        crop = self.build_dummy_batch(smaller[0], 1, smaller[1:], num_frames=least, frame_rule=frame_rule)
        if crop.pixels is not None and self.pixels is not None:
            _copy_corner(self.pixels, crop.pixels)
        if crop.moments is not None and self.moments is not None:
            _copy_corner(self.moments.mean_and_std, crop.moments.mean_and_std)
        for image, target in zip(controls, crop.control_pixels or crop.control_latents, strict=True):
            _copy_corner(image, target)
        for name, given in (crop.frame_cond or {}).items():
            value = (self.frame_cond or {})[name]
            if given.ndim == 5:
                _copy_corner(value, given)
            else:  # no latents, such as tokens of an image encoder
                given.copy_(value[: len(given)])
        if crop.sound is not None:
            crop = replace(crop, sound=crop.sound.new_zeros(1, PROBED_SOUND_LATENTS, crop.sound.shape[2]))
        return crop

    def vary_text_lengths(self, lengths: Sequence[TextLength]) -> "PixelBatch":
        """Give every sample the first text, made longer or shorter where the family's texts vary in length."""
        cond: Cond | None = None
        if self.cond is not None:
            cond = {
                name: [_resize_text(value[0], length) for length in lengths]
                if isinstance(value, list) and not name.startswith(FIXED_PREFIX)
                else value
                for name, value in self.cond.items()
            }
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
            control_keys=self.control_keys[rows],
            frame_keys=self.frame_keys[rows],
            bad_samples=self.bad_samples if rows.start == 0 else (),
        )

    def _map_tensors(self, fn: Callable[[Tensor], Tensor]) -> "PixelBatch":
        values = [(item.name, getattr(self, item.name)) for item in fields(self)]
        changed: dict[str, Any] = {name: fn(value) for name, value in values if isinstance(value, Tensor)}
        for name in ("control_pixels", "control_latents"):
            changed[name] = tuple(map(fn, getattr(self, name)))
        moments = None if self.moments is None else Moments(fn(self.moments.mean_and_std))
        cond = None if self.cond is None else map_cond_tensors(self.cond, fn)
        frame_cond = None
        if self.frame_cond is not None:
            frame_cond = {name: fn(value) for name, value in self.frame_cond.items()}
        return replace(self, moments=moments, cond=cond, frame_cond=frame_cond, **changed)


def _resize_text(text: Tensor, length: TextLength) -> Tensor:
    if length == "longer":
        return torch.cat([text, text[:1].expand(EXTRA_TEXT_TOKENS, *text.shape[1:])])
    return text[:2] if length == "shorter" else text


def _copy_corner(images: Tensor, target: Tensor) -> None:
    """Copy the corner of the first images, and of clips the first frame, which ``target`` may have without an axis."""
    corner = images[: len(target), ..., : target.shape[-2], : target.shape[-1]]
    if corner.ndim > target.ndim:
        corner = corner[..., 0, :, :]
    elif corner.shape[-3] != target.shape[-3]:
        corner = corner[..., : target.shape[-3], :, :]
    target.copy_(corner)


def _build_zeros(value: Tensor, batch_size: int, size: Sequence[int]) -> Tensor:
    """Build zeros like a tensor of ``frame_cond``, of which latents (B, C, F, H, W) have the size of the batch's.

    Those of a first frame alone, or of an image, have one frame.
    """
    if value.ndim != 5:
        return value.new_zeros(batch_size, *value.shape[1:])
    frames = size[0] if value.shape[2] > 1 else 1
    return value.new_zeros(batch_size, value.shape[1], frames, *size[-2:])


def _build_silence(rule: FrameRule, batch_size: int, num_frames: int) -> Tensor | None:
    """Build latents of sound that are zeros; None for a model that is trained without."""
    if not rule.sound_rate:
        return None
    return torch.zeros(batch_size, rule.count_sound_latents(num_frames), rule.sound_channels)


def _select_rows(value: Tensor | list[Tensor], rows: Sequence[int]) -> Tensor | list[Tensor]:
    return [value[row] for row in rows] if isinstance(value, list) else value[list(rows)]


def normalize_pixels(pixels: Tensor) -> Tensor:
    """Convert uint8 to -1..1, bit-identically on every device.

    The divisor is a tensor, because torch on CUDA multiplies by the inverse of a Python number and rounds differently.
    """
    return pixels.float().div(torch.full((), 127.5, device=pixels.device)).sub(1)


def concatenate_cond(conds: Sequence[Cond]) -> Cond:
    """Concatenate the conditioning of several batches of captions."""
    if len(conds) == 1:
        return conds[0]
    joined: Cond = {}
    for name, first in conds[0].items():
        values = [cond[name] for cond in conds]
        if isinstance(first, list):
            joined[name] = [item for value in values for item in value]
        else:
            joined[name] = torch.cat([value for value in values if isinstance(value, Tensor)])
    return joined


def map_cond_tensors(cond: Cond, fn: Callable[[Tensor], Tensor]) -> Cond:
    """Apply ``fn`` to every tensor."""
    return {
        name: [fn(item) for item in value] if isinstance(value, list) else fn(value) for name, value in cond.items()
    }


@dataclass(frozen=True)
class Batch:
    """The input of the denoiser; fields without a comment are those of ``PixelBatch``."""

    latents: Tensor  # (B, C, H, W), in the model's latent space; of models of videos (B, C, F, H, W)
    cond: Cond
    size_conditioning: Tensor
    loss_weights: Tensor
    global_positions: tuple[int, ...]
    sample_keys: tuple[str, ...]
    mask: Tensor | None = None  # (B, 1, H, W), 0..1: weight of the loss, of all frames
    text_pad_multiple: int = 1  # texts of varying length are padded to a multiple of this, and masked
    control_latents: tuple[Tensor, ...] = ()  # one tensor for each control image, as ``Family.encode_control`` returns
    resolution_sides: tuple[int, ...] = ()  # sides in pixels of squares with the areas of the datasets' resolutions
    frame_cond: Mapping[str, Tensor] = field(default_factory=dict)
    """What a model that continues images gets of the clip's own frames, by the family's own keys."""
    sound: Tensor | None = None  # (B, latents, channels): clean latents of sound; None where the samples have none
    noisy_sound: Tensor | None = None  # the same with noise, at the noise levels that belong to those of the frames
    expert: str = ""
    """The expert of the noise levels of this batch, where the model has two."""
    build_draws: Callable[[str], list[random.Random]] | None = None
    """Build a generator for each sample by what is drawn; None where nothing may be random, as in validation."""

    def __len__(self) -> int:
        return len(self.sample_keys)
