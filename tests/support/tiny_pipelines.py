"""Tiny pipelines with random weights for the contract test, one or more for each family, and a batch for each."""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import pytest
import tiny_sd1
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.modular_pipelines.anima.encoders import encode_vae_image
from diffusers.modular_pipelines.minimax_h3 import before_denoise
from diffusers.pipelines.cosmos import pipeline_cosmos2_video2world
from diffusers.pipelines.flux import pipeline_flux_fill
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video, pipeline_hunyuan_video_image2video
from diffusers.pipelines.joyimage import image_processor as joyimage_processor
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.ltx import pipeline_ltx_condition
from diffusers.pipelines.ltx2 import pipeline_ltx2_image2video
from diffusers.pipelines.prx import pipeline_prx, pipeline_prx_pixel
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
    pipeline_qwenimage_layered,
)
from diffusers.pipelines.skyreels_v2 import pipeline_skyreels_v2, pipeline_skyreels_v2_i2v
from diffusers.pipelines.stable_diffusion import pipeline_stable_diffusion_inpaint
from diffusers.pipelines.stable_diffusion_xl import pipeline_stable_diffusion_xl_inpaint
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_animate, pipeline_wan_i2v, pipeline_wan_vace
from diffusers.pipelines.wan.pipeline_wan_video2video import retrieve_latents
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from torch import Tensor
from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

from library.config.schema import ModelConfig
from library.models.detect import detect_model
from library.models.families import FAMILIES, IMAGE_TO_VIDEO_FAMILIES
from library.models.families import joyimage_edit as joyimage_edit_family
from library.models.families import qwen_image_layered as qwen_image_layered_family
from library.models.loading import import_model_class
from library.models.model_configs import load_bundled_config
from library.models.weights import build_random_component
from library.registry import copy_class_name
from library.tools.family_check.cases import HEIGHT, WIDTH, TinyCase, build_batch, return_unchanged
from library.tools.family_check.checks import TEXTS


def _draw_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, *shape, generator=generator) for shape in shapes]


def _load(source: str) -> Any:
    return FAMILIES.get(source.split(":")[1])().load(source, torch.float32)


def _build_inpaint_encoder(name: str, **others: Any) -> Callable[[Any, Tensor, Sequence[torch.Generator]], Tensor]:
    """Return a function that encodes images as diffusers' inpainting pipeline does."""

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        encode_reference = getattr(diffusers, name)(**{**pipe.components, **others})
        module = sys.modules[type(encode_reference).__module__]
        with mock.patch.object(module, "retrieve_latents", retrieve_latents):  # see shrink_references
            return encode_reference._encode_vae_image(pixels, list(generators))

    return encode


def _build_vae_encoder(
    name: str, *, is_video: bool = False
) -> Callable[[Any, Tensor, Sequence[torch.Generator]], Tensor]:
    """The same with a pipeline of another family that has this kind of VAE."""

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        pipeline_class = getattr(diffusers, name)
        modules, _ = pipeline_class._get_signature_keys(pipeline_class)
        encode_reference = pipeline_class(**{**dict.fromkeys(modules), "vae": pipe.vae})
        if is_video:
            return encode_reference._encode_vae_image(pixels.unsqueeze(2), list(generators)).squeeze(2)
        module = sys.modules[pipeline_class.__module__]
        with mock.patch.object(module, "retrieve_latents", retrieve_latents):
            return encode_reference._encode_vae_image(pixels, list(generators))

    return encode


