"""Ideogram 4: states of thirteen layers of Qwen3-VL in one sequence with the image, FLUX.2's VAE; flow matching.

Published models have a second transformer for guidance, which sees no text; training and previews have the first alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle, OriginalModule
from ...config.network_args import NetworkFacts
from ...diffusion.timestep_shift import IDEOGRAM4_SHIFT
from ...registry import copy_class_name
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
from ..family_noise_levels import UNIFORM, NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required
from ..shared_facts import DENOISER_PREFIXES, MASKED_ATTENTION_MODES, match_flow_model
from .flux2 import KLEIN_FACTS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import NoiseProcess

PATCH_SIDE = 2
"""Latents of a token in each direction."""
GUIDANCE, LAST_GUIDANCE = 7.0, 3.0
"""The guidance of previews, and that of their last steps, as the authors recommend."""


def _match_ideogram4(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    return match_flow_model(read, 4, f"the transformer has {config.get('num_layers', 34)} blocks")


_BLOCK_NAMES: Mapping[str, tuple[str, ...]] = {
    "attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
    "attention.o": ("attention.to_out.0",),
    **{
        name: (name,)
        for name in (
            *(f"feed_forward.{layer}" for layer in ("w1", "w2", "w3")),
            *("adaln_modulation", "attention.norm_q", "attention.norm_k"),
            *("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"),
        )
    },
}
_OUTER_NAMES = (
    *("input_proj", "llm_cond_norm", "llm_cond_proj", "adaln_proj", "embed_image_indicator"),
    *("t_embedding.mlp_in", "t_embedding.mlp_out", "final_layer.linear", "final_layer.adaln_modulation"),
)
_LAYOUT = (
    *(
        OriginalModule(f"layers.{{}}.{name}", tuple(f"layers.{{}}.{part}" for part in parts))
        for name, parts in _BLOCK_NAMES.items()
    ),
    *(OriginalModule(name, (name,)) for name in _OUTER_NAMES),
)
"""All modules of the transformer in the files of its authors and of ComfyUI."""
IDEOGRAM4_KEYS = KeyStyle(
    "ideogram4",
    _LAYOUT,
    is_read_by_diffusers=False,
    unread_in_comfyui=dict.fromkeys(("diffusers", "comfy"), "loads nothing of this layout"),
)


FACTS = FamilyFacts(
    title="Ideogram 4",
    pipeline=PipelineFacts(
        class_name="Ideogram4Pipeline", num_parameters=9_279_288_448, hub_id="ideogram-ai/ideogram-4-nf4-diffusers"
    ),
    detection=DetectionFacts(
        match_configs=_match_ideogram4,
        keys=("llm_cond_proj.weight", "embed_image_indicator.weight", "layers.0.attention.qkv.weight"),
        diffusers_keys={"layers.0.attention.qkv.weight": "layers.0.attention.to_q.weight"},
        shape_checks={
            ("llm_cond_proj.weight", 1): ("transformer", "llm_features_dim"),
            ("layers.0.feed_forward.w1.weight", 0): ("transformer", "intermediate_size"),
        },
        unsupported_file_names={"unconditional": "the transformer of Ideogram 4 for guidance, which reads no text"},
        trainer_names=TrainerNames(ai_toolkit=("ideogram4",)),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen3vl_8b.transformer.",),
        },
        classes=KLEIN_FACTS.single_files.classes,
        renames=KLEIN_FACTS.single_files.renames,
        layout=_LAYOUT,
    ),
    lora=FamilyLora(
        # Every linear layer of the blocks but the modulation.
        targets=(
            *(f"layers.*.attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"layers.*.feed_forward.{layer}" for layer in ("w1", "w2", "w3")),
        ),
        targets_of="musubi-tuner",
        optional_targets=("layers.*.adaln_modulation",),
        key_style=IDEOGRAM4_KEYS,
        modelspec_architecture="ideogram-4",
    ),
    blocks=BlockFacts(
        lists=("layers",),
        activation_args=("hidden_states",),
        token_args={
            "attention_mask": ((3, ("hidden_states",)),),
            "image_rotary_emb": ((1, ("hidden_states",)), (1, ("hidden_states",))),
        },
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "Qwen/Qwen3-VL-8B-Instruct"},
        has_variable_length=True,
        pad_multiple=64,
    ),
    training_noise=TrainingNoiseFacts(
        timestep_sampling="ideogram4_shift",
        reason="as the model is sampled: its steps are quantiles of this density",
        read_pipeline_shift=lambda read: IDEOGRAM4_SHIFT,
        other_trainers={"musubi-tuner": NoiseLevels("ideogram4_shift"), "ai-toolkit": UNIFORM},
    ),
    sampling=SamplingFacts(num_inference_steps=48, guidance_scale=GUIDANCE),
    options=FamilyOptions(
        components={"ae": "vae", "vae": "vae", "text_encoder": "text_encoder"},
        network=NetworkFacts(modules=("networks.lora_ideogram4",)),
    ),
    notes="fp8 files of ComfyUI, nf4 folders",
)


class Ideogram4(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        from diffusers import Ideogram4Pipeline

        return _build_pipeline_class(Ideogram4Pipeline)

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        """Order the statistics of a VAE file of FLUX.2 as the pipeline reads them: by the places in a patch first."""
        if pipe.vae is None or pipe.vae.bn.running_mean.is_meta:
            return
        area, mean = PATCH_SIDE**2, pipe.vae.bn.running_mean
        # The four places in a patch have nearly the same statistics.
        if mean.view(-1, area).var(1).sum() < mean.view(area, -1).var(0).sum():
            for values in (pipe.vae.bn.running_mean, pipe.vae.bn.running_var):
                values.copy_(values.view(-1, area).T.reshape(-1))

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("ideogram4", "ideogram-4")

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        """Latents are patches already; the pipeline computes its shift from the size, not from its scheduler."""
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess(IDEOGRAM4_SHIFT, patch_size=1)

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Encode each text at its own length: texts are not cut, and the pipeline pads those of a batch."""
        encoder, rows = pipe.text_encoder, []
        for prompt, text in zip(prompts, _apply_chat_template(pipe, prompts), strict=True):
            length = len(pipe.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
            embeds = pipe.encode_prompt(prompt, 0, 0, max_sequence_length=length, device=encoder.device)[0]
            rows.append(embeds[0].to(encoder.dtype))
        return {"embeds": rows}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import sys

        from .. import text_encoding

        texts, width = _apply_chat_template(pipe, prompts), pipe.transformer.config.llm_features_dim
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.tokenizer, texts, width, sys.maxsize)}

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import encode_patch_moments

        return encode_patch_moments(pipe, pixels, pipe.vae.config.batch_norm_eps)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_patch_latents

        return decode_patch_latents(pipe, latents, pipe.vae.config.batch_norm_eps)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        side = pipe.vae_scale_factor * pipe.patch_size
        grid = latents.transpose(1, 2).reshape(len(latents), -1, height // side, width // side)
        return self.decode_latents(pipe, grid)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        count, _, height, width = noisy_latents.shape
        texts, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        tokens = noisy_latents.flatten(2).transpose(1, 2)
        positions = _build_image_positions(height, width, noisy_latents.device).expand(count, -1, -1)
        velocity = _predict_velocity(denoiser, tokens, positions, 1 - timesteps / 1000, (texts, mask))
        return -velocity.transpose(1, 2).reshape(noisy_latents.shape)  # time, and so velocity, run to the image

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        steps = prompt.num_inference_steps or self.facts.sampling.num_inference_steps
        last = min(3, steps // 10)
        schedule = [GUIDANCE] * (steps - last) + [LAST_GUIDANCE] * last
        return dict(
            prompt="",
            encoded=(cond["embeds"][0], negative_cond["embeds"][0]),
            num_inference_steps=steps,
            guidance_scale=prompt.cfg_scale,
            guidance_schedule=schedule if prompt.cfg_scale is None else None,
        )


def _apply_chat_template(pipe: Any, prompts: Sequence[str]) -> list[str]:
    chats = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}] for prompt in prompts]
    return [pipe.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]


