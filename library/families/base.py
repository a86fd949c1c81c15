"""The contract of a model family: what training asks of a kind of model, and nothing else.

A family is stateless: its modules live in a diffusers pipeline ``pipe`` that is passed in and may be loaded in
parts.  The denoiser is passed apart, because a strategy may have wrapped it: call ``denoiser``, but read attributes
only from ``pipe``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from PIL.Image import Image
from torch import Tensor, nn

from ..data.batch import Batch, Cond
from ..data.prompts import Prompt
from ..diffusion.process import Process


class Family(ABC):
    """Subclass once for each family, directly."""

    pipeline: ClassVar[str]
    """Name of the diffusers pipeline class."""
    denoiser: ClassVar[str]
    """The part of the pipeline that is trained."""
    text_parts: ClassVar[tuple[str, ...]]
    """The parts that ``encode_prompts`` needs; they can be freed before the denoiser is loaded."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Ends of the names of the denoiser's modules that get a LoRA, cut at dots; sd-scripts' choice."""
    lora_prefix: ClassVar[str]
    """What stands before the names of the denoiser's modules in a kohya file."""
    base_model_version: ClassVar[str]
    """``ss_base_model_version`` in a LoRA file."""
    architecture: ClassVar[str]
    """``modelspec.architecture`` in a LoRA file, without ``/lora``."""
    picture_size: ClassVar[tuple[int, int]]
    """Width and height of a preview whose prompt names none."""
    picture_steps: ClassVar[int]
    """Steps of a preview whose prompt names none."""
    picture_scale: ClassVar[float]
    """Classifier-free guidance of a preview whose prompt names none."""

    @property
    def parts(self) -> tuple[str, ...]:
        """All that ``load`` can load, beside the scheduler."""
        return (*self.text_parts, "vae", self.denoiser)

    @abstractmethod
    def load(self, source: str | None, dtype: torch.dtype, parts: Sequence[str] | None = None) -> Any:
        """Load the pipeline, or only ``parts`` of it and its scheduler, to the CPU; the VAE is always float32.

        Without a source it is the built-in model.
        """

    @abstractmethod
    def process(self, pipe: Any) -> Process:
        """The noise process that the model was made with."""

    @abstractmethod
    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Text to conditioning, a row for each prompt; the keys are the family's own."""

    @abstractmethod
    def encode_pixels(self, pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Pixels (B, 3, height, width) in -1..1 to latents as the denoiser expects them.

        Each sample has its own generator, so that its latents do not depend on the others in the batch.
        """

    @abstractmethod
    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        """Latents to pixels in -1..1; undoes ``encode_pixels`` as far as the VAE can."""

    @abstractmethod
    def predict(self, pipe: Any, denoiser: nn.Module, noisy: Tensor, t: Tensor, batch: Batch) -> Tensor:
        """The model's prediction, to be compared with the target of ``process``; same shape as ``noisy``."""

    @abstractmethod
    def draw(
        self, pipe: Any, prompt: Prompt, cond: Cond, negative: Cond, generator: torch.Generator, sampler: str
    ) -> Image:
        """One picture by the diffusers pipeline with the modules in memory.

        ``cond`` and ``negative`` are ``encode_prompts`` of the prompt's two texts, so that no text encoder is needed
        here.  All randomness comes from ``generator``.
        """
