"""The static facts of a model family in groups, known without torch.

A fact is in one place: the class of a family (``library.models.base``) holds only methods and reads everything else
here.  Every group but ``PipelineFacts``, ``DetectionFacts``, ``FamilyLora``, ``TextFacts`` and ``SamplingFacts`` may be
left out, and within a group everything that has a default.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..adapters.original_module_names import CLIP_KEYS, DIFFUSERS_KEYS, KeyStyle, OriginalModule
from ..adapters.token_layout import TokenLayout
from ..config.network_args import GENERAL_NETWORK, NetworkFacts
from ..config.schema import ModelConfig
from ..dataset.clip_windows import FrameRule, TextImages
from ..diffusion.expert_selection import NoiseExperts
from ..problems import Problem
from .family_noise_levels import AS_SAMPLED, TrainingNoiseFacts
from .model_configs import ConfigReader

TORCH_ATTENTION_MODES = ("sdpa", "torch")
"""Values of ``attn_mode`` for torch's ``scaled_dot_product_attention``, which every denoiser supports."""


@dataclass(frozen=True)
class FamilyMatch:
    """The result of a detection: what the JSON files of a model tell about it."""

    reason: str
    """The words in which messages say why it is a model of this family."""
    size_multiple: int
    """Width and height of training images are multiples of this."""
    prediction_type: str
    """``epsilon``, ``v`` or ``flow``."""
    has_guidance_embeds: bool = False
    """Whether the denoiser takes the guidance scale as an input."""
    max_side: int | None = None
    """The longest side of an image, where the positions of the denoiser end."""
    control_sides: tuple[int, ...] = ()
    """The sides in pixels of control clips that are square, by their numbers; 0: they have the size of their clip."""


@dataclass(frozen=True)
class PipelineFacts:
    """The diffusers pipeline and the denoisers in it."""

    class_name: str
    """Name of the diffusers pipeline class in ``model_index.json``."""
    denoisers: tuple[str, ...] = ("transformer",)
    """The components that predict the noise: ``unet`` or ``transformer``; two, where there are ``experts``.

    The first has the LoRA; once both are loaded, it is both (``models/expert_denoiser.py``).
    """
    experts: NoiseExperts | None = None
    """The experts for high and low noise, where the model has two denoisers."""
    has_vae: bool = True
    """Whether there is a VAE; without one, the latents of the model are the pixels."""
    kind: Literal["image", "edit", "video"] = "image"
    """The kind of output: images from text, edited images, or videos."""
    frames: FrameRule | None = None
    """What a model of videos asks of the frames of clips; None: it makes images, and is trained on images only."""
    frame_encoders: tuple[str, ...] = ()
    """The components besides the VAE that ``encode_frame_cond`` needs, or that encode and decode sound."""
    num_parameters: int = 0
    """Number of parameters of the published denoiser; of its largest size, if there are several."""
    hub_id: str = ""
    """Hub id of this published model, with which presets of the web page begin."""
    separate_components: Mapping[str, str] = field(default_factory=dict)
    """The hub ids of components that folders of the published model lack, as their licence is another one."""
    configs: Mapping[str, Path] = field(default_factory=dict)
    """The configuration files of a family outside of this package, by variant: ``tiny``; empty for the published one.

    Each has the form of a file in ``models/configs``; ``random:package.module:Class:tiny`` is such a model.
    A relative path begins at the folder of the module that has the facts.
    """


@dataclass(frozen=True)
class TrainerNames:
    """The names of the model in the configurations of other trainers; empty for those that do not train it."""

    ai_toolkit: tuple[str, ...] = ()
    """Values of ``arch``, and the switches of older files, such as ``is_xl``."""
    diffusion_pipe: tuple[str, ...] = ()
    """Values of ``type`` in ``[model]``."""
    kohya_gui: tuple[str, ...] = ()
    """The switches of kohya_ss that choose the model; an empty text stands for none of them."""
    onetrainer: tuple[str, ...] = ()
    """Values of ``model_type``."""
    simpletuner: tuple[str, ...] = ()
    """Values of ``model_family``."""
    simpletuner_flavours: Mapping[str, str] = field(default_factory=dict)
    """The hub id of each ``model_flavour`` of SimpleTuner that can be trained here."""
    simpletuner_default: str = ""
    """The flavour that SimpleTuner trains where a file names none, if that is one of this family."""
    variant_pattern: str = ""
    """What the names of the model's files match, in lower case, where another family has the same name in a trainer."""


