"""What flows from the loader to the loss."""

from dataclasses import dataclass, replace

from torch import Tensor

Cond = dict[str, Tensor | list[Tensor]]
"""The text side, with a family's own keys; a list where lengths differ from sample to sample."""


@dataclass(frozen=True)
class PixelBatch:
    """Pictures of one bucket as the loader hands them out, before the VAE and the text encoders."""

    pixels: Tensor  # (B, 3, height, width), -1..1
    captions: tuple[str, ...]
    frame: Tensor  # (B, 6): original height, width; crop top, left; target height, width; in pixels
    weight: Tensor  # (B,): weight of each sample's loss; 0 for padding
    places: tuple[int, ...]  # of each sample in the whole optimizer step, over all ranks
    ids: tuple[str, ...]  # names of the samples, for messages
    mask: Tensor | None = None  # (B, 1, height, width): 1 where the loss counts

    def __len__(self) -> int:
        return len(self.ids)

    def pin_memory(self) -> "PixelBatch":
        """In memory from which an accelerator copies by itself; torch's DataLoader calls this."""
        mask = None if self.mask is None else self.mask.pin_memory()
        return replace(self, pixels=self.pixels.pin_memory(), frame=self.frame.pin_memory(),
                       weight=self.weight.pin_memory(), mask=mask)  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """What the denoiser is trained on; all the rest is as in ``PixelBatch``."""

    latents: Tensor  # (B, C, H, W), in the model's latent space
    cond: Cond
    frame: Tensor
    weight: Tensor
    places: tuple[int, ...]
    ids: tuple[str, ...]
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)
