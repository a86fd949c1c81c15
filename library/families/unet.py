"""What the families with a UNet have in common: the noise process, and the layers that get a LoRA."""

from typing import Any

from diffusers import DDPMScheduler

from ..diffusion.process import NoiseProcess, build_discrete_process

UNET_LORA_TARGET_MODULES = (
    "proj_in", "proj_out", "to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2",
)  # fmt: skip
"""Every linear layer and 1x1 convolution inside the UNet's Transformer2DModel blocks."""

UNET_CONV_LORA_TARGET_MODULES = (
    "resnets.*.conv1", "resnets.*.conv2", "resnets.*.conv_shortcut", "resnets.*.time_emb_proj", "downsamplers.*.conv",
    "upsamplers.*.conv",
)  # fmt: skip
"""What gets a LoRA besides when convolutions are to have one: all layers between the transformers."""


def build_noise_process(pipe: Any) -> NoiseProcess:
    """The process with the noise table of training; a folder may name any scheduler to draw with."""
    scheduler: Any = DDPMScheduler
    trained = scheduler.from_config(pipe.scheduler.config)
    return build_discrete_process(trained.alphas_cumprod, trained.config.prediction_type)
