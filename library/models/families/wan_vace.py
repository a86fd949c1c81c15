"""Wan 2.1 VACE: videos from a control clip, such as poses or depth, or from a clip of which a mask is painted anew.

Its blocks for the control run before those of Wan, whose hidden states they change.  They get the latents of what the
mask leaves of the control clip, those of what it paints, and the mask itself; without a mask, all is painted.

Reference images are latent frames before those of the clip, in the control and in what is denoised: the transformer
learns to make them, too, as in DiffSynth-Studio and VideoX-Fun, and the pipeline drops them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle
from ...registry import copy_class_name
from ..base import BaseModelInfo
from ..facts import ControlFacts, FamilyMatch, FamilyOptions, TrainerNames
from ..family_noise_levels import TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .wan import FACTS as WAN_FACTS
from .wan import WAN_TEXT_TOKENS, Wan, rename_to_original

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch

MASK_FACTOR = 8
"""Pixels per latent of a mask, each of which is a channel."""
MOST_REFERENCES = 4
"""The most reference images, as in VideoX-Fun's training."""
_CONTROL_PROJECTIONS = {"proj_in": "before_proj", "proj_out": "after_proj"}


def _match_wan_vace(read: ConfigReader) -> FamilyMatch:
    index, config = read_required(read, "model_index.json"), read_required(read, "transformer/config.json")
    if index.get("boundary_ratio") is not None:
        raise ModelError("it is a Wan 2.2 VACE of two experts, which cannot be trained yet; use Wan 2.1 VACE")
    num_control, num_blocks = len(config.get("vace_layers", ())), config.get("num_layers")
    match = match_flow_model(read, 1, f"the transformer has {num_blocks} blocks and {num_control} for the control")
    expected, channels = 2 * config["in_channels"] + MASK_FACTOR**2, config.get("vace_in_channels")
    if channels != expected:
        raise ModelError(f"its blocks for the control have {channels} input channels instead of {expected}")
    return match


def _rename_with_control(modules: Iterable[str]) -> Mapping[str, str]:
    renames = dict(rename_to_original(modules))
    for module in renames:
        block, _, name = module.rpartition(".")
        if block.startswith("vace_blocks.") and name in _CONTROL_PROJECTIONS:
            renames[module] = f"{block}.{_CONTROL_PROJECTIONS[name]}"
    return renames


VACE_KEYS = KeyStyle(
    "wan_vace",
    rename=_rename_with_control,
    is_read_by_diffusers=False,
    is_comfy_format_in_diffusers=False,
    unread_in_comfyui={"diffusers": "loads nothing of this layout"},
)
"""Names as those of Wan, which diffusers converts of its own blocks only."""

FACTS = replace(
    WAN_FACTS,
    title="Wan 2.1 VACE",
    pipeline=replace(
        WAN_FACTS.pipeline,
        class_name="WanVACEPipeline",
        num_parameters=17_337_592_896,
        hub_id="Wan-AI/Wan2.1-VACE-1.3B-diffusers",
    ),
    detection=replace(
        WAN_FACTS.detection,
        match_configs=_match_wan_vace,
        keys=(*WAN_FACTS.detection.keys, "vace_patch_embedding.weight"),
        shape_checks={
            **WAN_FACTS.detection.shape_checks,
            ("vace_patch_embedding.weight", 1): ("transformer", "vace_in_channels"),
        },
        unsupported_shapes={},
        trainer_names=TrainerNames(),
    ),
    lora=replace(
        WAN_FACTS.lora,
        # The blocks for the control.
        targets=tuple(f"vace_blocks.*.{layer}" for layer in WAN_FACTS.lora.targets),
        targets_of="DiffSynth-Studio",
        optional_targets=(
            *(f"blocks.*.{layer}" for layer in WAN_FACTS.lora.targets),
            *("vace_blocks.*.proj_in", "vace_blocks.*.proj_out"),
        ),
        key_style=VACE_KEYS,
        modelspec_architecture="wan2.1-vace",
    ),
    blocks=replace(
        WAN_FACTS.blocks,
        lists=("vace_blocks", "blocks"),
        unsupported_strategies={
            **WAN_FACTS.blocks.unsupported_strategies,
            **dict.fromkeys(("pp", "cp"), "its blocks for the control pass their states to several others"),
        },
    ),
    control=ControlFacts(num_images=(1, 2), most_references=MOST_REFERENCES, have_picture_size=True),
    training_noise=TrainingNoiseFacts(shift=WAN_FACTS.training_noise.shift, reason="as Wan 2.1"),
    options=FamilyOptions(components=WAN_FACTS.options.components),
    notes="from a control clip, a mask over time, and reference images; LoRA of the blocks for the control",
)


