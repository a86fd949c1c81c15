"""How the original programs name the modules of a model, and which of them diffusers has cut into several.

sd-scripts names LoRA weights after the original modules, and gives one LoRA to queries, keys and values together.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OriginalModule:
    """One module of the original model; ``{}`` in names is the number of the block."""

    name: str
    diffusers_modules: tuple[str, ...]
    """Its modules in diffusers, in the order of their outputs."""
    output_ratios: tuple[int, ...] = (1, 1, 1)
    """Outputs of each part as a multiple of the inputs; only looked at where there are several parts."""
    swaps_scale_shift: bool = False
    """Its two outputs for each input, if it has no more, are shift and scale; in diffusers, scale and shift."""


@dataclass(frozen=True)
class ModuleGroup:
    """One module of the original model and what is trained of it; None for a part that is not."""

    name: str
    modules: tuple[str | None, ...]
    original: OriginalModule


def _build_stream(original: str, blocks: str, parts: Sequence[str], names: Sequence[str]) -> tuple[OriginalModule, ...]:
    """One stream, of picture or text, in blocks with two: attention, its output, the MLP, and the modulation."""
    *attention, out, inner, outer, modulation = (f"{blocks}.{{}}.{part}" for part in parts)
    qkv, proj, first, second, modulating = (f"{original}{name}" for name in names)
    return (
        OriginalModule(qkv, tuple(attention)),
        OriginalModule(proj, (out,)),
        OriginalModule(first, (inner,)),
        OriginalModule(second, (outer,)),
        OriginalModule(modulating, (modulation,), swaps_scale_shift=True),
    )


IMAGE_STREAM = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2", "norm1.linear")


TEXT_STREAM = (
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "ff_context.net.0.proj",
    "ff_context.net.2",
    "norm1_context.linear",
)


_FLUX_STREAM_NAMES = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "mod.lin")


_SD3_STREAM_NAMES = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")


_FLUX_SINGLE_BLOCK = "single_transformer_blocks.{}"


FLUX_LAYOUT: tuple[OriginalModule, ...] = (
    *_build_stream("double_blocks.{}.img_", "transformer_blocks", IMAGE_STREAM, _FLUX_STREAM_NAMES),
    *_build_stream("double_blocks.{}.txt_", "transformer_blocks", TEXT_STREAM, _FLUX_STREAM_NAMES),
    OriginalModule(
        "single_blocks.{}.linear1",
        tuple(f"{_FLUX_SINGLE_BLOCK}.{part}" for part in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
        output_ratios=(1, 1, 1, 4),
    ),
    OriginalModule("single_blocks.{}.linear2", (f"{_FLUX_SINGLE_BLOCK}.proj_out",)),
    OriginalModule("single_blocks.{}.modulation.lin", (f"{_FLUX_SINGLE_BLOCK}.norm.linear",)),
    OriginalModule("img_in", ("x_embedder",)),
    OriginalModule("txt_in", ("context_embedder",)),
    OriginalModule("time_in.in_layer", ("time_text_embed.timestep_embedder.linear_1",)),
    OriginalModule("time_in.out_layer", ("time_text_embed.timestep_embedder.linear_2",)),
    OriginalModule("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
    OriginalModule("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
    OriginalModule("guidance_in.in_layer", ("time_text_embed.guidance_embedder.linear_1",)),
    OriginalModule("guidance_in.out_layer", ("time_text_embed.guidance_embedder.linear_2",)),
    OriginalModule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swaps_scale_shift=True),
    OriginalModule("final_layer.linear", ("proj_out",)),
)


SD3_LAYOUT: tuple[OriginalModule, ...] = (
    *_build_stream("joint_blocks.{}.x_block.", "transformer_blocks", IMAGE_STREAM, _SD3_STREAM_NAMES),
    *_build_stream("joint_blocks.{}.context_block.", "transformer_blocks", TEXT_STREAM, _SD3_STREAM_NAMES),
    OriginalModule(
        "joint_blocks.{}.x_block.attn2.qkv",
        tuple(f"transformer_blocks.{{}}.attn2.{part}" for part in ("to_q", "to_k", "to_v")),
    ),
    OriginalModule("joint_blocks.{}.x_block.attn2.proj", ("transformer_blocks.{}.attn2.to_out.0",)),
    OriginalModule("x_embedder.proj", ("pos_embed.proj",)),
    OriginalModule("context_embedder", ("context_embedder",)),
    OriginalModule("t_embedder.mlp.0", ("time_text_embed.timestep_embedder.linear_1",)),
    OriginalModule("t_embedder.mlp.2", ("time_text_embed.timestep_embedder.linear_2",)),
    OriginalModule("y_embedder.mlp.0", ("time_text_embed.text_embedder.linear_1",)),
    OriginalModule("y_embedder.mlp.2", ("time_text_embed.text_embedder.linear_2",)),
    OriginalModule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swaps_scale_shift=True),
    OriginalModule("final_layer.linear", ("proj_out",)),
)


Z_IMAGE_LAYOUT: tuple[OriginalModule, ...] = tuple(
    original
    for blocks in ("layers", "noise_refiner", "context_refiner")
    for original in (
        OriginalModule(
            f"{blocks}.{{}}.attention.qkv",
            tuple(f"{blocks}.{{}}.attention.{part}" for part in ("to_q", "to_k", "to_v")),
        ),
        OriginalModule(f"{blocks}.{{}}.attention.out", (f"{blocks}.{{}}.attention.to_out.0",)),
    )
)
"""What is called otherwise in the original Z-Image; everything else keeps its name."""


ORIGINAL_LAYOUTS: Mapping[str, tuple[OriginalModule, ...]] = {
    "flux": FLUX_LAYOUT,
    "sd3": SD3_LAYOUT,
    "z_image": Z_IMAGE_LAYOUT,
}
"""Style of names -> the modules of the original model, where some of them are several in diffusers."""


@dataclass(frozen=True)
class KeyMap:
    """What sd-scripts' files call the modules of a model."""

    renames: Mapping[str, str] = field(default_factory=dict)
    """For modules that are the same in both; one that is not in it keeps its name."""
    layout: tuple[OriginalModule, ...] = ()
    """Or all original modules, where some are several."""

    def group_modules(self, modules: Iterable[str]) -> list[ModuleGroup]:
        """The original modules that these modules are, or are parts of, in the order in which they are met."""
        if self.layout:
            return group_by_original_module(modules, self.layout)
        return [
            ModuleGroup(self.renames.get(module, module), (module,), OriginalModule(module, (module,)))
            for module in modules
        ]

    def filter_known_modules(self, modules: Iterable[str]) -> list[str]:
        """Those that have a name in the layout."""
        patterns = {part for original in self.layout for part in original.diffusers_modules}
        return [module for module in modules if _split_block_index(module)[0] in patterns]