def _build_image_positions(height: int, width: int, device: Any) -> Tensor:
    """Build the positions (tokens, 3) of an image of this many tokens, which are far from those of a text."""
    import torch
    from diffusers.models.transformers.transformer_ideogram4 import IMAGE_POSITION_OFFSET

    rows, columns = torch.meshgrid(
        torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
    )
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=2).flatten(0, 1) + IMAGE_POSITION_OFFSET


def _predict_velocity(
    denoiser: Any, tokens: Tensor, positions: Tensor, time: Tensor, encoded: tuple[Tensor, Tensor]
) -> Tensor:
    """Predict the velocity of image tokens beside texts (B, tokens, width) with a mask.

    The image comes first, and the padding of texts last, so that a token has the same place with other padding.
    """
    import torch
    from diffusers.models.transformers.transformer_ideogram4 import (
        LLM_TOKEN_INDICATOR,
        OUTPUT_IMAGE_INDICATOR,
        SEQUENCE_PADDING_INDICATOR,
    )

    from .ernie_image import ignore_autocast_on_meta

    (texts, mask), (count, num_tokens, channels) = encoded, tokens.shape
    numbers = torch.arange(texts.shape[1], device=tokens.device)[None, :, None].expand(count, -1, 3)
    of_image = mask.new_ones(count, num_tokens)
    segments = torch.where(mask > 0, mask, mask.new_full((), SEQUENCE_PADDING_INDICATOR))
    with ignore_autocast_on_meta(tokens.device):
        velocity: Tensor = denoiser(
            hidden_states=torch.cat([tokens, tokens.new_zeros(count, texts.shape[1], channels)], dim=1),
            timestep=time,
            encoder_hidden_states=torch.cat([texts.new_zeros(count, num_tokens, texts.shape[2]), texts], dim=1),
            position_ids=torch.cat([positions, numbers], dim=1),
            segment_ids=torch.cat([of_image, segments], dim=1),
            indicator=torch.cat([of_image * OUTPUT_IMAGE_INDICATOR, mask * LLM_TOKEN_INDICATOR], dim=1),
            return_dict=False,
        )[0]
    return velocity[:, :num_tokens]