def _build_single_encoder_case(family: str, source: str, pipe: Any, width: int) -> TinyCase:
    embeds, latents = _draw_tensors((77, width), (4, HEIGHT // 8, WIDTH // 8))
    return TinyCase(
        family,
        pipe,
        build_batch(latents, {"embeds": embeds}),
        {"prompt_embeds": embeds},
        {},
        _build_inpaint_encoder("StableDiffusionInpaintPipeline"),
        source,
    )


def built_in() -> TinyCase:
    return _build_single_encoder_case("sd1", "random:sd1:tiny", tiny_sd1.build_pipeline(), 64)


def sd1() -> TinyCase:
    return _build_single_encoder_case("sd1", "random:sd1:tiny", _load("random:sd1:tiny"), 64)


def sd1_velocity() -> TinyCase:
    tiny = sd1()
    tiny.pipe.scheduler = diffusers.DDIMScheduler.from_config(
        tiny.pipe.scheduler.config, prediction_type="v_prediction"
    )
    return tiny


def sd2() -> TinyCase:
    return _build_single_encoder_case("sd2", "random:sd2:tiny", _load("random:sd2:tiny"), 48)


def sd2_epsilon() -> TinyCase:
    return _build_single_encoder_case("sd2", "random:sd2:tinybase", _load("random:sd2:tinybase"), 48)


def sdxl() -> TinyCase:
    embeds, pooled, latents = _draw_tensors((77, 40), (24,), (4, HEIGHT // 8, WIDTH // 8))
    sizes = {"original_size": (80, 120), "crops_coords_top_left": (8, 4), "target_size": (HEIGHT, WIDTH)}
    return TinyCase(
        "sdxl",
        _load("random:sdxl:tiny"),
        build_batch(latents, {"embeds": embeds, "pooled": pooled}),
        {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, **sizes},
        sizes,
        _build_inpaint_encoder("StableDiffusionXLInpaintPipeline"),
        "random:sdxl:tiny",
    )


def draw_picture_and_mask() -> tuple[Image.Image, Image.Image]:
    """A picture, and a mask with an edge between latents."""
    mask = Image.new("L", (WIDTH, HEIGHT))
    mask.paste(255, (19, 11, 70, 45))
    return draw_frame_image(0), mask.convert("RGB")


def _draw_latents(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    parts, config = zip(pixels.split(1), generators, strict=True), pipe.vae.config
    draws = [pipe.vae.encode(pixel).latent_dist.sample(generator) for pixel, generator in parts]
    return (torch.cat(draws) - (config.shift_factor or 0)) * config.scaling_factor


def _add_mask(tiny: TinyCase, name: str, **more: Any) -> TinyCase:
    """The case of a text-to-image model as that of its inpainting model, with one picture and mask for all rows."""
    picture, mask = draw_picture_and_mask()
    arguments = {"image": picture, "mask_image": mask, "strength": 1.0}
    pipe = _load(f"random:{name}:tiny")
    processor = diffusers.image_processor.VaeImageProcessor(do_normalize=False, do_convert_grayscale=True)
    with torch.no_grad():
        is_painted = (processor.preprocess(mask) >= 0.5).float()
        left = pipe.image_processor.preprocess(picture) * (1 - is_painted)
        latents = pipe.vae.encode(left).latent_dist.mode()
    latents = (latents - (pipe.vae.config.shift_factor or 0)) * pipe.vae.config.scaling_factor
    size = latents.shape[-2:]
    if "flux" in name:
        channels = torch.cat([latents, torch.nn.functional.pixel_unshuffle(is_painted, 8)], dim=1)
    else:
        channels = torch.cat([torch.nn.functional.interpolate(is_painted, size), latents], dim=1)
    return replace(
        tiny,
        family=name,
        pipe=pipe,
        batch=replace(tiny.batch, control_latents=(channels.expand(2, -1, -1, -1),)),
        call={**tiny.call, **arguments},
        sizes={**tiny.sizes, **arguments},
        texts={**tiny.texts, **arguments},
        encode=_draw_latents,
        source=f"random:{name}:tiny",
        controls=(mask,),
        frame_images=(picture,),
        **more,
    )


def sd1_inpainting() -> TinyCase:
    return _add_mask(sd1(), "sd1_inpainting")


def sd2_inpainting() -> TinyCase:
    return _add_mask(sd2_epsilon(), "sd2_inpainting")


def sdxl_inpainting() -> TinyCase:
    return _add_mask(sdxl(), "sdxl_inpainting")


def _build_pix2pix_case(tiny: TinyCase, name: str) -> TinyCase:
    pipe, image = _load(f"random:{name}:tiny"), draw_frame_image(1)
    with torch.no_grad():
        latents = pipe.vae.encode(pipe.image_processor.preprocess(image)).latent_dist.mode()
    images = {"image": image}
    return replace(
        tiny,
        family=name,
        pipe=pipe,
        batch=replace(tiny.batch, control_latents=(latents.expand(2, -1, -1, -1),)),
        call={**tiny.call, "image": latents.expand(2, -1, -1, -1)},
        sizes={**tiny.sizes, **images},
        texts=images,
        encode=_draw_latents,
        source=f"random:{name}:tiny",
        controls=(image,),
    )


def sd1_pix2pix() -> TinyCase:
    return _build_pix2pix_case(sd1(), "sd1_pix2pix")


def sdxl_pix2pix() -> TinyCase:
    return _build_pix2pix_case(sdxl(), "sdxl_pix2pix")


def sdxl_refiner() -> TinyCase:
    embeds, pooled, latents = _draw_tensors((77, 24), (24,), (4, HEIGHT // 8, WIDTH // 8))
    pipe, picture = _load("random:sdxl_refiner:tiny"), draw_frame_image(1)
    with torch.no_grad():
        encoded = pipe.vae.encode(pipe.image_processor.preprocess(picture)).latent_dist.mode()
    sizes = {"original_size": (80, 120), "crops_coords_top_left": (8, 4)}
    return TinyCase(
        "sdxl_refiner",
        pipe,
        build_batch(latents, {"embeds": embeds, "pooled": pooled}),
        # From denoising_start on, the image is what is refined, without noise that is added to it.
        {
            "prompt_embeds": embeds,
            "pooled_prompt_embeds": pooled,
            "image": latents,
            "denoising_start": 0.3,
            **sizes,
        },
        {"image": latents, "denoising_start": 0.3, **sizes},
        _draw_latents,
        "random:sdxl_refiner:tiny",
        texts={"image": encoded * pipe.vae.config.scaling_factor, "strength": 1 / 3},
        simplify_call=dict,  # the latents of the picture are computed twice, and rounded apart
        frame_images=(picture,),
    )


def flux_fill() -> TinyCase:
    return _add_mask(_drop_negative_prompts(flux()), "flux_fill")


def _drop_negative_prompts(tiny: TinyCase) -> TinyCase:
    """The case of FLUX.1 for pipelines whose only guidance is an input of the model."""
    call = {name: value for name, value in tiny.call.items() if name != "guidance_scale"}
    return replace(tiny, call=call, sizes={}, build_negative=lambda pipe, text: {}, scale="guidance_scale")


def flux_control() -> TinyCase:
    tiny, pipe, image = _drop_negative_prompts(flux()), _load("random:flux_control:tiny"), draw_frame_image(1)
    with torch.no_grad():
        latents = pipe.vae.encode(pipe.image_processor.preprocess(image)).latent_dist.mode()
    latents = (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    return replace(
        tiny,
        family="flux_control",
        pipe=pipe,
        batch=replace(tiny.batch, control_latents=(latents.expand(2, -1, -1, -1),)),
        call={**tiny.call, "control_image": _pack_patches(latents).expand(2, -1, -1)},
        sizes={**tiny.sizes, "control_image": _pack_patches(latents).expand(2, -1, -1)},
        texts={**tiny.texts, "control_image": _pack_patches(latents)},
        source="random:flux_control:tiny",
        controls=(image,),
    )


def sdxl_velocity() -> TinyCase:
    tiny = sdxl()
    tiny.pipe.scheduler = diffusers.DDIMScheduler.from_config(
        tiny.pipe.scheduler.config, prediction_type="v_prediction"
    )
    return tiny


def _pack_patches(latents: Tensor) -> Tensor:
    """An independent implementation: a patch of 2 x 2 becomes one row, channels first."""
    rows = latents.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5)
    return rows.flatten(3).flatten(1, 2)


def _unpack_patches(rows: Tensor) -> Tensor:
    count, _, channels = rows.shape
    grid = rows.view(count, HEIGHT // 16, WIDTH // 16, channels // 4, 2, 2)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(count, channels // 4, HEIGHT // 8, WIDTH // 8)


def sd3() -> TinyCase:
    embeds, pooled, latents = _draw_tensors((77 + 9, 48), (40,), (4, HEIGHT // 8, WIDTH // 8))
    return TinyCase(
        "sd3",
        _load("random:sd3:tiny"),
        build_batch(latents, {"embeds": embeds, "pooled": pooled}),
        {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled},
        {},
        _build_inpaint_encoder("StableDiffusion3InpaintPipeline"),
        "random:sd3:tiny",
    )


def flux(source: str = "random:flux:tiny") -> TinyCase:
    embeds, pooled, latents = _draw_tensors((9, 48), (16,), (4, HEIGHT // 8, WIDTH // 8))
    return TinyCase(
        "flux",
        _load(source),
        build_batch(latents, {"embeds": embeds, "pooled": pooled}),
        {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "guidance_scale": 1.0},
        {"guidance_scale": 1.0},
        _build_inpaint_encoder("FluxInpaintPipeline"),
        source,
        _pack_patches,
        _unpack_patches,
        scale="true_cfg_scale",
    )


def flux_schnell() -> TinyCase:
    return replace(flux("random:flux:schnell:tiny"), texts={"max_sequence_length": 256})


def flux_kontext() -> TinyCase:
    tiny = flux_kontext_without_reference()
    (control,) = _draw_tensors((4, 6, 10))
    batch = replace(tiny.batch, control_latents=(control,))
    image = {"image": control}
    return replace(tiny, batch=batch, call={**tiny.call, **image}, sizes={**tiny.sizes, **image})


def flux_kontext_without_reference() -> TinyCase:
    tiny, area = flux("random:flux_kontext:tiny"), {"max_area": HEIGHT * WIDTH}
    return replace(tiny, family="flux_kontext", call={**tiny.call, **area}, texts=area)


def chroma() -> TinyCase:
    embeds, latents = _draw_tensors((9, 48), (4, HEIGHT // 8, WIDTH // 8))
    # The pipeline makes a mask of numbers, which are added to the attention; it takes one of booleans, too.
    mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3]).bool()
    call = {"prompt_embeds": embeds, "prompt_attention_mask": mask}

    @torch.no_grad()
    def encode_texts(pipe: Any, text: str, negative: str) -> dict[str, Any]:
        encoded = {"": pipe._get_t5_prompt_embeds(text), "negative_": pipe._get_t5_prompt_embeds(negative)}
        embeds = {f"{name}prompt_embeds": states for name, (states, _) in encoded.items()}
        return embeds | {f"{name}prompt_attention_mask": mask.bool() for name, (_, mask) in encoded.items()}

    return TinyCase(
        "chroma",
        _load("random:chroma:tiny"),
        build_batch(latents, {"embeds": embeds, "mask": mask.float()}),
        call,
        {},
        _build_inpaint_encoder("ChromaInpaintPipeline"),
        "random:chroma:tiny",
        _pack_patches,
        _unpack_patches,
        build_prompt=encode_texts,
        blocks=("ChromaTransformerBlock", "ChromaSingleTransformerBlock"),
    )


def _build_flux2_case(family: str, **options: Any) -> TinyCase:
    source = f"random:{family}:tiny"
    pipe = _load(source)
    generator = torch.Generator().manual_seed(5)
    pipe.vae.bn.running_mean = torch.randn(16, generator=generator)
    pipe.vae.bn.running_var = torch.rand(16, generator=generator) + 0.5
    embeds, latents = _draw_tensors((9, 48), (16, HEIGHT // 16, WIDTH // 16))

    def normalize(latents: Tensor) -> Tensor:
        """What the pipeline returns as latents -> the family's; independent of it."""
        patches = _pack_patches(latents).transpose(1, 2).unflatten(2, (HEIGHT // 16, WIDTH // 16))
        statistics = pipe.vae.bn.running_mean, (pipe.vae.bn.running_var + 1e-4).sqrt()
        mean, std = (values.view(1, -1, 1, 1) for values in statistics)
        return (patches - mean) / std

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        return normalize(pipe.vae.encode(pixels).latent_dist.mode())

    return TinyCase(
        family,
        pipe,
        build_batch(latents, {"embeds": embeds}),
        {"prompt_embeds": embeds},
        {},
        encode,
        source,
        unpack_latents=normalize,
        blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
        pack_prediction=lambda latents: latents.flatten(2).transpose(1, 2),
        **options,
    )


def flux2_klein() -> TinyCase:
    return _build_flux2_case(
        "flux2_klein", build_negative=lambda pipe, text: {"negative_prompt_embeds": pipe.encode_prompt([text])[0]}
    )


def flux2_klein_with_references() -> TinyCase:
    tiny = flux2_klein()
    images = [Image.radial_gradient("L").resize(size).convert("RGB") for size in ((64, 96), (80, 64))]
    pixels = [tiny.pipe.image_processor.preprocess(image) for image in images]
    with torch.no_grad():
        controls = [tiny.pipe._encode_vae_image(each, torch.Generator()) for each in pixels]
    batch = replace(tiny.batch, control_latents=tuple(latents.expand(2, -1, -1, -1) for latents in controls))
    return replace(tiny, batch=batch, call={**tiny.call, "image": images}, sizes={**tiny.sizes, "image": images})


def flux2_dev() -> TinyCase:
    tiny = _build_flux2_case("flux2_dev", build_negative=lambda pipe, text: {})
    grid = HEIGHT // 16, WIDTH // 16
    return replace(tiny, unpack_latents=lambda rows: rows.transpose(1, 2).unflatten(2, grid))


def z_image() -> TinyCase:
    texts, latents = _draw_tensors((43, 32), (4, HEIGHT // 8, WIDTH // 8))
    embeds = [texts[0], texts[1, :17]]
    # diffusers' own inpainting for Z-Image does not expose its encoding; that of FLUX has the same VAE.
    encode_reference = _build_inpaint_encoder("FluxInpaintPipeline", **dict.fromkeys(("text_encoder_2", "tokenizer_2")))
    return TinyCase(
        "z_image",
        _load("random:z_image:tiny"),
        build_batch(latents, {"embeds": embeds}),
        {"prompt_embeds": embeds},
        {},
        encode_reference,
        "random:z_image:tiny",
        guidance_off=0.0,
    )


def z_image_omni() -> TinyCase:
    """Two references, whose sides are multiples of 16, so that the pipeline crops nothing of what SigLIP reads."""
    tiny, source = z_image(), "random:z_image_omni:tiny"
    pipe, gradient = _load(source), Image.linear_gradient("L").rotate(30)
    picture = Image.merge("RGB", [gradient, gradient.rotate(90), gradient.rotate(50)])
    controls, vae = tuple(picture.resize(size) for size in ((112, 80), (64, 96))), pipe.vae
    start, between, end = _draw_tensors((4, 32), (3, 32), (2, 32))
    pieces, latents = {"start": start[0], "between": between[0], "end": end[0]}, []
    with torch.no_grad():
        for image in controls:
            mode = vae.encode(pipe.image_processor.preprocess(image)).latent_dist.mode()
            latents.append(((mode - vae.config.shift_factor) * vae.config.scaling_factor).expand(2, -1, -1, -1))
        (grids,) = pipe.prepare_siglip_embeds(list(controls), 1, torch.device("cpu"), torch.float32)
    pieces |= {f"reference{number}": grid for number, grid in enumerate([*grids, torch.zeros(1, 1, 24)])}
    embeds, images = tiny.batch.cond["embeds"], {"image": list(controls)}
    cond = {"embeds": embeds, **{f"fixed_{name}": [row, row] for name, row in pieces.items()}}
    return replace(
        tiny,
        family="z_image_omni",
        pipe=pipe,
        batch=replace(tiny.batch, cond=cond, control_latents=tuple(latents)),
        call={
            "prompt_embeds": [[pieces["start"], pieces["between"], row, pieces["end"]] for row in embeds],
            **images,
        },
        sizes=images,
        texts=images,
        encode=_build_vae_encoder("FluxInpaintPipeline"),
        source=source,
        controls=controls,
    )


def qwen_image() -> TinyCase:
    texts, latents = _draw_tensors((13, 32), (4, HEIGHT // 8, WIDTH // 8))
    embeds = [texts[0], texts[1, :7]]
    mask = torch.tensor([[1] * 13, [1] * 7 + [0] * 6])
    call = {"prompt_embeds": texts * mask.unsqueeze(2), "prompt_embeds_mask": mask}
    return TinyCase(
        "qwen_image",
        _load("random:qwen_image:tiny"),
        build_batch(latents, {"embeds": embeds}),
        call,
        {},
        _build_vae_encoder("QwenImageInpaintPipeline", is_video=True),
        "random:qwen_image:tiny",
        _pack_patches,
        _unpack_patches,
        scale="true_cfg_scale",
    )


def qwen_image21() -> TinyCase:
    texts, latents = _draw_tensors((13, 16), (4, HEIGHT // 8, WIDTH // 8))
    mask = torch.tensor([[1] * 13, [1] * 7 + [0] * 6])

    def add_alpha(pixels: Tensor) -> Tensor:
        return torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        return _build_vae_encoder("QwenImageInpaintPipeline", is_video=True)(pipe, add_alpha(pixels), generators)

    return TinyCase(
        "qwen_image21",
        _load("random:qwen_image21:tiny"),
        build_batch(latents, {"embeds": [texts[0], texts[1, :7]]}),
        {"prompt_embeds": texts * mask.unsqueeze(2), "prompt_embeds_mask": mask},
        {},
        encode,
        "random:qwen_image21:tiny",
        lambda latents: latents.flatten(2).transpose(1, 2),
        lambda rows: rows.transpose(1, 2).unflatten(2, (HEIGHT // 8, WIDTH // 8)),
        scale="true_cfg_scale",
        add_channels=add_alpha,
        blocks=("QwenImage21TransformerBlock",),
    )


def _compute_reference_size(area: int, ratio: float) -> tuple[int, int]:
    """Width and height as in the pipelines of Qwen-Image-Edit."""
    width = (area * ratio) ** 0.5
    return round(width / 32) * 32, round(width / ratio / 32) * 32


REFERENCE_AREA = 128 * 128
"""Of references in tests, instead of a megapixel."""


INPAINTING_PIPELINES = (
    pipeline_stable_diffusion_inpaint,
    pipeline_stable_diffusion_xl_inpaint,
    pipeline_flux_fill,
)


def shrink_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pipelines of editing models resize references to ``REFERENCE_AREA``, or to the size of the picture.

    The pipelines of Wan, SkyReels V2 and PRX clean texts with ftfy, which changes none of the tests' and is not installed.
    """
    for module in INPAINTING_PIPELINES:  # which draw a sample of the latents that the mask leaves
        monkeypatch.setattr(module, "retrieve_latents", lambda encoded, **_: encoded.latent_dist.mode())
    # Which draws a sample of the latents of the given frame.
    monkeypatch.setattr(pipeline_cosmos2_video2world, "retrieve_latents", lambda encoded, _: encoded.latent_dist.mode())
    others = pipeline_wan_vace, pipeline_skyreels_v2, pipeline_skyreels_v2_i2v, pipeline_prx, pipeline_prx_pixel
    for module in (pipeline_wan, pipeline_wan_i2v, pipeline_wan_animate, *others):
        monkeypatch.setattr(module, "ftfy", SimpleNamespace(fix_text=lambda text: text), raising=False)
    monkeypatch.setattr(qwen_image_layered_family, "DEFAULT_LAYERS", 2)
    for module in (pipeline_longcat_image_edit, pipeline_qwenimage_layered):
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: (WIDTH, HEIGHT))
    monkeypatch.setattr(
        pipeline_qwenimage_edit,
        "calculate_dimensions",
        lambda area, ratio: (*_compute_reference_size(REFERENCE_AREA, ratio), None),
    )
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", REFERENCE_AREA)
    monkeypatch.setitem(joyimage_processor.BUCKETS, 1024, [(HEIGHT, WIDTH), (128, 128)])


def _build_edit_case(source: str, *sizes: tuple[int, int]) -> TinyCase:
    tiny, name = qwen_image(), source.split(":")[1]
    pipe = _load(source)
    gradient = Image.linear_gradient("L").rotate(30)
    controls = tuple(
        Image.merge("RGB", [gradient, gradient.rotate(90), gradient.rotate(50)]).resize(each) for each in sizes
    )
    latents = []
    for image in controls:
        width, height = _compute_reference_size(REFERENCE_AREA, image.width / image.height)
        pixels = pipe.image_processor.preprocess(image, height, width).unsqueeze(2)
        with torch.no_grad():
            latents.append(pipe._encode_vae_image(pixels, torch.Generator()).squeeze(2).expand(2, -1, -1, -1))
    images = {"image": list(controls) if "plus" in name else controls[0]}
    embeds = tiny.batch.cond["embeds"][0]
    return replace(
        tiny,
        family=name,
        pipe=pipe,
        batch=replace(tiny.batch, control_latents=tuple(latents)),
        call={"prompt_embeds": embeds[None], "prompt_embeds_mask": torch.ones(1, len(embeds)).long(), **images},
        sizes=images,
        texts=images,
        encode=_build_vae_encoder("QwenImageInpaintPipeline", is_video=True),
        source=source,
        controls=controls,
        max_rows=1,
    )


def qwen_image_edit() -> TinyCase:
    return _build_edit_case("random:qwen_image_edit:tiny", (150, 100))


def qwen_image_edit_plus() -> TinyCase:
    return _build_edit_case("random:qwen_image_edit_plus:tiny", (150, 100), (90, 120))


def qwen_image_edit_plus_2511() -> TinyCase:
    return _build_edit_case("random:qwen_image_edit_plus:2511:tiny", (150, 100), (90, 120))


def qwen_image_layered() -> TinyCase:
    """A picture with two layers; the pipeline takes its size from the picture, and not as arguments."""
    tiny, source = qwen_image_edit(), "random:qwen_image_layered:tiny"
    pipe, layers = _load(source), 2

    class SizedPipeline(type(pipe)):
        def __call__(self, *, height: int | None = None, width: int | None = None, **arguments: Any) -> Any:
            if arguments.get("output_type") != "latent" or "callback_on_step_end" in arguments:
                return super().__call__(**arguments)
            return SimpleNamespace(images=qwen_image_layered_family.sample_latents(super().__call__, **arguments))

    pipe.__class__ = copy_class_name(SizedPipeline, type(pipe))
    image = tiny.controls[0].convert("RGBA")
    with torch.no_grad():
        pixels = pipe.image_processor.preprocess(image, HEIGHT, WIDTH).unsqueeze(2)
        picture = pipe._encode_vae_image(pixels, torch.Generator()).expand(2, -1, -1, -1, -1)
    (latents,) = _draw_tensors((2, layers + 1, HEIGHT // 8, WIDTH // 8))
    arguments = {"image": image, "layers": layers}

    def add_alpha(pixels: Tensor) -> Tensor:
        return torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)

    def pack(latents: Tensor) -> Tensor:
        shape = len(latents), 2, HEIGHT // 8, WIDTH // 8, latents.shape[2]
        return Tensor(pipe._pack_latents(latents.transpose(1, 2).contiguous(), *shape))

    return replace(
        tiny,
        family="qwen_image_layered",
        pipe=pipe,
        batch=replace(build_batch(latents, tiny.batch.cond), frame_cond={"picture": picture}),
        call={
            **{name: tiny.call[name] for name in ("prompt_embeds", "prompt_embeds_mask")},
            **arguments,
            "prompt": "-",
        },
        sizes=arguments,
        texts=arguments,
        encode=lambda pipe, pixels, generators: pipe._encode_vae_image(add_alpha(pixels).unsqueeze(2), generators),
        source=source,
        pack_latents=pack,
        unpack_latents=lambda rows: pipe._unpack_latents(rows, HEIGHT, WIDTH, layers, 8),
        controls=(image,),
        add_channels=add_alpha,
    )


def joyimage_edit() -> TinyCase:
    """A picture and its reference; the pipeline draws latents of the reference, of which the mean is taken here."""
    tiny, source = qwen_image_edit(), "random:joyimage_edit:tiny"
    pipe, image = _load(source), tiny.controls[0]

    class MeanPipeline(type(pipe)):
        def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(DiagonalGaussianDistribution, "sample", DiagonalGaussianDistribution.mode):
                return super().prepare_latents(*args, **kwargs)

    pipe.__class__ = copy_class_name(MeanPipeline, type(pipe))
    crop = pipe.vae_image_processor.resize_center_crop(image, (HEIGHT, WIDTH))
    with torch.no_grad():
        shape = 1, 4, HEIGHT, WIDTH, 1
        _, reference = pipe.prepare_latents(*shape, torch.float32, torch.device("cpu"), None, image=[crop])
    texts, latents = _draw_tensors((13, 16), (4, HEIGHT // 8, WIDTH // 8))
    embeds, images = texts[:, :7], {"image": image}
    return TinyCase(
        "joyimage_edit",
        pipe,
        replace(
            build_batch(latents, {"embeds": [embeds[0], embeds[1]]}),
            control_latents=(reference[:, 0, :, 0].expand(2, -1, -1, -1),),
        ),
        {"prompt_embeds": embeds[:1], "prompt_embeds_mask": torch.ones(1, 7).long(), **images},
        images,
        _build_vae_encoder("QwenImageInpaintPipeline", is_video=True),
        source,
        lambda latents: latents[:, None, :, None],
        lambda latents: latents if latents.ndim == 4 else latents[:, -1, :, 0],
        select_prediction=lambda latents: latents[:, -1:],
        texts=images,
        controls=(image,),
        max_rows=1,
        blocks=("JoyImageTransformerBlock",),
    )


def _drop_full_mask(arguments: dict[str, Any]) -> dict[str, Any]:
    mask = arguments.get("encoder_hidden_states_mask")
    is_full = mask is not None and bool(mask.all())
    return {name: value for name, value in arguments.items() if not (is_full and name == "encoder_hidden_states_mask")}


def joyimage_edit_plus() -> TinyCase:
    tiny, source = joyimage_edit(), "random:joyimage_edit_plus:tiny"
    pipe, images, references = _load(source), [tiny.controls[0], tiny.controls[0].rotate(90).resize((90, 120))], []
    mean, std = (torch.tensor(pipe.vae.config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    for image, size in zip(images, ((HEIGHT, WIDTH), (128, 128)), strict=True):
        pixels = pipe.image_processor.preprocess(pipe.image_processor.resize_center_crop(image, size))
        with torch.no_grad():
            encoded = pipe.vae.encode(pixels.unsqueeze(2)).latent_dist.mode()
        references.append(((encoded - mean) / std).squeeze(2).expand(2, -1, -1, -1))
    call = {**tiny.call, "images": images}
    del call["image"]
    return replace(
        tiny,
        family="joyimage_edit_plus",
        pipe=pipe,
        batch=replace(tiny.batch, control_latents=tuple(references)),
        call=call,
        sizes={"images": images},
        texts={"images": images},
        source=source,
        pack_latents=lambda latents: latents.unsqueeze(2),
        unpack_latents=lambda patches: joyimage_edit_family.unfold_patches(patches, HEIGHT // 8, WIDTH // 8),
        pack_prediction=joyimage_edit_family.fold_patches,
        select_prediction=lambda patches: patches[:, : HEIGHT // 16 * (WIDTH // 16)],
        simplify_call=_drop_full_mask,
        tolerances={"rtol": 1e-5, "atol": 1e-5},
        controls=tuple(images),
        blocks=("JoyImageEditPlusTransformerBlock",),
    )


def aura_flow() -> TinyCase:
    embeds, latents = _draw_tensors((9, 24), (4, HEIGHT // 8, WIDTH // 8))
    return TinyCase(
        "aura_flow",
        _load("random:aura_flow:tiny"),
        build_batch(latents, {"embeds": embeds}),
        {"prompt_embeds": embeds, "prompt_attention_mask": torch.ones(2, 9)},
        {},
        _build_vae_encoder("StableDiffusionXLInpaintPipeline"),
        "random:aura_flow:tiny",
    )


def ovis_image() -> TinyCase:
    embeds, latents = _draw_tensors((9, 32), (4, HEIGHT // 8, WIDTH // 8))
    return TinyCase(
        "ovis_image",
        _load("random:ovis_image:tiny"),
        build_batch(latents, {"embeds": embeds}),
        {"prompt_embeds": embeds},
        {},
        _build_vae_encoder("FluxInpaintPipeline"),
        "random:ovis_image:tiny",
        _pack_patches,
        _unpack_patches,
    )


def bria() -> TinyCase:
    embeds, latents = _draw_tensors((9, 48), (4, HEIGHT // 8, WIDTH // 8))
    return TinyCase(
        "bria",
        _load("random:bria:tiny"),
        build_batch(latents, {"embeds": embeds}),
        {"prompt_embeds": embeds},
        {},
        _draw_latents,
        "random:bria:tiny",
        _pack_patches,
        _unpack_patches,
        encodes_prompts_alone=True,  # as the pipeline, which so pads none
        blocks=("BriaTransformerBlock", "BriaSingleTransformerBlock"),
        untrained=r"norm|\.ff|\.proj_",
    )


def _drop_fibo_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    """Leave out the text tokens that the mask of the attention excludes."""
    embeds, layers = arguments["encoder_hidden_states"], arguments["text_encoder_layers"]
    mask = arguments["joint_attention_kwargs"].get("attention_mask")
    is_text = torch.ones(embeds.shape[:2]).bool() if mask is None else mask[:, 0, 0, : embeds.shape[1]]
    texts = [row[each] for state in (embeds, *layers) for row, each in zip(state, is_text, strict=True)]
    names = {"encoder_hidden_states", "text_encoder_layers"}
    return {"texts": texts, **{name: value for name, value in arguments.items() if name not in names}}


def bria_fibo() -> TinyCase:
    pipe, texts = _load("random:bria_fibo:tiny"), ["A caption that is longer.", "Blau"]
    (latents,) = _draw_tensors((4, HEIGHT // 16, WIDTH // 16))
    with torch.no_grad():
        cond = FAMILIES.get("bria_fibo")().encode_prompts(pipe, texts)

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        config = pipe.vae.config
        mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std))
        return _build_frame_encoder(lambda pipe, latents: (latents - mean) / std)(pipe, pixels, generators).squeeze(2)

    return TinyCase(
        "bria_fibo",
        pipe,
        build_batch(latents, cond),
        {"prompt": texts},
        {},
        encode,
        "random:bria_fibo:tiny",
        lambda latents: latents.flatten(2).transpose(1, 2),
        lambda rows: rows.transpose(1, 2).unflatten(2, (HEIGHT // 16, WIDTH // 16)),
        simplify_call=_drop_fibo_padding,
        blocks=("BriaFiboTransformerBlock", "BriaFiboSingleTransformerBlock"),
        untrained=r"norm|\.ff|\.proj_",
    )


def bria_fibo_edit() -> TinyCase:
    pipe, tiny, texts = _load("random:bria_fibo_edit:tiny"), bria_fibo(), ["A caption that is longer.", "Blau"]
    images = [draw_frame_image(0), draw_frame_image(1).resize((128, 80))]
    references = []
    for number, image in enumerate(images, 1):
        packed, _ = pipe.prepare_reference_latents(image, 4, torch.float32, torch.device("cpu"), False, number)
        size = (image.height // 16, image.width // 16)
        references.append(packed.detach().transpose(1, 2).unflatten(2, size).expand(2, -1, -1, -1))
    with torch.no_grad():
        cond = FAMILIES.get("bria_fibo_edit")().encode_prompts(pipe, texts)
    return replace(
        tiny,
        family="bria_fibo_edit",
        pipe=pipe,
        batch=replace(build_batch(tiny.batch.latents, cond), control_latents=tuple(references)),
        call={"prompt": texts, "image": images},
        sizes={"image": images},
        texts={"image": images},
        source="random:bria_fibo_edit:tiny",
        controls=tuple(images),
    )


def _clear_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    """Clear the states of text tokens that the mask excludes, which the pipeline leaves."""
    mask, states = arguments.get("encoder_attention_mask"), arguments["encoder_hidden_states"]
    return arguments if mask is None else {**arguments, "encoder_hidden_states": states * mask[:, None, :, None]}


def bria_fibo2() -> TinyCase:
    """Texts of different length, of a caption and of one with references, in sizes that the pipeline leaves."""
    pipe, images = _load("random:bria_fibo2:tiny"), [draw_frame_image(0).resize((128, 128)), draw_frame_image(1)]
    images[1] = images[1].resize((160, 112))
    generator = torch.Generator().manual_seed(5)
    pipe.vae.bn.running_mean = torch.randn(16, generator=generator)
    pipe.vae.bn.running_var = torch.rand(16, generator=generator) + 0.5

    class SmallPipeline(type(pipe)):
        default_sample_size = property(lambda self: 16, lambda self, size: None)

    pipe.__class__ = copy_class_name(SmallPipeline, type(pipe))
    (latents,) = _draw_tensors((4, HEIGHT // 8, WIDTH // 8))
    texts = ["A caption that is longer. " * 4, "Blau"]
    with torch.no_grad():
        cond = FAMILIES.get("bria_fibo2")().encode_prompts_with_controls(pipe, texts, [images] * 2)
        pixels, _ = pipe.image_processor.preprocess(images, area=128 * 128)
        references = pipe.prepare_image_latents(pixels, 2, torch.device("cpu"), torch.float32)

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        return torch.cat(pipe.prepare_image_latents(pixels.split(1), 1, pixels.device, pixels.dtype))

    return TinyCase(
        "bria_fibo2",
        pipe,
        replace(build_batch(latents, cond), control_latents=tuple(references)),
        {"prompt": texts[:1], "image": images},
        {"image": images},
        encode,
        "random:bria_fibo2:tiny",
        simplify_call=_clear_padding,
        texts={"image": images},
        controls=tuple(images),
        max_rows=1,
        blocks=("BriaFibo2TransformerBlock", "BriaFibo2PerceiverLayer"),
        untrained=r"^noise_refiner|adaLN|^perceiver.*(self_attention|ffn)",
    )


def longcat_image() -> TinyCase:
    embeds, latents = _draw_tensors((9, 32), (16, HEIGHT // 8, WIDTH // 8))  # 16 channels are fixed in the pipeline
    return TinyCase(
        "longcat_image",
        _load("random:longcat_image:tiny"),
        build_batch(latents, {"embeds": embeds}),
        {"prompt_embeds": embeds, "enable_prompt_rewrite": False},
        {},
        _build_vae_encoder("FluxInpaintPipeline"),
        "random:longcat_image:tiny",
        _pack_patches,
        _unpack_patches,
        texts={"enable_prompt_rewrite": False},
    )


def longcat_image_edit() -> TinyCase:
    tiny, source = longcat_image(), "random:longcat_image_edit:tiny"
    pipe, image = _load(source), Image.linear_gradient("L").rotate(30).resize((150, 100)).convert("RGB")
    with torch.no_grad():
        pixels = pipe.image_processor.preprocess(pipe.image_processor.resize(image, HEIGHT, WIDTH), HEIGHT, WIDTH)
        latents = pipe._encode_vae_image(pixels, torch.Generator())
    images = {"image": image}
    return replace(
        tiny,
        family="longcat_image_edit",
        pipe=pipe,
        batch=replace(tiny.batch, control_latents=(latents.expand(2, -1, -1, -1),)),
        call={"prompt_embeds": tiny.batch.cond["embeds"][:1], **images},
        sizes=images,
        texts=images,
        source=source,
        controls=(image,),
        max_rows=1,
    )


def ernie_image() -> TinyCase:
    pipe, generator = _load("random:ernie_image:tiny"), torch.Generator().manual_seed(5)
    pipe.vae.bn.running_mean = torch.randn(16, generator=generator)
    pipe.vae.bn.running_var = torch.rand(16, generator=generator) + 0.5
    texts, latents = _draw_tensors((13, 16), (16, HEIGHT // 16, WIDTH // 16))
    embeds = [texts[0], texts[1, :7]]

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        rows = _pack_patches(pipe.vae.encode(pixels).latent_dist.mode())
        normed = (rows - pipe.vae.bn.running_mean) / (pipe.vae.bn.running_var + 1e-5).sqrt()
        return normed.transpose(1, 2).unflatten(2, (HEIGHT // 16, WIDTH // 16))

    return TinyCase(
        "ernie_image",
        pipe,
        build_batch(latents, {"embeds": embeds}),
        {"prompt_embeds": embeds},
        {},
        encode,
        "random:ernie_image:tiny",
        blocks=("ErnieImageSharedAdaLNBlock",),
    )


def drop_padding(arguments: dict[str, Any], mask_name: str = "encoder_attention_mask") -> dict[str, Any]:
    """Leave out the text tokens that the mask excludes; without one, none."""
    names, states, mask = {"encoder_hidden_states", mask_name}, arguments["encoder_hidden_states"], arguments[mask_name]
    texts = list(states) if mask is None else [row[each] for row, each in zip(states, mask.bool(), strict=True)]
    return {"texts": texts, **{name: value for name, value in arguments.items() if name not in names}}


def lumina2() -> TinyCase:
    texts, latents = _draw_tensors((13, 24), (4, HEIGHT // 8, WIDTH // 8))
    mask = torch.tensor([[1] * 13, [1] * 7 + [0] * 6])
    return TinyCase(
        "lumina2",
        _load("random:lumina2:tiny"),
        build_batch(latents, {"embeds": [texts[0], texts[1, :7]]}),
        {"prompt_embeds": texts, "prompt_attention_mask": mask},
        {},
        _build_vae_encoder("FluxInpaintPipeline"),
        "random:lumina2:tiny",
        pack_prediction=lambda latents: latents,
        simplify_call=drop_padding,
        blocks=("Lumina2TransformerBlock", "LuminaLayerNormContinuous"),
    )


def krea2() -> TinyCase:
    texts, latents = _draw_tensors((13, 8, 16), (4, HEIGHT // 8, WIDTH // 8))
    mask = torch.tensor([[1] * 13, [1] * 7 + [0] * 6]).bool()

    def simplify_call(arguments: dict[str, Any]) -> dict[str, Any]:
        length = arguments["encoder_hidden_states"].shape[1]
        return drop_padding({**arguments, "position_ids": arguments["position_ids"][length:]})

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        encode_frame = _build_vae_encoder("QwenImageInpaintPipeline")
        return encode_frame(pipe, pixels.unsqueeze(2), generators).squeeze(2)

    return TinyCase(
        "krea2",
        _load("random:krea2:tiny"),
        build_batch(latents, {"embeds": [texts[0].flatten(1), texts[1, :7].flatten(1)]}),
        {"prompt_embeds": texts, "prompt_embeds_mask": mask},
        {},
        encode,
        "random:krea2:tiny",
        _pack_patches,
        _unpack_patches,
        guidance_off=0.0,
        simplify_call=simplify_call,
        blocks=("Krea2Transformer2DModel",),
        untrained=r"text_fusion\.projector",
    )


def sana() -> TinyCase:
    texts, latents = _draw_tensors((13, 24), (4, HEIGHT // 8, WIDTH // 8))
    mask, no_bins = torch.tensor([[1] * 13, [1] * 7 + [0] * 6]), {"use_resolution_binning": False}

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        latents: Tensor = pipe.vae.encode(pixels).latent * pipe.vae.config.scaling_factor
        return latents

    return TinyCase(
        "sana",
        _load("random:sana:tiny"),
        build_batch(latents, {"embeds": [texts[0], texts[1, :7]]}),
        {"prompt_embeds": texts, "prompt_attention_mask": mask, **no_bins},
        {},
        encode,
        "random:sana:tiny",
        texts=no_bins,
        simplify_call=drop_padding,
        blocks=("Attention",),
    )


def cogview4() -> TinyCase:
    embeds, latents = _draw_tensors((16, 24), (4, HEIGHT // 8, WIDTH // 8))
    sizes = {"original_size": (80, 120), "crops_coords_top_left": (8, 4)}

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        parts = zip(pixels.split(1), generators, strict=True)
        draws = [pipe.vae.encode(pixel).latent_dist.sample(generator) for pixel, generator in parts]
        return torch.cat(draws) * pipe.vae.config.scaling_factor

    return TinyCase(
        "cogview4",
        _load("random:cogview4:tiny"),
        build_batch(latents, {"embeds": list(embeds)}),
        {"prompt_embeds": embeds, **sizes},
        sizes,
        encode,
        "random:cogview4:tiny",
        encodes_prompts_alone=True,
        blocks=("Attention",),
    )


def glm_image() -> TinyCase:
    """Its language model, which would write the image tokens, is left out: they are those of a picture."""
    pipe, source = _load("random:glm_image:tiny"), "random:glm_image:tiny"
    gradient = Image.linear_gradient("L").rotate(30).resize((WIDTH, HEIGHT))
    image = Image.merge("RGB", [gradient, gradient.rotate(180), gradient.rotate(90)])
    tokens = tokenize_by_processor(pipe.vision_language_encoder.model, image)
    embeds, latents = _draw_tensors((9, 24), (4, HEIGHT // 8, WIDTH // 8))
    prior = {
        "prior": tokens.repeat_interleave(4, 0).repeat_interleave(4, 1)[None, None, None].expand(2, -1, -1, -1, -1)
    }
    ids = {"prior_token_ids": tokens.repeat_interleave(2, 0).repeat_interleave(2, 1).flatten()[None]}
    batch = build_batch(latents, {"embeds": list(embeds), "is_empty": torch.zeros(2, 1)}, (0, 0, 0, 0, HEIGHT, WIDTH))

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        parts = zip(pixels.split(1), generators, strict=True)
        draws = [pipe.vae.encode(pixel).latent_dist.sample(generator) for pixel, generator in parts]
        mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in list_latent_statistics(pipe.vae))
        return (torch.cat(draws) - mean) / std

    return TinyCase(
        "glm_image",
        pipe,
        replace(batch, frame_cond=prior),
        {"prompt_embeds": embeds[:1], **ids},
        ids,
        encode,
        source,
        texts=ids,
        build_negative=lambda pipe, text: {},
        simplify_call=lambda call: {name: value for name, value in call.items() if name != "prior_token_drop"},
        frame_images=(image,),
        captions=("a sign with 'red' and \"blue\"", "'7'"),
        max_rows=1,
        encodes_prompts_alone=True,
        blocks=("Attention",),
    )


def list_latent_statistics(vae: Any) -> tuple[list[float], list[float]]:
    return vae.config.latents_mean, vae.config.latents_std


def tokenize_by_processor(model: Any, image: Image.Image) -> Tensor:
    """The image tokens of a picture (rows, columns) as GLM-Image makes them of one that it edits."""
    settings = {"patch_size": 16, "merge_size": 1, "temporal_patch_size": 1}
    processor = GlmImageImageProcessorPil(size={"shortest_edge": 1, "longest_edge": 2048**2}, **settings)
    inputs = processor(images=[image], return_tensors="pt")
    ((_, rows, columns),) = inputs["image_grid_thw"].tolist()
    with torch.no_grad():
        states = model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output
        features = states.view(1, rows, columns, -1).permute(0, 3, 1, 2)
        return model.vqmodel.encode(features).image_tokens.view(rows, columns).int()


def anima() -> TinyCase:
    texts, latents = _draw_tensors((512, 16), (4, HEIGHT // 8, WIDTH // 8))
    texts[0, 13:], texts[1, 7:] = 0, 0

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        dtype, mode = pipe.vae.dtype, "sample"
        return encode_vae_image(pixels, pipe.vae, list(generators), pixels.device, dtype, 4, mode).squeeze(2)

    return TinyCase(
        "anima",
        _load("random:anima:tiny"),
        build_batch(latents, {"embeds": [texts[0, :13], texts[1, :7]]}),
        {"prompt_embeds": texts},
        {},
        encode,
        "random:anima:tiny",
        lambda latents: latents.unsqueeze(2),
        lambda latents: latents.squeeze(2),
        blocks=("Attention", "FeedForward"),
    )


COSMOS_LEVEL = 80.0
"""The highest noise level of Cosmos Predict2, with which its pipelines begin."""


def _convert_cosmos_case(tiny: TinyCase, num_given: int = 0) -> TinyCase:
    """The pipeline has noise levels that are added to a clip, and gives its scheduler the noise of such a clip.

    What the denoiser predicts is in there beside the latents, of which it is 1/81.
    """
    share = COSMOS_LEVEL / (1 + COSMOS_LEVEL)

    def pack(latents: Tensor) -> Tensor:
        return (latents if latents.ndim == 5 else latents.unsqueeze(2)) / share

    def find_velocity(noise: Tensor) -> Tensor:
        packed = pack(tiny.batch.latents[: len(noise)])
        return (1 + COSMOS_LEVEL) * (noise - share * packed)[:, :, num_given:]

    def pack_prediction(prediction: Tensor) -> Tensor:
        return (prediction if prediction.ndim == 5 else prediction.unsqueeze(2))[:, :, num_given:]

    return replace(
        tiny,
        pack_latents=pack,
        pack_prediction=pack_prediction,
        select_prediction=find_velocity,
        convert_timesteps=lambda timesteps: 1000 * (timesteps / 1000) / (1 + timesteps / 1000),
        compares_arguments=False,  # latents are multiplied by the level and divided by it again
        tolerances={"rtol": 1e-3, "atol": 1e-3},
        decoding_tolerance=1.05 / 255,  # of pixels that are cut to whole numbers for the guardrail
    )


def cosmos2_text2image() -> TinyCase:
    source = "random:cosmos2_text2image:tiny"
    tiny = wan("wan")
    frame = replace(tiny.batch, latents=tiny.batch.latents.squeeze(2))
    encode = tiny.encode
    return _convert_cosmos_case(
        replace(
            tiny,
            family="cosmos2_text2image",
            source=source,
            pipe=_load(source),
            batch=frame,
            call={"prompt_embeds": tiny.call["prompt_embeds"]},
            sizes={},
            texts={},
            encode=lambda *arguments: encode(*arguments).squeeze(2),
            encode_clips=None,
            unpack_latents=lambda latents: latents.squeeze(2),
            blocks=("CosmosTransformerBlock",),
            untrained=r"norm[123]\.linear_[12]$",
        )
    )


def cosmos2_video2world() -> TinyCase:
    """A clip of two latent frames, of which the first is given, in the place of noise."""
    source = "random:cosmos2_video2world:tiny"
    tiny = wan("wan")
    rate = {"fps": None}  # diffusers' default scales positions in time, which those of the authors' models are not
    tiny = replace(
        tiny,
        family="cosmos2_video2world",
        source=source,
        pipe=_load(source),
        call={**tiny.call, **rate},
        sizes={**tiny.sizes, **rate},
        texts={**tiny.texts, **rate},
        blocks=("CosmosTransformerBlock",),
        untrained=r"norm[123]\.linear_[12]$",
    )
    return _convert_cosmos_case(_add_frame_images(tiny, "image", num_frames=5), num_given=1)


def _build_frame_encoder(
    normalize: Callable[[Any, Tensor], Tensor],
) -> Callable[[Any, Tensor, Sequence[torch.Generator]], Tensor]:
    """Return a function that encodes images as clips of one frame, and normalizes their latents: (pipe, latents)."""

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        clips = pixels if pixels.ndim == 5 else pixels.unsqueeze(2)
        parts = zip(clips.split(1), generators, strict=True)
        drawn = [retrieve_latents(pipe.vae.encode(pixel), generator, "sample") for pixel, generator in parts]
        return normalize(pipe, torch.cat(drawn))

    return encode


def _build_clip_encoder(normalize: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda pipe, clips: normalize(pipe, pipe.vae.encode(clips).latent_dist.mode())


def wan(name: str = "wan", channels: int = 4) -> TinyCase:
    texts, latents = _draw_tensors((512, 16), (channels, 1, HEIGHT // 8, WIDTH // 8))
    texts[0, 13:], texts[1, 7:] = 0, 0
    one_frame = {"num_frames": 1}

    def normalize(pipe: Any, latents: Tensor) -> Tensor:
        config = pipe.vae.config
        mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std))
        return (latents - mean) * (1.0 / std)

    return TinyCase(
        name,
        _load(f"random:{name}:tiny"),
        build_batch(latents, {"embeds": [texts[0, :13], texts[1, :7]]}),
        {"prompt_embeds": texts, **one_frame},
        one_frame,
        _build_frame_encoder(normalize),
        f"random:{name}:tiny",
        encode_clips=_build_clip_encoder(normalize),
        texts=one_frame,
        simplify_call=dict,  # the pipeline multiplies by the inverse of what is divided by here, so pixels round apart
        blocks=("WanTransformerBlock",),
    )


def _add_frame_images(tiny: TinyCase, *names: str, num_frames: int = 1) -> TinyCase:
    """The pipeline takes one image for all rows, so these have the same; and of both ends, clips of some frames."""
    family, pipe = FAMILIES.get(tiny.family)(), tiny.pipe
    num_frames = max(num_frames, 1 + 4 * (len(names) - 1))
    images = tuple(draw_frame_image(number) for number in range(len(names)))
    pixels = torch.stack([pipe.video_processor.preprocess(image, HEIGHT, WIDTH)[0] for image in images], dim=1)
    clip = torch.rand(3, num_frames, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(6))
    clip[:, 0], clip[:, -1] = pixels[:, 0], pixels[:, -1]
    with torch.no_grad():
        moments = family.encode_moments(pipe, clip[None])
        cond = family.encode_frame_cond(pipe, clip[None], moments)
    frame_cond = {name: value.expand(2, *value.shape[1:]) for name, value in cond.items()}
    latents = _draw_tensors(tuple(moments.mean_and_std.shape[2:]))[0]
    arguments = {"num_frames": num_frames, **dict(zip(names, images, strict=True))}
    return replace(
        tiny,
        batch=replace(tiny.batch, latents=latents, frame_cond=frame_cond),
        call={**tiny.call, **arguments},
        sizes={**tiny.sizes, **arguments},
        texts={**tiny.texts, **arguments},
        frame_images=images,
        num_frames=num_frames,
        tolerances={"rtol": 1e-5, "atol": 1e-5},  # of latents that are divided here, and multiplied there
    )


def draw_frame_image(number: int) -> Image.Image:
    gradient = Image.linear_gradient("L").rotate(30 + 90 * number).resize((WIDTH, HEIGHT))
    return Image.merge("RGB", [gradient, gradient.rotate(90), gradient.rotate(50)])


def wan_i2v() -> TinyCase:
    return _add_frame_images(wan("wan_i2v"), "image")


def wan_flf2v() -> TinyCase:
    return _add_frame_images(wan("wan_flf2v"), "image", "last_image")


FACE_SIDE = 16
"""The side of the control clip of a face, which the tiny model of Wan 2.2 Animate reads."""


def draw_control_clips(num_clips: int, num_frames: int) -> list[list[Image.Image]]:
    """A control clip, and a mask with grey edges that moves; of four, poses, a face and a background come before it.

    No two frames are alike.
    """
    masks = [Image.new("RGB", (WIDTH, HEIGHT)) for _ in range(num_frames)]
    for number, mask in enumerate(masks):
        for grey, edge in ((90, 4), (170, 2)):
            mask.paste((grey,) * 3, (11 + number - edge, 19 - edge, 60 + number + edge, 45 + edge))
        mask.paste((255, 255, 255), (11 + number, 19, 60 + number, 45))
    clip = [draw_frame_image(number) for number in range(num_frames)]
    if num_clips < 4:
        return [clip, masks][:num_clips]
    faces = [frame.resize((FACE_SIDE, FACE_SIDE)) for frame in clip]
    return [clip, faces, [frame.rotate(180) for frame in clip], masks]


def encode_control_clips(family: Any, pipe: Any, clips: Sequence[Sequence[Image.Image]]) -> tuple[Tensor, ...]:
    """What the family makes of control clips, for two samples that have the same."""
    pixels = [pipe.video_processor.preprocess_video(list(clip), *clip[0].size[::-1]) for clip in clips]
    with torch.no_grad():
        encoded = family.encode_controls(pipe, pixels, torch.zeros_like(pixels[0]))
    return tuple(each.expand(2, *each.shape[1:]) for each in encoded)


class RepeatedVACE:
    """The pipeline of VACE, of which this is a base, which takes one text and one clip at a time, with the same conditions for all rows."""

    num_rows = 1

    def __call__(self, prompt: Any = None, **arguments: Any) -> Any:
        return super().__call__(prompt=prompt[0] if isinstance(prompt, list) else prompt, **arguments)

    def preprocess_conditions(self, video: Any, mask: Any, references: Any, batch_size: int, *others: Any) -> Any:
        self.num_rows = batch_size
        return super().preprocess_conditions(video, mask, references, 1, *others)

    def prepare_video_latents(self, *args: Any) -> Tensor:
        return super().prepare_video_latents(*args).expand(self.num_rows, -1, -1, -1, -1)

    def prepare_masks(self, *args: Any) -> Tensor:
        return super().prepare_masks(*args).expand(self.num_rows, -1, -1, -1, -1)


def wan_vace() -> TinyCase:
    tiny, ((image,),) = wan("wan_vace"), draw_control_clips(1, 1)
    pipeline_class = type("Repeated", (RepeatedVACE, type(tiny.pipe)), {})
    tiny.pipe.__class__ = copy_class_name(pipeline_class, diffusers.WanVACEPipeline)
    latents = encode_control_clips(FAMILIES.get("wan_vace")(), tiny.pipe, [[image]])
    arguments = {"video": [image]}
    return replace(
        tiny,
        batch=replace(tiny.batch, control_latents=latents),
        call={**tiny.call, **arguments},
        sizes={**tiny.sizes, **arguments},
        texts={**tiny.texts, **arguments},
        controls=(image,),
        has_control_clips=True,
        encodes_prompts_alone=True,
        blocks=("WanVACETransformerBlock",),
        untrained=r".*\.proj_(in|out)$",
        tolerances={"rtol": 1e-5, "atol": 1e-5},  # of latents that are divided here, and multiplied there
    )


def _add_control(tiny: TinyCase, family: Any) -> TinyCase:
    """Give both rows of a case one control clip, and as many frames as the case has."""
    ((image,),) = draw_control_clips(1, 1)
    clip = [image] * tiny.num_frames
    arguments = {"control_video": clip}
    return replace(
        tiny,
        batch=replace(tiny.batch, control_latents=encode_control_clips(family, tiny.pipe, [clip])),
        call={**tiny.call, **arguments},
        sizes={**tiny.sizes, **arguments},
        texts={**tiny.texts, **arguments},
        controls=(image,),
        tolerances={"rtol": 1e-5, "atol": 1e-5},  # of latents that are divided here, and multiplied there
    )


def wan_fun_control(name: str = "wan_fun_control") -> TinyCase:
    tiny = replace(wan(name, 3), untrained=r"add_[kv]_proj$")  # the layers for a given frame
    return _add_control(tiny, FAMILIES.get(name)())


def wan_fun_control_from_image(name: str = "wan_fun_control") -> TinyCase:
    """A clip of two latent frames, of which the first is given."""
    tiny, options = wan(name, 3), ModelConfig(f"random:{name}:tiny", image_to_video=True)
    model = detect_model(options)
    family = FAMILIES.get(IMAGE_TO_VIDEO_FAMILIES[name])(options)
    tiny = replace(tiny, family=IMAGE_TO_VIDEO_FAMILIES[name], pipe=family.load(model, torch.float32), model=model)
    return _add_control(_add_frame_images(tiny, "image", num_frames=5), family)


def wan_fun_control11() -> TinyCase:
    return wan_fun_control("wan_fun_control11")


def wan_fun_control11_from_image() -> TinyCase:
    return wan_fun_control_from_image("wan_fun_control11")


def wan22_fun_control() -> TinyCase:
    return _add_control(wan("wan22_fun_control", 3), FAMILIES.get("wan22_fun_control")())


def wan22_fun_control_from_image() -> TinyCase:
    return wan_fun_control_from_image("wan22_fun_control")


def wan_animate() -> TinyCase:
    """A clip of two latent frames, the first segment, behind the picture of the character."""
    tiny, family = _add_frame_images(wan("wan_animate"), "image", num_frames=5), FAMILIES.get("wan_animate")()
    poses, faces = ([clip[0]] * tiny.num_frames for clip in draw_control_clips(4, 1)[:2])
    batch = replace(tiny.batch, control_latents=encode_control_clips(family, tiny.pipe, [poses, faces]))
    arguments = {"pose_video": poses, "face_video": faces}
    return replace(
        tiny,
        batch=family.select_section(family.arrange_batch(batch), 0.0),
        call={**tiny.call, **arguments},
        sizes={**tiny.sizes, **arguments},
        texts={**tiny.texts, **arguments},
        unpack_latents=lambda latents: latents[:, :, 1:],
        controls=(poses[0], faces[0]),
        added_frames=1,
        untrained=r"add_[kv]_proj$",
    )


def wan22_t2v() -> TinyCase:
    return wan("wan22_t2v")


def wan22_i2v() -> TinyCase:
    return _add_frame_images(wan("wan22_i2v"), "image")


def wan22_ti2v() -> TinyCase:
    def simplify_call(arguments: dict[str, Any]) -> dict[str, Any]:
        """The pipeline gives each token the same time."""
        timestep = arguments["timestep"]
        each = timestep if timestep.ndim == 1 else timestep[:, 0]
        assert torch.equal(timestep, each if timestep.ndim == 1 else each[:, None].expand_as(timestep))
        return {**arguments, "timestep": each}

    return replace(wan("wan22_ti2v"), simplify_call=simplify_call, tolerances={"rtol": 1e-3, "atol": 1e-5})


def wan22_ti2v_from_image() -> TinyCase:
    """A clip of two latent frames, of which the first is given; the pipeline gives each token its own time."""
    tiny = wan("wan22_ti2v")
    options = ModelConfig("random:wan22_ti2v:tiny", image_to_video=True)
    family, model = IMAGE_TO_VIDEO_FAMILIES["wan22_ti2v"], detect_model(options)
    pipe = FAMILIES.get(family)(options).load(model, torch.float32)
    return _add_frame_images(replace(tiny, family=family, pipe=pipe, model=model), "image", num_frames=5)


def skyreels_v2() -> TinyCase:
    return replace(wan("skyreels_v2"), blocks=("SkyReelsV2TransformerBlock",))


def skyreels_v2_i2v() -> TinyCase:
    tiny = replace(wan("skyreels_v2_i2v"), blocks=("SkyReelsV2TransformerBlock",))
    return _add_frame_images(tiny, "image")


def ltx_video(name: str = "ltx_video") -> TinyCase:
    texts, latents = _draw_tensors((13, 48), (4, 1, HEIGHT // 16, WIDTH // 16))
    mask, one_frame = torch.tensor([[1] * 13, [1] * 7 + [0] * 6]), {"num_frames": 1}
    pipe, generator = _load(f"random:{name}:tiny"), torch.Generator().manual_seed(5)
    pipe.vae.latents_mean, pipe.vae.latents_std = torch.randn(4, generator=generator), torch.tensor([0.5, 1, 2, 3])

    def normalize(pipe: Any, latents: Tensor) -> Tensor:
        return pipe._normalize_latents(latents, pipe.vae.latents_mean, pipe.vae.latents_std)

    return TinyCase(
        name,
        pipe,
        build_batch(latents, {"embeds": [texts[0], texts[1, :7]]}),
        {"prompt_embeds": texts, "prompt_attention_mask": mask, **one_frame},
        one_frame,
        _build_frame_encoder(normalize),
        f"random:{name}:tiny",
        lambda latents: latents.flatten(2).transpose(1, 2),
        lambda rows: rows.transpose(1, 2).unflatten(2, (-1, HEIGHT // 16, WIDTH // 16)),
        encode_clips=_build_clip_encoder(normalize),
        texts=one_frame,
        simplify_call=drop_padding,
        blocks=("LTXVideoTransformerBlock",),
    )


class GivenLatents(diffusers.LTXConditionPipeline):
    """The pipeline draws its noise whatever latents it is given, and the latents of a given frame: here it does not."""

    def prepare_latents(self, *args: Any, latents: Tensor | None = None, **options: Any) -> Any:
        def take_latents(shape: Any, **more: Any) -> Tensor:
            return randn_tensor(shape, **more) if latents is None else latents.clone()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline_ltx_condition, "randn_tensor", take_latents)
            patch.setattr(
                pipeline_ltx_condition, "retrieve_latents", lambda encoded, **more: encoded.latent_dist.mode()
            )
            return super().prepare_latents(*args, **options)


GivenLatents.__name__ = "LTXConditionPipeline"


def ltx_video095() -> TinyCase:
    """The pipeline takes and returns latents that are not packed, and gives its scheduler packed ones."""
    tiny = ltx_video("ltx_video095")
    tiny.pipe.__class__ = GivenLatents
    return replace(
        tiny, pack_latents=return_unchanged, unpack_latents=return_unchanged, pack_prediction=tiny.pack_latents
    )


def ltx_video095_from_image() -> TinyCase:
    tiny, options = ltx_video095(), ModelConfig("random:ltx_video095:tiny", image_to_video=True)
    family, model = IMAGE_TO_VIDEO_FAMILIES["ltx_video095"], detect_model(options)
    tiny = _add_frame_images(replace(tiny, family=family, model=model), "image", num_frames=9)
    # The pipeline adds noise to the given frame while it samples, and mixes that frame in with rounding.
    no_noise = {"image_cond_noise_scale": 0.0}
    call, sizes = {**tiny.call, **no_noise}, {**tiny.sizes, **no_noise}
    return replace(tiny, call=call, sizes=sizes, compares_arguments=False)


class Isolation:
    """The pipeline leaves out the attention between pictures and sound in all calls, where that is asked for."""

    def __call__(self, *args: Any, isolated: bool = False, **options: Any) -> Any:
        def isolate(module: Any, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, "isolate_modalities": isolated or kwargs["isolate_modalities"]}

        handle = self.transformer.register_forward_pre_hook(isolate, with_kwargs=True)
        try:
            return super().__call__(*args, **options)
        finally:
            handle.remove()


class IsolatedText(Isolation, diffusers.LTX2Pipeline):
    pass


class IsolatedImage(Isolation, diffusers.LTX2ImageToVideoPipeline):
    """Given latents are noise here, and the first frame is mixed in."""

    def prepare_latents(self, image: Any, *args: Any) -> Any:
        *others, latents = args
        if latents is None:
            return super().prepare_latents(image, *args)
        pixels = self.video_processor.preprocess(image, HEIGHT, WIDTH)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline_ltx2_image2video, "randn_tensor", lambda shape, **more: latents.clone())
            return super().prepare_latents(pixels, *others, None)


IsolatedText.__name__, IsolatedImage.__name__ = "LTX2Pipeline", "LTX2ImageToVideoPipeline"

NO_GUIDANCE = {
    **{"audio_guidance_scale": 1.0, "stg_scale": 0.0, "audio_stg_scale": 0.0},
    **{"modality_scale": 1.0, "audio_modality_scale": 1.0},
}
"""What turns off all that LTX-2 is guided by, apart from the text."""


def drop_sound(arguments: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the pipeline gives the stream of sound, and the mask of texts in which nothing is masked."""
    assert bool(arguments.get("encoder_attention_mask", torch.ones(1)).all())
    return {
        name: value
        for name, value in arguments.items()
        if not name.startswith("audio") and name != "encoder_attention_mask"
    }


def ltx2(source: str = "random:ltx2:tiny") -> TinyCase:
    pipe, generator = _load(source), torch.Generator().manual_seed(5)
    config = load_bundled_config(source.removeprefix("random:").replace(":", "_"))
    for part in ("audio_vae", "vocoder"):  # which previews do without
        part_class = import_model_class(*config["model_index.json"][part])
        part_config = config[f"{part}/config.json"]
        pipe.register_modules(**{part: build_random_component(part_class, part_config, part, torch.float32, None)})
    pipe.__class__ = IsolatedText
    pipe.vae.latents_mean, pipe.vae.latents_std = torch.randn(4, generator=generator), torch.tensor([0.5, 1, 2, 3])
    states, latents = _draw_tensors((128, 72), (4, 1, HEIGHT // 16, WIDTH // 16))
    mask = torch.tensor([[0] * 115 + [1] * 13, [0] * 121 + [1] * 7])
    with torch.no_grad():
        embeds, sound_embeds, _ = pipe.connectors(states, mask)
    settings = {"num_frames": 1, "use_cross_timestep": "2_3" in source}
    sizes = {**settings, **NO_GUIDANCE, "isolated": True}

    def normalize(pipe: Any, latents: Tensor) -> Tensor:
        return pipe._normalize_latents(latents, pipe.vae.latents_mean, pipe.vae.latents_std)

    return TinyCase(
        "ltx2",
        pipe,
        build_batch(latents, {"embeds": embeds, "sound_embeds": sound_embeds}),
        {"prompt_embeds": states, "prompt_attention_mask": mask, **sizes},
        sizes,
        _build_frame_encoder(normalize),
        source,
        lambda latents: latents.flatten(2).transpose(1, 2),
        lambda latents: normalize(pipe, latents),
        encode_clips=_build_clip_encoder(normalize),
        texts=settings,
        simplify_call=drop_sound,
        tolerances={"rtol": 1e-5, "atol": 1e-5},  # of attention without the mask
        blocks=("LTX2VideoTransformerBlock",),
        untrained="audio|to_gate_logits",
    )


def ltx2_2_3() -> TinyCase:
    return ltx2("random:ltx2:2_3_tiny")


def ltx2_from_image() -> TinyCase:
    tiny, options = ltx2(), ModelConfig("random:ltx2:tiny", image_to_video=True)
    family, model = IMAGE_TO_VIDEO_FAMILIES["ltx2"], detect_model(options)
    components = {name: part for name, part in tiny.pipe.components.items() if part is not None}
    pipe = IsolatedImage(**components)
    pipe.vae_spatial_compression_ratio = tiny.pipe.vae_spatial_compression_ratio
    added = _add_frame_images(replace(tiny, family=family, model=model, pipe=pipe), "image", num_frames=9)
    no_compression = {"image_crf": 0}
    return replace(
        added,
        call={**added.call, **no_compression},
        sizes={**added.sizes, **no_compression},
        pack_latents=return_unchanged,
        pack_prediction=lambda latents: latents[:, :, 1:],
        compares_arguments=False,  # the pipeline mixes the given frame in with rounding
    )


def flux3() -> TinyCase:
    pipe, generator = _load("random:flux3:tiny"), torch.Generator().manual_seed(5)
    pipe.tokenizer.tokenizer = pipe.tokenizer  # of diffusers' processor
    pipe.vae.bn.running_mean = torch.randn(16, generator=generator)
    pipe.vae.bn.running_var = torch.rand(16, generator=generator) + 0.5
    embeds, latents = _draw_tensors((80, 64), (16, HEIGHT // 16, WIDTH // 16))

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        rows = _pack_patches(pipe.vae.encode(pixels).latent_dist.mode())
        normed = (rows - pipe.vae.bn.running_mean) / (pipe.vae.bn.running_var + pipe.vae.config.batch_norm_eps).sqrt()
        return normed.transpose(1, 2).unflatten(2, (HEIGHT // 16, WIDTH // 16))

    return TinyCase(
        "flux3",
        pipe,
        build_batch(latents, {"embeds": list(embeds)}),
        {"prompt_embeds": embeds},
        {},
        encode,
        "random:flux3:tiny",
        pack_prediction=lambda latents: latents.flatten(2).transpose(1, 2),
        encodes_prompts_alone=True,
        blocks=("Flux3ModeTransformerBlock", "Flux3SingleTransformerBlock"),
    )


def drop_glyph_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    """Leave out the tokens of both texts that their masks exclude."""
    simple = drop_padding(arguments)
    glyphs, mask = (simple.pop(f"encoder_{name}_2", None) for name in ("hidden_states", "attention_mask"))
    rows = [] if glyphs is None else [row[each] for row, each in zip(glyphs, mask.bool(), strict=True)]
    return {"glyphs": [row for row in rows if len(row)], **simple}


def hunyuan_image() -> TinyCase:
    texts, latents = _draw_tensors((13, 32), (4, HEIGHT // 16, WIDTH // 16))
    glyphs, mask = _draw_tensors((11, 24))[0], torch.tensor([[1] * 13, [1] * 7 + [0] * 6])
    glyphs[1] = 0  # nothing in quotes
    glyph_mask = torch.tensor([[1] * 11, [0] * 11])
    pipe = _load("random:hunyuan_image:tiny")
    longest = pipe.tokenizer(pipe.prompt_template_encode.format("a red circle on white ground")).input_ids
    pipe.tokenizer_max_length = len(longest) - pipe.prompt_template_encode_start_idx  # sums round by the padding

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        parts = zip(pixels.split(1), generators, strict=True)
        draws = [pipe.vae.encode(pixel).latent_dist.sample(generator) for pixel, generator in parts]
        return torch.cat(draws) * pipe.vae.config.scaling_factor

    return TinyCase(
        "hunyuan_image",
        pipe,
        build_batch(latents, {"embeds": [texts[0], texts[1, :7]], "glyphs": [glyphs[0], glyphs[1, :1]]}),
        {
            "prompt_embeds": texts,
            "prompt_embeds_mask": mask,
            "prompt_embeds_2": glyphs,
            "prompt_embeds_mask_2": glyph_mask,
        },
        {},
        encode,
        "random:hunyuan_image:tiny",
        simplify_call=drop_glyph_padding,
        blocks=("HunyuanImageTransformerBlock", "HunyuanImageSingleTransformerBlock"),
    )


def hunyuan_video15(name: str = "hunyuan_video15") -> TinyCase:
    texts, latents = _draw_tensors((13, 32), (4, 1, HEIGHT // 16, WIDTH // 16))
    glyphs, mask = _draw_tensors((11, 24))[0], torch.tensor([[1] * 13, [1] * 7 + [0] * 6])
    glyphs[1] = 0  # nothing in quotes
    glyph_mask, one_frame = torch.tensor([[1] * 11, [0] * 11]), {"num_frames": 1}
    pipe = _load(f"random:{name}:tiny")
    pipe.vae.enable_slicing()  # the mask of its attention is right for one clip only
    chat = [
        {"role": "system", "content": pipe.system_message},
        {"role": "user", "content": "a red circle on white ground"},
    ]
    longest = pipe.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    pipe.tokenizer_max_length = len(longest) - pipe.prompt_template_encode_start_idx  # sums round by the padding

    def simplify_call(arguments: dict[str, Any]) -> dict[str, Any]:
        images = arguments.get("image_embeds")
        assert images is None or not images.any(), "there is no first frame"
        simple = {name: value for name, value in arguments.items() if name != "image_embeds"}
        return drop_glyph_padding(simple)

    def scale(pipe: Any, latents: Tensor) -> Tensor:
        return latents * pipe.vae.config.scaling_factor

    return TinyCase(
        name,
        pipe,
        build_batch(latents, {"embeds": [texts[0], texts[1, :7]], "glyphs": [glyphs[0], glyphs[1, :1]]}),
        {
            "prompt_embeds": texts,
            "prompt_embeds_mask": mask,
            "prompt_embeds_2": glyphs,
            "prompt_embeds_mask_2": glyph_mask,
            **one_frame,
        },
        one_frame,
        _build_frame_encoder(scale),
        f"random:{name}:tiny",
        encode_clips=_build_clip_encoder(scale),
        texts=one_frame,
        simplify_call=simplify_call,
        blocks=("HunyuanVideo15TransformerBlock",),
    )


def hunyuan_video15_i2v() -> TinyCase:
    tiny = hunyuan_video15("hunyuan_video15_i2v")

    def simplify_call(arguments: dict[str, Any]) -> dict[str, Any]:
        return drop_glyph_padding(arguments)

    return _add_frame_images(replace(tiny, simplify_call=simplify_call), "image", num_frames=5)


def pixart_sigma() -> TinyCase:
    texts, latents = _draw_tensors((13, 48), (4, HEIGHT // 8, WIDTH // 8))
    mask, options = torch.tensor([[1] * 13, [1] * 7 + [0] * 6]), {"use_resolution_binning": False}
    texts_as_given = {"clean_caption": False, **options}
    return TinyCase(
        "pixart_sigma",
        _load("random:pixart_sigma:tiny"),
        build_batch(latents, {"embeds": [texts[0], texts[1, :7]]}),
        {"prompt_embeds": texts, "prompt_attention_mask": mask, **options},
        {},
        _build_vae_encoder("StableDiffusionXLInpaintPipeline"),
        "random:pixart_sigma:tiny",
        texts=texts_as_given,
        simplify_call=drop_padding,
        blocks=("Attention",),
    )


def prx() -> TinyCase:
    texts, latents = _draw_tensors((13, 24), (4, HEIGHT // 8, WIDTH // 8))
    mask, options = torch.tensor([[1] * 13, [1] * 7 + [0] * 6]).bool(), {"use_resolution_binning": False}
    return TinyCase(
        "prx",
        _load("random:prx:tiny"),
        build_batch(latents, {"embeds": [texts[0], texts[1, :7]]}),
        {"prompt_embeds": texts, "prompt_attention_mask": mask, **options},
        {},
        _build_vae_encoder("FluxInpaintPipeline"),
        "random:prx:tiny",
        texts=options,
        simplify_call=lambda arguments: drop_padding(arguments, "attention_mask"),
        tolerances={"rtol": 1e-5, "atol": 1e-5},  # of one timestep for all rows in the pipeline
        blocks=("PRXBlock",),
        untrained=r"modulation\.lin$",
    )


def prx_pixel() -> TinyCase:
    tiny, (texts, pixels) = prx(), _draw_tensors((13, 24), (3, HEIGHT, WIDTH))
    return replace(
        tiny,
        family="prx_pixel",
        pipe=_load("random:prx_pixel:tiny"),
        batch=build_batch(pixels, {"embeds": [texts[0], texts[1, :7]]}),
        encode=lambda pipe, pixels, generators: pixels,
        source="random:prx_pixel:tiny",
    )


def nucleus_image() -> TinyCase:
    tiny, (texts, latents) = qwen_image(), _draw_tensors((13, 16), (4, HEIGHT // 8, WIDTH // 8))
    mask = tiny.call["prompt_embeds_mask"]
    return replace(
        tiny,
        family="nucleus_image",
        pipe=_load("random:nucleus_image:tiny"),
        batch=build_batch(latents, {"embeds": [texts[0], texts[1, :7]]}),
        call={"prompt_embeds": texts * mask.unsqueeze(2), "prompt_embeds_mask": mask},
        source="random:nucleus_image:tiny",
        scale="guidance_scale",
        simplify_call=lambda arguments: drop_padding(arguments, "encoder_hidden_states_mask"),
        tolerances={"rtol": 1e-5, "atol": 1e-5},  # of texts that the pipeline pads to a multiple of 8 tokens
        blocks=("NucleusMoEImageTransformerBlock",),
        untrained=r"img_mod\.1$|encoder_proj$|img_mlp\.gate$",
    )


class _NegativeReference:
    """The transformer with a negative prompt in diffusers' order of tokens: padding, text, image."""

    def __init__(self, pipe: Any, text: str):
        self.pipe, self.text, self.dtype = pipe, text, pipe.transformer.dtype

    def __call__(self, hidden_states: Tensor, timestep: Tensor, **others: Any) -> tuple[Tensor]:
        grid, length = (HEIGHT // 16, WIDTH // 16), 80
        names = ("encoder_hidden_states", "position_ids", "segment_ids", "indicator")
        encoded = self.pipe.encode_prompt(self.text, *grid, length, hidden_states.device)
        tokens = torch.nn.functional.pad(hidden_states, (0, 0, length, 0))
        output = self.pipe.transformer(tokens, timestep, **dict(zip(names, encoded, strict=True)), return_dict=False)
        return (output[0][:, length:],)


def _sort_tokens(arguments: dict[str, Any]) -> dict[str, Any]:
    """The tokens of the image and then those of the text, without padding; Ideogram 4 tells them by an indicator."""
    names, roles = ("hidden_states", "encoder_hidden_states", "position_ids", "segment_ids"), arguments["indicator"]
    rows = {
        name: [row[role == part] for part in (2, 3) for row, role in zip(arguments[name], roles, strict=True)]
        for name in names
    }
    return {**arguments, **rows, "indicator": [roles.eq(2).sum(), roles.eq(3).sum()]}


def ideogram4() -> TinyCase:
    pipe, generator = _load("random:ideogram4:tiny"), torch.Generator().manual_seed(5)
    config = load_bundled_config("ideogram4_tiny")["unconditional_transformer/config.json"]
    pipe.unconditional_transformer = build_random_component(
        diffusers.Ideogram4Transformer2DModel, config, "unconditional_transformer", torch.float32, None
    )
    # The places in a patch come first, and are nearly equal.
    pipe.vae.bn.running_mean = torch.randn(4, generator=generator).repeat(4) + torch.randn(16, generator=generator) / 20
    pipe.vae.bn.running_var = torch.rand(16, generator=generator) + 0.5
    (latents,), texts = _draw_tensors((16, HEIGHT // 16, WIDTH // 16)), list(TEXTS)
    with torch.no_grad():
        cond = FAMILIES.get("ideogram4")().encode_prompts(pipe, texts)

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """The inverse of how the pipeline decodes."""
        rows = _pack_patches(pipe.vae.encode(pixels).latent_dist.mode())
        rows = rows.unflatten(2, (4, 4)).transpose(2, 3).flatten(2)
        deviation = (pipe.vae.bn.running_var + pipe.vae.config.batch_norm_eps).sqrt()
        normed = (rows - pipe.vae.bn.running_mean) / deviation
        return normed.transpose(1, 2).unflatten(2, (HEIGHT // 16, WIDTH // 16))

    def build_negative(pipe: Any, text: str) -> dict[str, Any]:
        pipe.unconditional_transformer = _NegativeReference(pipe, text)
        return {}

    # The first text without padding, which would be rounded in another way; the family encodes each text alone.
    settings = {"guidance_schedule": None, "max_sequence_length": len(cond["embeds"][0])}
    return TinyCase(
        "ideogram4",
        pipe,
        build_batch(latents, cond),
        {"prompt": texts[:1], **settings},
        {},
        encode,
        "random:ideogram4:tiny",
        lambda latents: latents.flatten(2).transpose(1, 2),
        lambda rows: rows.transpose(1, 2).unflatten(2, (HEIGHT // 16, WIDTH // 16)),
        texts=settings,
        build_negative=build_negative,
        simplify_call=_sort_tokens,
        tolerances={"rtol": 1e-5, "atol": 1e-5},  # of another order of the tokens
        max_rows=1,
        blocks=("Ideogram4TransformerBlock",),
        untrained=r"adaln_modulation$",
    )


def pixart_sigma_velocity() -> TinyCase:
    tiny = pixart_sigma()
    tiny.pipe.scheduler = diffusers.DDIMScheduler.from_config(
        tiny.pipe.scheduler.config, prediction_type="v_prediction"
    )
    return tiny


def kolors() -> TinyCase:
    tiny = sdxl()
    embeds, pooled = _draw_tensors((256, 32), (32,))
    return replace(
        tiny,
        family="kolors",
        pipe=_load("random:kolors:tiny"),
        batch=build_batch(tiny.batch.latents, {"embeds": embeds, "pooled": pooled}),
        call={"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, **tiny.sizes},
        encode=_build_vae_encoder("StableDiffusionXLInpaintPipeline"),
        source="random:kolors:tiny",
    )


def kolors_velocity() -> TinyCase:
    tiny = kolors()
    tiny.pipe.scheduler = diffusers.DDIMScheduler.from_config(
        tiny.pipe.scheduler.config, prediction_type="v_prediction"
    )
    return tiny


def hidream() -> TinyCase:
    t5, llama, pooled, latents = _draw_tensors((128, 48), (3, 128, 24), (40,), (4, HEIGHT // 8, WIDTH // 8))
    return TinyCase(
        "hidream",
        _load("random:hidream:tiny"),
        build_batch(latents, {"t5": t5, "llama": llama, "pooled": pooled}),
        {"prompt_embeds_t5": t5, "prompt_embeds_llama3": llama.transpose(0, 1), "pooled_prompt_embeds": pooled},
        {},
        _build_vae_encoder("FluxInpaintPipeline"),
        "random:hidream:tiny",
        blocks=("HiDreamAttention",),
    )


def kandinsky5_image() -> TinyCase:
    embeds, pooled, latents = _draw_tensors((9, 32), (16,), (4, HEIGHT // 8, WIDTH // 8))

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        parts = zip(pixels.split(1), generators, strict=True)
        draws = [pipe.vae.encode(pixel).latent_dist.sample(generator) for pixel, generator in parts]
        return torch.cat(draws) * pipe.vae.config.scaling_factor

    return TinyCase(
        "kandinsky5_image",
        _load("random:kandinsky5_image:tiny"),
        build_batch(latents, {"embeds": list(embeds), "pooled": pooled}),
        {
            "prompt_embeds_qwen": embeds,
            "prompt_embeds_clip": pooled,
            "prompt_cu_seqlens": torch.tensor([0, 9, 18]),
        },
        {},
        encode,
        "random:kandinsky5_image:tiny",
        lambda latents: latents.permute(0, 2, 3, 1).unsqueeze(1),
        lambda latents: latents.squeeze(1).permute(0, 3, 1, 2),
        encodes_prompts_alone=True,
        blocks=("Kandinsky5Attention",),
        untrained="out_layer",
    )


def hunyuan_video() -> TinyCase:
    texts, pooled, latents = _draw_tensors((13, 24), (16,), (4, 1, HEIGHT // 8, WIDTH // 8))
    mask, one_frame = torch.tensor([[1] * 13, [1] * 7 + [0] * 6]), {"num_frames": 1}
    options, pipe = {"guidance_scale": 1.0, **one_frame}, _load("random:hunyuan_video:tiny")
    template = pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE
    longest = len(pipe.tokenizer(template["template"].format("a red circle on white ground")).input_ids)

    def scale(pipe: Any, latents: Tensor) -> Tensor:
        return latents * pipe.vae.config.scaling_factor

    return TinyCase(
        "hunyuan_video",
        pipe,
        build_batch(latents, {"embeds": [texts[0], texts[1, :7]], "pooled": pooled}),
        {"prompt_embeds": texts, "prompt_attention_mask": mask, "pooled_prompt_embeds": pooled, **options},
        options,
        _build_frame_encoder(scale),
        "random:hunyuan_video:tiny",
        encode_clips=_build_clip_encoder(scale),
        texts={**one_frame, "max_sequence_length": longest - template["crop_start"]},  # sums round by the padding
        scale="true_cfg_scale",
        simplify_call=drop_padding,
        blocks=("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
        untrained=r"norm1|norm\.linear",
    )


class RepeatedFirstFrame:
    """A mixin of pipelines that encode one image, for texts and clips of several rows that begin with it."""

    def prepare_latents(self, image: Tensor, batch_size: int, *args: Any) -> Any:
        latents, given = super().prepare_latents(image, batch_size, *args)  # type: ignore[misc]
        return latents, given.expand(batch_size, -1, -1, -1, -1).clone()


def hunyuan_video_i2v(name: str = "hunyuan_video_i2v") -> TinyCase:
    """A clip of two latent frames; the pipeline mixes a thousandth of the given one into the noise of all frames."""
    tiny, pipe = hunyuan_video(), _load(f"random:{name}:tiny")
    pipe.__class__ = copy_class_name(type("Repeated", (RepeatedFirstFrame, type(pipe)), {}), type(pipe))
    template = pipeline_hunyuan_video_image2video.DEFAULT_PROMPT_TEMPLATE
    longest = len(pipe.tokenizer(template["template"].format("a red circle on white ground")).input_ids)
    texts = {"max_sequence_length": longest - template["crop_start"]}  # sums round by the padding
    tiny = replace(tiny, family=name, pipe=pipe, source=f"random:{name}:tiny", texts=texts)
    tiny = _add_frame_images(tiny, "image", num_frames=5)
    given = tiny.batch.frame_cond["first"]

    def mix(latents: Tensor) -> Tensor:
        return (latents - 0.001 * given[: len(latents)]) / 0.999

    return replace(
        tiny,
        pack_latents=mix,
        pack_prediction=lambda prediction: prediction[:, :, 1:],
        build_negative=lambda pipe, text: {"negative_prompt": text, "guidance_scale": 6.0},
        encodes_prompts_alone=True,
        compares_arguments=False,
        tolerances={"rtol": 1e-4, "atol": 1e-5},
        blocks=("HunyuanVideoTokenReplaceTransformerBlock", "HunyuanVideoTokenReplaceSingleTransformerBlock"),
    )


def _negate(pipe: Any, text: str) -> dict[str, Any]:
    return {"negative_prompt": text}


def hunyuan_video_33ch_i2v() -> TinyCase:
    tiny = hunyuan_video_i2v("hunyuan_video_33ch_i2v")
    blocks = ("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock")
    return replace(
        tiny, dropped_frames=4, blocks=blocks, pack_prediction=lambda prediction: prediction, build_negative=_negate
    )


class RepeatedSection:
    """A mixin of FramePack's pipeline, which takes one image, for texts of several rows."""

    num_rows = 1

    def __call__(self, *args: Any, prompt: Any = None, prompt_embeds: Any = None, **kwargs: Any) -> Any:
        texts = prompt if prompt_embeds is None else prompt_embeds
        self.num_rows = 1 if isinstance(texts, str) else len(texts)
        return super().__call__(*args, prompt=prompt, prompt_embeds=prompt_embeds, **kwargs)  # type: ignore[misc]

    def encode_image(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().encode_image(*args, **kwargs).expand(self.num_rows, -1, -1)  # type: ignore[misc]

    def prepare_image_latents(self, *args: Any, **kwargs: Any) -> Tensor:
        encoded = super().prepare_image_latents(*args, **kwargs)  # type: ignore[misc]
        return encoded.expand(self.num_rows, -1, -1, -1, -1)


def framepack() -> TinyCase:
    """A clip of one section after its first frame."""
    tiny, pipe = hunyuan_video(), _load("random:framepack:tiny")
    pipe.__class__ = copy_class_name(type("Repeated", (RepeatedSection, type(pipe)), {}), type(pipe))
    tiny = replace(tiny, family="framepack", pipe=pipe, source="random:framepack:tiny")
    tiny = _add_frame_images(tiny, "image", num_frames=37)
    batch = FAMILIES.get("framepack")().select_section(tiny.batch, 0.0)
    first = {"image_latents": batch.frame_cond["clean"][:, :, :1]}
    return replace(
        tiny,
        batch=batch,
        call={**tiny.call, **first},
        sizes={**tiny.sizes, **first},
        build_negative=lambda pipe, text: {"negative_prompt": text, "guidance_scale": 10.0},
    )


def _build_cogvideox_case(family: str, source: str, repeat_first: Callable[[Tensor], Tensor], frames: int) -> TinyCase:
    embeds, latents = _draw_tensors((226, 48), (4, frames, HEIGHT // 8, WIDTH // 8))
    one_frame = {"num_frames": 1}

    def encode(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        drawn = []
        for pixel, generator in zip(pixels.unsqueeze(2).split(1), generators, strict=True):
            moments = pipe.vae.encode(pixel).latent_dist.parameters
            drawn.append(DiagonalGaussianDistribution(repeat_first(moments)).sample(generator))
        return torch.cat(drawn) * pipe.vae.config.scaling_factor

    def encode_clips(pipe: Any, clips: Tensor) -> Tensor:
        return repeat_first(pipe.vae.encode(clips).latent_dist.mode()) * pipe.vae.config.scaling_factor

    return TinyCase(
        family,
        _load(source),
        build_batch(latents, {"embeds": embeds}),
        {"prompt_embeds": embeds, **one_frame},
        one_frame,
        encode,
        source,
        lambda latents: latents.transpose(1, 2),
        lambda latents: latents.transpose(1, 2),
        encode_clips=encode_clips,
        texts=one_frame,
        simplify_call=dict,  # the pipeline multiplies by the inverse of what is divided by here, so pixels round apart
        blocks=("Attention",),
    )


def cogvideox() -> TinyCase:
    return _build_cogvideox_case("cogvideox", "random:cogvideox:tiny", lambda latents: latents, 1)


def cogvideox_2b() -> TinyCase:
    return _build_cogvideox_case("cogvideox", "random:cogvideox:2b:tiny", lambda latents: latents, 1)


def cogvideox15() -> TinyCase:
    def repeat_first(latents: Tensor) -> Tensor:
        return torch.cat([latents[:, :, :1], latents], dim=2)

    return _build_cogvideox_case("cogvideox15", "random:cogvideox15:tiny", repeat_first, 2)


def mochi() -> TinyCase:
    texts, latents = _draw_tensors((13, 48), (12, 1, HEIGHT // 8, WIDTH // 8))
    mask, one_frame = torch.tensor([[1] * 13, [1] * 7 + [0] * 6]), {"num_frames": 1}

    def normalize(pipe: Any, latents: Tensor) -> Tensor:
        config = pipe.vae.config
        mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std))
        return (latents - mean) / std

    return TinyCase(
        "mochi",
        _load("random:mochi:tiny"),
        build_batch(latents, {"embeds": [texts[0], texts[1, :7]]}),
        {"prompt_embeds": texts, "prompt_attention_mask": mask.bool(), **one_frame},
        one_frame,
        _build_frame_encoder(normalize),
        "random:mochi:tiny",
        pack_prediction=lambda latents: -latents,
        convert_timesteps=lambda timesteps: 1000 - timesteps,
        encode_clips=_build_clip_encoder(normalize),
        texts=one_frame,
        simplify_call=drop_padding,
        blocks=("MochiAttention",),
    )


def kandinsky5_video() -> TinyCase:
    embeds, pooled, latents = _draw_tensors((9, 32), (16,), (4, 1, HEIGHT // 8, WIDTH // 8))
    one_frame = {"num_frames": 1}

    def scale(pipe: Any, latents: Tensor) -> Tensor:
        return latents * pipe.vae.config.scaling_factor

    def pack(latents: Tensor) -> Tensor:
        """Add the latents of a first frame, and a mask of frames that are given, which are zeros."""
        frames = latents.permute(0, 2, 3, 4, 1)
        return torch.cat([frames, torch.zeros_like(frames), torch.zeros_like(frames[..., :1])], dim=-1)

    return TinyCase(
        "kandinsky5_video",
        _load("random:kandinsky5_video:tiny"),
        build_batch(latents, {"embeds": list(embeds), "pooled": pooled}),
        {
            "prompt_embeds_qwen": embeds,
            "prompt_embeds_clip": pooled,
            "prompt_cu_seqlens": torch.tensor([0, 9, 18]),
            **one_frame,
        },
        one_frame,
        _build_frame_encoder(scale),
        "random:kandinsky5_video:tiny",
        pack,
        lambda latents: latents.permute(0, 4, 1, 2, 3),
        pack_prediction=lambda latents: latents.permute(0, 2, 3, 4, 1),
        encode_clips=_build_clip_encoder(scale),
        texts=one_frame,
        encodes_prompts_alone=True,
        blocks=("Kandinsky5Attention", "Kandinsky5FeedForward"),
    )


def kandinsky5_i2v() -> TinyCase:
    """A clip of two latent frames, of which the first is given, in the place of noise."""
    tiny = replace(kandinsky5_video(), family="kandinsky5_i2v", source="random:kandinsky5_i2v:tiny")
    tiny = _add_frame_images(replace(tiny, pipe=_load(tiny.source)), "image", num_frames=5)
    given = tiny.batch.frame_cond["first"].permute(0, 2, 3, 4, 1)

    def pack(latents: Tensor) -> Tensor:
        frames = torch.cat([given[: len(latents)], latents.permute(0, 2, 3, 4, 1)[:, 1:]], dim=1)
        packed = torch.cat([frames, torch.zeros_like(frames), torch.zeros_like(frames[..., :1])], dim=-1)
        packed[:, 0, ..., -1] = 1
        return packed

    return replace(tiny, pack_latents=pack, pack_prediction=lambda prediction: prediction.permute(0, 2, 3, 4, 1)[:, 1:])


def _drop_kandinsky6_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    """The pipeline gives the transformer masks (B, tokens), which the family gives the axes of attention."""
    mask = arguments.get("encoder_attention_mask")
    return drop_padding({**arguments, "encoder_attention_mask": None if mask is None else mask.flatten(1)})


def kandinsky6_video() -> TinyCase:
    embeds, pooled, latents = _draw_tensors((9, 32), (16,), (4, 1, HEIGHT // 8, WIDTH // 8))
    options, pipe = {"num_frames": 1, "sample_audio": False}, _load("random:kandinsky6_video:tiny")
    module = sys.modules[type(pipe).__module__]
    template, start = module._PROMPT_TEMPLATE, module._QWEN_CROP_START
    longest = len(pipe.tokenizer.tokenizer(template.format("a red circle on white ground")).input_ids)

    def scale(pipe: Any, latents: Tensor) -> Tensor:
        return latents * pipe.vae.config.scaling_factor

    return TinyCase(
        "kandinsky6_video",
        pipe,
        build_batch(latents, {"embeds": list(embeds), "pooled": pooled}),
        {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, **options},
        options,
        _build_frame_encoder(scale),
        "random:kandinsky6_video:tiny",
        pack_prediction=lambda latents: latents.permute(0, 2, 3, 4, 1),
        encode_clips=_build_clip_encoder(scale),
        texts={**options, "max_sequence_length": longest - start},  # sums round by the padding
        simplify_call=_drop_kandinsky6_padding,
        compares_arguments=False,  # texts that are not padded are rounded in another way
        tolerances={"rtol": 1e-4, "atol": 1e-5},
        blocks=("Kandinsky6TransformerEncoderBlock", "Kandinsky6FusedTransformerDecoderBlock"),
        untrained=r"modulation|audio_|\.(va|av)_",
    )


class RepeatedImage(diffusers.Kandinsky6TI2VAPipeline if hasattr(diffusers, "Kandinsky6TI2VAPipeline") else object):
    """The pipeline takes an image for each prompt, here the same one, and draws its latents, here their mean."""

    def encode_image(self, *args: Any, **options: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            module = sys.modules[diffusers.Kandinsky6TI2VAPipeline.__module__]
            patch.setattr(module, "retrieve_latents", lambda encoded, **more: encoded.latent_dist.mode())
            return super().encode_image(*args, **options)

    def __call__(self, *args: Any, image: Any = None, **options: Any) -> Any:
        prompts = next(
            each for each in (options.get("prompt"), *args, options.get("prompt_embeds")) if each is not None
        )
        count = 1 if isinstance(prompts, str) else len(prompts)
        return super().__call__(*args, image=image and [image] * count, **options)


RepeatedImage.__name__ = "Kandinsky6TI2VAPipeline"


def kandinsky6_video_from_image() -> TinyCase:
    """A clip of two latent frames, after which the pipeline adds the given one; what it predicts of that is unused."""
    tiny, options = kandinsky6_video(), ModelConfig("random:kandinsky6_video:tiny", image_to_video=True)
    family, model = IMAGE_TO_VIDEO_FAMILIES["kandinsky6_video"], detect_model(options)
    tiny = _add_frame_images(replace(tiny, family=family, model=model), "image", num_frames=5)
    given, tiny.pipe.__class__ = list[Tensor](), RepeatedImage
    tiny.pipe.transformer.register_forward_hook(lambda module, inputs, output: given.append(output[0][:, -1:]))
    return replace(
        tiny,
        pack_prediction=lambda prediction: torch.cat([prediction.permute(0, 2, 3, 4, 1), given[-1]], dim=1),
    )


def sana_video() -> TinyCase:
    tiny, (texts,) = wan("sana_video"), _draw_tensors((13, 24))
    mask, one_frame = torch.tensor([[1] * 13, [1] * 7 + [0] * 6]), {"num_frames": 1}
    options = {**one_frame, "use_resolution_binning": False}
    return replace(
        tiny,
        batch=build_batch(tiny.batch.latents, {"embeds": [texts[0], texts[1, :7]]}),
        call={"prompt_embeds": texts, "prompt_attention_mask": mask, **options},
        sizes=options,
        texts=options,
        simplify_call=drop_padding,
        blocks=("Attention",),
    )


class SilentH3:
    """The pipeline without tokens of sound, where that is asked for: the family trains pictures alone without them."""

    def __call__(self, *args: Any, is_silent: bool = False, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if is_silent:
                patch.setattr(before_denoise, "audio_latent_num_frames", lambda num_frames: 0)
            return super().__call__(*args, **options)


def minimax_h3() -> TinyCase:
    """A clip of as few frames as the decoder makes, since it makes no image."""
    texts, latents = _draw_tensors((13, 8), (4, 7, HEIGHT // 8, WIDTH // 8))
    pipe, frames = _load("random:minimax_h3:tiny"), {"num_frames": 22}
    silent_class = type("SilentPipeline", (SilentH3, type(pipe)), {})
    pipe.__class__ = copy_class_name(silent_class, type(pipe))
    colors = [torch.tensor(each).view(1, 3, 1, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]

    def normalize_pixels(pixels: Tensor) -> Tensor:
        return ((pixels + 1) / 2 - colors[0]) / colors[1]

    def normalize(pipe: Any, latents: Tensor) -> Tensor:
        config = pipe.vae.config
        mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std))
        return (latents - mean) / std

    encode, encode_clips = _build_frame_encoder(normalize), _build_clip_encoder(normalize)
    return TinyCase(
        "minimax_h3",
        pipe,
        build_batch(latents, {"embeds": [texts[0], texts[1, :7]]}),
        {"prompt_embeds": texts[:1], "is_silent": True, **frames},
        {"is_silent": True, **frames},
        lambda pipe, pixels, generators: encode(pipe, normalize_pixels(pixels), generators),
        "random:minimax_h3:tiny",
        pack_prediction=lambda latents: -_pack_h3_rows(latents)[0],
        convert_timesteps=lambda timesteps: 1000 - 1000 * timesteps,
        encode_clips=lambda pipe, clips: encode_clips(pipe, normalize_pixels(clips)),
        texts=frames,
        num_frames=22,
        add_channels=normalize_pixels,
        restore_pixels=lambda pixels: (pixels * colors[1] + colors[0]) * 2 - 1,
        max_rows=1,
        blocks=("MiniMaxH3TransformerBlock",),
        untrained="adaln_proj",
    )


def _pack_h3_rows(latents: Tensor) -> Tensor:
    """An independent implementation: a patch of 2 x 2 becomes one row, channels first, frame after frame."""
    rows = latents.unfold(3, 2, 2).unfold(4, 2, 2).permute(0, 2, 3, 4, 1, 5, 6)
    return rows.flatten(4).flatten(1, 3)


TINY: dict[str, Callable[[], TinyCase]] = {
    "built_in": built_in,
    "sd1": sd1,
    "sd1_velocity": sd1_velocity,
    "sd2": sd2,
    "sd2_epsilon": sd2_epsilon,
    "sdxl": sdxl,
    "sd1_inpainting": sd1_inpainting,
    "sd2_inpainting": sd2_inpainting,
    "sdxl_inpainting": sdxl_inpainting,
    "sd1_pix2pix": sd1_pix2pix,
    "sdxl_pix2pix": sdxl_pix2pix,
    "sdxl_refiner": sdxl_refiner,
    "flux_fill": flux_fill,
    "flux_control": flux_control,
    "sdxl_velocity": sdxl_velocity,
    "sd3": sd3,
    "flux": flux,
    "flux_schnell": flux_schnell,
    "flux_kontext": flux_kontext,
    "flux_kontext_without_reference": flux_kontext_without_reference,
    "chroma": chroma,
    "flux2_dev": flux2_dev,
    "flux2_klein": flux2_klein,
    "flux2_klein_with_references": flux2_klein_with_references,
    "z_image": z_image,
    "z_image_omni": z_image_omni,
    "qwen_image": qwen_image,
    "qwen_image21": qwen_image21,
    "qwen_image_edit": qwen_image_edit,
    "qwen_image_edit_plus": qwen_image_edit_plus,
    "qwen_image_layered": qwen_image_layered,
    "qwen_image_edit_plus_2511": qwen_image_edit_plus_2511,
    "aura_flow": aura_flow,
    "ovis_image": ovis_image,
    "bria": bria,
    "joyimage_edit": joyimage_edit,
    "joyimage_edit_plus": joyimage_edit_plus,
    "bria_fibo": bria_fibo,
    "bria_fibo_edit": bria_fibo_edit,
    "bria_fibo2": bria_fibo2,
    "longcat_image": longcat_image,
    "longcat_image_edit": longcat_image_edit,
    "ernie_image": ernie_image,
    "lumina2": lumina2,
    "krea2": krea2,
    "sana": sana,
    "cogview4": cogview4,
    "glm_image": glm_image,
    "anima": anima,
    "flux3": flux3,
    "hunyuan_image": hunyuan_image,
    "wan": wan,
    "wan_i2v": wan_i2v,
    "wan_flf2v": wan_flf2v,
    "wan_vace": wan_vace,
    "wan_fun_control": wan_fun_control,
    "wan_animate": wan_animate,
    "wan_fun_control_from_image": wan_fun_control_from_image,
    "wan_fun_control11": wan_fun_control11,
    "wan_fun_control11_from_image": wan_fun_control11_from_image,
    "wan22_fun_control": wan22_fun_control,
    "wan22_fun_control_from_image": wan22_fun_control_from_image,
    "wan22_t2v": wan22_t2v,
    "wan22_i2v": wan22_i2v,
    "wan22_ti2v": wan22_ti2v,
    "wan22_ti2v_from_image": wan22_ti2v_from_image,
    "skyreels_v2": skyreels_v2,
    "skyreels_v2_i2v": skyreels_v2_i2v,
    "hunyuan_video15": hunyuan_video15,
    "hunyuan_video15_i2v": hunyuan_video15_i2v,
    "ltx_video": ltx_video,
    "ltx_video095": ltx_video095,
    "ltx_video095_from_image": ltx_video095_from_image,
    "ltx2": ltx2,
    "ltx2_2_3": ltx2_2_3,
    "ltx2_from_image": ltx2_from_image,
    "hunyuan_video": hunyuan_video,
    "hunyuan_video_i2v": hunyuan_video_i2v,
    "hunyuan_video_33ch_i2v": hunyuan_video_33ch_i2v,
    "framepack": framepack,
    "cogvideox": cogvideox,
    "cogvideox_2b": cogvideox_2b,
    "cogvideox15": cogvideox15,
    "mochi": mochi,
    "kandinsky5_video": kandinsky5_video,
    "kandinsky5_i2v": kandinsky5_i2v,
    "cosmos2_video2world": cosmos2_video2world,
    "cosmos2_text2image": cosmos2_text2image,
    "kandinsky6_video": kandinsky6_video,
    "kandinsky6_video_from_image": kandinsky6_video_from_image,
    "sana_video": sana_video,
    "minimax_h3": minimax_h3,
    "hidream": hidream,
    "kandinsky5_image": kandinsky5_image,
    "kolors": kolors,
    "kolors_velocity": kolors_velocity,
    "pixart_sigma": pixart_sigma,
    "pixart_sigma_velocity": pixart_sigma_velocity,
    "prx": prx,
    "prx_pixel": prx_pixel,
    "nucleus_image": nucleus_image,
    "ideogram4": ideogram4,
}


def get_tiny_sd1_folder() -> str:
    """The random Stable Diffusion 1 pipeline as a folder, for runs whose generated images are not compared.

    It is written once and reused by every process and every later test run.
    """
    source = Path(tiny_sd1.__file__).read_bytes() + f"{torch.__version__}/{diffusers.__version__}".encode()
    name = f"lorikeet-tiny-sd1-{os.getuid()}-{hashlib.sha256(source).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    if not folder.exists():
        fresh = tempfile.mkdtemp(prefix=name)
        tiny_sd1.build_pipeline().save_pretrained(fresh)
        try:
            os.rename(fresh, folder)
        except OSError:  # another process was faster
            shutil.rmtree(fresh)
    return str(folder)
