"""FramePack with ``--one_frame``: pictures from control images, as frames of one section, as musubi-tuner trains them.

The control images are given frames at positions of their own, the picture is the one frame that is made, and the frames
beside them are empty, or left out.  SigLIP sees the first control image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...dataset.one_frame import OneFrame, parse_one_frame
from ...problems import Problem
from ...registry import copy_class_name
from ..facts import ControlFacts
from ..model_configs import ConfigReader
from .framepack import FACTS as CLIP_FACTS
from .framepack import NUM_2X, NUM_4X, NUM_NEAR, FramePack
from .hunyuan_video15_i2v import embed_siglip_images

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...config.schema import ModelConfig
    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt

MOST_CONTROLS = 16


def _find_mistakes(read: ConfigReader, options: ModelConfig) -> Iterator[Problem]:
    yield from CLIP_FACTS.options.validate(read, options)
    try:
        parse_one_frame(options.one_frame_settings)
    except ValueError as error:
        yield Problem("one_frame_settings", str(error))


FACTS = replace(
    CLIP_FACTS,
    title="FramePack one frame",
    pipeline=replace(CLIP_FACTS.pipeline, kind="edit", frames=None),
    control=ControlFacts(num_images=(1, MOST_CONTROLS), have_picture_size=True, have_alpha=True),
    sampling=replace(CLIP_FACTS.sampling, frame_images=(), reads_one_frame=True),
    options=replace(CLIP_FACTS.options, validate=_find_mistakes),
    notes="a picture from control images, as one frame",
)


class FramePackOneFrame(FramePack):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class(self.model_config.latent_window_size)

    @property
    def one_frame(self) -> OneFrame:
        """The positions in training, which previews without ``--of`` have as well."""
        return parse_one_frame(self.model_config.one_frame_settings)

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        super().prepare_denoiser(denoiser)
        _allow_no_frames(denoiser)

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        return {}  # SigLIP sees a control image instead

    def encode_control_cond(self, pipe: Any, controls: Sequence[Tensor]) -> dict[str, Tensor]:
        """Encode the first control image with SigLIP."""
        return {"images": embed_siglip_images(pipe, controls[0][:, :3])}

    def encode_control(self, pipe: Any, control: Tensor, pixels: Tensor) -> Tensor:
        """Encode the colors of a control image, and set what its alpha channel hides to zero."""
        latents = self.encode_moments(pipe, control[:, :3]).mean_and_std[:, 0]
        return latents if control.shape[1] == 3 else latents * _resize_alpha(control[:, 3:], latents)

    def select_section(self, batch: Batch, draw: float) -> Batch:
        return batch

    def arrange_batch(self, batch: Batch) -> Batch:
        """Arrange the control images and the empty frames beside the picture, and the positions of all of them."""
        given = _build_given(batch.control_latents, self.one_frame, self.model_config.latent_window_size)
        positions = given["positions"].to(batch.latents.device).expand(len(batch.latents), -1)
        return replace(batch, frame_cond={**batch.frame_cond, **given, "positions": positions})

    # Hooks of previews.

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        settings = self.one_frame if prompt.one_frame is None else parse_one_frame(prompt.one_frame)
        return {**super().build_sampling_kwargs(pipe, prompt, cond, negative_cond), "one_frame": settings}

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        return {"control_images": list(images), "encode_control": self.encode_control}

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        return self.decode_latents(pipe, latents)


def _resize_alpha(alpha: Tensor, latents: Tensor) -> Tensor:
    """Resize the alpha channel of images in -1..1 to their latents (B, C, 1, H, W), as musubi-tuner resizes it."""
    import numpy as np
    import torch
    from PIL import Image

    height, width = latents.shape[-2:]
    if alpha.is_meta:
        return alpha.new_empty(len(alpha), 1, 1, height, width)
    values = alpha[:, 0].add(1).mul(127.5).round().clamp(0, 255).byte().cpu().numpy()
    resized = [np.asarray(Image.fromarray(each).resize((width, height), Image.Resampling.LANCZOS)) for each in values]
    return torch.from_numpy(np.stack(resized)).to(latents).div(255)[:, None, None]


def _build_given(controls: Sequence[Tensor], settings: OneFrame, window: int) -> dict[str, Tensor]:
    """Build what the transformer gets beside the picture, in the order of ``FramePack``, and all positions."""
    import torch

    like, after = controls[0], 1 + window
    size = (len(like), like.shape[1]), like.shape[3:]
    counts = NUM_NEAR * settings.has_post, NUM_2X * settings.has_2x, NUM_4X * settings.has_4x
    near, twofold, fourfold = (like.new_zeros(*size[0], count, *size[1]) for count in counts)
    starts = after, after + NUM_NEAR, after + NUM_NEAR + NUM_2X
    beside = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    own = torch.tensor(settings.control_index), torch.tensor([settings.resolve_target(window).target_index])
    return {
        "clean": torch.cat([*controls, near], dim=2),
        "twofold": twofold,
        "fourfold": fourfold,
        "positions": torch.cat([own[0], *beside, own[1]]),
    }


def _allow_no_frames(denoiser: Any) -> None:
    """Let the transformer take no frames that are compressed, which diffusers' code has no positions for then."""
    from torch import nn

    class OptionalPositions(nn.Module):
        """Positions of frames; None where there are no frames."""

        def __init__(self, rope: nn.Module):
            super().__init__()
            self.rope = rope

        def forward(self, frame_indices: Tensor, **others: Any) -> Any:
            return self.rope(frame_indices=frame_indices, **others) if len(frame_indices) else None

    denoiser.rope = OptionalPositions(denoiser.rope)
    denoiser.clean_x_embedder.register_forward_pre_hook(_skip_empty)
    denoiser.clean_x_embedder.register_forward_hook(_return_empty)