@dataclass(frozen=True)
class DetectionFacts:
    """How a model of the family is recognized: by the JSON files of a folder, by the keys of a single file, or by its
    name in the configuration of another trainer."""

    match_configs: Callable[[ConfigReader], FamilyMatch | None]
    """Detect the model from its JSON files; None for another family with the same pipeline class.

    It raises ``ModelError`` for a variant that cannot be trained.
    """
    keys: tuple[str, ...] = ()
    """Keys of the denoiser in a single file, without prefix, that no other family has all of.

    Without any, models of the family are not loaded from single files.
    """
    diffusers_keys: Mapping[str, str] = field(default_factory=dict)
    """The names in diffusers of some of the ``keys``, which files with only the denoiser may use."""
    shape_checks: Mapping[tuple[str, int | None], tuple[str | int, ...]] = field(default_factory=dict)
    """The path in the bundled config of the length of a key's axis, to tell families and variants apart.

    For example ``("x_embedder.weight", 0): ("transformer", "hidden_size")``; without an axis: whether the key exists.
    """
    unsupported_shapes: Mapping[tuple[str, int, int], str] = field(default_factory=dict)
    """What a model is whose key has an axis of this length, if it cannot be trained."""
    unsupported_file_names: Mapping[str, str] = field(default_factory=dict)
    """What a model is whose file name contains this, if it cannot be trained and has the same keys and shapes."""
    trainer_names: TrainerNames = TrainerNames()
    """The names of the model in other trainers."""


@dataclass(frozen=True)
class SingleFileFacts:
    """How the weights of a single-file checkpoint are named, and how they become those of diffusers."""

    prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The possible prefixes of each component's keys in a checkpoint of the whole model."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """The diffusers class whose conversion of single files a component uses, if its own class has none."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """The beginnings of keys that the conversion expects, by those in the file without prefix."""
    layout: tuple[OriginalModule, ...] = ()
    """The modules of the denoiser in the file, where diffusers does not convert them."""
    joins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The ends of the names of modules that files have instead of one in ``layout``, by the end of its name.

    Their outputs, one after another, are those of the module.
    """
    text_patterns: Mapping[str, str] = field(default_factory=dict)
    """Patterns of the text encoder's keys in transformers, and what other files have there, in order."""
    build_vae_patterns: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None
    """Build from a VAE's config the patterns of its keys in diffusers, and what files have there, in order."""


@dataclass(frozen=True)
class TextEncoderLora:
    """How the LoRA of one text encoder is made and named."""

    targets: tuple[str, ...]
    """Suffixes of the names of the modules that get a LoRA, matched at dots."""
    prefix: str
    """Prefix of the encoder's keys in a kohya file."""
    key_style: KeyStyle = CLIP_KEYS
    """How a kohya file names the modules."""


@dataclass(frozen=True)
class FamilyLora:
    """Which layers get a LoRA, and how LoRA files of the family name them."""

    targets: tuple[str, ...]
    """Suffixes of the names of the denoiser's modules that get a LoRA, matched at dots."""
    targets_of: str = ""
    """The program that trains the same layers by default."""
    optional_targets: tuple[str, ...] = ()
    """Modules that get a LoRA only where ``include_patterns`` names them, or with ``train_modulation``."""
    conv_targets: tuple[str, ...] = ()
    """Modules that get a LoRA in addition to ``targets`` when convolutions are trained."""
    trained_by_clips: tuple[str, ...] = ()
    """Modules, by the last part of their names, that clips train and single frames do not."""
    preset_targets: tuple[str, ...] = ()
    """Modules that presets of LyCORIS may train in addition to ``targets`` and ``conv_targets``."""
    text_encoders: Mapping[str, TextEncoderLora] = field(default_factory=dict)
    """The text encoders that can be trained, in the order of ``text_encoder_lr``."""
    prefix: str = "lora_unet"
    """Prefix of the denoiser's keys in a kohya file."""
    key_style: KeyStyle = DIFFUSERS_KEYS
    """How a kohya file names the denoiser's modules: as diffusers does, or as the original code."""
    other_key_styles: tuple[KeyStyle, ...] = ()
    """Styles of keys that are read besides ``key_style``."""
    format: Literal["kohya", "diffusers", "comfy"] = "kohya"
    """The file format that most programs load for this family."""
    modelspec_architecture: str = ""
    """The beginning of ``modelspec.architecture`` in the metadata of the family's LoRA files."""
    modelspec_implementation: str = "diffusers"
    """``modelspec.implementation`` in the family's LoRA files: where sd-scripts names the authors' repository, that."""


