"""The task of a run on texts alone (``--slider_prompts``): what the LoRA learns is computed from the frozen model.

In each step, noise is denoised a random part of the way with the LoRA at the strength of the prompt, as in LECO.  There
the frozen model, the adapter switched off, predicts for the texts of the prompt, and their combination is the target of
the model with the LoRA.  From there on, loss, weights, gradients and checkpoints are those of every other run.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.injection import bypass_lora
from ..cache.readers import SliderFacts
from ..config.schema_objective import SliderConfig
from ..dataloader.batch import Batch, Cond, PixelBatch
from ..dataloader.prepare import PreparedData
from ..dataloader.slider_data import get_prompt_number
from ..dataset.slider_prompts import SliderPrompt
from ..diffusion.noise import apply_noise_options, copy_async
from ..diffusion.objective import NoisyBatch
from ..diffusion.partial_denoising import denoise, list_timesteps
from ..diffusion.process import FlowMatchingProcess
from ..distributed.step_phases import record_phase
from ..models.base import Family
from ..models.detect import DetectedModel
from ..models.loading import load_pipeline_on_meta
from ..randomness import Purpose, derive_rng
from .task import DiffusionTask, StepInputs

DEFAULT_GUIDANCE = 3.0
"""The guidance of the partial denoising in sd-scripts and LECO."""


class LatentShapes:
    """The shapes of the latents of a model, from its VAE on the meta device: no weights are read."""

    def __init__(self, family: Family, detected: DetectedModel):
        self._family = family
        self._pipe = load_pipeline_on_meta(family, detected, torch.float32)
        self._shapes: dict[tuple[tuple[int, int], int], tuple[int, ...]] = {}

    def __call__(self, size: tuple[int, int], num_frames: int) -> tuple[int, ...]:
        """Return the shape of one sample's latents for width and height, and a number of frames."""
        key = size, num_frames
        if key not in self._shapes:
            frames = (num_frames,) if num_frames > 1 else ()
            pixels = torch.empty(1, 3, *frames, size[1], size[0], device="meta")
            with torch.no_grad():
                self._shapes[key] = tuple(self._family.encode_moments(self._pipe, pixels).mean_and_std.shape[2:])
        return self._shapes[key]


@dataclass(frozen=True)
class DenoisingGuidance:
    """How the partial denoising is guided: by a second prediction, or by the guidance embedding of the model."""

    scale: float
    family: Family
    """The family, with the guidance embedding of the denoising if the model has one."""

    @classmethod
    def choose(cls, config: SliderConfig, family: Family, pipe: Any, *, has_embedding: bool) -> "DenoisingGuidance":
        """Choose the way of the model; few-step models are sampled without guidance."""
        default = 1.0 if family.is_step_distilled(pipe) else DEFAULT_GUIDANCE
        scale = default if config.denoise_guidance_scale is None else config.denoise_guidance_scale
        if not has_embedding:
            return cls(scale, family)
        return cls(1.0, type(family)(replace(family.model_config, guidance_scale=scale)))


