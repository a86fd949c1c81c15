"""HunyuanVideo 1.5 from the first frame: its latents and a mask as channels, and what SigLIP sees in it as tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.token_layout import OTHER_TOKENS, TokenLayout
from ...registry import copy_class_name
from ..base import BaseModelInfo
from ..facts import FamilyMatch, TrainerNames
from ..model_configs import ConfigReader, ModelError, read_required
from .hunyuan_image import BOTH_TEXTS, call_with_glyphs
from .hunyuan_video15 import FACTS as TEXT_FACTS
from .hunyuan_video15 import MAX_GLYPH_TOKENS, HunyuanVideo15, build_partial_pipeline_class, match_hunyuan_video15

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Moments

PROCESSOR_CONFIG = "feature_extractor/preprocessor_config.json"


def _match_hunyuan_video15_i2v(read: ConfigReader) -> FamilyMatch:
    if read_required(read, "transformer/config.json").get("task_type", "i2v") != "i2v":
        raise ModelError("its transformer is that of text to video in a pipeline from images; use its own folder")
    match = match_hunyuan_video15(read)
    return replace(match, reason=f"{match.reason} and is given the first frame")


FACTS = replace(
    TEXT_FACTS,
    title="HunyuanVideo 1.5 I2V",
    pipeline=replace(
        TEXT_FACTS.pipeline,
        class_name="HunyuanVideo15ImageToVideoPipeline",
        hub_id="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
        frame_encoders=("image_encoder",),
    ),
    detection=replace(
        TEXT_FACTS.detection,
        match_configs=_match_hunyuan_video15_i2v,
        unsupported_file_names={
            "t2v": "HunyuanVideo 1.5 T2V, whose weights have the same names; leave out --family hunyuan_video15_i2v",
            "distill": TEXT_FACTS.detection.unsupported_file_names["distill"],
        },
        trainer_names=TrainerNames(
            simpletuner=("hunyuanvideo",),
            simpletuner_flavours={
                "i2v-480p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
                "i2v-720p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
            },
            variant_pattern="i2v",
        ),
    ),
    lora=replace(TEXT_FACTS.lora, modelspec_architecture="hunyuan-video-1.5-i2v"),
    blocks=replace(
        TEXT_FACTS.blocks,
        # The tokens of the image come before those of both texts.
        token_layouts=dict.fromkeys(TEXT_FACTS.blocks.token_layouts, TokenLayout(segments=(OTHER_TOKENS, *BOTH_TEXTS))),
    ),
    sampling=replace(TEXT_FACTS.sampling, frame_images=("image_path",)),
    options=replace(
        TEXT_FACTS.options,
        components={**TEXT_FACTS.options.components, "image_encoder": "image_encoder"},
        musubi_versions={"i2v": {}},
    ),
    notes="from the first frame; LoRA in diffusers: `transformer.load_lora_adapter`",
)


class HunyuanVideo15I2V(HunyuanVideo15):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        register_image_processor(pipe, read)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("hunyuan_video_1.5_i2v", "hunyuan-video-1.5-i2v")

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """The latents of the first frame, which do not depend on later frames, and what SigLIP sees in it."""
        from ..vae import as_clips

        first = moments.mean_and_std[:, 0, :, :1].clone()  # which may be all of the moments of an image
        return {"first": first, "images": embed_siglip_images(pipe, as_clips(pixels)[:, :, 0])}

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch
        from torch.nn.functional import pad

        first = batch.frame_cond["first"].to(noisy_latents)
        given = torch.cat([first, torch.ones_like(first[:, :1])], dim=1)
        padded = torch.cat([noisy_latents, pad(given, (0, 0, 0, 0, 0, noisy_latents.shape[2] - 1))], dim=1)
        return call_with_glyphs(
            denoiser, padded, timesteps, batch, MAX_GLYPH_TOKENS, image_embeds=batch.frame_cond["images"]
        )


def register_image_processor(pipe: Any, read: ConfigReader) -> None:
    """Give the pipeline the processor of SigLIP's images."""
    import transformers

    # The one that resizes with Pillow, as the pipeline's does without torchvision; older versions have no other.
    names = ("SiglipImageProcessorPil", "SiglipImageProcessor")
    processor: Any = next(filter(None, (getattr(transformers, name, None) for name in names)))
    side = read_required(read, "image_encoder/config.json")["image_size"]
    settings = read(PROCESSOR_CONFIG) or {"size": {"height": side, "width": side}}
    pipe.register_modules(feature_extractor=processor(**settings))


def embed_siglip_images(pipe: Any, pixels: Tensor) -> Tensor:
    """Encode images (B, 3, height, width) in -1..1 with SigLIP, as the pipeline does."""
    from PIL.Image import fromarray

    encoder = pipe.image_encoder
    if pixels.is_meta:  # which has no values that could be resized
        config = encoder.config
        return pixels.new_empty(len(pixels), (config.image_size // config.patch_size) ** 2, config.hidden_size)
    values = pixels.add(1).mul(127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
    inputs = pipe.feature_extractor.preprocess(
        images=list(map(fromarray, values)), do_resize=True, return_tensors="pt", do_convert_rgb=True
    ).pixel_values
    states: Tensor = encoder(inputs.to(encoder.device, encoder.dtype)).last_hidden_state
    return states.float()


def _build_pipeline_class() -> Any:
    """diffusers' pipeline with the size of the clip as arguments of the call, where it follows from the image there."""
    from diffusers import HunyuanVideo15ImageToVideoPipeline

    pipeline: Any = build_partial_pipeline_class(HunyuanVideo15ImageToVideoPipeline)

    class SizedPipeline(pipeline):  # type: ignore[misc]
        def __call__(self, *args: Any, width: int | None = None, height: int | None = None, **kwargs: Any) -> Any:
            if width is None or height is None:
                return super().__call__(*args, **kwargs)
            self.video_processor.calculate_default_height_width = lambda **sizes: (height, width)
            try:
                return super().__call__(*args, **kwargs)
            finally:
                del self.video_processor.calculate_default_height_width

    return copy_class_name(SizedPipeline, HunyuanVideo15ImageToVideoPipeline)