@dataclass(frozen=True)
class BlockFacts:
    """The denoiser's blocks, as parallelism, offloading, compilation and attention backends need to know them.

    Layers of usual names (``to_q``, ``net.0.proj`` ...) need not be named here.
    """

    lists: tuple[str, ...] = ()
    """The denoiser's module lists of blocks in execution order; empty where blocks are not sequential."""
    has_skip_connections: bool = False
    """Whether the denoiser is a UNet."""
    activation_args: tuple[str, ...] = ("encoder_hidden_states", "hidden_states")
    """The arguments that a block gets from the previous block, in the order in which it returns them."""
    unsharded_args: tuple[str, ...] = ()
    """The part of ``activation_args`` whose tokens context parallelism leaves whole on every rank."""
    sound_args: tuple[str, ...] = ()
    """The part of ``activation_args`` that has no part in the result of a batch without sound."""
    token_args: Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]] = field(default_factory=dict)
    """The token axis of each tensor in a block argument that is no activation, and the ``activation_args`` whose
    tokens this axis covers, in order; a tensor may have one entry there for all tokens."""
    token_arg_dims: Mapping[str, int] = field(default_factory=dict)
    """The axes of those ``token_args`` which have tokens only if they have as many axes."""
    head_args: Mapping[str, int] = field(default_factory=dict)
    """The axis of the heads in the tensors of an argument of attention layers, which tensor parallelism splits."""
    single_stream_lists: tuple[str, ...] = ()
    """The part of ``lists`` whose layers get text and image tokens together."""
    token_layouts: Mapping[str, TokenLayout] = field(default_factory=dict)
    """The layout of the activations of the denoiser's layers, by pattern of their names.

    It is needed for layers whose activations are not (batch, tokens, width), and for those in which tokens come after
    a text of variable length: LoRA dropout is a function of sample and token, so it has to know where these are.
    """
    text_attention_calls: tuple[int, ...] = ()
    """Indices of the attention calls in a block that attend to a text that is not in ``activation_args``."""
    text_attention_layers: tuple[str, ...] = ()
    """Name suffixes of the key and value projections of ``text_attention_calls``, and of other layers of blocks that
    see no tokens which context parallelism shards."""
    gathered_attention_calls: tuple[int, ...] = ()
    """Indices of the attention calls in a block in which one of the ``unsharded_args`` attends to sharded tokens."""
    skipped_attention_calls: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Indices of the attention calls that a block leaves out if this argument of it is true."""
    fused_layers: Mapping[str, tuple[Literal["colwise", "rowwise"], tuple[int, ...]]] = field(default_factory=dict)
    """How tensor parallelism splits layers with fused parts or unusual names, by a pattern of their names; and the
    ratio of the parts' sizes, each of which is split."""
    unsupported_strategies: Mapping[str, str] = field(default_factory=dict)
    """Why the denoiser cannot be split by ``tp``, ``pp`` or ``cp``; under ``compile`` and ``cuda_graphs`` why not be
    compiled or captured; and under ``preservation`` why not with gradient checkpointing."""
    has_expert_matrices: bool = False
    """Whether modules hold the matrices of experts as parameters of three axes, which ``expert_weights`` names."""
    attention_modes: tuple[str, ...] = ("xformers",)
    """Values of ``attn_mode`` that the denoiser supports, in addition to ``TORCH_ATTENTION_MODES``."""

    def list_strategies(self) -> tuple[str, ...]:
        """List how training can be distributed, and whether blocks can wait in host memory."""
        blocks = ("pp",) if self.has_skip_connections or self.lists else ()
        tokens = ("cp",) if self.lists else ()
        names = ("ddp", "fsdp", "deepspeed", "tp", *blocks, *tokens, "block_swap")
        return tuple(name for name in names if name not in self.unsupported_strategies)


