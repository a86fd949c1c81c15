"""One batch to one loss per sample: encode, draw noise, predict, compare."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch, PixelBatch, as_model_input
from ..diffusion.masking import in_latents, mean_loss
from ..diffusion.objective import Objective
from ..families.base import Family
from ..randomness import seed_for


@dataclass(frozen=True)
class Seen:
    """What one micro-batch was like; the tensors stay on the device until somebody reads them."""

    t: Tensor  # (B,): the time of each sample, 0..1, where 1 is noise
    loss: Tensor  # (B,): its loss before the sample's own weight
    weight: Tensor  # (B,): 0 for padding
    ids: tuple[str, ...]


@dataclass
class Task:
    """What one sample means; how samples are spread over processes is the strategy's business."""

    family: Family
    pipe: Any
    denoiser: nn.Module  # as wrapped by the strategy
    objective: Objective
    seed: int
    device: torch.device
    masks_by_area: bool = False  # a picture weighs the same however much of it a mask leaves
    seen: list[Seen] = field(default_factory=list)
    """The micro-batches of the latest optimizer step on this process."""
    seen_in: int = -1
    """The optimizer step that ``seen`` is of."""

    def __call__(self, pixels: PixelBatch, step: int) -> Tensor:
        """Weighted losses (B,) of a batch in optimizer step ``step``."""
        batch = self.encode(pixels, step)
        noised = self.objective.noised(batch.latents, partial(self.generators, step=step, places=batch.places))
        predicted = self.family.predict(self.pipe, self.denoiser, noised.latents, noised.t, batch)
        loss = self.objective.elementwise(predicted, noised)
        losses = mean_loss(loss, batch.mask, by_area=self.masks_by_area) * self.objective.weights(noised.t)
        self._note(Seen(noised.t / 1000, losses.detach(), batch.weight, batch.ids), step)
        return losses * batch.weight

    def _note(self, seen: Seen, step: int) -> None:
        if step != self.seen_in:
            self.seen, self.seen_in = [], step
        self.seen.append(seen)

    @torch.no_grad()
    def encode(self, pixels: PixelBatch, step: int) -> Batch:
        """Pictures to latents and captions to conditioning; both encoders are frozen."""
        draws = self.generators("vae", step, pixels.places)
        with torch.autocast(self.device.type, enabled=False):  # the VAE overflows in half precision
            values = as_model_input(pixels.pixels.to(self.device, non_blocking=True))
            latents = self.family.encode_pixels(self.pipe, values, draws)
        cond = self.family.encode_prompts(self.pipe, list(pixels.captions))
        frame, weight = (
            pixels.frame.to(self.device, non_blocking=True),
            pixels.weight.to(self.device, non_blocking=True),
        )
        mask = pixels.mask
        if mask is not None:
            mask = in_latents(mask.to(self.device, non_blocking=True), (latents.shape[-2], latents.shape[-1]))
        return Batch(latents, cond, frame, weight, pixels.places, pixels.ids, mask)

    def generators(self, purpose: str, step: int, places: tuple[int, ...]) -> list[torch.Generator]:
        """A generator of its own for each sample: a function of (seed, purpose, step, place in the step).

        So one device with four micro-steps, four devices with one, and a resumed run all draw the same.
        """
        return [torch.Generator().manual_seed(seed_for(self.seed, purpose, step, place)) for place in places]
