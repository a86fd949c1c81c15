"""Tiny pipelines with random weights for the contract test, one or more for each family, and a batch for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor

from library.data.batch import Batch, Cond
from library.demo import stand_in
from library.families import FAMILIES

HEIGHT, WIDTH = 64, 96  # never square, and FRAME never symmetric: a swap must show
FRAME = [80.0, 120.0, 8.0, 4.0, HEIGHT, WIDTH]


def _same(latents: Tensor) -> Tensor:
    return latents


@dataclass(frozen=True)
class Tiny:
    """A model, and how diffusers is asked for the same thing."""

    family: str
    pipe: Any
    batch: Batch
    call: dict[str, Any]
    """How the diffusers pipeline is given the batch's conditioning and sizes."""
    sizes: dict[str, Any]
    """The part of ``call`` that is no conditioning, for a call with texts."""
    encode: Callable[[Any, Tensor, Sequence[torch.Generator]], Tensor]
    """Pixels to latents by a diffusers pipeline: (pipe, pixels, generators)."""
    source: str
    """``Family.load`` makes the same kind of model from it."""
    packed: Callable[[Tensor], Tensor] = _same
    """Latents as the family has them -> as the diffusers pipeline and its scheduler have them."""
    unpacked: Callable[[Tensor], Tensor] = _same
    """The way back."""


def batch_of(latents: torch.Tensor, cond: Cond) -> Batch:
    count = len(latents)
    names = tuple(f"sample {number}" for number in range(count))
    return Batch(latents, cond, torch.tensor([FRAME] * count), torch.ones(count), tuple(range(count)), names)


def _draws(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(2, *shape, generator=draw) for shape in shapes]


def _load(source: str) -> Any:
    return FAMILIES.get(source.split(":")[1])().load(source, torch.float32)


def _inpainted(name: str) -> Callable[[Any, Tensor, Sequence[torch.Generator]], Tensor]:
    """How diffusers' own inpainting encodes pictures."""

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        judge = getattr(diffusers, name)(**pipe.components)
        return judge._encode_vae_image(pixels, list(generators))

    return encode


def _one_encoder(family: str, source: str, pipe: Any, width: int) -> Tiny:
    embeds, latents = _draws((77, width), (4, HEIGHT // 8, WIDTH // 8))
    return Tiny(family, pipe, batch_of(latents, {"embeds": embeds}), {"prompt_embeds": embeds}, {},
                _inpainted("StableDiffusionInpaintPipeline"), source)  # fmt: skip


def built_in() -> Tiny:
    return _one_encoder("sd1", "random:sd1:tiny", stand_in.build(), 64)


def sd1() -> Tiny:
    return _one_encoder("sd1", "random:sd1:tiny", _load("random:sd1:tiny"), 64)


def sd1_velocity() -> Tiny:
    tiny = sd1()
    tiny.pipe.scheduler = diffusers.DDIMScheduler.from_config(tiny.pipe.scheduler.config,
                                                              prediction_type="v_prediction")  # fmt: skip
    return tiny


def sd2() -> Tiny:
    return _one_encoder("sd2", "random:sd2:tiny", _load("random:sd2:tiny"), 48)


def sd2_epsilon() -> Tiny:
    return _one_encoder("sd2", "random:sd2:tinybase", _load("random:sd2:tinybase"), 48)


def sdxl() -> Tiny:
    embeds, pooled, latents = _draws((77, 40), (24,), (4, HEIGHT // 8, WIDTH // 8))
    sizes = {"original_size": (80, 120), "crops_coords_top_left": (8, 4), "target_size": (HEIGHT, WIDTH)}
    return Tiny("sdxl", _load("random:sdxl:tiny"), batch_of(latents, {"embeds": embeds, "pooled": pooled}),
                {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, **sizes}, sizes,
                _inpainted("StableDiffusionXLInpaintPipeline"), "random:sdxl:tiny")  # fmt: skip


def sdxl_velocity() -> Tiny:
    tiny = sdxl()
    tiny.pipe.scheduler = diffusers.DDIMScheduler.from_config(tiny.pipe.scheduler.config,
                                                              prediction_type="v_prediction")  # fmt: skip
    return tiny


TINY: dict[str, Callable[[], Tiny]] = {
    "built_in": built_in, "sd1": sd1, "sd1_velocity": sd1_velocity, "sd2": sd2, "sd2_epsilon": sd2_epsilon,
    "sdxl": sdxl, "sdxl_velocity": sdxl_velocity,
}  # fmt: skip
