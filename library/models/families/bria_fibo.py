"""Bria FIBO: each block gets a layer of SmolLM3 for a caption, of JSON or plain; the VAE of Wan 2.2; flow matching.

The blocks are those of FLUX.1.  Before each, half of the width of the text is replaced by a projection of that layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import CONVERTED_BY_COMFYUI_KEYS
from ...adapters.token_layout import OTHER_TOKENS, TokenLayout
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
    TextFacts,
)
from ..model_configs import ConfigReader, read_required
from ..shared_facts import JOINT_ATTENTION_LORA_TARGET_MODULES, MASKED_ATTENTION_MODES, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import NoiseProcess

FIBO_MAX_SEQUENCE_LENGTH = 3000
"""Maximum tokens of the prompt, as in diffusers' pipeline."""
LAYERS_OF_THE_TEXT = "each block of Bria FIBO gets a layer of the text encoder, which is not sent between devices"


def _match_bria_fibo(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    blocks = f"{config.get('num_layers')} double and {config.get('num_single_layers')} single blocks"
    return match_flow_model(read, 1, f"the transformer has {blocks}", patch_size=1)


FIBO_KEYS = replace(CONVERTED_BY_COMFYUI_KEYS, is_comfy_format_alone_in_diffusers=True)


FACTS = FamilyFacts(
    title="Bria FIBO",
    pipeline=PipelineFacts(class_name="BriaFiboPipeline", num_parameters=8_285_836_848, hub_id="briaai/FIBO"),
    detection=DetectionFacts(match_configs=_match_bria_fibo),
    lora=FamilyLora(
        # The attention of all blocks.
        targets=JOINT_ATTENTION_LORA_TARGET_MODULES,
        key_style=FIBO_KEYS,
        format="diffusers",
        modelspec_architecture="bria-fibo",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks", "single_transformer_blocks"),
        token_layouts={r"^single_transformer_blocks\.": TokenLayout(segments=("encoder_hidden_states", OTHER_TOKENS))},
        # One matrix for the output of the attention and of the MLP.
        fused_layers={r"single_transformer_blocks\.\d+\.proj_out$": ("rowwise", (1, 4))},
        unsupported_strategies={"pp": LAYERS_OF_THE_TEXT, "cp": LAYERS_OF_THE_TEXT},
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "briaai/FIBO:tokenizer"},
        has_variable_length=True,
        pad_multiple=64,
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=5.0),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}),
    notes="from folders and the hub",
)


class BriaFibo(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        from diffusers import BriaFiboPipeline

        return build_encoded_pipeline_class(BriaFiboPipeline)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("bria_fibo", "bria-fibo")

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess.from_scheduler(pipe.scheduler.config, patch_size=1)

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        # The pipeline encodes empty texts as one token; with others it lengthens them.
        texts = iter(_encode_texts(pipe, [prompt for prompt in prompts if prompt]))
        empty = _encode_texts(pipe, [""] * (not all(prompts)))
        return {"embeds": [next(texts) if prompt else empty[0] for prompt in prompts]}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        config = pipe.text_encoder.config
        width, max_length = (config.num_hidden_layers + 1) * config.hidden_size, FIBO_MAX_SEQUENCE_LENGTH
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.tokenizer, prompts, width, max_length)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, FIBO_MAX_SEQUENCE_LENGTH)

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        from ..vae import encode_frame_moments

        return encode_frame_moments(pipe.vae, pixels)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        from ..vae import decode_frame_latents

        return decode_frame_latents(pipe.vae, latents)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        return self.decode_latents(pipe, pipe._unpack_latents_no_patch(latents, height, width, pipe.vae_scale_factor))

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..constant_copies import copy_constant
        from ..text_encoding import pad_text_embeds

        count, _, height, width = noisy_latents.shape
        states, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        layers = _split_layers(pipe.transformer.config, states)
        images = [noisy_latents, *(latents.to(noisy_latents.dtype) for latents in batch.control_latents)]
        tokens = torch.cat([pipe._pack_latents_no_patch(each, *each.shape) for each in images], dim=1)
        # Built on the CPU and copied asynchronously: the pipeline's own copies would synchronize.
        grids = [pipe._prepare_latent_image_ids(count, *each.shape[2:], None, noisy_latents.dtype) for each in images]
        for number, grid in enumerate(grids):
            grid[..., 0] = number
        is_unpadded = all(len(row) == states.shape[1] for row in batch.cond["embeds"])
        joint = torch.cat([mask, mask.new_ones(count, tokens.shape[1])], dim=1).bool()[:, None, None]
        predicted = denoiser(
            hidden_states=tokens,
            timestep=timesteps,
            encoder_hidden_states=_join_last_layers(layers),
            text_encoder_layers=_assign_layers(pipe.transformer.config, layers),
            txt_ids=noisy_latents.new_zeros(states.shape[1], 3),
            img_ids=copy_constant(torch.cat(grids), noisy_latents.device),
            joint_attention_kwargs={} if is_unpadded else {"attention_mask": joint},
            return_dict=False,
        )[0][:, : height * width]
        unpacked: Tensor = pipe._unpack_latents_no_patch(predicted, height, width, 1)
        return unpacked

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        scale = self.facts.sampling.get_guidance_scale(prompt.cfg_scale)
        return {"prompt": "", "encoded": (cond["embeds"][0], negative_cond["embeds"][0]), "guidance_scale": scale}


