"""What is known of a family before its code is imported: its parts, its options, how its files look; no torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ..config.schema import ModelConfig
from .reading import Reader


@dataclass(frozen=True)
class Look:
    """What the JSON files of a model say."""

    reason: str
    pixel_step: int
    """Sides of training pictures are multiples of this."""
    prediction: str
    """What the model predicts: ``epsilon``, ``v`` or ``flow``."""
    is_guided: bool = False
    """Whether the denoiser is told how strong the guidance is to be."""


@dataclass(frozen=True)
class Facts:
    """One family."""

    title: str
    """Its name in messages."""
    pipeline: str
    """Name of the diffusers pipeline class."""
    denoiser: str
    """The part that is trained."""
    parts: tuple[str, ...]
    """Folders that a complete model has, beside the scheduler's."""
    look: Callable[[Reader], Look | None]
    """What the JSON files say; None when they are those of another family with the same pipeline class."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Options that name a file or folder for one part -> that part."""
    name: str = ""
    """Its name in ``network_args``' rules and among the families; one of the user's own needs none."""
    text_encoders: tuple[str, ...] = ()
    """The text encoders that can be trained."""
    t5: str | None = None
    """Of these the T5, which is so large that it is trained only when somebody asks for it."""
    options: tuple[str, ...] = ()
    """Further options of ``ModelConfig`` that mean something for this family and not for every one."""
    refused: Callable[[Reader, ModelConfig], Iterator[str]] = lambda read, options: iter(())
    """Options that this very model cannot honour, in words."""
    attention: tuple[str, ...] = ("xformers",)
    """Values of ``attn_mode`` beside torch's own that the denoiser can be switched to."""
    prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Part -> what stands before the names of its weights in a single file; the first that is there counts."""
    keys: tuple[str, ...] = ()
    """Names of weights, without prefix, that the denoiser has in a single file."""
    own_names: Mapping[str, str] = field(default_factory=dict)
    """Such a name -> diffusers' own, which files of the denoiser alone may have, too."""
    sizes: Mapping[tuple[str, int | None], tuple[str | int, ...]] = field(default_factory=dict)
    """Name of such a weight and an axis -> where a shipped configuration says its length.

    Without an axis: whether the weight is there at all.  This tells families and variants apart:
    ``("x_embedder.weight", 0): ("transformer", "hidden_size")``.
    """
