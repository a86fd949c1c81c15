"""Wan 2.2 Animate: a character of a picture moves as a clip of poses and a clip of a face say, or replaces another one.

A clip is trained together with its control clips: the poses in its size, and the face, which is square and which a
motion encoder in the transformer reads as pixels.  To replace a character there are two more: the background, and a
mask whose white is made.  The picture of the character is the first frame of the clip.  Its latents come before those
of the clip and are denoised with them, as in sampling, and no loss is computed of them.

Long clips are sampled in segments, each of which begins with the last frames of the one before.  So a step trains
clips either as a first segment, or with one or five of their first frames known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...dataset.clip_windows import FrameRule
from ...registry import copy_class_name
from ..base import BaseModelInfo
from ..facts import ControlFacts, FamilyMatch, FamilyOptions, SamplingFacts, TrainerNames
from ..family_noise_levels import TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .wan import FACTS as TEXT_FACTS
from .wan import FRAME_STRIDE, WAN_TEXT_TOKENS, Wan
from .wan_i2v import CONDITION_CHANNELS, WanI2V, embed_images
from .wan_i2v import FACTS as IMAGE_FACTS

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Moments

FACE = 1
"""The number of the control clip of the face."""
FACE_FACTOR = 8
"""Pixels of the face, along a side, that are folded to channels, so that it has the form of latents."""
KNOWN_FRAMES = (0, 1, 5)
"""The frames of the segment before that are known: none in the first segment, and as many as the pipeline takes."""
FIRST_SEGMENT_SHARE = 0.5
"""The share of steps that train the first segment of a clip."""
SEGMENT_FRAMES = 77
"""The frames of the longest segment of a preview, as the pipeline and the authors sample."""


def _match_wan_animate(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    side = config.get("motion_encoder_size")
    if not isinstance(side, int):
        raise ModelError("its transformer has no motion encoder, which reads the face")
    reason = f"the transformer has {config.get('num_layers')} blocks and a motion encoder for faces"
    match = match_flow_model(read, 2, reason, more_channels=CONDITION_CHANNELS)
    return replace(match, control_sides=(0, side))


FACTS = replace(
    IMAGE_FACTS,
    title="Wan 2.2 Animate",
    pipeline=replace(
        IMAGE_FACTS.pipeline,
        class_name="WanAnimatePipeline",
        num_parameters=17_274_816_884,
        hub_id="Wan-AI/Wan2.2-Animate-14B-Diffusers",
        frames=FrameRule(stride=FRAME_STRIDE, fps=30.0, least=FRAME_STRIDE + 1),
    ),
    detection=replace(
        IMAGE_FACTS.detection,
        match_configs=_match_wan_animate,
        keys=(*IMAGE_FACTS.detection.keys, "pose_patch_embedding.weight"),
        trainer_names=TrainerNames(),
    ),
    lora=replace(
        IMAGE_FACTS.lora,
        targets=TEXT_FACTS.lora.targets,
        targets_of="DiffSynth-Studio",
        optional_targets=("attn2.add_k_proj", "attn2.add_v_proj"),
        modelspec_architecture="wan2.2-animate",
        modelspec_implementation="https://github.com/Wan-Video/Wan2.2",
    ),
    blocks=replace(
        IMAGE_FACTS.blocks,
        token_args={**IMAGE_FACTS.blocks.token_args, "token_frames": ((0, ("hidden_states",)),)},
        text_attention_calls=(*IMAGE_FACTS.blocks.text_attention_calls, 3),  # to the face
        fused_layers={r"^face_adapter\.\d+\.to_out$": ("rowwise", (1,))},
        unsupported_strategies={"cuda_graphs": "its motion encoder decomposes a matrix on the device"},
    ),
    control=ControlFacts(num_images=(2, 4), group_size=2, have_picture_size=True),
    training_noise=TrainingNoiseFacts(
        shift=TEXT_FACTS.training_noise.shift, reason="as Wan 2.1, since no trainer's guide has another"
    ),
    sampling=SamplingFacts(
        num_inference_steps=20, guidance_scale=1.0, image_size=(1280, 720), frame_images=("image_path",)
    ),
    options=FamilyOptions(components=IMAGE_FACTS.options.components, network=IMAGE_FACTS.options.network),
    notes="a picture's character moves as clips of poses and of a face say, or replaces another one",
)


class WanAnimate(Wan):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan_animate", "wan2.2-animate")

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    @classmethod
    def prepare_denoiser(cls, denoiser: nn.Module) -> None:
        from ..wan_animate_transformer import put_faces_into_blocks

        put_faces_into_blocks(denoiser)

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        WanI2V().configure_pipeline(pipe, read)

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """Encode the picture of the character, and what is known of segments on which nothing else is given."""
        import torch

        from ..vae import as_clips

        clip = as_clips(pixels)
        return {
            "reference": moments.mean_and_std[:, 0, :, :1].clone(),  # which does not depend on later frames
            "images": embed_images(pipe, clip[:, :, 0]),
            "given": self._encode_segments(pipe, clip, torch.zeros_like(clip)),
        }

    def _encode_segments(self, pipe: Any, clip: Tensor, others: Tensor) -> Tensor:
        """Encode each number of known frames of clips, with other clips behind them, one after another in channels."""
        import torch

        segments = [torch.cat([clip[:, :, :known], others[:, :, known:]], dim=2) for known in KNOWN_FRAMES]
        return torch.cat([self.encode_moments(pipe, each).mean_and_std[:, 0] for each in segments], dim=1)

    def encode_controls(self, pipe: Any, controls: Sequence[Tensor], pixels: Tensor) -> tuple[Tensor, ...]:
        """Encode the poses, and fold the pixels of the face to latents; then the background and what of it is left."""
        from ..vae import as_clips

        poses, face, *others = map(as_clips, controls)
        encoded = (self.encode_moments(pipe, poses).mean_and_std[:, 0], fold_face(face))
        if not others:
            return encoded
        background, mask = others
        left = 1 - mask[:, :1].add(1).div(2)
        return (*encoded, self._encode_segments(pipe, as_clips(pixels), background), _fold_mask(left, encoded[0]))

    def arrange_batch(self, batch: Batch) -> Batch:
        """Put the picture of the character before each clip."""
        import torch

        reference = batch.frame_cond["reference"].to(batch.latents)
        return replace(batch, latents=torch.cat([reference, batch.latents], dim=2))

    def select_section(self, batch: Batch, draw: float) -> Batch:
        """Select how many frames of the segment before are known, of those that leave some of the clip to be made."""
        import torch

        every, *masks = batch.control_latents[2:] or (batch.frame_cond["given"],)
        num_frames = every.shape[2]
        latents = torch.chunk(every, len(KNOWN_FRAMES), dim=1)
        counts = [-(-known // FRAME_STRIDE) for known in KNOWN_FRAMES]  # of latent frames
        usable = [number for number, count in enumerate(counts) if 0 < count < num_frames]
        number = 0
        if usable and draw >= FIRST_SEGMENT_SHARE:
            share = (draw - FIRST_SEGMENT_SHARE) / (1 - FIRST_SEGMENT_SHARE)
            number = usable[min(int(share * len(usable)), len(usable) - 1)]
        shape = (len(every), CONDITION_CHANNELS, *every.shape[2:])
        mask = masks[0].clone() if masks else every.new_zeros(shape)
        mask[:, :, : counts[number]] = 1
        frame_cond = {name: value for name, value in batch.frame_cond.items() if name != "given"}
        segment = torch.cat([mask.to(every), latents[number]], dim=1)
        return replace(batch, control_latents=batch.control_latents[:2], frame_cond={**frame_cond, "segment": segment})

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch
        from torch.nn.functional import pad

        from ..text_encoding import pad_text_embeds

        poses, face = (each.to(noisy_latents) for each in batch.control_latents)
        reference, segment = (batch.frame_cond[name].to(noisy_latents) for name in ("reference", "segment"))
        known = pad(reference[:, :, :1], (0, 0, 0, 0, 0, 0, CONDITION_CHANNELS, 0), value=1.0)
        given = torch.cat([known, segment], dim=2)
        predicted: Tensor = denoiser(
            hidden_states=torch.cat([noisy_latents, given], dim=1),
            timestep=timesteps,
            encoder_hidden_states=pad_text_embeds(batch.cond["embeds"], WAN_TEXT_TOKENS)[0],
            encoder_hidden_states_image=batch.frame_cond["images"],
            pose_hidden_states=poses,
            face_pixel_values=unfold_face(face),
            return_dict=False,
        )[0]
        return predicted

    def select_trained_frames(self, loss: Tensor, batch: Batch) -> Tensor:
        return loss[:, :, 1:]

    # Hooks of previews.

    def get_control_clip_size(self, pipe: Any, number: int, size: tuple[int, int]) -> tuple[int, int]:
        side = pipe.transformer.config.motion_encoder_size
        return (side, side) if number == FACE else size

    def build_control_clip_kwargs(self, pipe: Any, clips: Sequence[Sequence[Image]]) -> dict[str, Any]:
        names = ("pose_video", "face_video", "background_video", "mask_video")
        mode = "animate" if len(clips) == 2 else "replace"
        return {"mode": mode, **dict(zip(names, map(list, clips), strict=False))}

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        """The pipeline has decoded them already, as a segment begins with frames of the one before."""
        pixels: Tensor = pipe.sampled_pixels
        return pixels


def fold_face(pixels: Tensor) -> Tensor:
    """Fold the pixels of a face (B, 3, frames, side, side) in -1..1 to latents of 0..255, of its frames and pixels.

    Like the frames of latents, the first of these has one frame, which is repeated.
    """
    import torch

    values: Any = pixels.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    values = torch.cat([values[:, :, :1].expand(-1, -1, FRAME_STRIDE - 1, -1, -1), values], dim=2)
    count, channels, frames, side, _ = values.shape
    parts = (frames // FRAME_STRIDE, FRAME_STRIDE, *(side // FACE_FACTOR, FACE_FACTOR) * 2)
    folded: Tensor = values.reshape(count, channels, *parts).permute((0, 1, 3, 5, 7, 2, 4, 6)).flatten(1, 4)
    return folded


def unfold_face(latents: Tensor) -> Tensor:
    """Unfold what ``fold_face`` returns to pixels in -1..1."""
    values: Any = latents
    parts = values.unflatten(1, (3, FRAME_STRIDE, FACE_FACTOR, FACE_FACTOR)).permute((0, 1, 5, 2, 6, 3, 7, 4))
    pixels: Tensor = parts.flatten(6, 7).flatten(4, 5).flatten(2, 3)[:, :, FRAME_STRIDE - 1 :]
    return pixels / 127.5 - 1


def _fold_mask(mask: Tensor, latents: Tensor) -> Tensor:
    """Resize a mask (B, 1, frames, height, width) to latents, whose channels are the frames of each."""
    import torch
    from torch.nn.functional import interpolate

    count, _, num_frames, height, width = latents.shape
    resized = interpolate(mask.transpose(1, 2).flatten(0, 1), size=(height, width), mode="nearest")
    frames = resized.view(count, -1, height, width)
    frames = torch.cat([frames[:, :1].expand(-1, FRAME_STRIDE - 1, -1, -1), frames], dim=1)
    return frames.view(count, num_frames, FRAME_STRIDE, height, width).transpose(1, 2)


def choose_segment_frames(num_frames: int) -> int:
    """Choose the frames of the segments of a clip: as few segments as there can be, which are equally long."""
    steps = max(1, num_frames - 1) / FRAME_STRIDE
    num_segments = math.ceil(steps * FRAME_STRIDE / (SEGMENT_FRAMES - 1))
    return math.ceil(steps / num_segments) * FRAME_STRIDE + 1


def _build_pipeline_class() -> Any:
    """diffusers' pipeline, which is told how many frames a clip has, and returns the latents of all segments."""
    import torch
    from diffusers import WanAnimatePipeline

    pipeline: Any = WanAnimatePipeline

    class SegmentPipeline(pipeline):  # type: ignore[misc]
        sampled_pixels: Tensor | None = None

        def __call__(
            self, *args: Any, num_frames: int | None = None, output_type: str | None = "np", **kwargs: Any
        ) -> Any:
            if num_frames is not None:
                kwargs.setdefault("segment_frame_length", choose_segment_frames(num_frames))
            if output_type != "latent":
                return super().__call__(*args, output_type=output_type, **kwargs)
            segments = []

            def keep_last(sampled: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
                if step + 1 == sampled.num_timesteps:
                    segments.append(values["latents"])
                return {}

            result = super().__call__(*args, output_type="pt", callback_on_step_end=keep_last, **kwargs)
            self.sampled_pixels = result.frames.transpose(1, 2) * 2 - 1
            return type(result)(frames=torch.cat(segments, dim=2))

    return copy_class_name(SegmentPipeline, WanAnimatePipeline)