def _encode_texts(pipe: Any, texts: list[str]) -> list[Tensor]:
    """Return the states of all layers of each text (tokens, layers x width), without padding."""
    import torch

    if not texts:
        return []
    _, layers, mask = pipe.get_prompt_embeds(
        texts, max_sequence_length=FIBO_MAX_SEQUENCE_LENGTH, device=pipe.text_encoder.device
    )
    return [row[is_text] for row, is_text in zip(torch.cat(layers, dim=-1), mask.bool(), strict=True)]


def _split_layers(config: Any, states: Tensor) -> list[Tensor]:
    """Split the states of all layers of the text encoder (B, tokens, layers x width) to those of each."""
    return list(states.view(*states.shape[:2], -1, config.text_encoder_dim).unbind(2))


def _join_last_layers(layers: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.cat([layers[-1], layers[-2]], dim=-1)


def _assign_layers(config: Any, layers: list[Tensor]) -> list[Tensor]:
    """Give each block a layer: the last ones, of which the very last again where there are more blocks."""
    num_blocks = config.num_layers + config.num_single_layers
    return [*layers, *[layers[-1]] * (num_blocks - len(layers))][-num_blocks:]


def build_encoded_pipeline_class(pipeline: Any) -> Any:
    """diffusers' pipeline, which as of 0.42 takes no encoded texts, with such: ``encoded``, of prompt and negative."""
    import torch

    from ..text_encoding import pad_text_embeds

    class EncodedPipeline(pipeline):  # type: ignore[misc]
        encoded: tuple[Tensor, Tensor] | None = None

        def __call__(self, *args: Any, encoded: tuple[Tensor, Tensor] | None = None, **kwargs: Any) -> Any:
            self.encoded = encoded
            return super().__call__(*args, **kwargs)

        def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
            if self.encoded is None:
                return super().encode_prompt(*args, **kwargs)
            config, dtype = self.transformer.config, self.transformer.dtype
            texts = self.encoded if kwargs["guidance_scale"] > 1 else self.encoded[:1]
            padded, mask = pad_text_embeds(texts)
            states = [_split_layers(config, row) for row in padded.to(dtype)[:, None]]
            embeds, masks = [_join_last_layers(each) for each in states], list(mask.to(padded.device, dtype)[:, None])
            if len(texts) == 1:
                embeds, masks, states = [*embeds, None], [*masks, None], [*states, None]  # type: ignore[list-item]
            text_ids = torch.zeros(1, padded.shape[1], 3, device=padded.device, dtype=dtype)
            return embeds[0], embeds[1], text_ids, masks[0], masks[1], states[0], states[1]

    return copy_class_name(EncodedPipeline, pipeline)
