"""Wan 2.1 image to video, and first and last frame to video: clips that begin (and end) with a given image.

The transformer gets, beside the noisy latents, those of the given frames with grey ones in between, a mask of the
given frames, and what CLIP sees in them.  In training the given frames are those of the clip itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...config.network_args import NetworkFacts
from ..base import BaseModelInfo
from ..facts import FamilyMatch, PipelineFacts, SamplingFacts, TrainerNames
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .wan import FACTS as WAN_FACTS
from .wan import FRAME_STRIDE, WAN_FRAMES, WAN_TEXT_TOKENS, Wan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Moments

CONDITION_CHANNELS = FRAME_STRIDE
"""Channels of the mask: one for each frame of a latent frame."""
PROCESSOR_CONFIG = "image_processor/preprocessor_config.json"
REFERENCE_TRANSFORMER = "WanReferenceTransformer3DModel"
"""The class of the transformers that take a picture to refer to; see ``models/wan_reference_transformer.py``."""


def _match_wan_i2v(read: ConfigReader) -> FamilyMatch | None:
    return _match_images(read, has_last_frame=False)


def _match_wan_flf2v(read: ConfigReader) -> FamilyMatch | None:
    return _match_images(read, has_last_frame=True)


def _match_images(read: ConfigReader, *, has_last_frame: bool) -> FamilyMatch | None:
    index, config = read_required(read, "model_index.json"), read_required(read, "transformer/config.json")
    if index.get("boundary_ratio") is not None:
        return None  # Wan 2.2
    if index.get("expand_timesteps"):
        raise ModelError("its tokens have times of their own; give the folder of Wan 2.2 TI2V with WanPipeline")
    if bool(config.get("pos_embed_seq_len")) is not has_last_frame or is_control_model(read):
        return None
    given = "its first and last frame" if has_last_frame else "its first frame"
    reason = f"the transformer has {config.get('num_layers')} blocks and is given {given}"
    return match_flow_model(read, 2, reason, more_channels=CONDITION_CHANNELS)


def is_control_model(read: ConfigReader) -> bool:
    """Whether the input of a Wan has the channels of two clips beside the noisy ones, and none of a mask."""
    channels = read_required(read, "transformer/config.json").get("in_channels")
    latent_channels = read_required(read, "vae/config.json").get("z_dim", 0)
    return bool(channels == 3 * latent_channels != 2 * latent_channels + CONDITION_CHANNELS)


def takes_reference(read: ConfigReader) -> bool:
    """Whether it is a Fun-Control that takes a picture to refer to."""
    return bool((read_required(read, "model_index.json").get("transformer") or [None])[-1] == REFERENCE_TRANSFORMER)


FACTS = replace(
    WAN_FACTS,
    title="Wan 2.1 I2V",
    pipeline=PipelineFacts(
        class_name="WanImageToVideoPipeline",
        kind="video",
        num_parameters=16_394_878_784,
        hub_id="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        frames=WAN_FRAMES,
        frame_encoders=("image_encoder",),
    ),
    detection=replace(
        WAN_FACTS.detection,
        match_configs=_match_wan_i2v,
        keys=(*WAN_FACTS.detection.keys, "img_emb.proj.1.weight"),
        diffusers_keys={
            **WAN_FACTS.detection.diffusers_keys,
            "img_emb.proj.1.weight": "condition_embedder.image_embedder.ff.net.0.proj.weight",
            "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
        },
        shape_checks={
            **WAN_FACTS.detection.shape_checks,
            ("img_emb.emb_pos", None): ("transformer", "pos_embed_seq_len"),
        },
        unsupported_shapes={},
        trainer_names=TrainerNames(
            ai_toolkit=("wan21_i2v",),
            diffusion_pipe=("wan",),
            simpletuner=("wan",),
            simpletuner_flavours={
                "i2v-14b-2.1": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
                "i2v-14b-2.1-720p": "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
            },
            variant_pattern=r"(?<!t)i2v",
        ),
    ),
    single_files=replace(
        WAN_FACTS.single_files, renames={"img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed"}
    ),
    lora=replace(
        WAN_FACTS.lora,
        targets=(*WAN_FACTS.lora.targets, "attn2.add_k_proj", "attn2.add_v_proj"),
        modelspec_architecture="wan2.1-i2v",
    ),
    blocks=replace(
        WAN_FACTS.blocks,
        # In the cross-attention, tokens of the image come before those of the text.
        text_attention_calls=(1, 2),
        text_attention_layers=(*WAN_FACTS.blocks.text_attention_layers, "attn2.add_k_proj", "attn2.add_v_proj"),
    ),
    sampling=SamplingFacts(
        num_inference_steps=50, guidance_scale=5.0, image_size=(832, 480), frame_images=("image_path",)
    ),
    options=replace(
        WAN_FACTS.options,
        components={**WAN_FACTS.options.components, "image_encoder": "image_encoder"},
        network=NetworkFacts(modules=("networks.lora_wan",)),
        musubi_versions={"i2v-14B": {"ffn_dim": 13824}},
    ),
    notes="from the first frame",
)


class WanI2V(Wan):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan_i2v", "wan2.1-i2v")

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        import transformers

        # The one that resizes with Pillow, as the pipeline's does without torchvision; older versions have no other.
        names = ("CLIPImageProcessorPil", "CLIPImageProcessor")
        processor: Any = next(filter(None, (getattr(transformers, name, None) for name in names)))
        side = read_required(read, "image_encoder/config.json")["image_size"]
        sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        pipe.register_modules(image_processor=processor(**(read(PROCESSOR_CONFIG) or sizes)))

    @property
    def has_last_frame(self) -> bool:
        """Whether the last frame is given, too."""
        return "end_image_path" in self.facts.sampling.frame_images

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """Encode the given frames, with grey ones in between, and what CLIP sees in the given ones.

        ``images`` has one row of tokens per sample and given frame.
        """
        import torch

        from ..vae import as_clips

        clip = as_clips(pixels)
        given = torch.zeros_like(clip)
        numbers = sorted({0, clip.shape[2] - 1 if self.has_last_frame else 0})
        given[:, :, numbers] = clip[:, :, numbers]
        cond = {"latents": self.encode_moments(pipe, given).mean_and_std[:, 0]}
        if self.facts.pipeline.frame_encoders:
            ends = [clip[:, :, number] for number in ((0, -1) if self.has_last_frame else (0,))]
            cond["images"] = torch.stack([embed_images(pipe, each) for each in ends], dim=1)
        return cond

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..text_encoding import pad_text_embeds

        images, mask = batch.frame_cond.get("images"), self.build_mask(noisy_latents)
        inputs = torch.cat([noisy_latents, mask, batch.frame_cond["latents"]], dim=1)
        predicted: Tensor = denoiser(
            hidden_states=inputs,
            timestep=timesteps,
            encoder_hidden_states=pad_text_embeds(batch.cond["embeds"], WAN_TEXT_TOKENS)[0],
            encoder_hidden_states_image=None if images is None else images.flatten(0, 1),
            return_dict=False,
        )[0]
        return predicted

    def build_mask(self, latents: Tensor) -> Tensor:
        """Ones for given frames: the first latent frame is of one frame only, which counts for all of its channels."""
        import torch

        shape = (len(latents), CONDITION_CHANNELS, 1, *latents.shape[-2:])
        ones, zeros, num_frames = latents.new_ones(shape), latents.new_zeros(shape), latents.shape[2]
        frames = [ones, *[zeros] * (num_frames - 1)]
        if self.has_last_frame and num_frames > 1:
            frames[-1] = torch.cat([zeros[:, 1:], ones[:, :1]], dim=1)
        return torch.cat(frames, dim=2)


def embed_images(pipe: Any, pixels: Tensor) -> Tensor:
    """Encode images (B, 3, height, width) in -1..1 with the last but one layer of CLIP, as the pipeline does."""
    from PIL.Image import fromarray

    encoder = pipe.image_encoder
    if pixels.is_meta:  # which has no values that could be resized
        config = encoder.config
        return pixels.new_empty(len(pixels), (config.image_size // config.patch_size) ** 2 + 1, config.hidden_size)
    values = pixels.add(1).mul(127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
    inputs = pipe.image_processor(images=list(map(fromarray, values)), return_tensors="pt").pixel_values
    output = encoder(inputs.to(encoder.device, encoder.dtype), output_hidden_states=True)
    states: Sequence[Tensor] = output.hidden_states
    return states[-2].float()


FIRST_LAST_FACTS = replace(
    FACTS,
    title="Wan 2.1 FLF2V",
    pipeline=replace(
        FACTS.pipeline,
        num_parameters=16_395_536_704,
        hub_id="Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
    ),
    detection=replace(
        FACTS.detection,
        match_configs=_match_wan_flf2v,
        keys=(*FACTS.detection.keys, "img_emb.emb_pos"),
        trainer_names=TrainerNames(
            diffusion_pipe=("wan",),
            simpletuner=("wan",),
            simpletuner_flavours={"flf2v-14b-2.1": "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers"},
            variant_pattern="flf2v",
        ),
    ),
    lora=replace(FACTS.lora, modelspec_architecture="wan2.1-flf2v"),
    sampling=replace(FACTS.sampling, image_size=(1280, 720), frame_images=("image_path", "end_image_path")),
    options=replace(FACTS.options, musubi_versions={"flf2v-14B": {"ffn_dim": 13824}}),
    notes="from the first and the last frame",
)


class WanFLF2V(WanI2V):
    facts = FIRST_LAST_FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan_flf2v", "wan2.1-flf2v")
