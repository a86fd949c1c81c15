"""``KeyStyle``: the names of a component's modules in LoRA files, those of the original model and its fused modules.

sd-scripts names LoRA weights after the original modules, with one LoRA for a fused qkv.  The styles of one model family
only are in its file in ``models/families/``.  No torch here.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class OriginalModule:
    """A module of the original model; ``{}`` in names is the block index."""

    name: str
    diffusers_modules: tuple[str, ...]
    """The modules of diffusers that the original module became, in the order of their outputs."""
    output_ratios: tuple[int, ...] = (1, 1, 1)
    """Output features of each part, for fused modules, in units of which the inputs have ``input_ratio``."""
    input_ratio: int = 1
    swaps_scale_shift: bool = False
    """If it has two outputs per input, these are shift and scale, but scale and shift in diffusers."""
    swaps_halves: bool = False
    """Whether the module has the gate of a feed-forward layer before the values, which diffusers has after them."""


@dataclass(frozen=True)
class ModuleGroup:
    """A module of the original model and its trained parts; None for a part that is not trained."""

    name: str
    modules: tuple[str | None, ...]
    original: OriginalModule


def build_stream_modules(
    original: str, blocks: str, parts: Sequence[str], names: Sequence[str]
) -> tuple[OriginalModule, ...]:
    """The image or text stream of double-stream blocks: attention, its output, the MLP, and the modulation."""
    *attention, out, mlp_in, mlp_out, modulation = (f"{blocks}.{{}}.{part}" for part in parts)
    qkv, proj, first, second, original_modulation = (f"{original}{name}" for name in names)
    return (
        OriginalModule(qkv, tuple(attention)),
        OriginalModule(proj, (out,)),
        OriginalModule(first, (mlp_in,)),
        OriginalModule(second, (mlp_out,)),
        OriginalModule(original_modulation, (modulation,), swaps_scale_shift=True),
    )


IMAGE_STREAM = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2", "norm1.linear")

TEXT_STREAM = (
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    *("ff_context.net.0.proj", "ff_context.net.2", "norm1_context.linear"),
)


@dataclass(frozen=True)
class KeyMap:
    """The names of a model's modules in sd-scripts' files."""

    renames: Mapping[str, str] = field(default_factory=dict)
    """Names in files, by module, where they differ."""
    layout: tuple[OriginalModule, ...] = ()
    """The original modules, where diffusers has split some; used instead of ``renames``."""

    def group_modules(self, modules: Iterable[str]) -> list[ModuleGroup]:
        """Group modules by the original module that they are, or are parts of, in order of first occurrence."""
        if self.layout:
            return group_by_original_module(modules, self.layout)
        return [
            ModuleGroup(self.renames.get(module, module), (module,), OriginalModule(module, (module,)))
            for module in modules
        ]

    def filter_known_modules(self, modules: Iterable[str]) -> list[str]:
        """The modules that the layout lists."""
        patterns = {part for original in self.layout for part in original.diffusers_modules}
        return [module for module in modules if _split_block_index(module)[0] in patterns]


def group_by_original_module(modules: Iterable[str], layout: Sequence[OriginalModule]) -> list[ModuleGroup]:
    """Group diffusers modules by the original module that they are parts of."""
    positions = {
        part: (original, index) for original in layout for index, part in enumerate(original.diffusers_modules)
    }
    groups: dict[str, tuple[OriginalModule, list[str | None]]] = {}
    for module in modules:
        pattern, block = _split_block_index(module)
        if pattern not in positions:
            raise ValueError(f"{module} has no name in the files of sd-scripts")
        original, index = positions[pattern]
        name = original.name.format(block)
        groups.setdefault(name, (original, [None] * len(original.diffusers_modules)))[1][index] = module
    return [ModuleGroup(name, tuple(parts), original) for name, (original, parts) in groups.items()]


def _split_block_index(module: str) -> tuple[str, str]:
    """Split ``transformer_blocks.7.attn.to_q`` into ``transformer_blocks.{}.attn.to_q`` and ``7``."""
    first, _, rest = module.partition(".")
    number, _, end = rest.partition(".")
    if not number.isdigit():
        return module, ""
    return f"{first}.{{}}.{end}" if end else f"{first}.{{}}", number


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
    """Map the module names of a diffusers UNet to those of the original LDM code."""
    names = list(modules)
    block_names = dict(_find_ldm_block_names(names))
    return {name: _rename_to_ldm(name, block_names) for name in names}


def _find_ldm_block_names(modules: list[str]) -> Iterator[tuple[str, str]]:
    """Map resnets, attentions and samplers, such as ``down_blocks.1.attentions.0`` to ``input_blocks.4.1``."""
    units = {match[0] for name in modules if (match := re.match(r"(?:down|up)_blocks\.\d+\.\w+\.\d+(?=\.|$)", name))}
    resnets_per_block = {}
    for side in ("down", "up"):
        resnets = (name for name in units if name.startswith(f"{side}_blocks.") and ".resnets." in name)
        resnets_per_block[side] = 1 + max((int(name.split(".")[3]) for name in resnets), default=0)
    for name in units:
        side, block, unit_type, index = re.sub("_blocks", "", name).split(".")
        per_block = resnets_per_block[side]
        # LDM numbers layers consecutively; a downsampler is a layer of its own, an upsampler belongs to the last layer.
        if side == "down":
            layer = 1 + int(block) * (per_block + 1) + (per_block if unit_type == "downsamplers" else int(index))
            yield name, f"input_blocks.{layer}.{1 if unit_type == 'attentions' else 0}"
        else:
            layer = int(block) * per_block + (per_block - 1 if unit_type == "upsamplers" else int(index))
            has_attention = f"up_blocks.{block}.attentions.0" in units
            position = {"resnets": "0", "attentions": "1", "upsamplers": "2" if has_attention else "1"}[unit_type]
            yield name, f"output_blocks.{layer}.{position}"
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
        rest = _LDM_RESNET_NAMES.get(rest, rest)
    return f"{start}.{'op' if '.downsamplers.' in match[1] else rest}"


def keep_names(modules: Iterable[str]) -> Mapping[str, str]:
    """Names in files are those of the model."""
    return {name: name for name in modules}


def _add_text_model_prefix(modules: Iterable[str]) -> Mapping[str, str]:
    """Add the ``text_model.`` that ``CLIPTextModel`` of transformers 5 no longer has."""
    return {
        name: name if name.startswith(("text_model.", "text_projection")) else f"text_model.{name}" for name in modules
    }


@dataclass(frozen=True)
class KeyStyle:
    """The names of a component's modules in kohya files, and which of these files other programs read."""

    name: str
    layout: tuple[OriginalModule, ...] = ()
    """The modules of the original model, where diffusers has split some."""
    rename: Callable[[Iterable[str]], Mapping[str, str]] = keep_names
    """Maps module names to their names in files, if there is no layout."""
    is_text_encoder: bool = False
    is_read_by_diffusers: bool = True
    """Whether diffusers converts kohya files of this style."""
    is_comfy_format_in_diffusers: bool = True
    """Whether diffusers loads LoRA in ComfyUI's format, which has alphas."""
    is_comfy_format_alone_in_diffusers: bool = False
    """Whether diffusers loads LoRA in ComfyUI's format, though it converts no kohya files of this style."""
    has_original_names_in_diffusers: bool = False
    """Whether diffusers and ComfyUI both read the original names after ``diffusion_model.``, and ComfyUI no others."""
    diffusers_width: int | None = None
    """The only width of which diffusers splits the fused modules of a kohya file."""
    has_lokr_in_diffusers: bool = False
    """Whether diffusers loads LoKr in ComfyUI's format."""
    unread_in_diffusers: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What diffusers does not load of a LoRA file, by layout, where it loads other layouts whole."""
    unread_in_comfyui: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What ComfyUI does not load of a LoRA file, by layout."""
    comfyui_style: "KeyStyle | None" = None
    """The names of kohya files for ComfyUI, where it has others than sd-scripts."""

    @property
    def keeps_names(self) -> bool:
        """Whether modules have the same names in files."""
        return not self.layout and self.rename is keep_names

    @property
    def is_kohya_in_comfyui(self) -> bool:
        """Whether ComfyUI has the original model, and does not convert diffusers' names to its."""
        return "diffusers" in self.unread_in_comfyui

    @property
    def has_names_of_comfy(self) -> bool:
        """Whether files have names that ComfyUI and diffusers know with the prefix ``diffusion_model.``."""
        is_converted = bool(self.unread_in_comfyui) and not self.is_read_by_diffusers
        return (self.keeps_names and not is_converted) or self.has_original_names_in_diffusers


