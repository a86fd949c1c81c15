"""diffusers' modular pipeline of MiniMax H3 as a pipeline, with classifier-free guidance for trained models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...registry import copy_class_name
from ..modular_pipelines import PipelineSteps, build_pipeline_class

if TYPE_CHECKING:
    from torch import Tensor

SHORTEST_CLIP = 22
"""The frames of the shortest clip that the decoder makes."""
SOUND_SHIFT = 3.0
"""The shift of the noise levels of sound, of diffusers' second scheduler."""

_MODULES = "diffusers.modular_pipelines.minimax_h3"


def _build_modular_class(components: tuple[str, ...]) -> Any:
    """Build diffusers' pipeline as one that is called as others are."""
    from diffusers import MiniMaxH3ModularPipeline

    blocks: Any = import_module(f"{_MODULES}.modular_blocks_minimax_h3")
    decoders: Any = import_module(f"{_MODULES}.decoders")
    steps = PipelineSteps(
        encode=lambda: {"text_encoder": blocks.MiniMaxH3TextEncoderStep()},
        denoise=lambda: {"denoise": blocks.MiniMaxH3CoreDenoiseStep()},
        decode=lambda: {"decode": decoders.MiniMaxH3VideoDecodeStep()},
        results={"frames": ("latents", "videos"), "audio": ("audio_latents", "audio")},
    )
    names = tuple(dict.fromkeys((*components, "audio_vae", "scheduler", "audio_scheduler")))
    return build_pipeline_class(MiniMaxH3ModularPipeline, names, steps)


def build_h3_pipeline_class(components: tuple[str, ...]) -> Any:
    """Build the pipeline's class, which has these components besides those of sound, and makes clips of any length."""
    from diffusers import MiniMaxH3Scheduler

    decoders: Any = import_module(f"{_MODULES}.decoders")
    base: Any = _build_modular_class(components)
    scheduler_class: Any = MiniMaxH3Scheduler

    class H3Pipeline(base):  # type: ignore[misc]
        # diffusers' own takes clips from 5 to 15 seconds, those of the model's training.
        min_duration, max_duration = 0.0, math.inf

        def __init__(self, **parts: Any) -> None:
            if parts.get("audio_scheduler") is None:
                parts["audio_scheduler"] = scheduler_class(shift=SOUND_SHIFT)
            super().__init__(**{name: part for name, part in parts.items() if name != "processor"})
            self.processor = TextProcessor()
            self.negative: tuple[Tensor, float] | None = None
            """The embeddings of the negative prompt, and the scale of guidance, of the current call."""

        def __call__(
            self,
            prompt: Any = None,
            *,
            negative_prompt: str = "",
            negative_prompt_embeds: Any = None,
            guidance_scale: float = 1.0,
            num_frames: int = SHORTEST_CLIP,
            **inputs: Any,
        ) -> Any:
            if inputs.get("prompt_embeds") is not None:
                inputs.setdefault("text_token_tags", _build_text_tags(inputs["prompt_embeds"]))
            if guidance_scale != 1:
                if negative_prompt_embeds is None:
                    negative_prompt_embeds = encode_h3_text(self, negative_prompt)
                self.negative = negative_prompt_embeds, guidance_scale
            try:
                return super().__call__(prompt, num_frames=max(num_frames, SHORTEST_CLIP), **inputs)
            finally:
                self.negative = None

        def build_denoise_steps(self) -> Mapping[str, Any]:
            built: Mapping[str, Any] = super().build_denoise_steps()
            if self.negative is not None:
                built["denoise"].sub_blocks["denoise"] = _build_guided_step(*self.negative)
            return built

        def build_decode_steps(self) -> Mapping[str, Any]:
            built: Mapping[str, Any] = super().build_decode_steps()
            return built if self.audio_vae is None else {**built, "sound": decoders.MiniMaxH3AudioDecodeStep()}

    return copy_class_name(H3Pipeline, base)


