"""The static facts of a model family, known without torch: how it is detected, its components and its options."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..adapters.original_module_names import OriginalModule
from ..config.network_args import GENERAL_NETWORK, NetworkFacts, get_network_args
from ..config.schema import AdapterConfig, ModelConfig, OptimConfig
from ..config.unused_options import is_self_tuning_adafactor
from ..problems import Problem
from .model_configs import ConfigReader

TORCH_ATTENTION_MODES = ("sdpa", "torch")
"""Values of ``attn_mode`` for torch's ``scaled_dot_product_attention``, which every denoiser supports."""


@dataclass(frozen=True)
class FamilyMatch:
    """What the JSON files of a model tell."""

    reason: str
    size_multiple: int
    """Width and height of training images are multiples of this."""
    prediction_type: str
    """``epsilon``, ``v`` or ``flow``."""
    has_guidance_embeds: bool = False
    """Whether the denoiser takes the guidance scale as an input ."""
    max_side: int | None = None
    """The longest side of an image, where the positions of the denoiser end."""


@dataclass(frozen=True)
class FamilyFacts:
    """The facts of one family."""

    title: str
    """Name in messages."""
    pipeline_class: str
    """Name of the diffusers pipeline class."""
    denoiser_name: str
    """The component that is trained."""
    components: tuple[str, ...]
    """Subfolders of a complete model, apart from the scheduler's."""
    match_configs: Callable[[ConfigReader], FamilyMatch | None]
    """Detect the model from its JSON files; None for another family with the same pipeline class."""
    num_parameters: int = 0
    """Of the published denoiser; the largest of its sizes."""
    kind: Literal["image", "edit", "video"] = "image"
    lora_targets_of: str = ""
    """The program that trains the same layers by default."""
    notes: str = ""
    """What users of this family have to know, in a few words."""
    component_options: Mapping[str, str] = field(default_factory=dict)
    """Option that sets the file or folder of one component -> that component."""
    name: str = ""
    """Name in the registry, used for ``network_args``; may be empty for a user's own family."""
    text_encoders: tuple[str, ...] = ()
    """The text encoders that can be trained."""
    t5_encoder: str | None = None
    """The T5 among them, which is large and therefore trained only on request."""
    extra_options: tuple[str, ...] = ()
    """Options of ``ModelConfig`` that apply to this family, but not to all."""
    is_version_2: bool = False
    """Whether sd-scripts' option ``v2`` stands for this family."""
    kohya_defaults: Mapping[str, str] = field(default_factory=dict)
    """Defaults of sd-scripts for this family that differ from those here."""
    network: NetworkFacts = GENERAL_NETWORK
    """The family's own network modules and arguments."""
    modelspec_architecture: str = ""
    """How ``modelspec.architecture`` in the family's LoRA files begins."""
    control_images: tuple[int, int] = (0, 0)
    """The fewest and the most control images of a picture: references of editing models."""
    text_tokens_per_control: int = 0
    """Text tokens of a control image, at most, where the text encoder reads it together with the caption; else 0."""
    is_preview_size_of_control: bool = False
    """Whether previews have the size that the diffusers pipeline takes from their control image."""
    masks_text_in_denoiser: bool = False
    """Whether ``apply_t5_attn_mask`` masks the denoiser's attention, too."""
    validate_options: Callable[[ConfigReader, ModelConfig], Iterator[Problem]] = lambda read, options: iter(())
    """Yield a problem for each option that this model does not support."""
    attention_modes: tuple[str, ...] = ("xformers",)
    """Values of ``attn_mode`` that the denoiser supports, in addition to ``TORCH_ATTENTION_MODES``."""
    single_file_prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component -> possible prefixes of its keys in a single-file checkpoint."""
    single_file_keys: tuple[str, ...] = ()
    """Keys, without prefix, that identify the denoiser in a single-file checkpoint."""
    diffusers_keys: Mapping[str, str] = field(default_factory=dict)
    """Such a key -> its name in diffusers, which files with only the denoiser may use."""
    unsupported_shapes: Mapping[tuple[str, int, int], str] = field(default_factory=dict)
    """Such a key, an axis and its length -> what the model is, if it cannot be trained."""
    single_file_classes: Mapping[str, str] = field(default_factory=dict)
    """Component -> the class whose conversion of single files in diffusers it uses, if it has none of its own."""
    single_file_renames: Mapping[str, str] = field(default_factory=dict)
    """Beginning of a key in single files, without prefix -> that which the conversion expects."""
    single_file_layout: tuple[OriginalModule, ...] = ()
    """The original modules of the denoiser, where diffusers does not convert them."""
    single_file_joins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """End of the name of such a module -> ends of the modules in files whose outputs it has, one after another."""
    build_vae_patterns: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None
    """Config of a VAE -> patterns of its keys in diffusers, and what original files have there, in this order."""
    shape_checks: Mapping[tuple[str, int | None], tuple[str | int, ...]] = field(default_factory=dict)
    """Such a key and an axis -> path of its length in the bundled config, to tell families and variants apart.

    For example ``("x_embedder.weight", 0): ("transformer", "hidden_size")``; without an axis: whether the key exists.
    """


def get_component_lr(component: str, config: OptimConfig, facts: FamilyFacts) -> float:
    """Return the peak learning rate of the denoiser or of a text encoder."""
    if component not in facts.text_encoders:
        return config.learning_rate if config.unet_lr is None else config.unet_lr
    rates = config.text_encoder_lr or (config.learning_rate,)
    return rates[min(facts.text_encoders.index(component), len(rates) - 1)]


def select_trained_text_encoders(config: AdapterConfig, optim: OptimConfig, facts: FamilyFacts) -> tuple[str, ...]:
    """Select the text encoders that get an adapter; a learning rate of 0 excludes one."""
    if not config.trains_text_encoders:
        return ()
    with_t5 = get_network_args(config).train_t5xxl
    parts = [part for part in facts.text_encoders if with_t5 or part != facts.t5_encoder]
    return tuple(part for part in parts if not optim.text_encoder_lr or get_component_lr(part, optim, facts))


def caches_only_t5(config: AdapterConfig, optim: OptimConfig, facts: FamilyFacts) -> bool:
    """Whether cached text-encoder outputs are those of T5 alone, because CLIP is trained."""
    trained = select_trained_text_encoders(config, optim, facts)
    return bool(trained) and facts.t5_encoder is not None and facts.t5_encoder not in trained


def describe_trained_components(config: AdapterConfig, optim: OptimConfig, facts: FamilyFacts) -> str:
    """Name what is trained, with learning rates: ``training: U-Net (1e-4), text encoder (5e-5)``."""
    names = {} if not config.trains_denoiser else {facts.denoiser_name: _DENOISER_TITLES.get(facts.denoiser_name)}
    for encoder in select_trained_text_encoders(config, optim, facts):
        number = encoder.removeprefix("text_encoder").strip("_") or ("1" if len(facts.text_encoders) > 1 else "")
        names[encoder] = f"text encoder {number}".strip()
    if is_self_tuning_adafactor(optim):
        return f"training: {', '.join(title or name for name, title in names.items())}"
    rates = ((title or name, get_component_lr(name, optim, facts)) for name, title in names.items())
    return f"training: {', '.join(f'{title} (learning rate {rate:g})' for title, rate in rates)}"


_DENOISER_TITLES = {"unet": "U-Net", "transformer": "transformer"}
