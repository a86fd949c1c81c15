"""Tiny pipelines with random weights for the contract test, one or more for each family, and a batch for each."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import tiny_sd1
import torch
from torch import Tensor

from library.data.batch import Batch, Cond
from library.models.families import FAMILIES

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
    scale: str = "guidance_scale"
    """What the diffusers pipeline calls the guidance that compares with a negative prompt."""
    unguided: float = 1.0
    """The value that switches it off."""
    texts: dict[str, Any] = field(default_factory=dict)
    """How the diffusers pipeline is told to read texts as the family does."""


def batch_of(latents: torch.Tensor, cond: Cond) -> Batch:
    count = len(latents)
    names = tuple(f"sample {number}" for number in range(count))
    return Batch(latents, cond, torch.tensor([FRAME] * count), torch.ones(count), tuple(range(count)), names)


def _draws(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(2, *shape, generator=draw) for shape in shapes]


def _load(source: str) -> Any:
    return FAMILIES.get(source.split(":")[1])().load(source, torch.float32)


def _inpainted(name: str, **others: Any) -> Callable[[Any, Tensor, Sequence[torch.Generator]], Tensor]:
    """How diffusers' own inpainting encodes pictures."""

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        judge = getattr(diffusers, name)(**{**pipe.components, **others})
        return judge._encode_vae_image(pixels, list(generators))

    return encode