def _skip_empty(embedder: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each if each is None or each.shape[2] else None for each in inputs)


def _return_empty(embedder: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    clean = outputs[0]
    return tuple(clean[:, :0] if each is None else each for each in outputs)


def _to_pixels(image: Image, size: tuple[int, int]) -> Tensor:
    """Fit an image into a size as training does, and return its colors and alpha channel (1, 4, H, W) in -1..1."""
    import numpy as np
    import torch

    from ...dataloader.batch import normalize_pixels
    from ...dataloader.images import fit_frame

    values = np.array(fit_frame(image.convert("RGBA"), size))
    return normalize_pixels(torch.from_numpy(values)).permute(2, 0, 1)[None]


def _build_pipeline_class(window: int) -> Any:
    """diffusers' pipeline for one section, of which it makes one frame with the positions that it is told."""
    import torch
    from diffusers import HunyuanVideoFramepackPipeline

    pipeline: Any = HunyuanVideoFramepackPipeline

    class OneFramePipeline(pipeline):  # type: ignore[misc]
        first_frame: Tensor | None = None
        seen: Tensor | None = None

        def __call__(
            self,
            *args: Any,
            control_images: Sequence[Image],
            encode_control: Any,
            one_frame: OneFrame,
            height: int,
            width: int,
            image: Image | None = None,
            **kwargs: Any,
        ) -> Any:
            device = self._execution_device
            controls = [_to_pixels(each, (width, height)).to(device, self.vae.dtype) for each in control_images]
            self.seen = (controls[0] if image is None else _to_pixels(image, (width, height)))[:, :3]
            latents = [encode_control(self, each, each) for each in controls]
            given = {name: value.to(device) for name, value in _build_given(latents, one_frame, window).items()}
            self.first_frame = torch.zeros_like(latents[0], dtype=torch.float32)  # in its place are the control images
            handle = self.transformer.register_forward_pre_hook(
                lambda _, args, kwargs: (args, replace_frames(kwargs, given)), with_kwargs=True
            )
            try:
                result = super().__call__(
                    *args,
                    image=image or control_images[0],
                    height=height,
                    width=width,
                    latent_window_size=window,
                    sampling_type="inverted_anti_drifting",
                    **{**kwargs, "num_frames": 1},
                )
            finally:
                handle.remove()
            return type(result)(frames=result.frames[-1][:, :, -1:])

        def encode_image(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.seen is None:
                raise AssertionError("the image is set by the call")
            return embed_siglip_images(self, self.seen)

        def prepare_image_latents(self, *args: Any, **kwargs: Any) -> Tensor | None:
            return self.first_frame

        def prepare_latents(self, *args: Any, **kwargs: Any) -> Tensor:
            batch_size, channels, height, width, _, *others = args
            drawn: Tensor = super().prepare_latents(batch_size, channels, height, width, 1, *others, **kwargs)
            return drawn

    return copy_class_name(OneFramePipeline, HunyuanVideoFramepackPipeline)


def replace_frames(kwargs: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Any]:
    """Replace the frames that a section gets in a call of the transformer, and all positions."""
    import torch

    rows = len(kwargs["hidden_states"])
    frames = {"latents_clean": "clean", "latents_history_2x": "twofold", "latents_history_4x": "fourfold"}
    values = {name: given[key].to(kwargs[name]).expand(rows, *given[key].shape[1:]) for name, key in frames.items()}
    sizes = [*(value.shape[2] for value in values.values()), 1]
    names = "indices_latents_clean", "indices_latents_history_2x", "indices_latents_history_4x", "indices_latents"
    return {**kwargs, **values, **dict(zip(names, torch.split(given["positions"], sizes), strict=True))}
