"""One batch to one loss per sample: encode, draw noise, predict, compare."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.dropout import Dropout
from ..data.batch import Batch, Cond, Moments, PixelBatch, as_model_input, each_tensor, joined
from ..data.cache.texts import TextReader
from ..diffusion.masking import in_latents, mean_loss
from ..diffusion.objective import Objective
from ..distributed.copies import Copies
from ..distributed.memory import phase
from ..families.base import Family
from ..randomness import seed_for


@dataclass(frozen=True)
class Seen:
    """What one micro-batch was like; the tensors stay on the device until somebody reads them."""

    t: Tensor  # (B,): the time of each sample, 0..1, where 1 is noise
    loss: Tensor  # (B,): its loss before the sample's own weight
    weight: Tensor  # (B,): 0 for padding
    ids: tuple[str, ...]
    places: tuple[int, ...]


@dataclass
class Task:
    """What one sample means; how samples are spread over processes is the strategy's business."""

    family: Family
    pipe: Any
    denoiser: nn.Module  # as wrapped by the strategy
    objective: Objective
    seed: int
    here: Copies
    """Brings tensors to the device while it computes."""
    masks_by_area: bool = False  # a picture weighs the same however much of it a mask leaves
    pictures_at_once: int = 1
    captions_at_once: int = 1
    texts: TextReader | None = None  # where captions are encoded already
    trains_texts: bool = False
    dropout: Dropout | None = None
    evens_texts: bool = False
    """Whether texts are filled up, so that batches differ in size less often."""
    seen: list[Seen] = field(default_factory=list)
    """The micro-batches of the latest optimizer step on this process."""
    seen_in: int = -1
    """The optimizer step that ``seen`` is of."""

    def __call__(self, pixels: PixelBatch, step: int) -> Tensor:
        """Weighted losses (B,) of a batch in optimizer step ``step``."""
        self.recall(pixels, step)
        with phase("encode", pixels):
            batch = self.encode(pixels, step)
        noised = self.objective.noised(batch.latents, partial(self.generators, step=step, places=batch.places))
        predicted = self.family.predict(self.pipe, self.denoiser, noised.latents, noised.t, batch)
        loss = self.objective.elementwise(predicted, noised)
        losses = mean_loss(loss, batch.mask, by_area=self.masks_by_area) * self.objective.weights(noised.t)
        self._note(Seen(noised.t / 1000, losses.detach(), batch.weight, batch.ids, batch.places), step)
        return losses * batch.weight

    def recall(self, pixels: PixelBatch, step: int) -> None:
        """What is left out at random is that of this batch, also where it is computed again for the backward pass."""
        if self.dropout is not None:
            keys = [seed_for(self.seed, "dropout", step, place) % 2**62 for place in pixels.places]
            self.dropout.keys = self.here(torch.tensor(keys))

    def _note(self, seen: Seen, step: int) -> None:
        """Once each, in the plan's order: some are tried first, and those of one size may come before others."""
        if step != self.seen_in:
            self.seen, self.seen_in = [], step
        self.seen[:] = sorted([*(old for old in self.seen if old.places != seen.places), seen],
                              key=lambda each: each.places)  # fmt: skip

    def shape_of(self, pixels: PixelBatch) -> Hashable:
        """Batches of which it is the same make tensors of the same sizes."""
        text = self._text_length(pixels) if self.family.texts_vary else None
        return len(pixels), tuple(pixels.frame[0, -2:].tolist()), pixels.mask is None, text

    def _text_length(self, pixels: PixelBatch) -> int:
        """Of the longest text, as the denoiser has it; whoever encodes it need not have done so."""
        cond = pixels.cond or self.family.outline_prompts(self.pipe, pixels.captions)
        longest = max(len(text) for texts in cond.values() for text in texts)
        multiple = lcm(self.family.text_steps, self._text_multiple)
        return -(-longest // multiple) * multiple

    @property
    def _text_multiple(self) -> int:
        return self.family.text_padding if self.evens_texts else 1

    def forget(self) -> None:
        """The step comes again from its first micro-batch on."""
        self.seen_in = -1

    def encode(self, pixels: PixelBatch, step: int) -> Batch:
        """Pictures to latents and captions to conditioning, as far as that is not done."""
        with torch.set_grad_enabled(self.trains_texts and torch.is_grad_enabled()):
            cond = self.text(pixels.captions) if pixels.cond is None else each_tensor(pixels.cond, self.here)
        with torch.no_grad():
            return self._encoded(pixels, cond, step)

    def _encoded(self, pixels: PixelBatch, cond: Cond, step: int) -> Batch:
        kept = pixels.moments
        moments = self.moments(pixels.pixels) if kept is None else Moments(self.here(kept.both))
        latents = moments.drawn(self.generators("vae", step, pixels.places))
        frame, weight = self.here(pixels.frame), self.here(pixels.weight)
        mask = None if pixels.latent_mask is None else self.here(pixels.latent_mask)
        if pixels.mask is not None:
            mask = in_latents(self.here(pixels.mask), (latents.shape[-2], latents.shape[-1]))
        return Batch(latents, cond, frame, weight, pixels.places, pixels.ids, mask, self._text_multiple)

    def moments(self, pixels: Tensor | None) -> Moments:
        """What the VAE says of pictures, as many at once as it is to take."""
        if pixels is None:
            raise AssertionError("a batch has pixels or moments")
        with torch.autocast(self.here.device.type, enabled=False):  # the VAE overflows in half precision
            parts = [self.family.encode_moments(self.pipe, as_model_input(self.here(part))).both
                     for part in torch.split(pixels, self.pictures_at_once)]  # fmt: skip
        return Moments(torch.cat(parts))

    def text(self, captions: Sequence[str]) -> Cond:
        """Conditioning for captions: what was kept, or else as many at once as the text encoders are to take."""
        if self.texts is not None:
            return each_tensor(self.texts.cond(captions), self.here)
        size = len(captions) if self.trains_texts else self.captions_at_once  # their graph is kept for all of them
        parts = [self.family.encode_prompts(self.pipe, list(captions[first : first + size]))
                 for first in range(0, len(captions), size)]  # fmt: skip
        return joined(parts)

    def generators(self, purpose: str, step: int, places: tuple[int, ...]) -> list[torch.Generator]:
        """A generator of its own for each sample: a function of (seed, purpose, step, place in the step).

        So one device with four micro-steps, four devices with one, and a resumed run all draw the same.
        """
        return [torch.Generator().manual_seed(seed_for(self.seed, purpose, step, place)) for place in places]
