"""How the original programs name the modules of a model, and which of them diffusers has cut into several.

sd-scripts names LoRA weights after the original modules, and gives one LoRA to queries, keys and values together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Original:
    """One module of the original model; ``{}`` in names is the number of the block."""

    name: str
    parts: tuple[str, ...]
    """Its modules in diffusers, in the order of their outputs."""
    outputs: tuple[int, ...] = (1, 1, 1)
    """Outputs of each part as a multiple of the inputs; only looked at where there are several parts."""
    pair: bool = False
    """Its two outputs for each input, if it has no more, are shift and scale; in diffusers, scale and shift."""


@dataclass(frozen=True)
class Group:
    """One module of the original model and what is trained of it; None for a part that is not."""

    name: str
    modules: tuple[str | None, ...]
    original: Original


def _stream(original: str, blocks: str, parts: Sequence[str], names: Sequence[str]) -> tuple[Original, ...]:
    """One stream, of picture or text, in blocks with two: attention, its output, the MLP, and the modulation."""
    *attention, out, inner, outer, modulation = (f"{blocks}.{{}}.{part}" for part in parts)
    qkv, proj, first, second, modulating = (f"{original}{name}" for name in names)
    return (
        Original(qkv, tuple(attention)),
        Original(proj, (out,)),
        Original(first, (inner,)),
        Original(second, (outer,)),
        Original(modulating, (modulation,), pair=True),
    )


PICTURE = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2", "norm1.linear")
TEXT = (
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out", "ff_context.net.0.proj",
    "ff_context.net.2", "norm1_context.linear",
)  # fmt: skip
_FLUX_NAMES = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "mod.lin")
_SD3_NAMES = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")
_SINGLE = "single_transformer_blocks.{}"

FLUX: tuple[Original, ...] = (
    *_stream("double_blocks.{}.img_", "transformer_blocks", PICTURE, _FLUX_NAMES),
    *_stream("double_blocks.{}.txt_", "transformer_blocks", TEXT, _FLUX_NAMES),
    Original(
        "single_blocks.{}.linear1",
        tuple(f"{_SINGLE}.{part}" for part in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
        outputs=(1, 1, 1, 4),
    ),
    Original("single_blocks.{}.linear2", (f"{_SINGLE}.proj_out",)),
    Original("single_blocks.{}.modulation.lin", (f"{_SINGLE}.norm.linear",)),
    Original("img_in", ("x_embedder",)),
    Original("txt_in", ("context_embedder",)),
    Original("time_in.in_layer", ("time_text_embed.timestep_embedder.linear_1",)),
    Original("time_in.out_layer", ("time_text_embed.timestep_embedder.linear_2",)),
    Original("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
    Original("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
    Original("guidance_in.in_layer", ("time_text_embed.guidance_embedder.linear_1",)),
    Original("guidance_in.out_layer", ("time_text_embed.guidance_embedder.linear_2",)),
    Original("final_layer.adaLN_modulation.1", ("norm_out.linear",), pair=True),
    Original("final_layer.linear", ("proj_out",)),
)

SD3: tuple[Original, ...] = (
    *_stream("joint_blocks.{}.x_block.", "transformer_blocks", PICTURE, _SD3_NAMES),
    *_stream("joint_blocks.{}.context_block.", "transformer_blocks", TEXT, _SD3_NAMES),
    Original(
        "joint_blocks.{}.x_block.attn2.qkv",
        tuple(f"transformer_blocks.{{}}.attn2.{part}" for part in ("to_q", "to_k", "to_v")),
    ),
    Original("joint_blocks.{}.x_block.attn2.proj", ("transformer_blocks.{}.attn2.to_out.0",)),
    Original("x_embedder.proj", ("pos_embed.proj",)),
    Original("context_embedder", ("context_embedder",)),
    Original("t_embedder.mlp.0", ("time_text_embed.timestep_embedder.linear_1",)),
    Original("t_embedder.mlp.2", ("time_text_embed.timestep_embedder.linear_2",)),
    Original("y_embedder.mlp.0", ("time_text_embed.text_embedder.linear_1",)),
    Original("y_embedder.mlp.2", ("time_text_embed.text_embedder.linear_2",)),
    Original("final_layer.adaLN_modulation.1", ("norm_out.linear",), pair=True),
    Original("final_layer.linear", ("proj_out",)),
)

Z_IMAGE: tuple[Original, ...] = tuple(
    original
    for blocks in ("layers", "noise_refiner", "context_refiner")
    for original in (
        Original(
            f"{blocks}.{{}}.attention.qkv",
            tuple(f"{blocks}.{{}}.attention.{part}" for part in ("to_q", "to_k", "to_v")),
        ),
        Original(f"{blocks}.{{}}.attention.out", (f"{blocks}.{{}}.attention.to_out.0",)),
    )
)
"""What is called otherwise in the original Z-Image; everything else keeps its name."""

LAYOUTS: Mapping[str, tuple[Original, ...]] = {"flux": FLUX, "sd3": SD3, "z_image": Z_IMAGE}
"""Style of names -> the modules of the original model, where some of them are several in diffusers."""


@dataclass(frozen=True)
class Names:
    """What sd-scripts' files call the modules of a model."""

    single: Mapping[str, str] = field(default_factory=dict)
    """For modules that are the same in both; one that is not in it keeps its name."""
    layout: tuple[Original, ...] = ()
    """Or all original modules, where some are several."""

    def groups(self, modules: Iterable[str]) -> list[Group]:
        """The original modules that these modules are, or are parts of, in the order in which they are met."""
        if self.layout:
            return groups(modules, self.layout)
        return [Group(self.single.get(module, module), (module,), Original(module, (module,))) for module in modules]

    def known(self, modules: Iterable[str]) -> list[str]:
        """Those that have a name in the layout."""
        patterns = {part for original in self.layout for part in original.parts}
        return [module for module in modules if _abstract(module)[0] in patterns]


def groups(modules: Iterable[str], layout: Sequence[Original]) -> list[Group]:
    """The original modules that these modules are parts of."""
    places = {part: (original, number) for original in layout for number, part in enumerate(original.parts)}
    found: dict[str, tuple[Original, list[str | None]]] = {}
    for module in modules:
        pattern, block = _abstract(module)
        if pattern not in places:
            raise ValueError(f"{module} has no name in the files of sd-scripts")
        original, number = places[pattern]
        name = original.name.format(block)
        found.setdefault(name, (original, [None] * len(original.parts)))[1][number] = module
    return [Group(name, tuple(parts), original) for name, (original, parts) in found.items()]


def _abstract(module: str) -> tuple[str, str]:
    """``transformer_blocks.7.attn.to_q`` -> ``transformer_blocks.{}.attn.to_q`` and ``7``."""
    first, _, rest = module.partition(".")
    number, _, end = rest.partition(".")
    return (f"{first}.{{}}.{end}", number) if number.isdigit() else (module, "")
