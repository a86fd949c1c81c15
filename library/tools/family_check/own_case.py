"""The case of a user's family: a small model, a batch, and a call of its pipeline in the way of all pipelines."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ...config.schema import ModelConfig
from ...dataloader.batch import Cond
from ...dataloader.sample_prompts import Prompt
from ...errors import UserError
from ...models.base import Family
from ...models.detect import DetectedModel, detect_model
from ...models.families import FAMILY_FACTS
from ...models.own_families import list_own_configs, load_own_family
from ...problems import Problem
from ...randomness import Purpose, derive_generator
from .cases import HEIGHT, WIDTH, CheckSkippedError, Recorder, TinyCase, build_batch, return_unchanged
from .checks import TEXTS

TINY = "tiny"
PLAIN_TYPES = (bool, int, float, str)
MAX_PARAMETERS = 100_000_000
"""A larger model is no tiny one, and its checks would take hours."""


def detect_check_model(family: str, path_or_id: str | None) -> DetectedModel:
    """Detect the model that a family is checked with: the given one, or its tiny configuration."""
    if path_or_id is None:
        load_own_family(family)
        if family not in FAMILY_FACTS and TINY not in list_own_configs(family):
            text = f"{family} has no configuration {TINY!r} in pipeline.configs"
            fix = "add one, or give the folder of a small model with --pretrained_model_name_or_path"
            raise UserError(Problem("family", text, fix))
        path_or_id = f"random:{family}:{TINY}"
    return detect_model(ModelConfig(path_or_id, family=family))


def build_own_case(family: Family, model: DetectedModel) -> TinyCase:
    """Load the model and build a batch whose conditioning and sizes are those of a call of its pipeline."""
    pipe = family.load(model, torch.float32)
    pipe.set_progress_bar_config(disable=True)
    denoiser = getattr(pipe, family.facts.denoiser_name)
    count = sum(parameter.numel() for parameter in denoiser.parameters())
    if count > MAX_PARAMETERS:
        text = f"{model.path_or_id}: {count:,} parameters; checks are for small models of at most {MAX_PARAMETERS:,}"
        raise UserError(Problem("pretrained_model_name_or_path", text, "give one with two blocks of each type"))
    height, width = _choose_size(model.size_multiple)
    case = TinyCase(
        family=model.family,
        pipe=pipe,
        batch=build_batch(torch.empty(0), {}),
        call={},
        sizes={},
        encode=encode_with_vae,
        source=model.path_or_id,
        compares_arguments=False,
        max_rows=1,  # some pipelines let the texts of a batch affect each other
        model=model,
        size=(height, width),
        controls=_draw_controls(family, height, width),
        encodes_prompts_alone=True,
    )
    return _fill_case(family, case)


def _choose_size(multiple: int) -> tuple[int, int]:
    """Choose a height and a greater width, near those of the other cases."""
    height = -(-HEIGHT // multiple) * multiple
    return height, max(-(-WIDTH // multiple) * multiple, height + multiple)


def _draw_controls(family: Family, height: int, width: int) -> tuple[Image.Image, ...]:
    gradient = Image.linear_gradient("L").rotate(30).resize((width, height))
    image = Image.merge("RGB", [gradient, gradient.rotate(90), gradient.rotate(50)])
    return (image,) * family.facts.control.num_images[0]


@torch.no_grad()
def _fill_case(family: Family, case: TinyCase) -> TinyCase:
    pipe, (height, width) = case.pipe, case.size
    moments = family.encode_moments(pipe, case.make_pixels())
    generator = derive_generator(0, Purpose.RANDOM_MODEL)
    latents = torch.randn(moments.mean_and_std[:, 0].shape, generator=generator)
    cond = case.encode_prompts(family, pipe, TEXTS)
    frame, sizes = _build_sizes(pipe, height, width)
    names = inspect.signature(type(pipe).__call__).parameters
    if {"guidance_scale", "true_cfg_scale"} <= names.keys():  # of which one is an input of the denoiser
        sizes["guidance_scale"] = family.model_config.guidance_scale
    batch = replace(
        build_batch(latents, cond, frame), control_latents=tuple(moments.mean_and_std[:, 0] for _ in case.controls)
    )
    settings = _read_call_settings(family, case, cond)
    if family.facts.pipeline.frames is not None:
        settings["num_frames"] = 1
    pack, unpack = _find_packing(pipe, height, width)
    case = replace(
        case, batch=batch, sizes={**sizes, **settings}, texts=settings, pack_latents=pack, unpack_latents=unpack
    )
    # Where guidance is on, the pipeline calls the denoiser with twice as many rows, or a second time.
    case = replace(case, call={"prompt": [TEXTS[0]], **case.sizes}, **_find_guidance(family, case))
    return case


def _build_sizes(pipe: Any, height: int, width: int) -> tuple[Sequence[float], dict[str, Any]]:
    """Choose original size, crop and target size of the batch, and the pipeline's arguments for them, if it has any."""
    names = inspect.signature(type(pipe).__call__).parameters
    if not {"original_size", "crops_coords_top_left"} <= names.keys():
        return (height, width, 0, 0, height, width), {}
    sizes = {"original_size": (80, 120), "crops_coords_top_left": (8, 4), "target_size": (height, width)}
    return (80, 120, 8, 4, height, width), {name: value for name, value in sizes.items() if name in names}


