"""``--control channels``: the condition's latents are further channels of the denoiser's input.

FLUX.1 is trained as diffusers' ``FluxControlPipeline`` runs it ("control LoRA").  Stable Diffusion 1 has the same for
the built-in model; no other program reads such a LoRA.  The input layer is widened with weights of zero, so that the
model begins as it is, and the LoRA of that layer learns to read the condition.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...adapters.original_module_names import DIFFUSERS_KEYS
from ...config.network_args import GENERAL_NETWORK
from ..base import Family
from ..facts import ControlFacts
from .flux import FACTS as FLUX_FACTS
from .flux import FLUX_KEYS, XLABS_KEYS, Flux
from .sd1_sd2 import SD1_FACTS, StableDiffusion1

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call of the denoiser: positional ones, and those by name."""


class ChannelControl(Family):
    """A family with the condition in further channels of its input."""

    input_layer: ClassVar[str]
    """The layer of the denoiser that is widened."""

    @classmethod
    def prepare_denoiser(cls, denoiser: nn.Module) -> None:
        """Widen the input layer to twice its channels; the new weights are zero."""
        import torch

        layer: Any = denoiser.get_submodule(cls.input_layer)
        weight = torch.cat([layer.weight.data, torch.zeros_like(layer.weight.data)], dim=1)
        layer.weight = torch.nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
        size = "in_features" if isinstance(layer, torch.nn.Linear) else "in_channels"
        setattr(layer, size, weight.shape[1])

    @abstractmethod
    def join_control(self, pipe: Any, arguments: CallArguments, control: Tensor) -> CallArguments:
        """Add the latents of the condition to the input of a call."""

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        (control,) = batch.control_latents

        def call_with_control(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.join_control(pipe, (args, kwargs), control)
            return denoiser(*args, **kwargs)

        without: Any = replace(batch, control_latents=())
        called: Any = call_with_control
        return super().predict(pipe, called, noisy_latents, timesteps, without)  # type: ignore[safe-super]

    def generate_frames(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> list[Image]:
        """Sample with the pipeline of the family without control; the condition is cropped to the image's shape."""
        from PIL import ImageOps

        from ...dataloader.images import load_preview_controls

        width, height = self.facts.sampling.get_image_size(prompt.width, prompt.height)
        (image,) = load_preview_controls(prompt)
        fitted = ImageOps.fit(image, (width, height))
        pixels = pipe.image_processor.preprocess(fitted, height, width)
        control = self.encode_moments(pipe, pixels.float()).mean_and_std[:, 0]
        denoiser = getattr(pipe, self.facts.denoiser_name)
        handle = denoiser.register_forward_pre_hook(
            lambda _, args, kwargs: self.join_control(pipe, (args, kwargs), control), with_kwargs=True
        )
        try:
            without = replace(prompt, control_images=())
            return super().generate_frames(
                pipe, without, cond, negative_cond=negative_cond, generator=generator, sampler=sampler
            )
        finally:
            handle.remove()


class FluxChannelControl(ChannelControl, Flux):
    facts = replace(
        FLUX_FACTS,
        title="FLUX.1 with control channels",
        lora=replace(
            FLUX_FACTS.lora,
            # As the script for control LoRAs of diffusers.
            targets=(
                "x_embedder",
                *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")),
                *(f"attn.add_{name}_proj" for name in "qkv"),
                *(f"{name}.net.{layer}" for name in ("ff", "ff_context") for layer in ("0.proj", "2")),
            ),
            targets_of="diffusers",
            text_encoders={},
            key_style=DIFFUSERS_KEYS,
            other_key_styles=(FLUX_KEYS, XLABS_KEYS),
            format="diffusers",
        ),
        text=replace(FLUX_FACTS.text, t5_encoder=None),
        control=ControlFacts(num_images=(1, 1)),
        options=replace(FLUX_FACTS.options, network=GENERAL_NETWORK, kohya_objective=None),
    )
    input_layer = "x_embedder"

    def get_non_block_lora_targets(self, denoiser: Any) -> tuple[str, ...]:
        return tuple(name for name in super().get_non_block_lora_targets(denoiser) if name != self.input_layer)

    def join_control(self, pipe: Any, arguments: CallArguments, control: Tensor) -> CallArguments:
        import torch

        args, kwargs = arguments
        tokens = kwargs["hidden_states"]
        packed = pipe._pack_latents(control.to(tokens.dtype), *control.shape)
        return args, {**kwargs, "hidden_states": torch.cat([tokens, packed], dim=2)}


class StableDiffusion1ChannelControl(ChannelControl, StableDiffusion1):
    facts = replace(
        SD1_FACTS,
        title="Stable Diffusion 1 with control channels",
        lora=replace(
            SD1_FACTS.lora,
            targets=(*SD1_FACTS.lora.targets, "conv_in"),
            preset_targets=SD1_FACTS.lora.preset_targets[1:],
            format="diffusers",
        ),
        control=ControlFacts(num_images=(1, 1)),
    )
    input_layer = "conv_in"

    def join_control(self, pipe: Any, arguments: CallArguments, control: Tensor) -> CallArguments:
        import torch

        (noisy, *others), kwargs = arguments
        repeated = control.to(noisy.dtype).repeat(len(noisy) // len(control), 1, 1, 1)  # with guidance, one more
        return (torch.cat([noisy, repeated], dim=1), *others), kwargs