class WanVACE(Wan):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("wan_vace", "wan2.1-vace")

    def get_pipeline_class(self) -> Any:
        return _build_pipeline_class()

    def encode_controls(self, pipe: Any, controls: Sequence[Tensor], pixels: Tensor) -> tuple[Tensor, ...]:
        """Encode what the mask leaves of the control clip and what it paints, behind each other; then the mask."""
        import torch

        from ..vae import as_clips

        clip, *masks = map(as_clips, controls)
        # The blocks for the control get grey edges as they are, but a pixel of the clip is painted or given.
        mask = masks[0][:, :1].add(1).div(2).clamp(0, 1) if masks else clip.new_ones(())
        painted = (mask > 0.5).to(mask)
        parts = (clip * (1 - painted), clip * painted)
        latents = torch.cat([self.encode_moments(pipe, part).mean_and_std[:, 0] for part in parts], dim=1)
        return (latents, _fold_mask(mask, latents.shape[2])) if masks else (latents,)

    def arrange_batch(self, batch: Batch) -> Batch:
        """Put the latents of reference images before those of the clip; its mask does not hide them."""
        import torch

        references, mask = _select_references(batch), batch.mask
        if not references:
            return batch
        latents = torch.cat([*references, batch.latents], dim=2)
        if mask is not None:
            size = len(mask), 1, batch.latents.shape[2], *mask.shape[2:]
            frames = mask.new_ones(len(mask), 1, len(references), *mask.shape[2:])
            mask = torch.cat([frames, mask.unsqueeze(2).expand(size)], dim=2)
        return replace(batch, latents=latents, mask=mask)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..text_encoding import pad_text_embeds

        references = _select_references(batch)
        clip, *masks = batch.control_latents[: len(batch.control_latents) - len(references)]
        mask = masks[0] if masks else clip.new_ones(len(clip), MASK_FACTOR**2, *clip.shape[2:])
        control = torch.cat([clip, mask], dim=1)
        if references:
            # Of a reference image nothing is painted, and its mask is 0.
            frames = torch.cat(references, dim=2)
            rest = frames.new_zeros(len(frames), control.shape[1] - frames.shape[1], *frames.shape[2:])
            control = torch.cat([torch.cat([frames, rest], dim=1), control], dim=2)
        predicted: Tensor = denoiser(
            hidden_states=noisy_latents,
            timestep=timesteps,
            encoder_hidden_states=pad_text_embeds(batch.cond["embeds"], WAN_TEXT_TOKENS)[0],
            control_hidden_states=control.to(noisy_latents),
            control_hidden_states_scale=noisy_latents.new_ones(len(pipe.transformer.config.vace_layers)),
            return_dict=False,
        )[0]
        return predicted

    def build_control_clip_kwargs(self, pipe: Any, clips: Sequence[Sequence[Image]]) -> dict[str, Any]:
        return dict(zip(("video", "mask"), map(list, clips), strict=False))

    def build_reference_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        """diffusers puts each reference image before the others, so it gets the last one first."""
        return {"reference_images": list(images)[::-1]}


def _select_references(batch: Batch) -> tuple[Tensor, ...]:
    """Select the latents of reference images, which alone have as many channels as those of the clip."""
    return tuple(each for each in batch.control_latents if each.shape[1] == batch.latents.shape[1])


def _build_pipeline_class() -> Any:
    """diffusers' pipeline, which returns the latents of the clip without those of reference images."""
    from diffusers import WanVACEPipeline

    pipeline: Any = WanVACEPipeline

    class ReferencePipeline(pipeline):  # type: ignore[misc]
        def __call__(self, *args: Any, reference_images: Any = None, **kwargs: Any) -> Any:
            result = super().__call__(*args, reference_images=reference_images, **kwargs)
            if kwargs.get("output_type") != "latent" or not reference_images:
                return result
            return type(result)(frames=result.frames[:, :, len(reference_images) :])

    return copy_class_name(ReferencePipeline, WanVACEPipeline)


def _fold_mask(mask: Tensor, num_frames: int) -> Tensor:
    """Fold the pixels of each latent of a mask (B, 1, frames, height, width) to channels, and select frames."""
    from torch.nn.functional import interpolate

    height, width = (side // MASK_FACTOR for side in mask.shape[-2:])
    folded = mask.reshape((len(mask), -1, height, MASK_FACTOR, width, MASK_FACTOR))
    channels = folded.permute((0, 3, 5, 1, 2, 4)).flatten(1, 2)
    return interpolate(channels, size=(num_frames, height, width), mode="nearest-exact")