def _build_pipeline_class(pipeline: Any) -> Any:
    """diffusers' pipeline, which as of 0.42 takes no encoded texts, with such: ``encoded``, of prompt and negative.

    The negative prompt then goes to the same transformer, in place of the second one, which is not trained.
    """
    import torch

    class EncodedPipeline(pipeline):  # type: ignore[misc]
        encoded: tuple[Tensor, Tensor] | None = None

        def __call__(self, *args: Any, encoded: tuple[Tensor, Tensor] | None = None, **kwargs: Any) -> Any:
            self.encoded = encoded
            if encoded is None:
                return super().__call__(*args, **kwargs)
            self.unconditional_transformer = NegativeDenoiser(self.transformer, encoded[1])
            return super().__call__(*args, max_sequence_length=len(encoded[0]), **kwargs)

        def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
            if self.encoded is None:
                return super().encode_prompt(*args, **kwargs)
            text, grid, device = self.encoded[0], (kwargs["grid_h"], kwargs["grid_w"]), kwargs["device"]
            padding = text.new_zeros(grid[0] * grid[1], text.shape[1])
            embeds = torch.cat([text, padding])[None].to(device)
            return embeds, *self._prepare_ids([len(text)], *grid, max_text_tokens=len(text), device=device)

        def _patchify_latents(self, latents: Tensor) -> Tensor:
            (count, channels, height, width), side = latents.shape, PATCH_SIDE
            patches = latents.view((count, channels, height // side, side, width // side, side))
            return patches.permute((0, 3, 5, 1, 2, 4)).flatten(1, 3)

        def _unpatchify_latents(self, latents: Tensor) -> Tensor:
            (count, channels, height, width), side = latents.shape, PATCH_SIDE
            patches = latents.view((count, side, side, channels // side**2, height, width))
            return patches.permute((0, 3, 4, 1, 5, 2)).reshape(count, -1, height * side, width * side)

    return copy_class_name(EncodedPipeline, pipeline)


class NegativeDenoiser:
    """A transformer that predicts with a negative prompt, where the pipeline calls one that reads no text."""

    def __init__(self, transformer: Any, text: Tensor):
        self.transformer, self.dtype, self.text = transformer, transformer.dtype, text[None]

    def __call__(self, hidden_states: Tensor, timestep: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor]:
        import torch

        text = self.text.to(hidden_states.device, hidden_states.dtype)
        mask = torch.ones(text.shape[:2], dtype=torch.long, device=text.device)
        return (_predict_velocity(self.transformer, hidden_states, position_ids, timestep, (text, mask)),)
