"""Key names of adapter weights: clean parameter names, and those of each component's modules in all LoRA formats.

The keys of a file are written in ``kohya_diffusers_comfyui_keys``.

Names are looked up in a table of every name under which some program stores a module of this model.  They are not
rewritten by rules, since an underscore in a kohya name may stand for a dot or for an underscore.
"""

import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from .original_module_names import DIFFUSERS_KEYS, T5_KEYS, KeyMap, KeyStyle, ModuleGroup

_WRAPPER_NAMES = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "default"}
_WRAPPER_PATTERN = re.compile(rf"(?:^|[._])(?:module|{'|'.join(_WRAPPER_NAMES)})(?=[._])")


def clean_parameter_name(name: str) -> str:
    """Remove from a parameter name what wrappers (DDP, FSDP, compile) and peft add to it."""
    parts = [part for part in name.split(".") if part not in _WRAPPER_NAMES]
    while parts[0] == "module":  # only in front: models may have submodules of that name
        parts = parts[1:]
    return ".".join(parts)


def find_wrapper_names(names: Iterable[str]) -> list[str]:
    """The names that contain a wrapper's or peft's names, which no loader knows."""
    return [name for name in names if _WRAPPER_PATTERN.search(name)]


def build_key_map(modules: Iterable[str], key_style: KeyStyle) -> KeyMap:
    """The names of all modules of a model in kohya files."""
    if key_style.layout:
        return KeyMap(layout=key_style.layout)
    return KeyMap(key_style.rename([clean_parameter_name(name) for name in modules]))


def build_kohya_name(module: str, prefix: str) -> str:
    """Build a name such as ``lora_unet_mid_block_attentions_0_proj_in`` from ``mid_block.attentions.0.proj_in``."""
    return f"{prefix}_{module.replace('.', '_')}"


def list_module_names(model: nn.Module) -> tuple[str, ...]:
    """The names of all modules of a model, wrapped or not, without those of its adapter."""
    adapters = tuple(f"{name}." for name, module in model.named_modules() if hasattr(module, "base_layer"))
    names = (name for name, _ in model.named_modules() if name and not name.startswith(adapters))
    return tuple(dict.fromkeys(clean_parameter_name(name) for name in names))


@dataclass(frozen=True)
class ComponentKeys:
    """A trainable component of a pipeline, and how LoRA files name its modules."""

    name: str
    """The attribute of the pipeline that holds the component: ``unet``, ``transformer``, ``text_encoder``."""
    modules: tuple[str, ...]
    """Names of all modules, containers included."""
    key_prefix: str
    """The prefix of the component's keys in kohya files."""
    key_style: KeyStyle = DIFFUSERS_KEYS
    """How kohya files name the modules: see ``FamilyLora.key_style`` of the model family."""
    other_key_styles: tuple[KeyStyle, ...] = ()
    """Key styles that are read besides ``key_style``."""

    @property
    def is_text_encoder(self) -> bool:
        return self.key_style.is_text_encoder

    def get_key_map(self, key_style: KeyStyle | None = None) -> KeyMap:
        """The names of its modules in kohya files."""
        return build_key_map(self.modules, key_style or self.key_style)

    def use_comfyui_names(self) -> "ComponentKeys":
        """Return the component with the names of kohya files for ComfyUI."""
        return replace(self, key_style=self.key_style.comfyui_style or self.key_style)

    def has_comfyui_names(self, names: Iterable[str]) -> bool:
        """Whether some names of a kohya file are those that only ComfyUI has."""
        if self.key_style.comfyui_style is None:
            return False
        own, theirs = (
            {build_kohya_name(group.name, self.key_prefix) for group in self._group_modules(style)}
            for style in (self.key_style, self.key_style.comfyui_style)
        )
        return not (theirs - own).isdisjoint(names)

    def iter_known_names(self) -> Iterator[tuple[str, ModuleGroup]]:
        """All names of its modules in the files of known programs, the usual ones first."""
        dotted, underscored = self._list_other_prefixes()
        for style in self._list_key_styles():
            for group in self._group_modules(style):
                yield build_kohya_name(group.name, self.key_prefix), group
                for prefix in dotted:
                    yield f"{prefix}{group.name}", group
                for prefix in underscored:
                    yield build_kohya_name(group.name, prefix), group

    def list_written_names(self) -> frozenset[str]:
        """The names that sd-scripts, ComfyUI and diffusers write for its layers; other programs write more."""
        names = {f"{prefix}{module}" for module in self._list_layers() for prefix in (f"{self.name}.", "")}
        for style in filter(None, (self.key_style, self.key_style.comfyui_style)):
            for group in self._group_modules(style):
                dotted = self.name if self.is_text_encoder else "diffusion_model"
                names |= {build_kohya_name(group.name, self.key_prefix), f"{dotted}.{group.name}"}
        return frozenset(names)

    def list_written_groups(self, modules: Iterable[str]) -> frozenset[tuple[Hashable, ...]]:
        """List what decides the names of these modules in a new file; equal entries give equal names in all formats."""
        listed = list(modules)
        return frozenset(
            (self.name, self.key_prefix, *_list_naming_rules(style), group.name if self.is_text_encoder else group)
            for style in filter(None, (self.key_style, self.key_style.comfyui_style))
            for group in self.get_key_map(style).group_modules(listed)
        )

    def _list_key_styles(self) -> tuple[KeyStyle, ...]:
        styles = (self.key_style, *self.other_key_styles)
        return styles if any(style.keeps_names for style in styles) else (*styles, DIFFUSERS_KEYS)

    def _list_other_prefixes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Prefixes of other programs: for dotted names, and for names with underscores."""
        if not self.is_text_encoder:
            # Without prefix: files of a diffusers model's own save_lora_adapter, and of XLabs.
            plain = (f"{self.name}.", "diffusion_model.", "base_model.model.", "")
            return plain, ("lora_transformer", "lycoris", "oft_unet")
        number = self.name.removeprefix("text_encoder").strip("_") or "1"
        clients = ("t5xxl",) if self.key_style == T5_KEYS else ("clip_l", "clip_h") if number == "1" else ("clip_g",)
        # OneTrainer numbers encoders, also where sd-scripts writes lora_te for one, or lora_te3 for FLUX.1's T5.
        dotted = (f"{self.name}.", *(f"text_encoders.{client}.transformer." for client in clients))
        return dotted, () if self.key_prefix == f"lora_te{number}" else (f"lora_te{number}",)

    def _group_modules(self, key_style: KeyStyle) -> list[ModuleGroup]:
        key_map, layers = self.get_key_map(key_style), self._list_layers()
        return key_map.group_modules(key_map.filter_known_modules(layers) if key_map.layout else layers)

    def _list_layers(self) -> list[str]:
        containers = {name.rpartition(".")[0] for name in self.modules}
        return [name for name in self.modules if name not in containers]


def _list_naming_rules(style: KeyStyle) -> tuple[bool, ...]:
    """List what decides, besides the names, which prefix a file has and which layout ``comfy`` stands for."""
    return style.has_names_of_comfy, style.has_original_names_in_diffusers, style.is_kohya_in_comfyui
