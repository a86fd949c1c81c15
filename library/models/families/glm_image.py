"""GLM-Image: double streams with one set of weights, as CogView4; it draws the image tokens that it is given.

A language model writes these tokens from the caption when pictures are made.  In training they are those of the picture
itself: what the vision tower and the codebook of that model, which are loaded without the rest, make of it at half its
size, as they do with pictures that it edits.  Of the caption, the transformer reads only what is in quotes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ...adapters.original_module_names import TRANSFORMER_LOADER_KEYS
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
from ..family_noise_levels import TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required, read_scheduler_config
from ..shared_facts import match_flow_model
from .cogview4 import build_attention_processor, build_dynamic_shift

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import FlowMatchingProcess

GLYPH_MAX_SEQUENCE_LENGTH = 2048
"""Maximum bytes of each quoted text, as in diffusers' pipeline."""
PRIOR = "prior"
"""The key of ``Batch.frame_cond``: the index of the image token at each latent, (B, 1, 1, H, W)."""
LATENTS_PER_TOKEN = 4
"""The latents along each side of an image token, which stands for 32 pixels; the transformer has tokens of 16."""
DROPPED = -1
"""The index instead of those of image tokens that the transformer does not get: for classifier-free guidance."""


def _match_glm_image(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    reason = f"the transformer has {config.get('num_layers')} blocks and draws image tokens"
    return match_flow_model(read, 1, reason, patch_size=LATENTS_PER_TOKEN)


FACTS = FamilyFacts(
    title="GLM-Image",
    pipeline=PipelineFacts(
        class_name="GlmImagePipeline",
        num_parameters=6_926_882_880,
        hub_id="zai-org/GLM-Image",
        frame_encoders=("vision_language_encoder",),
    ),
    detection=DetectionFacts(match_configs=_match_glm_image),
    lora=FamilyLora(
        # The attention, which text and image share.
        targets=("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
        optional_targets=("transformer_blocks.*.ff.net.0.proj", "transformer_blocks.*.ff.net.2"),
        key_style=TRANSFORMER_LOADER_KEYS,
        format="diffusers",
        modelspec_architecture="glm-image",
    ),
    blocks=BlockFacts(
        token_layouts={r"\.attn1\.": TokenLayout(segments=("encoder_hidden_states", OTHER_TOKENS))},
        lists=("transformer_blocks",),
        activation_args=("hidden_states", "encoder_hidden_states"),
        unsupported_strategies={
            "cp": "the feed-forward layers of GLM-Image see the image and the text one after the other",
            "cuda_graphs": "each layer of GLM-Image copies its rotary embedding from the host",
        },
        attention_modes=("xformers",),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "zai-org/GLM-Image:tokenizer"},
        has_variable_length=True,
    ),
    training_noise=TrainingNoiseFacts(
        multiples_per_token=0.5,  # sides are even numbers of tokens
        read_pipeline_shift=lambda read: build_dynamic_shift(read_scheduler_config(read)),
    ),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=1.5, frame_images=("image_path",)),
    options=FamilyOptions(components={"vae": "vae", "text_encoder": "text_encoder"}),
    notes="previews draw the image tokens of a given picture; from folders and the hub; LoRA in diffusers: "
    "`transformer.load_lora_adapter`",
)


