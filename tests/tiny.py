"""Tiny pipelines with random weights for the contract test, one or more for each family, and a batch for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DDIMScheduler

from library.data.batch import Batch, Cond
from library.demo import stand_in

HEIGHT, WIDTH = 64, 96  # never square, and FRAME never symmetric: a swap must show
FRAME = [80.0, 120.0, 8.0, 4.0, HEIGHT, WIDTH]


@dataclass(frozen=True)
class Tiny:
    family: str
    pipe: Any
    batch: Batch
    call: dict[str, Any]  # how the diffusers pipeline is given the same conditioning


def batch_of(latents: torch.Tensor, cond: Cond) -> Batch:
    count = len(latents)
    names = tuple(f"sample {number}" for number in range(count))
    return Batch(latents, cond, torch.tensor([FRAME] * count), torch.ones(count), tuple(range(count)), names)


def sd1() -> Tiny:
    draw = torch.Generator().manual_seed(3)
    embeds = torch.randn(2, 77, 64, generator=draw)
    latents = torch.randn(2, 4, HEIGHT // 8, WIDTH // 8, generator=draw)
    return Tiny("sd1", stand_in.build(), batch_of(latents, {"embeds": embeds}), {"prompt_embeds": embeds})


def sd1_velocity() -> Tiny:
    tiny = sd1()
    tiny.pipe.scheduler = DDIMScheduler.from_config(tiny.pipe.scheduler.config, prediction_type="v_prediction")
    return tiny


TINY: dict[str, Callable[[], Tiny]] = {"sd1": sd1, "sd1_velocity": sd1_velocity}