@dataclass(frozen=True)
class TextFacts:
    """The text encoders, and the length of what they return."""

    components: tuple[str, ...]
    """The components that ``encode_prompts`` needs; they can be freed before the denoiser is loaded."""
    tokenizer_repo_ids: Mapping[str, str]
    """The hub id of each tokenizer and processor in ``components``, for single files, which contain none."""
    t5_encoder: str | None = None
    """The T5 beside CLIP encoders.  It is large: it is trained only on request, and cached while CLIP is trained."""
    has_variable_length: bool = False
    """Whether the text conditioning is as long as its caption."""
    denoiser_pad_multiple: int = 1
    """The denoiser itself pads variable-length text to a multiple of this many tokens."""
    pad_multiple: int = 1
    """Pad (and mask) variable-length text to a multiple of this many tokens where fewer shapes pay off (compile)."""
    is_masked_in_denoiser: bool = False
    """Whether ``apply_t5_attn_mask`` masks the denoiser's attention, too."""
    version: int = 1
    """A number that is raised when the family encodes the same caption in another way than before, so that cached
    outputs of text encoders are made anew."""
    has_negative_encoding: bool = False
    """Whether negative prompts are encoded in another way than captions: by ``encode_negative_prompts``."""
    embedding_keys: Mapping[str, str] = field(default_factory=dict)
    """The CLIP encoders that new words can be trained for (textual inversion), with their keys in embedding files.
    Empty for families whose ``encode_prompts`` does not tokenize with ``tokenize_for_clip`` alone."""


@dataclass(frozen=True)
class SamplingFacts:
    """Defaults of previews, unless their prompts set other values."""

    num_inference_steps: int
    """Number of sampling steps of a preview."""
    guidance_scale: float
    """Scale of classifier-free guidance."""
    image_size: tuple[int, int] = (1024, 1024)
    """Width and height of the image."""
    frame_images: tuple[Literal["image_path", "end_image_path"], ...] = ()
    """The images of prompts that clips begin and end with, by the keys of prompts."""
    reads_one_frame: bool = False
    """Whether prompts say which frame is made, and which ones are given."""
    is_guidance_embedded: bool = False
    """Whether guidance is an input of the model alone: ``--g`` and ``--l`` both set it, and there are no negative
    prompts."""

    def get_guidance_scale(self, cfg_scale: float | None) -> float:
        """Return the guidance of a prompt that may set its own."""
        return self.guidance_scale if cfg_scale is None else cfg_scale

    def get_image_size(self, width: int | None, height: int | None) -> tuple[int, int]:
        """Return width and height of the image of a prompt that may set its own."""
        return width or self.image_size[0], height or self.image_size[1]


@dataclass(frozen=True)
class ControlFacts:
    """The control images beside a picture: conditions, and references of editing models."""

    num_images: tuple[int, int] = (0, 0)
    """The fewest and the most control images of a picture."""
    group_size: int = 1
    """How many control images there are more of, if there are more than the fewest."""
    most_references: int = 0
    """The most reference images beside the control clips of a clip, which show something that appears in it."""
    have_picture_size: bool = False
    """Whether control images are as large as their picture, such as those in channels of the input."""
    have_alpha: bool = False
    """Whether the alpha channel of control images is read, which says what of them counts."""
    are_masks: bool = False
    """Whether the control image is a mask, whose white is painted into the picture."""
    text_tokens_per_image: int = 0
    """Text tokens of a control image, at most, where the text encoder reads it together with the caption; else 0."""
    are_layers: bool = False
    """Whether they are layers of the picture, with alpha, which are trained together with it; a preview has one image,
    of which it makes the layers."""
    text_reads_first_frame: bool = False
    """Whether what the text encoder reads is the first frame of the clip itself, in place of control images."""
    sets_preview_size: bool = False
    """Whether previews have the size that the diffusers pipeline takes from their control image."""


