"""HunyuanVideo I2V, in both of its kinds: LLaVA reads the first frame together with the caption.

One replaces the tokens of the first latent frame by those of the given one, with a noise level of their own; the older
one, of 33 channels, gets its latents and a mask as further channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...dataset.clip_windows import FrameRule
from ...registry import copy_class_name
from ..base import BaseModelInfo, ControlTextFamily
from ..facts import ControlFacts, FamilyMatch, TrainerNames
from ..model_configs import ConfigReader, read_required
from ..shared_facts import CLIP_L_TOKENIZER, match_flow_model
from .hunyuan_video import FACTS as TEXT_FACTS
from .hunyuan_video import MAX_TOKENS, HunyuanVideo

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt

PROCESSOR_CONFIG = "image_processor/preprocessor_config.json"
NUM_IMAGE_TOKENS = 576
"""The tokens of an image in LLaVA, of which the transformer gets one in so many."""

TOKEN_REPLACE_INTERLEAVE, LATENT_CONCAT_INTERLEAVE, NEGATIVE_INTERLEAVE = 4, 2, 2
END_TOKENS = 4
"""The tokens of the template after a caption that are left out."""

NUM_LEAD_FRAMES = 4
"""The frames that the pipeline with 33 channels samples before those that it returns."""


def _match_i2v(read: ConfigReader, kind: str, reason: str) -> FamilyMatch | None:
    config = read_required(read, "transformer/config.json")
    if config.get("image_condition_type") != kind:
        return None
    has_channels = kind == "latent_concat"
    match = match_flow_model(read, 1 + has_channels, reason, more_channels=int(has_channels))
    return replace(match, has_guidance_embeds=bool(config.get("guidance_embeds", True)))


def _match_token_replace(read: ConfigReader) -> FamilyMatch | None:
    return _match_i2v(read, "token_replace", "the transformer replaces the tokens of the first frame")


def _match_latent_concat(read: ConfigReader) -> FamilyMatch | None:
    return _match_i2v(read, "latent_concat", "the transformer gets the first frame as channels")


FACTS = replace(
    TEXT_FACTS,
    title="HunyuanVideo I2V",
    pipeline=replace(
        TEXT_FACTS.pipeline,
        class_name="HunyuanVideoImageToVideoPipeline",
        hub_id="hunyuanvideo-community/HunyuanVideo-I2V",
        frames=FrameRule(stride=4, fps=24.0, least=5),
    ),
    detection=replace(
        TEXT_FACTS.detection,
        match_configs=_match_token_replace,
        unsupported_shapes={},
        unsupported_file_names={"t2v": "HunyuanVideo T2V, whose weights have the same names; leave out --family"},
        trainer_names=TrainerNames(),
    ),
    lora=replace(
        TEXT_FACTS.lora,
        modelspec_architecture="hunyuan-video-i2v",
        modelspec_implementation="https://github.com/Tencent-Hunyuan/HunyuanVideo-I2V",
    ),
    blocks=replace(
        TEXT_FACTS.blocks,
        unsupported_strategies={"cp": "its blocks tell the tokens of the first frame from the others by their number"},
    ),
    text=replace(
        TEXT_FACTS.text,
        tokenizer_repo_ids={
            "tokenizer": "hunyuanvideo-community/HunyuanVideo-I2V:tokenizer",
            "tokenizer_2": CLIP_L_TOKENIZER,
        },
        has_negative_encoding=True,
    ),
    control=ControlFacts(
        text_tokens_per_image=NUM_IMAGE_TOKENS // TOKEN_REPLACE_INTERLEAVE, text_reads_first_frame=True
    ),
    sampling=replace(TEXT_FACTS.sampling, frame_images=("image_path",)),
    notes="from the first frame, by replaced tokens",
)

CONCAT_FACTS = replace(
    FACTS,
    title="HunyuanVideo I2V 33ch",
    pipeline=replace(
        FACTS.pipeline,
        num_parameters=12_810_991_680,
        hub_id="hunyuanvideo-community/HunyuanVideo-I2V-33ch",
        frames=TEXT_FACTS.pipeline.frames,
    ),
    detection=replace(FACTS.detection, match_configs=_match_latent_concat, unsupported_file_names={}),
    lora=replace(FACTS.lora, modelspec_architecture="hunyuan-video-i2v-33ch"),
    blocks=TEXT_FACTS.blocks,
    text=replace(
        FACTS.text,
        tokenizer_repo_ids={
            "tokenizer": "hunyuanvideo-community/HunyuanVideo-I2V-33ch:tokenizer",
            "tokenizer_2": CLIP_L_TOKENIZER,
        },
    ),
    control=replace(FACTS.control, text_tokens_per_image=NUM_IMAGE_TOKENS // LATENT_CONCAT_INTERLEAVE),
    options=replace(FACTS.options, extra=()),
    notes="from the first frame, as channels",
)


class HunyuanVideoI2V(HunyuanVideo, ControlTextFamily):
    facts = FACTS
    interleave = TOKEN_REPLACE_INTERLEAVE

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("hunyuan_video_i2v", "hunyuan-video-i2v")

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        import transformers

        # The one that resizes with Pillow, as the pipeline's does without torchvision; older versions have no other.
        names = ("CLIPImageProcessorPil", "CLIPImageProcessor")
        processor: Any = next(filter(None, (getattr(transformers, name, None) for name in names)))
        side = read_required(read, "text_encoder/config.json")["vision_config"]["image_size"]
        sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        pipe.register_modules(image_processor=processor(**(read(PROCESSOR_CONFIG) or sizes)))

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_negative_prompts(pipe, prompts)

    def encode_negative_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Encode texts with a black image, as the pipeline does with negative prompts."""
        from PIL.Image import new

        side = pipe.text_encoder.config.vision_config.image_size
        return _encode(pipe, prompts, [new("RGB", (side, side))] * len(prompts), NEGATIVE_INTERLEAVE)

    def encode_prompts_with_controls(
        self, pipe: Any, prompts: Sequence[str], controls: Sequence[Sequence[Image]]
    ) -> Cond:
        """Encode texts with the first frame of each."""
        return _encode(pipe, prompts, [image for (image,) in controls], self.interleave)

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self._encode_on_meta(pipe, prompts, NEGATIVE_INTERLEAVE)

    def encode_prompts_with_controls_on_meta(
        self, pipe: Any, prompts: Sequence[str], control_sizes: Sequence[tuple[int, int]]
    ) -> Cond:
        return self._encode_on_meta(pipe, prompts, self.interleave)

    def _encode_on_meta(self, pipe: Any, prompts: Sequence[str], interleave: int) -> Cond:
        import torch

        from .. import text_encoding

        config, template = pipe.transformer.config, _get_template()
        texts = [template["template"].format(prompt) for prompt in prompts]
        width, start = config.text_embed_dim, template["crop_start"]
        rows = text_encoding.build_meta_text_embeds(pipe.tokenizer, texts, width, MAX_TOKENS, start)
        more = NUM_IMAGE_TOKENS // interleave - END_TOKENS
        embeds = [torch.empty(len(row) + more, width, device="meta") for row in rows]
        return {"embeds": embeds, "pooled": torch.empty(len(prompts), config.pooled_projection_dim, device="meta")}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        template = _get_template()
        prefix, _, _ = template["template"].partition("{}")
        texts = {prefix + prompt: prompt for prompt in prompts}
        # Without the start token, and with the end of the template up to where the answer begins.
        most = MAX_TOKENS + template["crop_start"] - 1 - END_TOKENS
        return [texts[text] for text in text_encoding.find_truncated_prompts(pipe.tokenizer, [*texts], most)]

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """The latents of the first frame alone: the VAE normalizes groups of channels over all frames of a clip."""
        from ..vae import as_clips

        return {"first": self.encode_moments(pipe, as_clips(pixels)[:, :, :1]).mean_and_std[:, 0]}

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        guidance = None
        if pipe.transformer.config.guidance_embeds:
            guidance = timesteps.new_full(timesteps.shape, 1000 * self.model_config.guidance_scale)
        predicted: Tensor = denoiser(
            hidden_states=self.add_first_frame(noisy_latents, batch.frame_cond["first"].to(noisy_latents)),
            timestep=timesteps,
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask.to(embeds.dtype),
            pooled_projections=batch.cond["pooled"],
            guidance=guidance,
            return_dict=False,
        )[0]
        return predicted

    def add_first_frame(self, latents: Tensor, first: Tensor) -> Tensor:
        """Put the given frame in the place of the first one, whose tokens the blocks treat as clean."""
        import torch

        return torch.cat([first, latents[:, :, 1:]], dim=2)

    def select_trained_frames(self, loss: Tensor, batch: Batch) -> Tensor:
        return loss[:, :, 1:]

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        kwargs = super().build_sampling_kwargs(pipe, prompt, cond, negative_cond)
        if prompt.embedded_guidance is None and not pipe.transformer.config.guidance_embeds:
            kwargs["guidance_scale"] = 1.0
        return kwargs


