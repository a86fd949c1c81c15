"""A tiny Stable Diffusion 1 pipeline with random weights from a seed.

It has the components and module names of the published model, and trains in seconds on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from library.models.tokenizers import END_TOKEN, START_TOKEN, build_byte_tokenizer, build_byte_vocabulary
from library.randomness import derive_seed

PARTS = ("vae", "text_encoder", "tokenizer", "unet")
_TEXT_WIDTH = 64
_MAX_TOKENS = 77


def build_pipeline(parts: Sequence[str] = PARTS, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Build a pipeline with these components; the weights of each do not depend on the others."""
    makers: dict[str, Callable[[], Any]] = {"vae": _build_vae, "text_encoder": _build_text_encoder, "unet": _build_unet}
    modules: dict[str, Any] = {name: _build_seeded(make, seed, name) for name, make in makers.items() if name in parts}
    for name, module in modules.items():
        # Not the model's own ``to``: that of diffusers warns about layers that must stay float32; there are none.
        nn.Module.to(module.eval(), dtype=torch.float32 if name == "vae" else dtype)
    return _construct(
        StableDiffusionPipeline,
        vae=modules.get("vae"),
        text_encoder=modules.get("text_encoder"),
        tokenizer=_build_tokenizer() if "tokenizer" in parts else None,
        unet=modules.get("unet"),
        scheduler=_build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _build_seeded(make: Callable[[], Any], seed: int, name: str) -> Any:
    # Modules are initialized from the global generator, which is restored.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, f"stand-in/{name}"))
        return make()


def _construct(cls: Any, **settings: Any) -> Any:
    """Call an untyped class of diffusers."""
    return cls(**settings)


def _build_scheduler() -> Any:
    """The noise schedule of Stable Diffusion 1."""
    return _construct(
        DDIMScheduler,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def _build_unet() -> Any:
    return _construct(
        UNet2DConditionModel,
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        cross_attention_dim=_TEXT_WIDTH,
    )


def _build_vae() -> Any:
    """Eight pixels become one latent, as in Stable Diffusion 1."""
    vae = _construct(
        AutoencoderKL,
        block_out_channels=(8, 16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=4.0,
    )
    with torch.no_grad():
        # The second half of the encoder's output is the log variance.  Without training it is near 0, and its noise
        # would be larger than the signal.
        vae.quant_conv.bias[4:] -= 6
    return vae


def _build_text_encoder() -> Any:
    words = build_byte_vocabulary()
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=2 * _TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=_MAX_TOKENS,
            bos_token_id=words[START_TOKEN],
            eos_token_id=words[END_TOKEN],
            pad_token_id=words[END_TOKEN],
        )
    )
    # Versions of transformers initialize weights differently; this gives the same model with each.
    torch.manual_seed(torch.initial_seed())
    for weight in encoder.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.1)
    return encoder


def _build_tokenizer() -> CLIPTokenizer:
    tokenizer: CLIPTokenizer = build_byte_tokenizer(CLIPTokenizer, {"model_max_length": _MAX_TOKENS})
    return tokenizer