class GlmImage(Family):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    @classmethod
    def prepare_denoiser(cls, denoiser: Any) -> None:
        processor = build_attention_processor()
        for block in denoiser.transformer_blocks:
            block.attn1.set_processor(processor)
        denoiser.prior_token_embedding.__class__ = _build_embedding_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("glm_image", "glm-image")

    def build_noise_process(self, pipe: Any) -> FlowMatchingProcess:
        from ...diffusion.process import FlowMatchingProcess

        return FlowMatchingProcess(build_dynamic_shift(pipe.scheduler.config))

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Encode what is in quotes, and remember which captions are empty: those get no image tokens either."""
        import torch

        device = pipe.text_encoder.device
        rows = [pipe._get_glyph_embeds([prompt], GLYPH_MAX_SEQUENCE_LENGTH, device)[0] for prompt in prompts]
        is_empty = torch.tensor([[float(not prompt)] for prompt in prompts], device=device)
        return {"embeds": rows, "is_empty": is_empty}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        import torch

        width = pipe.transformer.config.text_embed_dim
        rows = []
        for texts in pipe.get_glyph_texts(list(prompts)):
            # The pipeline pads each of an even number of texts by one token.
            lengths = [len(ids) + (len(texts or [""]) + 1) % 2 for ids in _tokenize(pipe, texts or [""])]
            rows.append(torch.empty(sum(lengths), width, device="meta"))
        return {"embeds": rows, "is_empty": torch.empty(len(prompts), 1, device="meta")}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        def is_long(prompt: str) -> bool:
            (texts,) = pipe.get_glyph_texts(prompt)
            return any(len(text.encode()) >= GLYPH_MAX_SEQUENCE_LENGTH for text in texts)

        return [prompt for prompt in prompts if is_long(prompt)]

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        import torch

        from ...dataloader.batch import Moments
        from ..vae import disable_autocast, get_latent_statistics

        vae = pipe.vae
        with torch.no_grad(), disable_autocast(vae):
            latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
        mean, std = (each.squeeze(2) for each in get_latent_statistics(vae, latents.mean))
        return Moments.from_mean_and_std((latents.mean - mean) / std, latents.std / std)

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        import torch

        from ..vae import disable_autocast, get_latent_statistics

        vae = pipe.vae
        latents = latents.to(vae.device, vae.dtype)
        mean, std = (each.squeeze(2) for each in get_latent_statistics(vae, latents))
        with torch.no_grad(), disable_autocast(vae):
            pixels: Tensor = vae.decode(latents * std + mean, return_dict=False)[0]
        return pixels

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """The image tokens of the picture, each repeated for the latents that it stands for."""
        height, width = pixels.shape[2:]
        if pixels.is_meta:
            return {PRIOR: moments.mean_and_std.new_empty(len(pixels), 1, 1, *moments.mean_and_std.shape[-2:])}
        values = pixels.add(1).mul(127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
        tokens = _stack([_tokenize_picture(pipe.vision_language_encoder, _as_image(row)) for row in values])
        return {PRIOR: _repeat(tokens, LATENTS_PER_TOKEN)[:, None, None, : height // 8, : width // 8]}

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        is_unpadded = all(len(row) == embeds.shape[1] for row in batch.cond["embeds"])
        sizes = batch.size_conditioning.to(embeds.dtype)
        step = LATENTS_PER_TOKEN
        tokens = _repeat(batch.frame_cond[PRIOR][:, 0, 0, ::step, ::step].long(), 2).flatten(1)
        is_empty = cast("Tensor", batch.cond["is_empty"]) > 0
        # The model is told the timestep before the shift of its noise level.
        process = self.build_noise_process(pipe)
        factor = process.shift.compute_factor(process.count_tokens(noisy_latents.shape))
        sigmas = timesteps / 1000
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents,
            encoder_hidden_states=embeds,
            prior_token_id=torch.where(is_empty, DROPPED, tokens),
            # Nothing more is dropped: selecting tokens by a mask would wait for the device.
            prior_token_drop=torch.empty(0, dtype=torch.long, device=tokens.device),
            timestep=1000 * sigmas / (factor - (factor - 1) * sigmas) - 1,
            target_size=sizes[:, 4:],
            crop_coords=sizes[:, 2:4],
            attention_kwargs=None if is_unpadded else {"text_mask": mask.bool()},
            return_dict=False,
        )[0]
        return predicted

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        scale = self.facts.sampling.get_guidance_scale(prompt.cfg_scale)
        return {"prompt": "", "encoded": (cond["embeds"][0], negative_cond["embeds"][0]), "guidance_scale": scale}

    def build_prompt_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        """Give the pipeline the image tokens of the prompt's picture, in the size of the preview."""
        from ...dataloader.images import load_frame_images

        image, _ = load_frame_images(prompt)
        if image is None:
            raise AssertionError("prompts without a picture are rejected")
        size = self.facts.sampling.get_image_size(prompt.width, prompt.height)
        tokens = _tokenize_picture(pipe.vision_language_encoder, _cover(image, size))[None]
        kwargs = self.build_sampling_kwargs(pipe, prompt, cond, negative_cond)
        return {**kwargs, "prior_token_ids": _repeat(tokens, 2).flatten(1)}


