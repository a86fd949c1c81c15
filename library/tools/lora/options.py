"""The options of ``python -m library lora``, for each command."""

from dataclasses import dataclass, field
from typing import Literal

from ...config.option_needs import AnyOf, HasValue, IsSet, IsUnset
from ...config.options import define_option

RULES = ("sv_ratio", "sv_fro", "sv_cumulative", "energy", "threshold")
"""The options of ``RankOptions`` that choose a rank for each layer."""

_NO_MODEL = (IsUnset("model"),)
"""Merging into a model is exact, and writes no LoRA file."""


@dataclass(frozen=True)
class InspectOptions:
    """``lora inspect``."""

    layers: bool = define_option(False, "list every layer with type, rank, alpha and update norm")
    json: bool = define_option(False, "print JSON")


@dataclass(frozen=True)
class OutputOptions:
    """What all commands that write a file have."""

    output: str | None = define_option(None, "the file to write (for a model folder: the folder)")
    overwrite: bool = define_option(False, "replace the output if it exists", needs=(IsSet("output"),))


@dataclass(frozen=True)
class ModelFamilyOptions:
    """What all commands that read LoRA files have, except ``metadata``."""

    family: str | None = define_option(
        None, "model family of the files, where names and sizes of their layers fit several (default: detected)"
    )


@dataclass(frozen=True)
class FormatOptions:
    """What all commands that write a LoRA file have."""

    to: Literal["kohya", "diffusers", "comfy"] | None = define_option(
        None, "key names of the file (default: those of the first input)", needs=_NO_MODEL
    )
    save_precision: Literal["float", "fp16", "bf16"] | None = define_option(
        None, "type of the weights in the file (default: the widest of the inputs)"
    )


@dataclass(frozen=True)
class RankOptions:
    """How ranks are chosen."""

    rank: int | None = define_option(
        None, "rank of every layer; with a rule below: at most this rank", minimum=1, needs=_NO_MODEL
    )
    conv_rank: int | None = define_option(
        None,
        "the same for convolutions (default: as --rank)",
        minimum=1,
        needs=(*_NO_MODEL, AnyOf(tuple(map(IsSet, ("rank", *RULES))), "rank is not set")),
    )
    sv_ratio: float | None = define_option(
        None, "keep singular values above the largest / N, as sd-scripts' resize_lora", minimum=1.0, needs=_NO_MODEL
    )
    sv_fro: float | None = define_option(
        None,
        "keep this share of the Frobenius norm, 0 to 1, as sd-scripts' resize_lora",
        minimum=0.0,
        maximum=1.0,
        needs=_NO_MODEL,
    )
    sv_cumulative: float | None = define_option(
        None,
        "keep this share of the sum of singular values, as sd-scripts' resize_lora",
        minimum=0.0,
        maximum=1.0,
        needs=_NO_MODEL,
    )
    energy: float | None = define_option(
        None,
        "keep this share of the sum of squares of singular values, with the smallest rank",
        minimum=0.0,
        maximum=1.0,
        needs=_NO_MODEL,
    )
    threshold: float | None = define_option(None, "keep singular values above this value", minimum=0.0, needs=_NO_MODEL)


@dataclass(frozen=True)
class MergeOptions:
    """``lora merge``."""

    weights: tuple[float, ...] = define_option(
        (),
        "weight of each file (default: 1 each)",
        needs=(
            AnyOf(
                (IsUnset("denoiser_weights"), IsUnset("text_encoder_weights")),
                "denoiser_weights and text_encoder_weights are set",
            ),
        ),
    )
    denoiser_weights: tuple[float, ...] = define_option((), "weight of each file for the U-Net or transformer")
    text_encoder_weights: tuple[float, ...] = define_option((), "weight of each file for the text encoders")
    blocks: tuple[str, ...] = define_option(
        (),
        "factors by block: NAME=FACTOR,... or a list of 12, 17, 20 or 26 block weights; 2:NAME=FACTOR for file 2 only",
    )
    method: Literal["concat", "svd"] | None = define_option(
        None,
        "concat: exact, ranks add up (default without a rank); svd: to the rank of --rank or a rule",
        needs=_NO_MODEL,
    )
    model: str | None = define_option(None, "merge into this model: a diffusers folder or a .safetensors file")
    math: Literal["float32", "float64"] = define_option(
        "float32",
        "precision of the computation with --model",
        needs=(IsSet("model", "LoRA files are merged in float64"),),
    )


