"""One batch to one loss per sample: encode, draw noise, predict, compare."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.regularization import LoraDropout
from ..cache.readers import TextReader
from ..data.batch import Batch, Cond, Moments, PixelBatch, concatenate_cond, map_cond_tensors, normalize_pixels
from ..diffusion.losses import reduce_loss_per_sample, resize_mask_to_latents
from ..diffusion.objective import Objective
from ..distributed.async_copy import CopyStream
from ..distributed.memory import record_phase
from ..models.base import Family
from ..randomness import derive_generator, derive_seed


@dataclass(frozen=True)
class MicroBatchStats:
    """What one micro-batch was like; the tensors stay on the device until somebody reads them."""

    timesteps: Tensor  # (B,): the time of each sample, 0..1, where 1 is noise
    losses: Tensor  # (B,): its loss before the sample's own weight
    loss_weights: Tensor  # (B,): 0 for padding
    sample_keys: tuple[str, ...]
    global_positions: tuple[int, ...]


@dataclass
class DiffusionTask:
    """What one sample means; how samples are spread over processes is the strategy's business."""

    family: Family
    pipe: Any
    denoiser: nn.Module  # as wrapped by the strategy
    objective: Objective
    seed: int
    to_device: CopyStream
    """Brings tensors to the device while it computes."""
    normalize_masked_loss: bool = False  # a picture weighs the same however much of it a mask leaves
    vae_batch_size: int = 1
    text_encoder_batch_size: int = 1
    text_reader: TextReader | None = None  # where captions are encoded already
    trains_text_encoders: bool = False
    dropout: LoraDropout | None = None
    pads_texts: bool = False
    """Whether texts are filled up, so that batches differ in size less often."""
    micro_batch_stats: list[MicroBatchStats] = field(default_factory=list)
    """The micro-batches of the latest optimizer step on this process."""
    stats_step: int = -1
    """The optimizer step that ``seen`` is of."""

    def __call__(self, pixel_batch: PixelBatch, step: int) -> Tensor:
        """Weighted losses (B,) of a batch in optimizer step ``step``."""
        self.seed_dropout(pixel_batch, step)
        with record_phase("encode", pixel_batch):
            batch = self.encode(pixel_batch, step)
        noised = self.objective.add_noise(
            batch.latents, partial(self.build_generators, step=step, global_positions=batch.global_positions)
        )
        predicted = self.family.predict(self.pipe, self.denoiser, noised.latents, noised.timesteps, batch)
        loss = self.objective.compute_elementwise_loss(predicted, noised)
        losses = reduce_loss_per_sample(
            loss, batch.mask, normalize_by_area=self.normalize_masked_loss
        ) * self.objective.compute_loss_weights(noised.timesteps)
        self._record_stats(
            MicroBatchStats(
                noised.timesteps / 1000, losses.detach(), batch.loss_weights, batch.sample_keys, batch.global_positions
            ),
            step,
        )
        return losses * batch.loss_weights

    def seed_dropout(self, pixel_batch: PixelBatch, step: int) -> None:
        """What is left out at random is that of this batch, also where it is computed again for the backward pass."""
        if self.dropout is not None:
            keys = [derive_seed(self.seed, "dropout", step, place) % 2**62 for place in pixel_batch.global_positions]
            self.dropout.sample_keys = self.to_device(torch.tensor(keys))

    def _record_stats(self, stats: MicroBatchStats, step: int) -> None:
        """Once each, in the plan's order: some are tried first, and those of one size may come before others."""
        if step != self.stats_step:
            self.micro_batch_stats, self.stats_step = [], step
        self.micro_batch_stats[:] = sorted(
            [*(old for old in self.micro_batch_stats if old.global_positions != stats.global_positions), stats],
            key=lambda each: each.global_positions,
        )

    def get_shape_key(self, pixel_batch: PixelBatch) -> Hashable:
        """Batches of which it is the same make tensors of the same sizes."""
        text = self._compute_text_length(pixel_batch) if self.family.has_variable_text_length else None
        return len(pixel_batch), tuple(pixel_batch.size_conditioning[0, -2:].tolist()), pixel_batch.mask is None, text

    def _compute_text_length(self, pixel_batch: PixelBatch) -> int:
        """Of the longest text, as the denoiser has it; whoever encodes it need not have done so."""
        cond = pixel_batch.cond or self.family.encode_prompts_on_meta(self.pipe, pixel_batch.captions)
        longest = max(len(text) for texts in cond.values() for text in texts)
        multiple = lcm(self.family.denoiser_text_multiple, self._text_multiple)
        return -(-longest // multiple) * multiple

    @property
    def _text_multiple(self) -> int:
        return self.family.pad_text_to_multiple_of if self.pads_texts else 1

    def reset_stats(self) -> None:
        """The step comes again from its first micro-batch on."""
        self.stats_step = -1

    def encode(self, pixel_batch: PixelBatch, step: int) -> Batch:
        """Pictures to latents and captions to conditioning, as far as that is not done."""
        with torch.set_grad_enabled(self.trains_text_encoders and torch.is_grad_enabled()):
            cond = (
                self.encode_text(pixel_batch.captions)
                if pixel_batch.cond is None
                else map_cond_tensors(pixel_batch.cond, self.to_device)
            )
        with torch.no_grad():
            return self._build_batch(pixel_batch, cond, step)

    def _build_batch(self, pixel_batch: PixelBatch, cond: Cond, step: int) -> Batch:
        kept = pixel_batch.moments
        moments = (
            self.encode_moments(pixel_batch.pixels) if kept is None else Moments(self.to_device(kept.mean_and_std))
        )
        latents = moments.sample(self.build_generators("vae", step, pixel_batch.global_positions))
        frame, weight = self.to_device(pixel_batch.size_conditioning), self.to_device(pixel_batch.loss_weights)
        mask = None if pixel_batch.latent_mask is None else self.to_device(pixel_batch.latent_mask)
        if pixel_batch.mask is not None:
            mask = resize_mask_to_latents(self.to_device(pixel_batch.mask), (latents.shape[-2], latents.shape[-1]))
        return Batch(
            latents,
            cond,
            frame,
            weight,
            pixel_batch.global_positions,
            pixel_batch.sample_keys,
            mask,
            self._text_multiple,
        )

    def encode_moments(self, pixels: Tensor | None) -> Moments:
        """What the VAE says of pictures, as many at once as it is to take."""
        if pixels is None:
            raise AssertionError("a batch has pixels or moments")
        with torch.autocast(self.to_device.device.type, enabled=False):  # the VAE overflows in half precision
            parts = [
                self.family.encode_moments(self.pipe, normalize_pixels(self.to_device(part))).mean_and_std
                for part in torch.split(pixels, self.vae_batch_size)
            ]
        return Moments(torch.cat(parts))

    def encode_text(self, captions: Sequence[str]) -> Cond:
        """Conditioning for captions: what was kept, or else as many at once as the text encoders are to take."""
        if self.text_reader is not None:
            return map_cond_tensors(self.text_reader.read_cond(captions), self.to_device)
        size = (
            len(captions) if self.trains_text_encoders else self.text_encoder_batch_size
        )  # their graph is kept for all of them
        parts = [
            self.family.encode_prompts(self.pipe, list(captions[first : first + size]))
            for first in range(0, len(captions), size)
        ]
        return concatenate_cond(parts)

    def build_generators(self, purpose: str, step: int, global_positions: tuple[int, ...]) -> list[torch.Generator]:
        """A generator of its own for each sample: a function of (seed, purpose, step, place in the step).

        So one device with four micro-steps, four devices with one, and a resumed run all draw the same.
        """
        return [derive_generator(self.seed, purpose, step, place) for place in global_positions]
