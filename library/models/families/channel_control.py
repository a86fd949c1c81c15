"""``--control channels``: the condition's latents are further channels of the denoiser's input.

FLUX.1 is trained as diffusers' ``FluxControlPipeline`` runs it ("control LoRA").  Stable Diffusion 1 has the same for
the built-in model; no other program reads such a LoRA.  The input layer is widened with weights of zero, so that the
model begins as it is, and the LoRA of that layer learns to read the condition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...adapters.original_module_names import DIFFUSERS_KEYS
from ...config.network_args import GENERAL_NETWORK
from .channel_inputs import (
    ONE_CONTROL,
    ChannelInput,
    FluxChannelInput,
    UNetChannelInput,
    encode_preview_control,
    load_preview_control,
)
from .flux import FACTS as FLUX_FACTS
from .flux import FLUX_KEYS, XLABS_KEYS, Flux
from .sd1_sd2 import SD1_FACTS, StableDiffusion1

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import nn

    from ...dataloader.batch import Cond
    from ...dataloader.sample_prompts import Prompt


class ChannelControl(ChannelInput):
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
        control = encode_preview_control(self, pipe, load_preview_control(self, prompt))
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


class FluxChannelControl(ChannelControl, FluxChannelInput, Flux):
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
        control=ONE_CONTROL,
        options=replace(FLUX_FACTS.options, network=GENERAL_NETWORK, kohya_objective=None),
    )
    input_layer = "x_embedder"

    def get_non_block_lora_targets(self, denoiser: Any) -> tuple[str, ...]:
        return tuple(name for name in super().get_non_block_lora_targets(denoiser) if name != self.input_layer)


class StableDiffusion1ChannelControl(ChannelControl, UNetChannelInput, StableDiffusion1):
    facts = replace(
        SD1_FACTS,
        title="Stable Diffusion 1 with control channels",
        lora=replace(
            SD1_FACTS.lora,
            targets=(*SD1_FACTS.lora.targets, "conv_in"),
            preset_targets=SD1_FACTS.lora.preset_targets[1:],
            format="diffusers",
        ),
        control=ONE_CONTROL,
    )
    input_layer = "conv_in"