@dataclass
class SliderTask(DiffusionTask):
    """Computes the loss of each sample against the closed form of its prompt."""

    prompts: tuple[SliderPrompt, ...] = ()
    base_model: nn.Module | None = None
    """The denoiser without the collectives of DDP, for predictions without gradients."""
    guidance: DenoisingGuidance | None = None
    max_denoising_steps: int = 40

    def prepare(self, pixel_batch: PixelBatch, step: int) -> StepInputs:
        """Denoise a part of the way, and let the frozen model predict the target there."""
        prompt = self.prompts[get_prompt_number(pixel_batch.sample_keys[0])]
        with record_phase("encode", pixel_batch):
            batch = self.encode(pixel_batch, step)
        with torch.no_grad():
            latents, timesteps = self._denoise(prompt, batch, step)
            draws = self._build_step_draws(batch, step)
            batch = replace(batch, latents=latents, build_draws=draws)
            target = self._predict_target(prompt, NoisyBatch(latents, latents, timesteps), batch)
        self.seed_dropout(pixel_batch, step)
        dropout_keys = None if self.dropout is None else self.dropout.sample_keys
        return StepInputs(batch, NoisyBatch(latents, target, timesteps), dropout_keys)

    def _build_step_draws(self, batch: Batch, step: int) -> Callable[[str], list[Any]]:
        return lambda purpose: self._build_draws(purpose, step, batch.global_positions)

    def _draw_noise(self, batch: Batch, step: int) -> Tensor:
        """Draw the noise of each sample, which its position in the step decides."""

        def make_generators(purpose: str) -> list[torch.Generator]:
            return self.build_generators(purpose, step, batch.global_positions)

        drawn = [torch.randn(batch.latents.shape[1:], generator=each) for each in make_generators(Purpose.NOISE)]
        noise = copy_async(torch.stack(drawn), batch.latents)
        return apply_noise_options(noise, batch.latents, self.objective.noise_config, make_generators)

    def draw_num_steps(self, step: int) -> int:
        """Draw how many steps of a whole denoising an optimizer step takes, the same on all ranks."""
        return derive_rng(self.seed, Purpose.SLIDER_STEPS, step).randint(1, self.max_denoising_steps - 1)

    def _denoise(self, prompt: SliderPrompt, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Denoise noise a random part of the way for the target, with the LoRA at the strength that it has."""
        if self.guidance is None or self.base_model is None:
            raise AssertionError("a task of sliders has a model to denoise with, and a guidance")
        model, family, scale = self.base_model, self.guidance.family, self.guidance.scale
        process = self.family.build_noise_process(self.pipe)
        num_tokens = self.objective.count_tokens(batch.latents.shape)
        timesteps = list_timesteps(process, self.max_denoising_steps, num_tokens)[: self.draw_num_steps(step) + 1]
        plain = replace(batch, cond=self._encode_text_of(prompt.unconditional, len(batch), is_negative=True))

        def predict(latents: Tensor, t: Tensor) -> Tensor:
            conditional = family.predict(self.pipe, model, latents, t, batch)
            if scale == 1:
                return conditional
            unconditional = family.predict(self.pipe, model, latents, t, plain)
            return unconditional + scale * (conditional - unconditional)

        if self.dropout is not None:
            self.dropout.sample_keys = None  # only what is trained drops out
        noise = self._draw_noise(batch, step)
        noise = process.scale_noise(noise) if isinstance(process, FlowMatchingProcess) else noise
        return denoise(process, noise, timesteps, predict)

    def _predict_target(self, prompt: SliderPrompt, noised: NoisyBatch, batch: Batch) -> Tensor:
        """Predict with the frozen model for the texts of the prompt, and combine its predictions."""
        if self.base_model is None:
            raise AssertionError("a task of sliders has a model that predicts the target")
        needed = (prompt.neutral, *((prompt.positive, prompt.unconditional) if prompt.direction else ()))
        predicted = dict[str, Tensor]()
        with bypass_lora(*self.base_model.modules()):
            for text in dict.fromkeys(needed):
                other = replace(batch, cond=self._encode_text_of(text, len(batch)))
                output = self.family.predict(self.pipe, self.base_model, noised.latents, noised.timesteps, other)
                predicted[text] = output.float()
        target = predicted[prompt.neutral]
        if prompt.direction:
            target = target + prompt.direction * (predicted[prompt.positive] - predicted[prompt.unconditional])
        return target

    def _encode_text_of(self, text: str, count: int, *, is_negative: bool = False) -> Cond:
        """Return the conditioning of one text for each sample, from the cache or from the text encoders."""
        return self.encode_text([text] * count, is_negative=is_negative)


def build_slider_facts(prepared: PreparedData, family: Family, detected: DetectedModel) -> SliderFacts | None:
    """Read the facts of the model for a run on texts alone, whose VAE is built on the meta device; None for others."""
    if not prepared.slider_prompts:
        return None
    return SliderFacts(LatentShapes(family, detected), detected.size_multiple, detected.has_guidance_embeds)


def build_slider_task(
    task: DiffusionTask, config: SliderConfig, facts: SliderFacts, prepared: PreparedData, model: nn.Module
) -> SliderTask:
    """Build the task from that of images; ``model`` is without the collectives of DDP."""
    guidance = DenoisingGuidance.choose(config, task.family, task.pipe, has_embedding=facts.has_guidance_embedding)
    return SliderTask(
        **{item.name: getattr(task, item.name) for item in fields(task)},
        prompts=prepared.slider_prompts,
        base_model=model,
        guidance=guidance,
        max_denoising_steps=config.max_denoising_steps,
    )
