"""Wan Fun-Control: videos that follow a control clip, whose latents are channels behind the noisy ones.

Behind these are the latents of a first frame, if one is given, and zeros.  Wan 2.1 has no mask of what is given, and
what CLIP sees in that frame, which is zeros without one, as in the code of the authors.  Wan 2.2 has two experts, which
get a first frame as those of I2V do.  1.1 and 2.2 also refer to a picture, which is the second control.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...config.network_args import GENERAL_NETWORK, NetworkFacts
from ...diffusion.expert_selection import NoiseExperts
from ...registry import copy_class_name
from ..base import BaseModelInfo
from ..facts import ControlFacts, FamilyFacts, FamilyMatch, FamilyOptions, SamplingFacts, TrainerNames
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .wan import FACTS as TEXT_FACTS
from .wan import WAN_TEXT_TOKENS, Wan
from .wan22_experts import FACTS as EXPERT_FACTS
from .wan22_experts import IMAGE_BOUNDARY, FirstFrame, JoinedExperts, match_experts, select_expert
from .wan_i2v import CONDITION_CHANNELS, WanI2V, embed_images, is_control_model, takes_reference
from .wan_i2v import FACTS as IMAGE_FACTS

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Moments


def _match_wan_fun_control(read: ConfigReader) -> FamilyMatch | None:
    return None if takes_reference(read) else _match_control(read)


def _match_wan_fun_control11(read: ConfigReader) -> FamilyMatch | None:
    return _match_control(read) if takes_reference(read) else None


def _match_control(read: ConfigReader) -> FamilyMatch | None:
    index, config = read_required(read, "model_index.json"), read_required(read, "transformer/config.json")
    if index.get("boundary_ratio") is not None or index.get("expand_timesteps") or not is_control_model(read):
        return None
    if not config.get("image_dim"):
        raise ModelError("its transformer takes no image, as those of Wan 2.2 Fun-Control, of which it has one only")
    return match_flow_model(read, 3, f"the transformer has {config.get('num_layers')} blocks and channels of a control")


def _match_wan22_fun_control(read: ConfigReader) -> FamilyMatch | None:
    if read_required(read, "model_index.json").get("boundary_ratio") is None or not takes_reference(read):
        return None
    return match_experts(read, IMAGE_BOUNDARY, 3, CONDITION_CHANNELS)


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
    has_mask: ClassVar[bool] = False
    """Whether a mask of what is given is before the latents of the first frame."""
    takes_reference: ClassVar[bool] = False
    """Whether there is a picture to refer to, or zeros in its place."""

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class(self)

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan_fun_control", "wan2.1-fun-control")

    def encode_controls(self, pipe: Any, controls: Sequence[Tensor], pixels: Tensor) -> tuple[Tensor, ...]:
        """Encode the control clip, and the picture to refer to, which is the first frame of a second one."""
        from ..vae import as_clips

        clip, *pictures = map(as_clips, controls)
        every = (clip, *(picture[:, :, :1] for picture in pictures))
        return tuple(self.encode_control(pipe, each, pixels) for each in every)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..text_encoding import pad_text_embeds

        control, *references = (each.to(noisy_latents) for each in batch.control_latents)
        condition = self.join_condition(control, self.build_given(control, batch), references)
        predicted: Tensor = denoiser(
            hidden_states=torch.cat([noisy_latents, condition], dim=1),
            timestep=timesteps,
            encoder_hidden_states=pad_text_embeds(batch.cond["embeds"], WAN_TEXT_TOKENS)[0],
            encoder_hidden_states_image=self.build_image_features(pipe, batch),
            return_dict=False,
        )[0]
        return predicted

    def build_given(self, control: Tensor, batch: Batch) -> Tensor:
        """Build the channels of the first frame: its latents, or zeros, and zeros for all others."""
        import torch

        given, first = torch.zeros_like(control), batch.frame_cond.get("first")
        if first is not None:
            given[:, :, :1] = first
        return given

    def build_image_features(self, pipe: Any, batch: Batch) -> Tensor | None:
        """Return what CLIP sees in the first frame, or zeros."""
        images, (control, *_) = batch.frame_cond.get("images"), batch.control_latents
        return control.new_zeros(len(control), 1, pipe.transformer.config.image_dim) if images is None else images

    def join_condition(self, control: Tensor, given: Tensor, references: Sequence[Tensor]) -> Tensor:
        """Join all channels behind the noisy latents; the picture to refer to is in the first frame of the last ones.

        Without a picture, its latents are zeros, as in the code of the authors.
        """
        import torch

        parts = [control, given]
        if self.takes_reference:
            place = torch.zeros_like(control)
            for reference in references:
                place[:, :, :1] = reference[:, :, :1]
            parts.append(place)
        return torch.cat(parts, dim=1)

    def build_control_clip_kwargs(self, pipe: Any, clips: Sequence[Sequence[Image]]) -> dict[str, Any]:
        clip, *pictures = clips
        reference = {"reference_image": pictures[0][0]} if pictures else {}
        return {"control_video": list(clip), **reference}


FROM_IMAGE_FACTS = replace(
    FACTS,
    title="Wan 2.1 Fun-Control from images",
    pipeline=replace(FACTS.pipeline, frame_encoders=("image_encoder",)),
    lora=replace(FACTS.lora, targets=IMAGE_FACTS.lora.targets, trained_by_clips=("add_k_proj", "add_v_proj")),
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


def _add_reference(facts: FamilyFacts, title: str, architecture: str) -> FamilyFacts:
    """The facts of a model that takes a picture to refer to."""
    detection, single_files = facts.detection, facts.single_files
    return replace(
        facts,
        title=title,
        detection=replace(detection, keys=(*detection.keys, "ref_conv.weight"), trainer_names=TrainerNames()),
        single_files=replace(
            single_files,
            classes=dict.fromkeys(("transformer", "transformer_2"), "WanTransformer3DModel"),
            renames={**single_files.renames, "ref_conv.": "patch_embedding.ref_conv."},
        ),
        lora=replace(facts.lora, targets_of="", modelspec_architecture=architecture),
        control=ControlFacts(num_images=(1, 2), have_picture_size=True),
    )


def _add_reference11(facts: FamilyFacts, title: str) -> FamilyFacts:
    added = _add_reference(facts, title, "wan2.1-fun-control-1.1")
    return replace(
        added,
        pipeline=replace(added.pipeline, num_parameters=16_395_457_344),
        detection=replace(added.detection, match_configs=_match_wan_fun_control11),
        notes="as Fun-Control, also with a picture to refer to",
    )


class WanFunControl11(WanFunControl):
    facts = _add_reference11(FACTS, "Wan 2.1 Fun-Control 1.1")
    takes_reference = True

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan_fun_control11", "wan2.1-fun-control-1.1")


class WanFunControl11FromImage(WanFunControlFromImage, WanFunControl11):
    facts = _add_reference11(FROM_IMAGE_FACTS, "Wan 2.1 Fun-Control 1.1 from images")


_ADDED = _add_reference(EXPERT_FACTS, "Wan 2.2 Fun-Control", "wan2.2-fun-control-a14b")
EXPERTS_FACTS = replace(
    _ADDED,
    pipeline=replace(
        _ADDED.pipeline,
        class_name="WanImageToVideoPipeline",
        experts=NoiseExperts(IMAGE_BOUNDARY),
        num_parameters=14_289_561_664,
        hub_id="",
    ),
    detection=replace(_ADDED.detection, match_configs=_match_wan22_fun_control),
    sampling=replace(FACTS.sampling, guidance_scale=6.0),
    options=replace(
        _ADDED.options,
        network=GENERAL_NETWORK,  # no task of musubi-tuner is for this model
        musubi_versions={},
        extra=(*_ADDED.options.extra, "image_to_video"),
    ),
    notes="two experts, from a control clip, also from the first frame (`--image_to_video`); single files",
)
EXPERTS_FROM_IMAGE_FACTS = replace(
    EXPERTS_FACTS,
    title="Wan 2.2 Fun-Control from images",
    sampling=replace(EXPERTS_FACTS.sampling, frame_images=("image_path",)),
)


class _ExpertControl(WanFunControl):
    """The methods of one or both experts, which have a mask and no CLIP."""

    has_mask = takes_reference = True

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan22_fun_control", "wan2.2-fun-control-a14b")

    def build_given(self, control: Tensor, batch: Batch) -> Tensor:
        batch_size, channels, *sizes = control.shape
        return control.new_zeros(batch_size, CONDITION_CHANNELS + channels, *sizes)

    def build_image_features(self, pipe: Any, batch: Batch) -> Tensor | None:
        return None


class _ExpertControlFromImage(_ExpertControl, FirstFrame):
    """The methods with the first frame given: its latents with grey frames behind it, and a mask, as of I2V."""

    def build_given(self, control: Tensor, batch: Batch) -> Tensor:
        import torch

        given = torch.cat([self.build_mask(control), batch.frame_cond["latents"].to(control)], dim=1)
        return given if control.shape[2] > 1 else given * 0  # an image has no other frame


class WanFunControlExperts(JoinedExperts, _ExpertControl):
    facts = EXPERTS_FACTS


class WanFunControlHighNoise(_ExpertControl):
    facts = select_expert(EXPERTS_FACTS, "high_noise", "transformer")


class WanFunControlLowNoise(_ExpertControl):
    facts = select_expert(EXPERTS_FACTS, "low_noise", "transformer_2")


class WanFunControlFromImageExperts(JoinedExperts, _ExpertControlFromImage):
    facts = EXPERTS_FROM_IMAGE_FACTS


class WanFunControlFromImageHighNoise(_ExpertControlFromImage):
    facts = select_expert(EXPERTS_FROM_IMAGE_FACTS, "high_noise", "transformer")


class WanFunControlFromImageLowNoise(_ExpertControlFromImage):
    facts = select_expert(EXPERTS_FROM_IMAGE_FACTS, "low_noise", "transformer_2")


def _build_pipeline_class(family: WanFunControl) -> Any:
    """diffusers' pipeline from images with the channels of Fun-Control in place of its mask and given frames."""
    import torch
    from diffusers import WanImageToVideoPipeline
    from PIL import Image as images

    pipeline: Any = WanImageToVideoPipeline

    class ControlPipeline(pipeline):  # type: ignore[misc]
        control_video: Any = None
        reference_image: Any = None
        has_first_frame = False

        def __call__(
            self, *args: Any, control_video: Any = None, reference_image: Any = None, image: Any = None, **kwargs: Any
        ) -> Any:
            if control_video is None:
                raise ValueError("a control clip is needed: control_video")
            self.control_video, self.reference_image = control_video, reference_image
            is_clip = kwargs.get("num_frames", 2) > 1  # an image is no first frame
            self.has_first_frame = family.facts.sampling.frame_images != () and is_clip
            black = images.new("RGB", control_video[0].size)
            return super().__call__(image or black, *args, **kwargs)

        def encode_image(self, image: Any, device: Any = None) -> torch.Tensor:
            if self.has_first_frame:
                states: torch.Tensor = super().encode_image(image, device)
                return states
            return torch.zeros(1, 1, self.transformer.config.image_dim, device=device)

        def prepare_latents(self, image: Any, count: int, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
            latents, condition = super().prepare_latents(image, count, *others)
            sides = image.shape[-2:]
            control = self._encode_frames(self.control_video, sides).to(latents)
            control = control.expand(len(latents), *control.shape[1:])
            given = condition if family.has_mask else condition[:, -control.shape[1] :].clone()
            if not family.has_mask:
                given[:, :, 1:] = 0
            given = given * int(self.has_first_frame)
            pictures = [] if self.reference_image is None else [self.reference_image]
            references = [self._encode_frames([each], sides).to(latents) for each in pictures]
            return latents, family.join_condition(control, given, references)

        def _encode_frames(self, frames: Any, sides: Sequence[int]) -> torch.Tensor:
            from ..vae import encode_clip_moments

            pixels = self.video_processor.preprocess_video(frames, *sides)
            return encode_clip_moments(self.vae, pixels.float()).mean_and_std[:, 0]

    return copy_class_name(ControlPipeline, WanImageToVideoPipeline)
