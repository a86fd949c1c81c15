"""Models whose input has further channels beside the noisy latents: those of a control image, or of a masked picture.

Inpainting models get the mask and the latents of what it leaves of the picture; their control image is the mask, whose
white is painted.  diffusers' pipelines draw a sample of these latents; here they are the mean, so that they are cached.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base import Family
from ..facts import ControlFacts

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call of the denoiser: positional ones, and those by name."""

ONE_CONTROL = ControlFacts(num_images=(1, 1), have_picture_size=True)
ONE_MASK = replace(ONE_CONTROL, are_masks=True)
"""The control images of a model with one condition, and of one that paints into a picture."""


class ChannelInput(Family):
    """A family with what ``encode_control`` returns in further channels of its input."""

    @abstractmethod
    def join_control(self, pipe: Any, arguments: CallArguments, control: Tensor) -> CallArguments:
        """Add the channels of the control image to the input of a call."""

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        (control,) = batch.control_latents

        def call_with_control(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.join_control(pipe, (args, kwargs), control)
            return denoiser(*args, **kwargs)

        without: Any = replace(batch, control_latents=())
        called: Any = call_with_control
        return super().predict(pipe, called, noisy_latents, timesteps, without)  # type: ignore[safe-super]


class UNetChannelInput(ChannelInput):
    """A UNet with further channels behind the noisy latents."""

    def join_control(self, pipe: Any, arguments: CallArguments, control: Tensor) -> CallArguments:
        import torch

        (noisy, *others), kwargs = arguments
        repeated = control.to(noisy.dtype).repeat(len(noisy) // len(control), 1, 1, 1)  # with guidance, one more
        return (torch.cat([noisy, repeated], dim=1), *others), kwargs


class FluxChannelInput(ChannelInput):
    """FLUX.1 with further channels behind each token."""

    def join_control(self, pipe: Any, arguments: CallArguments, control: Tensor) -> CallArguments:
        import torch

        args, kwargs = arguments
        tokens = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": torch.cat([tokens, pack_control(pipe, control, tokens)], dim=2)}


def pack_control(pipe: Any, control: Tensor, like: Tensor) -> Tensor:
    """Pack patches of 2 x 2 of each group of channels, one after the other, to tokens (B, tokens, channels)."""
    packed: Tensor = pipe._pack_latents(control.to(like.dtype), *control.shape)
    return packed


def binarize_mask(pixels: Tensor) -> Tensor:
    """Return the mask (B, 1, height, width) of an image in -1..1: 1, where it is painted, is the brighter half."""
    import torch

    red, green, blue = (pixels.float().add(1) / 2).unbind(1)
    brightness = (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)
    return torch.where(brightness >= 0.5, 1.0, 0.0)


class UNetInpainting(UNetChannelInput):
    """A UNet whose input has the mask, in the size of the latents, and the latents of what it leaves."""

    def encode_control(self, pipe: Any, control: Tensor, pixels: Tensor) -> Tensor:
        import torch
        from torch.nn.functional import interpolate

        mask = binarize_mask(control)
        left = self.encode_moments(pipe, pixels * (mask < 0.5)).mean_and_std[:, 0]
        return torch.cat([interpolate(mask, left.shape[-2:]), left], dim=1)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        picture, mask = load_picture_and_mask(self, prompt)
        control = encode_preview_control(self, pipe, mask, picture)
        kwargs = super().build_sampling_kwargs(pipe, prompt, cond, negative_cond)
        return {
            **kwargs,
            "image": picture,
            "mask_image": mask,
            "masked_image_latents": control[:, 1:],
            "strength": 1.0,
        }

    def build_control_kwargs(self, pipe: Any, images: Any) -> dict[str, Any]:
        return {}  # they are among build_sampling_kwargs

    def build_frame_image_kwargs(self, pipe: Any, first: Image | None, last: Image | None) -> dict[str, Any]:
        return {}


def load_picture_and_mask(family: Family, prompt: Prompt) -> tuple[Image, Image]:
    """Load the picture of a preview and its mask, cropped to the shape of the preview."""
    return load_picture(family, prompt), load_preview_control(family, prompt)


def load_picture(family: Family, prompt: Prompt) -> Image:
    """Load the picture with which a preview begins, cropped to the shape of the preview."""
    from ...dataloader.images import load_frame_images

    picture, _ = load_frame_images(prompt)
    if picture is None:
        raise AssertionError(f"a preview of {family.facts.title} has a picture")
    return _fit(family, prompt, picture)


def load_preview_control(family: Family, prompt: Prompt) -> Image:
    """Load the one control image of a preview, cropped to the shape of the preview."""
    from ...dataloader.images import load_preview_controls

    (image,) = load_preview_controls(prompt, are_masks=family.facts.control.are_masks)
    return _fit(family, prompt, image)


def _fit(family: Family, prompt: Prompt, image: Image) -> Image:
    from PIL import ImageOps

    return ImageOps.fit(image, family.facts.sampling.get_image_size(prompt.width, prompt.height))


def encode_preview_control(family: Family, pipe: Any, control: Image, picture: Image | None = None) -> Tensor:
    """Encode the control image of a preview in float32, as in training."""
    images = [pipe.image_processor.preprocess(image) for image in (control, picture or control)]
    return family.encode_control(pipe, *(image.float().to(pipe.vae.device) for image in images))