class HunyuanVideoI2V33Channels(HunyuanVideoI2V):
    facts = CONCAT_FACTS
    interleave = LATENT_CONCAT_INTERLEAVE

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("hunyuan_video_33ch_i2v", "hunyuan-video-i2v-33ch")

    def add_first_frame(self, latents: Tensor, first: Tensor) -> Tensor:
        """Append the given frame, with zeros in place of all others, and a mask of ones for it."""
        import torch
        from torch.nn.functional import pad

        given = torch.cat([first, torch.ones_like(first[:, :1])], dim=1)
        return torch.cat([latents, pad(given, (0, 0, 0, 0, 0, latents.shape[2] - 1))], dim=1)

    def select_trained_frames(self, loss: Tensor, batch: Batch) -> Tensor:
        return loss

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        return self.decode_latents(pipe, latents)[:, :, NUM_LEAD_FRAMES:]


def _get_template() -> dict[str, Any]:
    """Return the text around every prompt, and where its parts begin and end."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import DEFAULT_PROMPT_TEMPLATE

    template: dict[str, Any] = DEFAULT_PROMPT_TEMPLATE
    return template


def _encode(pipe: Any, prompts: Sequence[str], images: Sequence[Image], interleave: int) -> Cond:
    """Encode texts one by one with their images, as the pipeline does, without the padding that it masks."""
    from .. import text_encoding

    template, rows = _get_template(), list[Any]()
    pipe.tokenizer.padding_side = "right"
    for prompt, image in zip(prompts, images, strict=True):
        text = template["template"].format(prompt)
        length = len(pipe.tokenizer(text, truncation=False, verbose=False).input_ids) - template["crop_start"]
        embeds, mask = pipe._get_llama_prompt_embeds(
            image,
            [prompt],
            template,
            device=pipe.text_encoder.device,
            max_sequence_length=min(length, MAX_TOKENS),
            image_embed_interleave=interleave,
        )
        rows += text_encoding.drop_padding(embeds, mask)
    with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer_2):
        pooled = pipe._get_clip_prompt_embeds(list(prompts), device=pipe.text_encoder_2.device)
    return {"embeds": rows, "pooled": pooled}


def _build_pipeline_class() -> Any:
    """diffusers' pipeline, which samples as many frames as it is told, and returns all latents.

    diffusers leaves out the first latent frame, and the first four frames, of what it samples.
    """
    from diffusers import HunyuanVideoImageToVideoPipeline

    pipeline: Any = HunyuanVideoImageToVideoPipeline

    class LeadingPipeline(pipeline):  # type: ignore[misc]
        def __call__(self, *args: Any, num_frames: int = 1, latents: Tensor | None = None, **kwargs: Any) -> Any:
            kept: dict[str, Any] = {}

            def keep_latents(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                kept.update(tensors)
                return {}

            count = num_frames + (NUM_LEAD_FRAMES if latents is None else 0)
            kwargs["callback_on_step_end"] = keep_latents
            result = super().__call__(*args, num_frames=count, latents=latents, **kwargs)
            if kwargs.get("output_type") != "latent":
                return result
            return type(result)(frames=kept["latents"])

    return copy_class_name(LeadingPipeline, HunyuanVideoImageToVideoPipeline)