@dataclass(frozen=True)
class KohyaObjective:
    """The objective of sd-scripts' script for a family: its defaults, and which options it has and does not read."""

    defaults: Mapping[str, str | float] = field(default_factory=dict)
    """The defaults of that script, by option, where ours may be other ones."""
    weighted_prediction_types: tuple[str, ...] | None = None
    """The values of ``model_prediction_type`` with which ``weighting_scheme`` weights the loss; None: all."""
    ignored: tuple[str, ...] = ()
    """The options that the script accepts and ignores."""
    is_logit_mean_reversed: bool = False
    """Whether a ``logit_mean`` above 0 means less noise."""
    max_huber_timestep: int = 1000
    """The timestep of pure noise for ``huber_schedule exponential``, whose threshold is ``huber_c`` at 1000."""


@dataclass(frozen=True)
class FamilyOptions:
    """The options that depend on the family, and the objective of sd-scripts."""

    components: Mapping[str, str] = field(default_factory=dict)
    """The component whose file or folder each option sets."""
    extra: tuple[str, ...] = ()
    """Options of ``ModelConfig`` or ``DataConfig`` that apply to this family, but not to all."""
    validate: Callable[[ConfigReader, ModelConfig], Iterator[Problem]] = lambda read, options: iter(())
    """Yield a problem for each option whose value this model does not support."""
    network: NetworkFacts = GENERAL_NETWORK
    """The family's own network modules and ``network_args``."""
    is_version_2: bool = False
    """Whether sd-scripts' option ``v2`` stands for this family."""
    musubi_versions: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """The values of ``model_version`` that stand for this family, with values of the denoiser's config by which models
    of this family differ."""
    kohya_objective: KohyaObjective | None = None
    """The objective of sd-scripts' script for this family; None where it has none."""


@dataclass(frozen=True)
class FamilyFacts:
    """Everything that is known of a model family without torch."""

    title: str
    """Name of the family in messages."""
    pipeline: PipelineFacts
    detection: DetectionFacts
    lora: FamilyLora
    text: TextFacts
    sampling: SamplingFacts
    blocks: BlockFacts = BlockFacts()
    single_files: SingleFileFacts = SingleFileFacts()
    control: ControlFacts = ControlFacts()
    training_noise: TrainingNoiseFacts = AS_SAMPLED
    options: FamilyOptions = FamilyOptions()
    notes: str = ""
    """A few words for the table of models about what users of this family have to know."""

    @property
    def denoiser_name(self) -> str:
        """The component that is trained."""
        return self.pipeline.denoisers[0]

    def get_frame_rule(self, options: ModelConfig) -> FrameRule | None:
        """Return what the model asks of the frames of clips: whole sections, where it is trained on these."""
        rule = self.pipeline.frames
        if rule is None or not self.has_sections:
            return rule
        window = options.latent_window_size
        stride = rule.stride // rule.latents_per_stride * window
        return replace(rule, stride=stride, latents_per_stride=window, least=stride + 1)

    @property
    def has_sections(self) -> bool:
        """Whether the model makes clips section by section, each of ``latent_window_size`` latent frames."""
        return "latent_window_size" in self.options.extra

    @property
    def text_images(self) -> TextImages:
        """The images that the text encoder reads together with a caption."""
        if not self.control.text_tokens_per_image:
            return "none"
        return "first frame" if self.control.text_reads_first_frame else "controls"

    @property
    def file_denoiser(self) -> str:
        """The denoiser that a single file has: of two experts, the one for low noise."""
        return self.pipeline.denoisers[-1]

    @property
    def components(self) -> tuple[str, ...]:
        """The subfolders of a complete model, apart from the scheduler's; all that can be loaded."""
        return (*self.pipeline.denoisers, *self.image_encoders, *self.text.components)

    @property
    def image_encoders(self) -> tuple[str, ...]:
        """The components that encode images and clips; without them training has to have cached latents."""
        return (*(("vae",) if self.pipeline.has_vae else ()), *self.pipeline.frame_encoders)
