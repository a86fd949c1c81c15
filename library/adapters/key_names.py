"""Names of adapter weights: clean parameter names, and the names of each component's modules in LoRA files."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from .original_layouts import ORIGINAL_LAYOUTS, KeyMap, ModuleGroup, map_to_ldm_names

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


NO_KEY_MAP = KeyMap()
"""Modules have the same names in files."""


def build_key_map(modules: Iterable[str], key_style: str) -> KeyMap:
    """The names of all modules of a model in kohya files; for the style see ``Family.lora_key_style``."""
    if key_style in ORIGINAL_LAYOUTS:
        return KeyMap(layout=ORIGINAL_LAYOUTS[key_style])
    return KeyMap(_KEY_STYLES[key_style]([clean_parameter_name(name) for name in modules]))


def _keep_names(modules: Iterable[str]) -> Mapping[str, str]:
    return {name: name for name in modules}


def _add_text_model_prefix(modules: Iterable[str]) -> Mapping[str, str]:
    """Add the ``text_model.`` that ``CLIPTextModel`` of transformers 5 no longer has."""
    return {
        name: name if name.startswith(("text_model.", "text_projection")) else f"text_model.{name}" for name in modules
    }


_KEY_STYLES: Mapping[str, Callable[[Iterable[str]], Mapping[str, str]]] = {
    "diffusers": _keep_names,
    "ldm": map_to_ldm_names,
    "clip": _add_text_model_prefix,
    "t5": _keep_names,
}


def build_kohya_name(module: str, prefix: str) -> str:
    """``mid_block.attentions.0.proj_in`` -> ``lora_unet_mid_block_attentions_0_proj_in``."""
    return f"{prefix}_{module.replace('.', '_')}"


@dataclass(frozen=True)
class ComponentKeys:
    """A trainable component of a pipeline, and how LoRA files name its modules."""

    name: str
    """In the pipeline: ``unet``, ``transformer``, ``text_encoder``."""
    modules: tuple[str, ...]
    """Names of all modules, containers included."""
    key_prefix: str
    """Prefix of its keys in kohya files."""
    key_style: str = "diffusers"
    """How kohya files name the modules: see ``Family.lora_key_style``; ``clip`` or ``t5`` for text encoders."""
    other_key_styles: tuple[str, ...] = ()
    """Further key styles that are read."""

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        name: str,
        key_prefix: str,
        key_style: str = "diffusers",
        other_key_styles: tuple[str, ...] = (),
    ) -> "ComponentKeys":
        """Describe ``model``, wrapped or not, with or without an adapter."""
        adapters = tuple(f"{name}." for name, module in model.named_modules() if hasattr(module, "base_layer"))
        names = (name for name, _ in model.named_modules() if name and not name.startswith(adapters))
        modules = dict.fromkeys(clean_parameter_name(name) for name in names)
        return cls(name, tuple(modules), key_prefix, key_style, other_key_styles)

    @property
    def is_text_encoder(self) -> bool:
        return self.key_style in ("clip", "t5")

    def get_key_map(self, key_style: str | None = None) -> KeyMap:
        """The names of its modules in kohya files."""
        return build_key_map(self.modules, key_style or self.key_style)

    def iter_known_names(self) -> Iterator[tuple[str, ModuleGroup]]:
        """All names of its modules in the files of known programs, the usual ones first."""
        dotted, underscored = self._list_other_prefixes()
        for style in dict.fromkeys((self.key_style, *self.other_key_styles, "diffusers")):
            for group in self._group_modules(style):
                yield build_kohya_name(group.name, self.key_prefix), group
                for prefix in dotted:
                    yield f"{prefix}{group.name}", group
                for prefix in underscored:
                    yield build_kohya_name(group.name, prefix), group

    def _list_other_prefixes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Prefixes of other programs: for dotted names, and for names with underscores."""
        if not self.is_text_encoder:
            # Without prefix: files of a diffusers model's own save_lora_adapter, and of XLabs.
            plain = (f"{self.name}.", "diffusion_model.", "base_model.model.", "")
            return plain, ("lora_transformer", "lycoris", "oft_unet")
        number = self.name.removeprefix("text_encoder").strip("_") or "1"
        clients = ("t5xxl",) if self.key_style == "t5" else ("clip_l", "clip_h") if number == "1" else ("clip_g",)
        # OneTrainer numbers encoders, also where sd-scripts writes lora_te for one, or lora_te3 for FLUX.1's T5.
        dotted = (f"{self.name}.", *(f"text_encoders.{client}.transformer." for client in clients))
        return dotted, () if self.key_prefix == f"lora_te{number}" else (f"lora_te{number}",)

    def _group_modules(self, key_style: str) -> list[ModuleGroup]:
        key_map = self.get_key_map(key_style)
        containers = {name.rpartition(".")[0] for name in self.modules}
        layers = [name for name in self.modules if name not in containers]
        return key_map.group_modules(key_map.filter_known_modules(layers) if key_map.layout else layers)