@dataclass(frozen=True)
class ExtractOptions:
    """``lora extract``."""

    type: Literal["lora", "dora", "lokr", "loha", "oft"] = define_option("lora", "adapter type: lora, dora or lokr")
    factor: int = define_option(
        8,
        "lokr: the size of the first factor, reduced where it does not divide a layer",
        minimum=1,
        needs=(HasValue("type", ("lokr",)),),
    )
    layers: Literal["usual", "all"] = define_option(
        "usual",
        "usual: the layers that a LoRA of this family has, and convolutions; all: every linear layer and convolution",
    )
    no_conv: bool = define_option(False, "leave out convolutions with a kernel, as sd-scripts without --conv_dim")
    min_difference: float = define_option(
        0.0, "leave out a component whose weights differ by no more than this (sd-scripts: 0.01)", minimum=0.0
    )
    math: Literal["float32", "float64"] = define_option("float32", "precision of the computation")
    device: str | None = define_option(None, "device of the computation (default: the processor)")
    show_layers: bool = define_option(False, "print the error of every layer")


@dataclass(frozen=True)
class ResizeOptions:
    """``lora resize``."""

    show_layers: bool = define_option(False, "print the error of every layer")


@dataclass(frozen=True)
class BlockOptions:
    """``lora scale`` and ``lora prune``."""

    blocks: tuple[str, ...] = define_option(
        (), "scale: NAME=FACTOR,... or a list of block weights; prune: the NAMEs to remove"
    )
    keep: tuple[str, ...] = define_option((), "prune: remove all but these NAMEs")


@dataclass(frozen=True)
class MetadataOptions:
    """``lora metadata``."""

    set: tuple[str, ...] = define_option((), "KEY=VALUE pairs to set; title=... is short for modelspec.title=...")
    remove: tuple[str, ...] = define_option((), "keys to remove; ss_* and other patterns with * are allowed")
    json: bool = define_option(
        False, "print JSON", needs=(IsUnset("set", "a file is written"), IsUnset("remove", "a file is written"))
    )


@dataclass(frozen=True)
class InspectArguments:
    """All options of ``inspect``."""

    inspect: InspectOptions = field(default_factory=InspectOptions)
    family: ModelFamilyOptions = field(default_factory=ModelFamilyOptions)


@dataclass(frozen=True)
class MergeArguments:
    """All options of ``merge``."""

    merge: MergeOptions = field(default_factory=MergeOptions)
    family: ModelFamilyOptions = field(default_factory=ModelFamilyOptions)
    ranks: RankOptions = field(default_factory=RankOptions)
    format: FormatOptions = field(default_factory=FormatOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@dataclass(frozen=True)
class ExtractArguments:
    """All options of ``extract``."""

    extract: ExtractOptions = field(default_factory=ExtractOptions)
    ranks: RankOptions = field(default_factory=RankOptions)
    format: FormatOptions = field(default_factory=FormatOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@dataclass(frozen=True)
class ResizeArguments:
    """All options of ``resize``."""

    resize: ResizeOptions = field(default_factory=ResizeOptions)
    family: ModelFamilyOptions = field(default_factory=ModelFamilyOptions)
    ranks: RankOptions = field(default_factory=RankOptions)
    format: FormatOptions = field(default_factory=FormatOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@dataclass(frozen=True)
class BlockArguments:
    """All options of ``scale`` and ``prune``."""

    blocks: BlockOptions = field(default_factory=BlockOptions)
    family: ModelFamilyOptions = field(default_factory=ModelFamilyOptions)
    format: FormatOptions = field(default_factory=FormatOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@dataclass(frozen=True)
class MetadataArguments:
    """All options of ``metadata``."""

    metadata: MetadataOptions = field(default_factory=MetadataOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