DIFFUSERS_KEYS = KeyStyle("diffusers")
DIFFUSERS_ONLY_KEYS = KeyStyle("diffusers_only", is_read_by_diffusers=False)
"""The names of diffusers, of a family whose LoRA diffusers loads in its own layout only."""
CONVERTED_BY_COMFYUI_KEYS = KeyStyle(
    "diffusers_only", is_read_by_diffusers=False, unread_in_comfyui={"kohya": "loads nothing of this layout"}
)
"""Names for a model that ComfyUI has in its original form: diffusers' names are converted, those of kohya files not."""
TRANSFORMER_LOADER_KEYS = replace(
    CONVERTED_BY_COMFYUI_KEYS,
    has_lokr_in_diffusers=True,
    unread_in_diffusers={"comfy": "ignores the alphas of this layout"},
)
"""``CONVERTED_BY_COMFYUI_KEYS`` for a pipeline without a LoRA loader in diffusers whose transformer has one."""
PEFT_LOADER_KEYS = replace(
    CONVERTED_BY_COMFYUI_KEYS,
    unread_in_diffusers=dict.fromkeys(
        ("kohya", "diffusers", "comfy"), "does not load LoRA of this transformer, which peft does"
    ),
)
"""``CONVERTED_BY_COMFYUI_KEYS`` for a transformer that diffusers loads no LoRA for."""

LDM_KEYS = KeyStyle("ldm", rename=map_to_ldm_names)
"""A UNet as in the original code of Stable Diffusion."""

CLIP_KEYS = KeyStyle("clip", rename=_add_text_model_prefix, is_text_encoder=True)
T5_KEYS = KeyStyle("t5", is_text_encoder=True)
