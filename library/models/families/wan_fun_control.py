"""Wan 2.1 Fun-Control: videos that follow a control clip, whose latents are channels behind the noisy ones.

Behind these are the latents of a first frame, if one is given, and zeros; there is no mask.  What CLIP sees in that
frame is zeros without one, as in the code of the authors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...config.network_args import NetworkFacts
from ...registry import copy_class_name
from ..base import BaseModelInfo
from ..facts import ControlFacts, FamilyMatch, FamilyOptions, SamplingFacts, TrainerNames
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .wan import FACTS as TEXT_FACTS
from .wan import WAN_TEXT_TOKENS, Wan
from .wan_i2v import FACTS as IMAGE_FACTS
from .wan_i2v import WanI2V, embed_images, is_control_model

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Moments


def _match_wan_fun_control(read: ConfigReader) -> FamilyMatch | None:
    index, config = read_required(read, "model_index.json"), read_required(read, "transformer/config.json")
    if index.get("boundary_ratio") is not None or index.get("expand_timesteps") or not is_control_model(read):
        return None
    if not config.get("image_dim"):
        raise ModelError("its transformer takes no image; Wan 2.2 Fun-Control cannot be trained yet")
    return match_flow_model(read, 3, f"the transformer has {config.get('num_layers')} blocks and channels of a control")


FACTS = replace(
    IMAGE_FACTS,
    title="Wan 2.1 Fun-Control",
    pipeline=replace(IMAGE_FACTS.pipeline, num_parameters=16_395_124_544, hub_id="", frame_encoders=()),
    detection=replace(
        IMAGE_FACTS.detection,
        match_configs=_match_wan_fun_control,
        trainer_names=TrainerNames(),
    ),
    # Without a given frame all tokens of the image are alike, and its projections get no gradient.
    lora=replace(
        IMAGE_FACTS.lora,
        targets=TEXT_FACTS.lora.targets,
        targets_of="",
        modelspec_architecture="wan2.1-fun-control",
    ),
    control=ControlFacts(num_images=(1, 1), have_picture_size=True),
    sampling=SamplingFacts(num_inference_steps=50, guidance_scale=6.0, image_size=(832, 480)),
    options=FamilyOptions(
        components=TEXT_FACTS.options.components,
        extra=("image_to_video",),
        network=NetworkFacts(modules=("networks.lora_wan",)),
        musubi_versions={"t2v-1.3B-FC": {"ffn_dim": 8960}, "t2v-14B-FC": {"ffn_dim": 13824}},
    ),
    notes="from a control clip, also from the first frame (`--image_to_video`); single files",
)


class WanFunControl(Wan):
    facts = FACTS

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class(self.facts.sampling.frame_images != ())

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan_fun_control", "wan2.1-fun-control")

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..text_encoding import pad_text_embeds

        (control,) = batch.control_latents
        first, images = batch.frame_cond.get("first"), batch.frame_cond.get("images")
        if images is None:
            images = control.new_zeros(len(control), 1, pipe.transformer.config.image_dim)
        given = torch.zeros_like(control)
        if first is not None:
            given[:, :, :1] = first
        predicted: Tensor = denoiser(
            hidden_states=torch.cat([noisy_latents, control.to(noisy_latents), given.to(noisy_latents)], dim=1),
            timestep=timesteps,
            encoder_hidden_states=pad_text_embeds(batch.cond["embeds"], WAN_TEXT_TOKENS)[0],
            encoder_hidden_states_image=images,
            return_dict=False,
        )[0]
        return predicted

    def build_control_clip_kwargs(self, pipe: Any, clips: Sequence[Sequence[Image]]) -> dict[str, Any]:
        (clip,) = clips
        return {"control_video": list(clip)}


FROM_IMAGE_FACTS = replace(
    FACTS,
    title="Wan 2.1 Fun-Control from images",
    pipeline=replace(FACTS.pipeline, frame_encoders=("image_encoder",)),
    lora=replace(FACTS.lora, targets=IMAGE_FACTS.lora.targets),
    sampling=replace(FACTS.sampling, frame_images=("image_path",)),
    options=replace(
        FACTS.options,
        components=IMAGE_FACTS.options.components,
        musubi_versions={"i2v-14B-FC": {"ffn_dim": 13824}},
    ),
)


class WanFunControlFromImage(WanFunControl):
    """The model with the first frame of each clip given; an image has no other frame and is trained without one."""

    facts = FROM_IMAGE_FACTS

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        WanI2V().configure_pipeline(pipe, read)

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """The latents of the first frame, which do not depend on later frames, and what CLIP sees in it."""
        from ..vae import as_clips

        clip, first = as_clips(pixels), moments.mean_and_std[:, 0, :, :1].clone()
        images = embed_images(pipe, clip[:, :, 0])
        return {"first": first, "images": images} if clip.shape[2] > 1 else {"first": first * 0, "images": images * 0}


def _build_pipeline_class(has_first_frame: bool) -> Any:
    """diffusers' pipeline from images with the channels of Fun-Control in place of its mask and given frames."""
    import torch
    from diffusers import WanImageToVideoPipeline
    from PIL import Image as images

    pipeline: Any = WanImageToVideoPipeline

    class ControlPipeline(pipeline):  # type: ignore[misc]
        control_video: Any = None
        has_first_frame = False

        def __call__(self, *args: Any, control_video: Any = None, image: Any = None, **kwargs: Any) -> Any:
            if control_video is None:
                raise ValueError("a control clip is needed: control_video")
            self.control_video = control_video
            self.has_first_frame = has_first_frame and kwargs.get("num_frames", 2) > 1  # an image is no first frame
            black = images.new("RGB", control_video[0].size)
            return super().__call__(image or black, *args, **kwargs)

        def encode_image(self, image: Any, device: Any = None) -> torch.Tensor:
            if self.has_first_frame:
                states: torch.Tensor = super().encode_image(image, device)
                return states
            return torch.zeros(1, 1, self.transformer.config.image_dim, device=device)

        def prepare_latents(self, image: Any, count: int, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
            from ..vae import encode_clip_moments

            latents, condition = super().prepare_latents(image, count, *others)
            height, width = image.shape[-2:]
            pixels = self.video_processor.preprocess_video(self.control_video, height, width)
            control = encode_clip_moments(self.vae, pixels.float()).mean_and_std[:, 0].to(latents)
            given = condition[:, -control.shape[1] :].clone()
            given[:, :, int(self.has_first_frame) :] = 0
            return latents, torch.cat([control.expand_as(given), given], dim=1)

    return copy_class_name(ControlPipeline, WanImageToVideoPipeline)