def _one_encoder(family: str, source: str, pipe: Any, width: int) -> Tiny:
    embeds, latents = _draws((77, width), (4, HEIGHT // 8, WIDTH // 8))
    return Tiny(
        family,
        pipe,
        batch_of(latents, {"embeds": embeds}),
        {"prompt_embeds": embeds},
        {},
        _inpainted("StableDiffusionInpaintPipeline"),
        source,
    )


def built_in() -> Tiny:
    return _one_encoder("sd1", "random:sd1:tiny", tiny_sd1.build_pipeline(), 64)


def sd1() -> Tiny:
    return _one_encoder("sd1", "random:sd1:tiny", _load("random:sd1:tiny"), 64)


def sd1_velocity() -> Tiny:
    tiny = sd1()
    tiny.pipe.scheduler = diffusers.DDIMScheduler.from_config(
        tiny.pipe.scheduler.config, prediction_type="v_prediction"
    )
    return tiny


def sd2() -> Tiny:
    return _one_encoder("sd2", "random:sd2:tiny", _load("random:sd2:tiny"), 48)


def sd2_epsilon() -> Tiny:
    return _one_encoder("sd2", "random:sd2:tinybase", _load("random:sd2:tinybase"), 48)


def sdxl() -> Tiny:
    embeds, pooled, latents = _draws((77, 40), (24,), (4, HEIGHT // 8, WIDTH // 8))
    sizes = {"original_size": (80, 120), "crops_coords_top_left": (8, 4), "target_size": (HEIGHT, WIDTH)}
    return Tiny(
        "sdxl",
        _load("random:sdxl:tiny"),
        batch_of(latents, {"embeds": embeds, "pooled": pooled}),
        {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, **sizes},
        sizes,
        _inpainted("StableDiffusionXLInpaintPipeline"),
        "random:sdxl:tiny",
    )


def sdxl_velocity() -> Tiny:
    tiny = sdxl()
    tiny.pipe.scheduler = diffusers.DDIMScheduler.from_config(
        tiny.pipe.scheduler.config, prediction_type="v_prediction"
    )
    return tiny


def _patches(latents: Tensor) -> Tensor:
    """Written anew, not by diffusers: a patch of 2 x 2 becomes one row, channels first."""
    rows = latents.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5)
    return rows.flatten(3).flatten(1, 2)


def _unpatched(rows: Tensor) -> Tensor:
    count, _, channels = rows.shape
    grid = rows.view(count, HEIGHT // 16, WIDTH // 16, channels // 4, 2, 2)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(count, channels // 4, HEIGHT // 8, WIDTH // 8)


def sd3() -> Tiny:
    embeds, pooled, latents = _draws((77 + 9, 48), (40,), (4, HEIGHT // 8, WIDTH // 8))
    return Tiny(
        "sd3",
        _load("random:sd3:tiny"),
        batch_of(latents, {"embeds": embeds, "pooled": pooled}),
        {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled},
        {},
        _inpainted("StableDiffusion3InpaintPipeline"),
        "random:sd3:tiny",
    )


def flux(source: str = "random:flux:tiny") -> Tiny:
    embeds, pooled, latents = _draws((9, 48), (16,), (4, HEIGHT // 8, WIDTH // 8))
    return Tiny(
        "flux",
        _load(source),
        batch_of(latents, {"embeds": embeds, "pooled": pooled}),
        {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "guidance_scale": 1.0},
        {"guidance_scale": 1.0},
        _inpainted("FluxInpaintPipeline"),
        source,
        _patches,
        _unpatched,
        scale="true_cfg_scale",
    )


def flux_schnell() -> Tiny:
    return replace(flux("random:flux:schnell:tiny"), texts={"max_sequence_length": 256})


def z_image() -> Tiny:
    texts, latents = _draws((43, 32), (4, HEIGHT // 8, WIDTH // 8))
    embeds = [texts[0], texts[1, :17]]
    # diffusers' own inpainting for Z-Image hides its encoding; that of FLUX has the same VAE.
    judge = _inpainted("FluxInpaintPipeline", **dict.fromkeys(("text_encoder_2", "tokenizer_2")))
    return Tiny(
        "z_image",
        _load("random:z_image:tiny"),
        batch_of(latents, {"embeds": embeds}),
        {"prompt_embeds": embeds},
        {},
        judge,
        "random:z_image:tiny",
        unguided=0.0,
    )


def qwen_image() -> Tiny:
    texts, latents = _draws((13, 32), (4, HEIGHT // 8, WIDTH // 8))
    embeds = [texts[0], texts[1, :7]]
    mask = torch.tensor([[1] * 13, [1] * 7 + [0] * 6])
    call = {"prompt_embeds": texts * mask.unsqueeze(2), "prompt_embeds_mask": mask}
    inpainting = _inpainted("QwenImageInpaintPipeline")

    def judge(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        return inpainting(pipe, pixels.unsqueeze(2), generators).squeeze(2)

    return Tiny(
        "qwen_image",
        _load("random:qwen_image:tiny"),
        batch_of(latents, {"embeds": embeds}),
        call,
        {},
        judge,
        "random:qwen_image:tiny",
        _patches,
        _unpatched,
        scale="true_cfg_scale",
    )


TINY: dict[str, Callable[[], Tiny]] = {
    "built_in": built_in,
    "sd1": sd1,
    "sd1_velocity": sd1_velocity,
    "sd2": sd2,
    "sd2_epsilon": sd2_epsilon,
    "sdxl": sdxl,
    "sdxl_velocity": sdxl_velocity,
    "sd3": sd3,
    "flux": flux,
    "flux_schnell": flux_schnell,
    "z_image": z_image,
    "qwen_image": qwen_image,
}


def get_tiny_sd1_folder() -> str:
    """The random Stable Diffusion 1 pipeline as a folder, for runs in which the model's drawings do not matter.

    It is written once and found again by every process and every later test run.
    """
    source = Path(tiny_sd1.__file__).read_bytes() + f"{torch.__version__}/{diffusers.__version__}".encode()
    name = f"lorikeet-tiny-sd1-{os.getuid()}-{hashlib.sha256(source).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    if not folder.exists():
        fresh = tempfile.mkdtemp(prefix=name)
        tiny_sd1.build_pipeline().save_pretrained(fresh)
        try:
            os.rename(fresh, folder)
        except OSError:  # another process was quicker
            shutil.rmtree(fresh)
    return str(folder)