def encode_h3_text(pipe: Any, text: str) -> Tensor:
    """Encode one text (1, tokens, width) as the step of the pipeline does; an empty one is one token of padding."""
    encoders: Any = import_module(f"{_MODULES}.encoders")
    ids = pipe.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False).input_ids
    encoder = pipe.text_encoder
    states: Tensor = encoders.get_qwen3vl_prompt_embeds(
        encoder,
        TextProcessor(),
        ids or [pipe.tokenizer.pad_token_id],
        {},
        text_encoder_layer=pipe.text_encoder_layer,
        device=encoder.device,
        dtype=encoder.dtype,
    )
    return states


class TextProcessor:
    """What the pipeline asks of Qwen3-VL's processor where there are texts alone: which tokens are of pictures."""

    def create_mm_token_type_ids(self, rows: list[list[int]]) -> list[list[int]]:
        return [[0] * len(row) for row in rows]


def _build_text_tags(embeds: Tensor) -> Tensor:
    """The kinds of tokens of a text without pictures: all are text."""
    import torch

    tags: Any = import_module(f"{_MODULES}.modular_pipeline").MINIMAX_H3_TEXT_TAG
    return torch.full((embeds.shape[1],), tags, dtype=torch.long)


def _build_guided_step(negative_embeds: Tensor, scale: float) -> Any:
    """The loop of the pipeline with a second prediction, for the negative prompt, in each step."""
    denoise: Any = import_module(f"{_MODULES}.denoise")

    class GuidedDenoiser(denoise.MiniMaxH3LoopDenoiser):  # type: ignore[misc]
        def __call__(self, components: Any, state: Any, i: int, t: Tensor) -> Any:
            super().__call__(components, state, i=i, t=t)
            predicted = state.noise_pred, state.audio_noise_pred
            own = {name: getattr(state, name) for name in ("prompt_embeds", "denoiser_input_fields")}
            plan = state.row_timestep_plan[i]
            self.describe_negative(components, state, i, plan)
            super().__call__(components, state, i=i, t=t)
            negative = state.noise_pred, state.audio_noise_pred
            for name, value in own.items():
                setattr(state, name, value)
            state.row_timestep_plan[i] = plan
            guided = (low + scale * (high - low) for high, low in zip(predicted, negative, strict=True))
            state.noise_pred, state.audio_noise_pred = guided
            return components, state

        def describe_negative(self, components: Any, state: Any, i: int, plan: tuple[Tensor, Tensor]) -> None:
            """Describe the sequence of tokens with the negative prompt in place of the prompt."""
            import torch

            fields, (levels, indices) = state.denoiser_input_fields, plan
            count, own = negative_embeds.shape[1], len(fields["text_indices"])
            difference = count - own
            positions, tags = fields["position_ids"][own:].clone(), fields["token_tags"][own:]
            positions[:, 0] += difference  # the time of a clip begins where its text ends
            text_positions = positions.new_zeros(count, 3)
            text_positions[:, 0] = torch.arange(count, device=positions.device)
            state.denoiser_input_fields = {
                **fields,
                "position_ids": torch.cat([text_positions, positions]),
                "token_tags": torch.cat([tags.new_full((count,), components.text_tag), tags]),
                "text_indices": torch.arange(count, device=tags.device),
                **{name: fields[name] + difference for name in ("video_indices", "audio_indices")},
            }
            state.prompt_embeds = negative_embeds
            text_level = indices[:1].expand(count)  # the text has the noise level of the frames
            state.row_timestep_plan[i] = levels, torch.cat([text_level, indices[own:]])

    class GuidedStep(denoise.MiniMaxH3DenoiseLoopWrapper):  # type: ignore[misc]
        block_classes = [GuidedDenoiser, denoise.MiniMaxH3LoopSchedulerStep]
        block_names = ["denoiser", "update"]

    return GuidedStep()
