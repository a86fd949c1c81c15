"""What is known of a family before its code is imported: its parts, its options, how its files look; no torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ..config.schema import ModelConfig
from .model_configs import ConfigReader


@dataclass(frozen=True)
class FamilyMatch:
    """What the JSON files of a model say."""

    reason: str
    size_multiple: int
    """Sides of training pictures are multiples of this."""
    prediction_type: str
    """What the model predicts: ``epsilon``, ``v`` or ``flow``."""
    has_guidance_embeds: bool = False
    """Whether the denoiser is told how strong the guidance is to be."""


@dataclass(frozen=True)
class FamilyFacts:
    """One family."""

    title: str
    """Its name in messages."""
    pipeline_class: str
    """Name of the diffusers pipeline class."""
    denoiser_name: str
    """The part that is trained."""
    components: tuple[str, ...]
    """Folders that a complete model has, beside the scheduler's."""
    match_configs: Callable[[ConfigReader], FamilyMatch | None]
    """What the JSON files say; None when they are those of another family with the same pipeline class."""
    component_options: Mapping[str, str] = field(default_factory=dict)
    """Options that name a file or folder for one part -> that part."""
    name: str = ""
    """Its name in ``network_args``' rules and among the families; one of the user's own needs none."""
    text_encoders: tuple[str, ...] = ()
    """The text encoders that can be trained."""
    t5_encoder: str | None = None
    """Of these the T5, which is so large that it is trained only when somebody asks for it."""
    extra_options: tuple[str, ...] = ()
    """Further options of ``ModelConfig`` that mean something for this family and not for every one."""
    validate_options: Callable[[ConfigReader, ModelConfig], Iterator[str]] = lambda read, options: iter(())
    """Options that this very model cannot honour, in words."""
    attention_modes: tuple[str, ...] = ("xformers",)
    """Values of ``attn_mode`` beside torch's own that the denoiser can be switched to."""
    single_file_prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Part -> what stands before the names of its weights in a single file; the first that is there counts."""
    single_file_keys: tuple[str, ...] = ()
    """Names of weights, without prefix, that the denoiser has in a single file."""
    diffusers_keys: Mapping[str, str] = field(default_factory=dict)
    """Such a name -> diffusers' own, which files of the denoiser alone may have, too."""
    shape_checks: Mapping[tuple[str, int | None], tuple[str | int, ...]] = field(default_factory=dict)
    """Name of such a weight and an axis -> where a shipped configuration says its length.

    Without an axis: whether the weight is there at all.  This tells families and variants apart:
    ``("x_embedder.weight", 0): ("transformer", "hidden_size")``.
    """
