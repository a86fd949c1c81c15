"""ERNIE-Image: single-stream, with variable-length text of Ministral 3 after the image; FLUX.2's VAE; flow matching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import DIFFUSERS_ONLY_KEYS
from ...adapters.token_layout import TokenLayout
from ..base import BaseModelInfo, Family
from ..facts import (
    BlockFacts,
    DetectionFacts,
    FamilyFacts,
    FamilyLora,
    FamilyMatch,
    FamilyOptions,
    PipelineFacts,
    SamplingFacts,
    SingleFileFacts,
    TextFacts,
    TrainerNames,
)
from ..family_noise_levels import LOGIT_NORMAL, WEIGHTED, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required
from ..shared_facts import DENOISER_PREFIXES, MASKED_ATTENTION_MODES, match_flow_model

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...diffusion.process import NoiseProcess

BATCH_NORM_EPS = 1e-5
"""Added to the variance of latents, as in diffusers' pipeline; the VAE's config has another value."""


def _match_ernie_image(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    return match_flow_model(read, 4, f"the transformer has {config.get('num_layers')} blocks")


FACTS = FamilyFacts(
    title="ERNIE-Image",
    pipeline=PipelineFacts(class_name="ErnieImagePipeline", num_parameters=8_033_490_048, hub_id="baidu/ERNIE-Image"),
    detection=DetectionFacts(
        match_configs=_match_ernie_image,
        keys=("layers.0.self_attention.to_q.weight", "layers.0.mlp.linear_fc2.weight"),
        shape_checks={
            ("layers.0.mlp.linear_fc2.weight", 0): ("transformer", "hidden_size"),
            ("layers.0.mlp.linear_fc2.weight", 1): ("transformer", "ffn_hidden_size"),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("ernie_image",),
            diffusion_pipe=("ernie_image",),
            onetrainer=("ERNIE",),
            simpletuner=("ernie",),
            simpletuner_flavours={"base": "baidu/ERNIE-Image", "turbo": "baidu/ERNIE-Image-Turbo"},
            simpletuner_default="base",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.ministral3_3b.transformer.",),
        },
        classes={"vae": "AutoencoderKL"},
        renames={"encoder.quant_conv.": "quant_conv.", "decoder.post_quant_conv.": "post_quant_conv."},
    ),
    lora=FamilyLora(
        # Every linear layer of the blocks; the modulation is outside of them.
        targets=(
            *(f"layers.*.self_attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"layers.*.mlp.{layer}" for layer in ("gate_proj", "up_proj", "linear_fc2")),
        ),
        targets_of="ai-toolkit",
        key_style=DIFFUSERS_ONLY_KEYS,
        format="diffusers",
        modelspec_architecture="ernie-image",
    ),
    blocks=BlockFacts(
        token_layouts={r"^layers\.\d+\.mlp\.": TokenLayout(batch_axis=1)},
        lists=("layers",),
        activation_args=("x",),
        fused_layers={
            r"\.mlp\.(gate|up)_proj$": ("colwise", (1,)),
            r"\.mlp\.linear_fc2$": ("rowwise", (1,)),
        },
        unsupported_strategies={"cp": "the blocks of ERNIE-Image have their tokens before the batch"},
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "baidu/ERNIE-Image:tokenizer"},
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(
        timestep_sampling="sigma",
        reason="uniform with the pipeline's shift of 4, which already prefers noise",
        other_trainers={"ai-toolkit": WEIGHTED, "OneTrainer": LOGIT_NORMAL},
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=4.0),
    options=FamilyOptions(components={"ae": "vae", "vae": "vae", "text_encoder": "text_encoder"}),
    notes="train on the base model; the Turbo loses its few steps",
)


class ErnieImage(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("ernie_image", "ernie-image")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return {"embeds": pipe.encode_prompt(list(prompts), pipe.text_encoder.device)}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        width, max_length = pipe.transformer.config.text_in_dim, pipe.tokenizer.model_max_length
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.tokenizer, prompts, width, max_length)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, pipe.tokenizer.model_max_length)

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        """Latents are patches already."""
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess.from_scheduler(pipe.scheduler.config, patch_size=1)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import encode_patch_moments

        return encode_patch_moments(pipe, pixels, BATCH_NORM_EPS)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_patch_latents

        return decode_patch_latents(pipe, latents, BATCH_NORM_EPS)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        lengths = mask.sum(1)
        with ignore_autocast_on_meta(noisy_latents.device):
            predicted: Tensor = denoiser(
                hidden_states=noisy_latents, timestep=timesteps, text_bth=embeds, text_lens=lengths, return_dict=False
            )[0]
        return predicted


@contextmanager
def ignore_autocast_on_meta(device: torch.device) -> Iterator[None]:
    """The model disables autocast for its positions, which torch refuses on the meta device of memory estimates."""
    import torch

    autocast = torch.autocast
    if device.type == "meta":
        setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # noqa: B010
    try:
        yield
    finally:
        setattr(torch, "autocast", autocast)  # noqa: B010
