"""The contract of a model family: what training asks of a kind of model, and nothing else.

A family keeps nothing but the frozen options that it was made with: its modules live in a diffusers pipeline ``pipe``
that is passed in and may be loaded in parts.  The denoiser is passed apart, because a strategy may have wrapped it:
call ``denoiser``, but read attributes only from ``pipe``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from PIL.Image import Image
from torch import Tensor, nn

from ..config.schema import ModelConfig
from ..data.batch import Batch, Cond, Moments
from ..data.prompts import Prompt
from ..diffusion.process import NoiseProcess
from .detect import DetectedModel
from .facts import FamilyFacts
from .loading import load_pipeline


@dataclass(frozen=True)
class BaseModelInfo:
    """What a LoRA file says of the model that it was trained on."""

    base_model_version: str
    """``ss_base_model_version``."""
    architecture: str
    """``modelspec.architecture``, without ``/lora``."""


class Family(ABC):
    """Subclass once for each family, directly."""

    facts: ClassVar[FamilyFacts]
    """What is known without importing the family."""
    denoiser_name: ClassVar[str]
    """The part of the pipeline that is trained."""
    text_components: ClassVar[tuple[str, ...]]
    """The parts that ``encode_prompts`` needs; they can be freed before the denoiser is loaded."""
    tokenizer_repo_ids: ClassVar[Mapping[str, str]]
    """Hub ids of the tokenizers, for single files, which bring none."""
    lora_target_modules: ClassVar[tuple[str, ...]]
    """Ends of the names of the denoiser's modules that get a LoRA, cut at dots; sd-scripts' choice."""
    lora_prefix: ClassVar[str]
    """What stands before the names of the denoiser's modules in a kohya file."""
    lora_key_style: ClassVar[str] = "diffusers"
    """How a kohya file names the denoiser's modules: ``diffusers``, or the original names of ``ldm`` (SDXL), ``flux``
    or ``sd3``, where some of them are one."""
    lora_other_key_styles: ClassVar[tuple[str, ...]] = ()
    """More of these, in which LoRA files by others name the denoiser's modules."""
    lora_format: ClassVar[Literal["kohya", "diffusers"]] = "kohya"
    """What LoRA files every loader reads: sd-scripts' (``kohya``), or ``diffusers`` with names as in diffusers."""
    conv_lora_target_modules: ClassVar[tuple[str, ...]] = ()
    """What joins ``lora_targets`` when convolutions are trained, too."""
    text_lora_target_modules: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Each of ``facts.text_encoders`` -> the same as ``lora_targets`` for it."""
    text_lora_prefixes: ClassVar[Mapping[str, str]] = {}
    """Text encoder -> what stands before the names of its modules in a kohya file."""
    block_lists: ClassVar[tuple[str, ...]] = ()
    """Lists of the denoiser's blocks in the order in which they run; none where blocks do not simply follow each
    other."""
    has_skip_connections: ClassVar[bool] = False
    """Whether it is a UNet, whose first blocks hand on to its last ones as well."""
    block_activation_args: ClassVar[tuple[str, ...]] = ("encoder_hidden_states", "hidden_states")
    """The arguments that such a block gets from the one before, in the order in which it returns them."""
    block_token_args: ClassVar[Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]]] = {}
    """Its other arguments that say something of each token -> for each tensor in them, the axis of tokens, and the
    arguments of ``block_flow`` that bring these, in their order."""
    has_variable_text_length: ClassVar[bool] = False
    """Whether conditioning is as long as its caption."""
    denoiser_text_multiple: ClassVar[int] = 1
    """To a multiple of so many tokens the denoiser itself makes such texts longer."""
    pad_text_to_multiple_of: ClassVar[int] = 1
    """To a multiple of so many they are filled up, and masked, where it pays that few lengths differ."""
    default_image_size: ClassVar[tuple[int, int]]
    """Width and height of a preview whose prompt names none."""
    default_num_inference_steps: ClassVar[int]
    """Steps of a preview whose prompt names none."""
    default_guidance_scale: ClassVar[float]
    """Classifier-free guidance of a preview whose prompt names none."""

    def __init__(self, model_config: ModelConfig | None = None):
        self.model_config = model_config or ModelConfig()

    @property
    def components(self) -> tuple[str, ...]:
        """All that ``load`` can load, beside the scheduler."""
        return (*self.text_components, "vae", self.denoiser_name)

    def load(
        self,
        model: DetectedModel | str | None,
        dtype: torch.dtype,
        components: Sequence[str] | None = None,
        *,
        pipe: Any = None,
        device: torch.device | None = None,
    ) -> Any:
        """Load ``parts``, or all, straight to dtype and device (without one: the CPU); the VAE is always float32.

        ``into`` is a pipeline of which other parts are loaded: it gets the new ones beside them.  So text encoders
        can come first, and go (set them to None) before the denoiser comes.
        """
        return load_pipeline(self, model, dtype, self.components if components is None else components, pipe, device)

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        """Names of layers that no gradient reaches, since the model leaves out what they make; they get no LoRA."""
        return ()

    @classmethod
    def get_text_key_style(cls, component: str) -> str:
        """How a kohya file names a text encoder's modules: as ``clip`` or ``t5``."""
        return "t5" if component == cls.facts.t5_encoder else "clip"

    def get_non_block_lora_target_modules(self, denoiser: Any) -> tuple[str, ...]:
        """What joins ``lora_targets`` when layers outside of the blocks are trained, too."""
        return ()

    def get_unused_text_layers(self, encoder: Any, component: str) -> tuple[str, ...]:
        """The same for a text encoder: what comes after the layer that is read."""
        return ()

    @abstractmethod
    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        """The noise process that the model was made with."""

    @abstractmethod
    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        """What LoRA files say of this model."""

    @abstractmethod
    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Text to conditioning, a row for each prompt; the keys are the family's own.

        A row does not depend on the other prompts, its length included: where texts differ in length, it is a list.
        Gradients are not switched off here: text encoders may be trained.
        """

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Of ``encode_prompts`` only the sizes, by a pipeline without weights."""
        with torch.no_grad():
            return self.encode_prompts(pipe, prompts)

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        """Those of the prompts whose ends ``encode_prompts`` leaves out."""
        return []

    @abstractmethod
    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        """Pixels (B, 3, height, width) in -1..1 to what the VAE says of them, as the denoiser expects latents.

        Shift and scale are done: to the mean both, to the standard deviation the scale.  Nothing is random here, so
        that what comes out can be kept, and training with it is training without it.
        """

    def encode_pixels(self, pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Pixels to latents as the denoiser expects them, drawn for each sample by its own generator."""
        return self.encode_moments(pipe, pixels).sample(generators)

    @abstractmethod
    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        """Latents to pixels in -1..1; undoes ``encode_pixels`` as far as the VAE can."""

    @abstractmethod
    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        """The model's prediction, to be compared with the target of ``process``; same shape as ``noisy``."""

    @abstractmethod
    def generate_image(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> Image:
        """One picture by the diffusers pipeline with the modules in memory.

        ``cond`` and ``negative`` are ``encode_prompts`` of the prompt's two texts, so that no text encoder is needed
        here.  All randomness comes from ``generator``.  Without a sampler the family chooses.
        """
