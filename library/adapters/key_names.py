"""Names of adapter weights: as modules carry them, and as files call the modules of each part of a pipeline."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from .original_layouts import ORIGINAL_LAYOUTS, KeyMap, ModuleGroup, map_to_ldm_names

_WRAPPER_NAMES = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "default"}


_WRAPPER_PATTERN = re.compile(rf"(?:^|[._])(?:module|{'|'.join(_WRAPPER_NAMES)})(?=[._])")


def clean_parameter_name(name: str) -> str:
    """The name of a parameter without what wrappers (DDP, compile) and peft add to it."""
    parts = [part for part in name.split(".") if part not in _WRAPPER_NAMES]
    while parts[0] == "module":  # only in front: a model may have a part of that name
        parts = parts[1:]
    return ".".join(parts)


def find_wrapper_names(names: Iterable[str]) -> list[str]:
    """The names in which something of a wrapper or of peft is left; no loader would know them."""
    return [name for name in names if _WRAPPER_PATTERN.search(name)]


NO_KEY_MAP = KeyMap()
"""Modules keep their names."""


def build_key_map(modules: Iterable[str], key_style: str) -> KeyMap:
    """What kohya's files call a model's modules, trained or not; for the style see ``Family.lora_names``."""
    if key_style in ORIGINAL_LAYOUTS:
        return KeyMap(layout=ORIGINAL_LAYOUTS[key_style])
    return KeyMap(_KEY_STYLES[key_style]([clean_parameter_name(name) for name in modules]))


def _keep_names(modules: Iterable[str]) -> Mapping[str, str]:
    return {name: name for name in modules}


def _add_text_model_prefix(modules: Iterable[str]) -> Mapping[str, str]:
    """Names in files: with the ``text_model.`` that transformers 5 no longer has in ``CLIPTextModel``."""
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
    """A part of a pipeline in which something may be trained, and what files call its modules."""

    name: str
    """In the pipeline: ``unet``, ``transformer``, ``text_encoder``."""
    modules: tuple[str, ...]
    """All of them, by their names in the part, containers included."""
    key_prefix: str
    """What stands before them in a kohya file."""
    key_style: str = "diffusers"
    """What kohya files call them: see ``Family.lora_names``; ``clip`` and ``t5`` for text encoders."""
    other_key_styles: tuple[str, ...] = ()
    """More styles in which files are met."""

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        name: str,
        key_prefix: str,
        key_style: str = "diffusers",
        other_key_styles: tuple[str, ...] = (),
    ) -> "ComponentKeys":
        """The part that ``model`` is, wrapped or not, with an adapter or without."""
        inside = tuple(f"{name}." for name, module in model.named_modules() if hasattr(module, "base_layer"))
        names = (
            clean_parameter_name(name) for name, _ in model.named_modules() if name and not name.startswith(inside)
        )
        return cls(name, tuple(dict.fromkeys(names)), key_prefix, key_style, other_key_styles)

    @property
    def is_text_encoder(self) -> bool:
        return self.key_style in ("clip", "t5")

    def get_key_map(self, key_style: str | None = None) -> KeyMap:
        """What its modules are called."""
        return build_key_map(self.modules, key_style or self.key_style)

    def iter_known_names(self) -> Iterator[tuple[str, ModuleGroup]]:
        """Every name under which files are known to keep an original module, the usual ones first."""
        styles = dict.fromkeys((self.key_style, *self.other_key_styles, "diffusers"))
        for style in styles:
            for group in self._group_modules(style):
                yield build_kohya_name(group.name, self.key_prefix), group
                for start in self._dotted_prefixes:
                    yield f"{start}{group.name}", group
                for start in self._underscored_prefixes:
                    yield build_kohya_name(group.name, start), group

    @property
    def _dotted_prefixes(self) -> tuple[str, ...]:
        return (
            (f"{self.name}.",) if self.is_text_encoder else (f"{self.name}.", "diffusion_model.", "base_model.model.")
        )

    @property
    def _underscored_prefixes(self) -> tuple[str, ...]:
        if self.is_text_encoder:  # with one text encoder, sd-scripts and others differ about the number
            return ("lora_te1",) if self.key_prefix == "lora_te" else ()
        return ("lora_transformer", "lycoris")

    def _group_modules(self, key_style: str) -> list[ModuleGroup]:
        names = self.get_key_map(key_style)
        containers = {name.rpartition(".")[0] for name in self.modules}
        layers = [name for name in self.modules if name not in containers]
        return names.group_modules(names.filter_known_modules(layers) if names.layout else layers)
