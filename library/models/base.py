"""The interface of a model family: everything that training needs to know about an architecture.

How to add a family: see docs/adding_a_family.md.  What can be said without torch is in the family's ``FamilyFacts``
(``models/facts.py``); the class holds the methods.  Both are in one file, which imports no torch: detection reads the
facts before anything heavy is imported.  So methods import torch, and what needs it, themselves.

A family is stateless apart from its frozen ``ModelConfig``: the modules live in a diffusers pipeline ``pipe`` that is
passed in and may be loaded in parts.  The denoiser is passed separately, because a parallel strategy may have wrapped
it: call ``denoiser``, but read its attributes from ``pipe`` only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..config.schema import ModelConfig
from .facts import FamilyFacts

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor, nn

    from ..dataloader.batch import Batch, Cond, Moments
    from ..dataloader.sample_prompts import Prompt
    from ..dataset.clip_encoding import SoundTrack
    from ..dataset.clip_windows import FrameRule
    from ..diffusion.expert_selection import NoiseExperts
    from ..diffusion.process import NoiseProcess
    from .detect import DetectedModel
    from .model_configs import ConfigReader


@dataclass(frozen=True)
class BaseModelInfo:
    """How the metadata of a LoRA file names the base model."""

    base_model_version: str
    """The value of ``ss_base_model_version``."""
    architecture: str
    """The value of ``modelspec.architecture``, without ``/lora``."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """The keys and values that sd-scripts writes for this family only, besides those of all families."""


class Family(ABC):
    """The methods of a model family; variants of a family may subclass it.

    A family has ``facts`` and writes ``get_base_model_info``, ``encode_prompts`` and ``predict``.  All other methods
    are hooks with defaults, grouped by what they are about: a family overrides those in which it differs.
    """

    facts: ClassVar[FamilyFacts]
    """Everything that is known of the family without importing torch."""

    def __init__(self, model_config: ModelConfig | None = None):
        self.model_config = model_config or ModelConfig()

    def load(
        self,
        model: DetectedModel | str | None,
        dtype: torch.dtype,
        components: Sequence[str] | None = None,
        *,
        pipe: Any = None,
        device: torch.device | None = None,
        keeps_stored: bool = False,
    ) -> Any:
        """Load ``components`` (default: all) directly to dtype and device (default: CPU); the VAE is always float32.

        With ``pipe``, the components are added to that pipeline.  So the text encoders can be loaded, used and freed
        (set to None) before the denoiser is loaded.  With ``keeps_stored``, layers of the denoiser that its files store
        quantized stay empty, for ``keep_stored_layers``; else they are dequantized.
        """
        from .loading import load_pipeline

        names = self.facts.components if components is None else components
        return load_pipeline(self, model, dtype, names, pipe=pipe, device=device, keeps_stored=keeps_stored)

    @property
    def experts(self) -> NoiseExperts | None:
        """The experts of the model, with the boundary of ``timestep_boundary``; None if it has one denoiser."""
        experts, boundary = self.facts.pipeline.experts, self.model_config.noise_boundary
        return experts if experts is None or boundary is None else replace(experts, boundary=boundary)

    @property
    def frame_rule(self) -> FrameRule | None:
        """What the model asks of the frames of clips; None: it makes images."""
        return self.facts.get_frame_rule(self.model_config)

    @property
    def shares_adapters(self) -> bool:
        """Whether two experts have one adapter (``expert_adapters shared``)."""
        experts = self.facts.pipeline.experts
        return experts is not None and experts.trained == "both" and self.model_config.expert_adapters == "shared"

    # What every family writes.

    @abstractmethod
    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        """Return the base model's names for the metadata of LoRA files."""

    @abstractmethod
    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Encode texts to conditioning with one row per prompt; the keys are the family's own.

        A row, including its length, must not depend on the other prompts: values of variable length are lists.
        Gradients stay enabled: text encoders may be trained.
        """

    @abstractmethod
    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        """Run the denoiser; the result has the shape of the latents and is compared with the process's target."""

    # Hooks of loading, noise and layers.

    def get_pipeline_class(self) -> Any:
        """Return the class of pipelines: diffusers', or a subclass of it."""
        from .loading import import_model_class

        return import_model_class("diffusers", self.facts.pipeline.class_name)

    @classmethod
    def prepare_denoiser(cls, denoiser: nn.Module) -> None:
        """Change the denoiser after loading, also on the meta device, where training needs more than diffusers has."""
        return

    def configure_pipeline(self, pipe: Any, read: ConfigReader) -> None:
        """Set what diffusers' pipeline reads of components when it is built, as these may be loaded later."""
        return

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        """Build the noise process of the model, according to its scheduler."""
        from ..diffusion.process import FlowMatchingProcess
        from .noise_schedulers import build_ddpm_process

        if "FlowMatch" in type(pipe.scheduler).__name__ or pipe.scheduler.config.get("use_flow_sigmas"):
            return FlowMatchingProcess.from_scheduler(pipe.scheduler.config)
        return build_ddpm_process(pipe.scheduler)

    def build_training_process(self, pipe: Any) -> NoiseProcess:
        """Build the noise process with the shift of ``facts.training_noise`` instead of the pipeline's."""
        from ..diffusion.process import FlowMatchingProcess

        process, shift = self.build_noise_process(pipe), self.facts.training_noise.shift
        return replace(process, shift=shift) if shift and isinstance(process, FlowMatchingProcess) else process

    def is_step_distilled(self, pipe: Any) -> bool:
        """Whether the loaded model is distilled to few steps; training it directly undoes the distillation."""
        return False

    def get_non_block_lora_targets(self, denoiser: Any) -> tuple[str, ...]:
        """Return the modules that get a LoRA in addition to ``facts.lora.targets`` when layers outside of the blocks
        are trained."""
        return ()

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        """Return the layers, and weights outside of layers, that no gradient reaches: they are not trained."""
        return ()

    def get_unused_text_layers(self, encoder: Any, component: str) -> tuple[str, ...]:
        """Return the layers of a text encoder after the one whose hidden states are used; they get no LoRA."""
        return ()

    # Hooks of texts.

    def encode_negative_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Encode negative prompts of previews, where ``facts.text.has_negative_encoding`` says that they differ."""
        return self.encode_prompts(pipe, prompts)

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Return the shapes that ``encode_prompts`` returns, from a pipeline on the meta device."""
        import torch

        with torch.no_grad():
            return self.encode_prompts(pipe, prompts)

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        """Find the prompts that ``encode_prompts`` truncates."""
        return []

    # Hooks of latents.

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        """Encode pixels (B, 3, height, width) in -1..1 to the mean and standard deviation of their latents.

        The VAE's shift and scale are applied, so samples are what the denoiser expects.  Nothing is random here, so
        that training on cached moments equals training without a cache.
        """
        from .vae import encode_vae_moments

        return encode_vae_moments(pipe.vae, pixels)

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """Encode what the denoiser gets of the frames of a clip itself, such as the first, beside the noisy latents.

        ``moments`` are those of the pixels.  Nothing is random here; the result is cached with the moments, in one row
        per sample, and is ``Batch.frame_cond``.
        """
        return {}

    def encode_sound(self, pipe: Any, samples: Tensor, rate: int, num_frames: int) -> Tensor:
        """Encode the sound (2, samples) of a window of so many frames to latents (latents, channels).

        ``samples`` have a second before the window and one after it.  Only for families whose ``FrameRule`` counts
        latents of sound.  Nothing is random here; the result is cached with the moments, and is ``Batch.sound``.
        """
        raise NotImplementedError(f"{self.facts.title} has no sound")

    def convert_to_sound_timesteps(self, timesteps: Tensor) -> Tensor:
        """Convert the timesteps of the frames of samples to those of their sound; by default, they are the same."""
        return timesteps

    def predict_with_sound(
        self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """Run the denoiser as ``predict`` does; beside it return what it predicts of ``batch.noisy_sound``, if any."""
        return self.predict(pipe, denoiser, noisy_latents, timesteps, batch), None

    def encode_control(self, pipe: Any, control: Tensor, pixels: Tensor) -> Tensor:
        """Encode a control image to what ``Batch.control_latents`` has of it; by default, the mean of its latents.

        ``pixels`` are those of the picture itself.  Nothing is random here; the result is cached with the moments.
        """
        return self.encode_moments(pipe, control).mean_and_std[:, 0]

    def encode_controls(self, pipe: Any, controls: Sequence[Tensor], pixels: Tensor) -> tuple[Tensor, ...]:
        """Encode all control images of a picture, each to one tensor; by default, each by itself."""
        return tuple(self.encode_control(pipe, control, pixels) for control in controls)

    def encode_control_cond(self, pipe: Any, controls: Sequence[Tensor]) -> dict[str, Tensor]:
        """Encode what else the denoiser gets of control images, in one row per sample; part of ``Batch.frame_cond``."""
        return {}

    def encode_references(self, pipe: Any, references: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Encode reference images of clips (B, 3, 1, height, width), each to a tensor of ``Batch.control_latents``."""
        return tuple(self.encode_moments(pipe, image).mean_and_std[:, 0] for image in references)

    def encode_all_controls(
        self, pipe: Any, controls: Sequence[Tensor], pixels: Tensor, num_references: int
    ) -> tuple[Tensor, ...]:
        """Encode all control images of a picture, of which the last ``num_references`` are reference images."""
        first = len(controls) - num_references
        encoded = self.encode_controls(pipe, controls[:first], pixels)
        return (*encoded, *(self.encode_references(pipe, controls[first:]) if num_references else ()))

    def arrange_batch(self, batch: Batch) -> Batch:
        """Arrange the latents of a batch, before noise is added, to those that the denoiser predicts."""
        return batch

    def select_section(self, batch: Batch, draw: float) -> Batch:
        """Select the section of each clip that a step trains, before noise is added, by a draw in 0..1.

        All samples of an optimizer step have the same draw, on all ranks and in all of its micro-batches.
        """
        return batch

    def select_trained_frames(self, loss: Tensor, batch: Batch) -> Tensor:
        """Leave out of a loss for each element that of the frames that are given to the denoiser."""
        return loss

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        """Decode latents to pixels in -1..1."""
        from .vae import decode_vae_latents

        return decode_vae_latents(pipe.vae, latents)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        """Decode what the pipeline returns for ``output_type="latent"`` to pixels in -1..1; the size is in pixels."""
        if latents.ndim == 3:  # packed into patches
            latents = pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor)
            latents = latents.squeeze(2) if latents.ndim == 5 else latents  # the frame axis of a video VAE
        return self.decode_latents(pipe, latents)

    # Hooks of previews.

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        """Build the arguments of the diffusers pipeline's call for a preview: guidance and text embeddings."""
        kwargs: dict[str, Any] = {"guidance_scale": self.facts.sampling.get_guidance_scale(prompt.cfg_scale)}
        for key, name in (("embeds", "prompt_embeds"), ("pooled", "pooled_prompt_embeds")):
            if key in cond:
                kwargs |= {name: cond[key], f"negative_{name}": negative_cond[key]}
        return kwargs

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        """Build the arguments of the diffusers pipeline's call for the control images of a preview."""
        return {"image": list(images)} if images else {}

    def get_control_clip_size(self, pipe: Any, number: int, size: tuple[int, int]) -> tuple[int, int]:
        """Return width and height of a control clip of a preview, which has this size."""
        return size

    def build_control_clip_kwargs(self, pipe: Any, clips: Sequence[Sequence[Image]]) -> dict[str, Any]:
        """Build the arguments of the diffusers pipeline's call for the control clips of a preview, in their sizes."""
        raise NotImplementedError(f"{self.facts.title} takes no control clips")

    def build_reference_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        """Build the arguments of the diffusers pipeline's call for the reference images of a clip, in its size."""
        raise NotImplementedError(f"{self.facts.title} takes no reference images")

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Adapt the pipeline of one preview, whose modules are shared with training, before it is called."""
        return sampling_pipe

    def build_frame_image_kwargs(self, pipe: Any, first: Image | None, last: Image | None) -> dict[str, Any]:
        """Build the arguments of the diffusers pipeline's call for the images with which a clip begins and ends."""
        return {name: image for name, image in (("image", first), ("last_image", last)) if image is not None}

    def generate_image(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> Image:
        """Sample one preview image with the diffusers pipeline and the modules in memory; of a clip, the first frame.

        ``cond`` and ``negative_cond`` are the encoded texts of the prompt, so no text encoder is needed here.  All
        random numbers come from ``generator``.  ``sampler`` None is the family's default.
        """
        return self.generate_frames(
            pipe, prompt, cond, negative_cond=negative_cond, generator=generator, sampler=sampler
        )[0]

    def generate_frames(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> list[Image]:
        """Sample all frames of a preview as ``generate_image`` does; an image is one frame."""
        from .sampling import sample_clip

        sampling_kwargs = self.build_prompt_kwargs(pipe, prompt, cond, negative_cond)
        return sample_clip(self, pipe, prompt, sampling_kwargs, generator=generator, sampler=sampler)[0]

    def generate_clip(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> tuple[list[Image], SoundTrack | None]:
        """Sample all frames of a preview as ``generate_frames`` does, and its sound where the model makes some."""
        frames = self.generate_frames(
            pipe, prompt, cond, negative_cond=negative_cond, generator=generator, sampler=sampler
        )
        return frames, None

    def build_prompt_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        """Build all arguments of the diffusers pipeline's call that depend on the prompt and its images."""
        from ..dataloader.images import (
            build_grey_clip,
            load_control_clips,
            load_frame_images,
            load_preview_controls,
            load_reference_images,
        )

        kwargs, rule = self.build_sampling_kwargs(pipe, prompt, cond, negative_cond), self.frame_rule
        if rule is not None and self.facts.control.num_images[1]:
            size = self.facts.sampling.get_image_size(prompt.width, prompt.height)
            has_references = self.facts.control.most_references > 0
            clips = load_control_clips(
                prompt,
                rule,
                lambda number: self.get_control_clip_size(pipe, number, size),
                has_references=has_references,
            )
            if has_references and prompt.control_images:
                kwargs |= self.build_reference_kwargs(pipe, load_reference_images(prompt, size))
                clips = clips or [build_grey_clip(prompt, size)]
            kwargs |= self.build_control_clip_kwargs(pipe, clips)
        else:
            images = load_preview_controls(prompt, have_alpha=self.facts.control.have_alpha)
            kwargs |= self.build_control_kwargs(pipe, images)
        return kwargs | self.build_frame_image_kwargs(pipe, *load_frame_images(prompt))

    def decode_sampled_sound(self, pipe: Any, output: Any) -> SoundTrack | None:
        """Decode the sound of what the pipeline returns for ``output_type="latent"``; None where it makes none."""
        return None


class T5Family(Family):
    """A family with CLIP encoders and the T5 of ``facts.text.t5_encoder``.

    Its encoding is in two parts, so that the outputs of T5 can be cached while CLIP is trained.
    """

    @abstractmethod
    def encode_t5_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Encode the part of ``encode_prompts`` that T5 alone makes."""

    @abstractmethod
    def encode_clip_prompts(self, pipe: Any, prompts: Sequence[str], t5_cond: Cond) -> Cond:
        """Complete ``encode_t5_prompts`` of the same texts to what ``encode_prompts`` returns, without running T5."""

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_clip_prompts(pipe, prompts, self.encode_t5_prompts(pipe, prompts))


class ControlTextFamily(Family):
    """A family whose text encoder reads control images together with captions.

    ``facts.control.text_tokens_per_image`` says how many tokens they add.
    """

    @abstractmethod
    def encode_prompts_with_controls(
        self, pipe: Any, prompts: Sequence[str], controls: Sequence[Sequence[Image]]
    ) -> Cond:
        """Encode texts together with the control images of each."""

    @abstractmethod
    def encode_prompts_with_controls_on_meta(
        self, pipe: Any, prompts: Sequence[str], control_sizes: Sequence[tuple[int, int]]
    ) -> Cond:
        """Return the shapes that ``encode_prompts_with_controls`` returns, from a pipeline on the meta device.

        Each prompt has control images of these (width, height).
        """