def _read_call_settings(family: Family, case: TinyCase, cond: Cond) -> dict[str, Any]:
    """The settings among the arguments of previews, such as ``use_resolution_binning``; and texts as they are."""
    row = {name: value[:1] for name, value in cond.items()}
    arguments = family.build_sampling_kwargs(case.pipe, Prompt(TEXTS[0]), row, row)
    names = inspect.signature(type(case.pipe).__call__).parameters
    settings = {name: value for name, value in arguments.items() if isinstance(value, PLAIN_TYPES) and name in names}
    settings = {  # scale and number of steps are those of each check
        name: value for name, value in settings.items() if not name.endswith(("_scale", "prompt", "_steps"))
    }
    return {**settings, **({"clean_caption": False} if "clean_caption" in names else {})}


def _find_packing(pipe: Any, height: int, width: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Find how the pipeline packs latents into patches, if it does."""
    if not hasattr(pipe, "_pack_latents"):
        return return_unchanged, return_unchanged

    pack_names, unpack_names = (
        inspect.signature(function).parameters for function in (pipe._pack_latents, pipe._unpack_latents)
    )

    def pack(latents: Tensor) -> Tensor:
        has_shape = "batch_size" in pack_names
        return Tensor(pipe._pack_latents(latents, *(latents.shape if has_shape else ())))

    def unpack(latents: Tensor) -> Tensor:
        if latents.ndim != 3:
            return latents
        if "num_frames" in unpack_names:  # of clips, whose pipelines count in latents
            factor = pipe.vae_spatial_compression_ratio
            return Tensor(pipe._unpack_latents(latents, 1, height // factor, width // factor))
        more = (pipe.vae_scale_factor,) if "vae_scale_factor" in unpack_names else ()
        unpacked = pipe._unpack_latents(latents, height, width, *more)
        return Tensor(unpacked.squeeze(2) if unpacked.ndim == 5 else unpacked)

    return pack, unpack


def _find_guidance(family: Family, case: TinyCase) -> dict[str, Any]:
    """Find the argument and the value that disable classifier-free guidance: the denoiser gets one row."""
    names = inspect.signature(type(case.pipe).__call__).parameters
    scale = next((name for name in ("true_cfg_scale", "guidance_scale") if name in names), "guidance_scale")
    for value in (1.0, 0.0):
        record = Recorder(getattr(case.pipe, family.facts.denoiser_name))
        arguments = {"prompt": [TEXTS[0]], **case.sizes, scale: value, **case.size_arguments}
        try:
            case.pipe(**arguments, num_inference_steps=2, output_type="latent")
        except (TypeError, ValueError, AttributeError, RuntimeError, NameError):
            break  # the checks that call it say why
        if len(record.calls) == 2 and len(record.outputs[0]) == 1:
            return {"scale": scale, "guidance_off": value}
    return {"scale": scale}


def encode_with_vae(pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Encode pixels as the pipelines with an ``AutoencoderKL`` do: scaled by its config, and shifted if they do so."""
    vae = pipe.vae
    if type(vae).__name__ != "AutoencoderKL":
        raise CheckSkippedError(f"there is no reference for a VAE of the class {type(vae).__name__}")
    rows = [vae.encode(each.unsqueeze(0)).latent_dist for each in pixels]
    latents = torch.cat([row.sample(generator) for row, generator in zip(rows, generators, strict=True)])
    shift = vae.config.shift_factor if "shift_factor" in inspect.getsource(type(pipe)) else None
    return Tensor((latents - (shift or 0.0)) * vae.config.scaling_factor)