def _tokenize(pipe: Any, texts: Sequence[str]) -> list[list[int]]:
    ids: list[list[int]] = pipe.tokenizer(list(texts), max_length=GLYPH_MAX_SEQUENCE_LENGTH, truncation=True).input_ids
    return ids


def _as_image(pixels: Any) -> Image:
    from PIL.Image import fromarray

    return fromarray(pixels)


def _stack(rows: list[Tensor]) -> Tensor:
    import torch

    return torch.stack(rows)


def _repeat(tokens: Tensor, count: int) -> Tensor:
    """Repeat tokens (B, rows, columns) along both sides."""
    return tokens.repeat_interleave(count, dim=-1).repeat_interleave(count, dim=-2)


def _cover(image: Image, size: tuple[int, int]) -> Image:
    """Resize a picture to cover this width and height, and crop its center."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    return ImageOps.fit(image, size, Resampling.LANCZOS)


def _tokenize_picture(encoder: Any, image: Image) -> Tensor:
    """The indices of the image tokens of a picture (rows, columns), each for 32 pixels, of its half size.

    The pixels are processed as by the model's own processor, which has no other size for a picture of 512 pixels or
    more, and would enlarge a smaller one.
    """
    import torch
    from PIL.Image import Resampling
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    from ..vae import disable_autocast

    side = encoder.config.vision_config.patch_size
    columns, rows = (length // (2 * side) for length in image.size)
    half = image.resize((columns * side, rows * side), Resampling.BICUBIC)
    pixels = torch.frombuffer(bytearray(half.tobytes()), dtype=torch.uint8).view(rows, side, columns, side, 3)
    mean, std = torch.tensor(OPENAI_CLIP_MEAN), torch.tensor(OPENAI_CLIP_STD)
    patches = ((pixels.float() / 255 - mean) / std).permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)
    grid = torch.tensor([[1, rows, columns]], device=encoder.device)
    with torch.no_grad(), disable_autocast(encoder):
        states = encoder.model.visual(patches.to(encoder.device, encoder.dtype), grid_thw=grid).last_hidden_state
        features = states.T.reshape(1, -1, rows, columns)
        tokens: Tensor = encoder.model.vqmodel.encode(features).image_tokens
    return tokens.view(rows, columns).int()


def build_prior_tokenizer_class() -> Any:
    """The part of GLM-Image's language model that makes tokens of pictures: its vision tower and codebook.

    The rest, nine billion parameters that write tokens from a text, is not built, and its weights are not read.
    """
    from torch import nn
    from transformers.models.glm_image import modeling_glm_image as glm_image

    class PictureTokens(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.visual = glm_image.GlmImageVisionModel._from_config(config.vision_config)
            self.vqmodel = glm_image.GlmImageVQVAE._from_config(config.vq_config)

    class PriorTokenizer(glm_image.GlmImagePreTrainedModel):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = (r"^model\.language_model\.", r"^lm_head\.")

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = PictureTokens(config)
            self.post_init()

    return copy_class_name(PriorTokenizer, glm_image.GlmImageForConditionalGeneration)


def _build_embedding_class() -> Any:
    """torch's embedding with zeros for ``DROPPED``."""
    from torch import nn

    class DroppableEmbedding(nn.Embedding):
        def forward(self, indices: Tensor) -> Tensor:
            rows: Tensor = super().forward(indices.clamp(min=0))
            return rows * (indices != DROPPED).unsqueeze(-1).to(rows.dtype)

    return copy_class_name(DroppableEmbedding, nn.Embedding)


def _build_pipeline_class() -> Any:
    """diffusers' pipeline with encoded texts of different lengths: ``encoded``, of the prompt and the negative one."""
    from diffusers import GlmImagePipeline

    pipeline: Any = GlmImagePipeline

    class EncodedPipeline(pipeline):  # type: ignore[misc]
        encoded: tuple[Tensor, Tensor] | None = None

        def __call__(self, *args: Any, encoded: tuple[Tensor, Tensor] | None = None, **kwargs: Any) -> Any:
            self.encoded = encoded
            try:
                return super().__call__(*args, **kwargs)
            finally:
                self.encoded = None

        def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
            if self.encoded is None:
                return super().encode_prompt(*args, **kwargs)
            prompt, negative = (each.unsqueeze(0) for each in self.encoded)
            return prompt, negative

    return copy_class_name(EncodedPipeline, GlmImagePipeline)