def group_by_original_module(modules: Iterable[str], layout: Sequence[OriginalModule]) -> list[ModuleGroup]:
    """The original modules that these modules are parts of."""
    places = {part: (original, number) for original in layout for number, part in enumerate(original.diffusers_modules)}
    found: dict[str, tuple[OriginalModule, list[str | None]]] = {}
    for module in modules:
        pattern, block = _split_block_index(module)
        if pattern not in places:
            raise ValueError(f"{module} has no name in the files of sd-scripts")
        original, number = places[pattern]
        name = original.name.format(block)
        found.setdefault(name, (original, [None] * len(original.diffusers_modules)))[1][number] = module
    return [ModuleGroup(name, tuple(parts), original) for name, (original, parts) in found.items()]


def _split_block_index(module: str) -> tuple[str, str]:
    """``transformer_blocks.7.attn.to_q`` -> ``transformer_blocks.{}.attn.to_q`` and ``7``."""
    first, _, rest = module.partition(".")
    number, _, end = rest.partition(".")
    return (f"{first}.{{}}.{end}", number) if number.isdigit() else (module, "")


_LDM_RESNET_NAMES = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


_LDM_OUTER_NAMES = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}


def map_to_ldm_names(modules: Iterable[str]) -> Mapping[str, str]:
    """Names of all modules of a diffusers UNet -> the original names; what is not in a block keeps its own."""
    known = list(modules)
    places = dict(_find_ldm_block_names(known))
    return {name: _rename_to_ldm(name, places) for name in known}


def _find_ldm_block_names(modules: list[str]) -> Iterator[tuple[str, str]]:
    """Where each resnet, attention and sampler stands: ``down_blocks.1.attentions.0`` -> ``input_blocks.4.1``."""
    found = {match[0] for name in modules if (match := re.match(r"(?:down|up)_blocks\.\d+\.\w+\.\d+(?=\.|$)", name))}
    per_block = {
        side: 1
        + max(
            (int(name.split(".")[3]) for name in found if name.startswith(f"{side}_blocks.") and ".resnets." in name),
            default=0,
        )
        for side in ("down", "up")
    }
    for name in found:
        side, block, kind, number = re.sub("_blocks", "", name).split(".")
        # The original counts layer after layer; a sampler is a layer of its own going down, and a part of one going up.
        if side == "down":
            first = 1 + int(block) * (per_block["down"] + 1)
            at, inner = (first + int(number), "1" if kind == "attentions" else "0")
            if kind == "downsamplers":
                at = first + per_block["down"]
            yield name, f"input_blocks.{at}.{inner}"
        else:
            at = int(block) * per_block["up"] + (per_block["up"] - 1 if kind == "upsamplers" else int(number))
            has_attention = f"up_blocks.{block}.attentions.0" in found
            inner = {"resnets": "0", "attentions": "1", "upsamplers": "2" if has_attention else "1"}[kind]
            yield name, f"output_blocks.{at}.{inner}"
    yield from (
        ("mid_block.resnets.0", "middle_block.0"),
        ("mid_block.attentions.0", "middle_block.1"),
        ("mid_block.resnets.1", "middle_block.2"),
    )


def _rename_to_ldm(name: str, block_names: Mapping[str, str]) -> str:
    if name in _LDM_OUTER_NAMES:
        return _LDM_OUTER_NAMES[name]
    match = re.match(r"((?:(?:down|up)_blocks\.\d+|mid_block)\.\w+\.\d+)(?:\.(.*))?$", name)
    if match is None or match[1] not in block_names:
        return name
    start, rest = block_names[match[1]], match[2]
    if rest is None:
        return start
    if ".resnets." in match[1]:
        return f"{start}.{_LDM_RESNET_NAMES.get(rest, rest)}"
    if ".downsamplers." in match[1]:
        return f"{start}.op"
    return f"{start}.{rest}"
