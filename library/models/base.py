"""The interface of a model family: everything that training needs to know about an architecture.

How to add a family: see docs/adding_a_family.md.  Facts and class are in one file, which imports no torch: detection
reads the facts before anything heavy is imported.  So methods import torch, and what needs it, themselves.

A family is stateless apart from its frozen ``ModelConfig``: the modules live in a diffusers pipeline ``pipe`` that is
passed in and may be loaded in parts.  The denoiser is passed separately, because a parallel strategy may have wrapped
it: call ``denoiser``, but read its attributes from ``pipe`` only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..adapters.original_module_names import CLIP_KEYS, DIFFUSERS_KEYS, T5_KEYS, KeyStyle
from ..adapters.token_layout import TokenLayout
from ..config.schema import AdapterConfig, ModelConfig, OptimConfig
from .facts import FamilyFacts, caches_only_t5

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor, nn

    from ..dataloader.batch import Batch, Cond, Moments
    from ..dataloader.sample_prompts import Prompt
    from ..diffusion.process import NoiseProcess
    from .detect import DetectedModel


NEGATIVE_MARK = "\0"
"""Before the text of a negative prompt, in families that encode these in another way than captions."""


@dataclass(frozen=True)
class BaseModelInfo:
    """How the metadata of a LoRA file names the base model."""

    base_model_version: str
    """``ss_base_model_version``."""
    architecture: str
    """``modelspec.architecture``, without ``/lora``."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """What sd-scripts writes for this family only."""


class Family(ABC):
    """One class per family; variants of a family may subclass it."""

    facts: ClassVar[FamilyFacts]
    """What is known without importing torch."""
    denoiser_name: ClassVar[str]
    """The pipeline component that is trained: ``unet`` or ``transformer``."""
    text_components: ClassVar[tuple[str, ...]]
    """The components that ``encode_prompts`` needs; they can be freed before the denoiser is loaded."""
    tokenizer_repo_ids: ClassVar[Mapping[str, str]]
    """Hub ids of the tokenizers, for single-file checkpoints, which contain none."""

    lora_target_modules: ClassVar[tuple[str, ...]]
    """Suffixes of the names of the denoiser's modules that get a LoRA, matched at dots; same choice as sd-scripts."""
    lora_prefix: ClassVar[str] = "lora_unet"
    """Prefix of the denoiser's keys in a kohya file."""
    lora_key_style: ClassVar[KeyStyle] = DIFFUSERS_KEYS
    """How a kohya file names the denoiser's modules: as diffusers does, or as the original code."""
    lora_other_key_styles: ClassVar[tuple[KeyStyle, ...]] = ()
    """Further key styles that are read."""
    lora_format: ClassVar[Literal["kohya", "diffusers", "comfy"]] = "kohya"
    """The file format that most programs load for this family."""
    conv_lora_target_modules: ClassVar[tuple[str, ...]] = ()
    """Additional ``lora_target_modules`` when convolutions are trained."""
    preset_lora_target_modules: ClassVar[tuple[str, ...]] = ()
    """Additional ``lora_target_modules`` that presets of LyCORIS may train."""
    text_lora_target_modules: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Each of ``facts.text_encoders`` -> its ``lora_target_modules``."""
    text_lora_prefixes: ClassVar[Mapping[str, str]] = {}
    """Text encoder -> prefix of its keys in a kohya file."""

    block_lists: ClassVar[tuple[str, ...]] = ()
    """The denoiser's module lists of blocks in execution order; empty where blocks are not sequential."""
    has_skip_connections: ClassVar[bool] = False
    """Whether the denoiser is a UNet."""
    block_activation_args: ClassVar[tuple[str, ...]] = ("encoder_hidden_states", "hidden_states")
    """The arguments that a block gets from the previous block, in the order in which it returns them."""
    block_token_args: ClassVar[Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]]] = {}
    """Further block arguments with a token axis -> for each of their tensors: that axis, and the
    ``block_activation_args`` whose tokens it covers, in order."""

    single_stream_block_lists: ClassVar[tuple[str, ...]] = ()
    """Those of ``block_lists`` whose layers get text and image tokens together."""
    token_layouts: ClassVar[Mapping[str, TokenLayout]] = {}
    """Pattern of the names of the denoiser's layers -> the layout of their activations, where it is not
    (batch, tokens, width), or where anything comes after a text of variable length; LoRA dropout needs it."""
    text_attention_calls: ClassVar[tuple[int, ...]] = ()
    """Indices of the attention calls in a block that attend to a text that is not in ``block_activation_args``."""
    text_attention_layers: ClassVar[tuple[str, ...]] = ()
    """Name suffixes of the key and value projections of these calls."""
    fused_parallel_layers: ClassVar[Mapping[str, tuple[Literal["colwise", "rowwise"], tuple[int, ...]]]] = {}
    """Pattern of the names of layers with fused parts -> how tensor parallelism splits them, and the ratio of the
    parts' sizes, each of which is split."""

    unsupported_strategies: ClassVar[Mapping[str, str]] = {}
    """``tp``, ``pp`` or ``cp`` -> why the denoiser cannot be split so; ``compile`` -> why it cannot be compiled."""

    has_variable_text_length: ClassVar[bool] = False
    """Whether the text conditioning is as long as its caption."""
    denoiser_text_pad_multiple: ClassVar[int] = 1
    """The denoiser itself pads variable-length text to a multiple of this many tokens."""
    text_pad_multiple: ClassVar[int] = 1
    """Pad (and mask) variable-length text to a multiple of this many tokens where fewer shapes pay off (compile)."""

    default_image_size: ClassVar[tuple[int, int]] = (1024, 1024)
    """Width and height of a preview, unless its prompt sets them."""
    default_num_inference_steps: ClassVar[int]
    """Sampling steps of a preview, unless its prompt sets them."""
    default_guidance_scale: ClassVar[float]
    """Classifier-free guidance of a preview, unless its prompt sets it."""

    def __init__(self, model_config: ModelConfig | None = None):
        self.model_config = model_config or ModelConfig()

    @property
    def components(self) -> tuple[str, ...]:
        """All components that ``load`` can load, apart from the scheduler."""
        return (*self.text_components, "vae", self.denoiser_name)

    def list_cached_text_components(self, adapter: AdapterConfig, optim: OptimConfig) -> tuple[str, ...]:
        """The text components whose outputs do not change during training: all, or those of T5."""
        if not caches_only_t5(adapter, optim, self.facts):
            return self.text_components
        encoder = self.facts.t5_encoder or ""
        return encoder, encoder.replace("text_encoder", "tokenizer")

    def load(
        self,
        model: DetectedModel | str | None,
        dtype: torch.dtype,
        components: Sequence[str] | None = None,
        *,
        pipe: Any = None,
        device: torch.device | None = None,
    ) -> Any:
        """Load ``components`` (default: all) directly to dtype and device (default: CPU); the VAE is always float32.

        With ``pipe``, the components are added to that pipeline.  So the text encoders can be loaded, used and freed
        (set to None) before the denoiser is loaded.
        """
        from .loading import load_pipeline

        return load_pipeline(self, model, dtype, self.components if components is None else components, pipe, device)

    def get_pipeline_class(self) -> Any:
        """The class of pipelines: diffusers', or a subclass of it."""
        from .loading import import_model_class

        return import_model_class("diffusers", self.facts.pipeline_class)

    @classmethod
    def get_text_key_style(cls, component: str) -> KeyStyle:
        """How a kohya file names a text encoder's modules."""
        return T5_KEYS if component == cls.facts.t5_encoder else CLIP_KEYS

    @classmethod
    def prepare_denoiser(cls, denoiser: nn.Module) -> None:
        """Change the denoiser after loading, also on the meta device, where training needs more than diffusers has."""
        return

    @classmethod
    def list_strategies(cls) -> tuple[str, ...]:
        """How training can be distributed, and whether blocks can wait in host memory."""
        blocks = ("pp",) if cls.has_skip_connections or cls.block_lists else ()
        tokens = ("cp",) if cls.block_lists else ()
        names = ("ddp", "fsdp", "deepspeed", "tp", *blocks, *tokens, "block_swap")
        return tuple(name for name in names if name not in cls.unsupported_strategies)

    def get_non_block_lora_target_modules(self, denoiser: Any) -> tuple[str, ...]:
        """Additional ``lora_target_modules`` when layers outside of the blocks are trained."""
        return ()

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        """Layers whose output the model discards: no gradient reaches them, so they get no LoRA."""
        return ()

    def get_unused_text_layers(self, encoder: Any, component: str) -> tuple[str, ...]:
        """The same for a text encoder: the layers after the one whose hidden states are used."""
        return ()

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        """The noise process of the model, according to its scheduler."""
        from ..diffusion.process import FlowMatchingProcess
        from .noise_schedulers import build_ddpm_process

        if "FlowMatch" in type(pipe.scheduler).__name__ or pipe.scheduler.config.get("use_flow_sigmas"):
            return FlowMatchingProcess.from_scheduler(pipe.scheduler.config)
        return build_ddpm_process(pipe.scheduler)

    @abstractmethod
    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        """The base model's names for the metadata of LoRA files."""

    @abstractmethod
    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Encode texts to conditioning with one row per prompt; the keys are the family's own.

        A row, including its length, must not depend on the other prompts: values of variable length are lists.
        Gradients stay enabled: text encoders may be trained.
        """

    def encode_prompts_with_controls(
        self, pipe: Any, prompts: Sequence[str], controls: Sequence[Sequence[Image]]
    ) -> Cond:
        """``encode_prompts`` together with the control images of each; for families whose text encoder reads them."""
        return self.encode_prompts(pipe, prompts)

    def encode_t5_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """The part of ``encode_prompts`` that T5 alone makes; for families with ``facts.t5_encoder``."""
        raise NotImplementedError

    def encode_clip_prompts(self, pipe: Any, prompts: Sequence[str], t5_cond: Cond) -> Cond:
        """Complete ``encode_t5_prompts`` of the same texts to what ``encode_prompts`` returns, without running T5."""
        raise NotImplementedError

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """The shapes that ``encode_prompts`` returns, from a pipeline on the meta device."""
        import torch

        with torch.no_grad():
            return self.encode_prompts(pipe, prompts)

    def encode_prompts_with_controls_on_meta(
        self, pipe: Any, prompts: Sequence[str], control_sizes: Sequence[tuple[int, int]]
    ) -> Cond:
        """The same for ``encode_prompts_with_controls``; each prompt has control images of these (width, height)."""
        return self.encode_prompts_on_meta(pipe, prompts)

    def mark_negative_prompt(self, text: str) -> str:
        """The text from which ``encode_prompts`` makes the conditioning of a preview's negative prompt."""
        return text

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        """The prompts that ``encode_prompts`` truncates."""
        return []

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        """Encode pixels (B, 3, height, width) in -1..1 to the mean and standard deviation of their latents.

        The VAE's shift and scale are applied, so samples are what the denoiser expects.  Nothing is random here, so
        that training on cached moments equals training without a cache.
        """
        from .vae import encode_vae_moments

        return encode_vae_moments(pipe.vae, pixels)

    def encode_pixels(self, pipe: Any, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Encode pixels and sample latents, with one generator per sample."""
        return self.encode_moments(pipe, pixels).sample(generators)

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

    @abstractmethod
    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        """Run the denoiser; the result has the shape of the latents and is compared with the process's target."""

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        """The arguments of the diffusers pipeline's call for a preview: guidance and text embeddings."""
        kwargs: dict[str, Any] = {"guidance_scale": self.get_guidance_scale(prompt)}
        for key, name in (("embeds", "prompt_embeds"), ("pooled", "pooled_prompt_embeds")):
            if key in cond:
                kwargs |= {name: cond[key], f"negative_{name}": negative_cond[key]}
        return kwargs

    def is_step_distilled(self, pipe: Any) -> bool:
        """Whether the loaded model is distilled to few steps; training it directly undoes the distillation."""
        return False

    def get_guidance_scale(self, prompt: Prompt) -> float:
        """The classifier-free guidance of a preview."""
        return self.default_guidance_scale if prompt.cfg_scale is None else prompt.cfg_scale

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        """The arguments of the diffusers pipeline's call for the control images of a preview."""
        return {"image": list(images)} if images else {}

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        """Adapt the pipeline of one preview, whose modules are shared with training, before it is called."""
        return sampling_pipe

    def generate_image(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> Image:
        """Sample one preview image with the diffusers pipeline and the modules in memory.

        ``cond`` and ``negative_cond`` are the encoded texts of the prompt, so no text encoder is needed here.  All
        random numbers come from ``generator``.  ``sampler`` None is the family's default.
        """
        from ..dataloader.images import load_preview_controls
        from .sampling import sample_image

        sampling_kwargs = self.build_sampling_kwargs(pipe, prompt, cond, negative_cond)
        sampling_kwargs |= self.build_control_kwargs(pipe, load_preview_controls(prompt))
        return sample_image(self, pipe, prompt, sampling_kwargs, generator, sampler)
