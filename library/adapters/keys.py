"""Names of adapter weights: as modules carry them, and as files call the modules of each part of a pipeline."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from .layouts import LAYOUTS, Group, Names
from .ldm_names import ldm_names

_ADDED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "default"}
_STRAY = re.compile(rf"(?:^|[._])(?:module|{'|'.join(_ADDED)})(?=[._])")


def clean(name: str) -> str:
    """The name of a parameter without what wrappers (DDP, compile) and peft add to it."""
    parts = [part for part in name.split(".") if part not in _ADDED]
    while parts[0] == "module":  # only in front: a model may have a part of that name
        parts = parts[1:]
    return ".".join(parts)


def stray(names: Iterable[str]) -> list[str]:
    """The names in which something of a wrapper or of peft is left; no loader would know them."""
    return [name for name in names if _STRAY.search(name)]


SAME = Names()
"""Modules keep their names."""


def file_names(modules: Iterable[str], style: str) -> Names:
    """What kohya's files call a model's modules, trained or not; for the style see ``Family.lora_names``."""
    if style in LAYOUTS:
        return Names(layout=LAYOUTS[style])
    return Names(_STYLES[style]([clean(name) for name in modules]))


def _own_names(modules: Iterable[str]) -> Mapping[str, str]:
    return {name: name for name in modules}


def _clip_names(modules: Iterable[str]) -> Mapping[str, str]:
    """Names in files: with the ``text_model.`` that transformers 5 no longer has in ``CLIPTextModel``."""
    return {name: name if name.startswith(("text_model.", "text_projection")) else f"text_model.{name}"
            for name in modules}  # fmt: skip


_STYLES: Mapping[str, Callable[[Iterable[str]], Mapping[str, str]]] = {
    "diffusers": _own_names,
    "ldm": ldm_names,
    "clip": _clip_names,
    "t5": _own_names,
}


def kohya_name(module: str, prefix: str) -> str:
    """``mid_block.attentions.0.proj_in`` -> ``lora_unet_mid_block_attentions_0_proj_in``."""
    return f"{prefix}_{module.replace('.', '_')}"


@dataclass(frozen=True)
class PartNames:
    """A part of a pipeline in which something may be trained, and what files call its modules."""

    name: str
    """In the pipeline: ``unet``, ``transformer``, ``text_encoder``."""
    modules: tuple[str, ...]
    """All of them, by their names in the part, containers included."""
    prefix: str
    """What stands before them in a kohya file."""
    style: str = "diffusers"
    """What kohya files call them: see ``Family.lora_names``; ``clip`` and ``t5`` for text encoders."""
    others: tuple[str, ...] = ()
    """More styles in which files are met."""

    @classmethod
    def of(
        cls, model: nn.Module, name: str, prefix: str, style: str = "diffusers", others: tuple[str, ...] = ()
    ) -> "PartNames":
        """The part that ``model`` is, wrapped or not, with an adapter or without."""
        inside = tuple(f"{name}." for name, module in model.named_modules() if hasattr(module, "base_layer"))
        names = (clean(name) for name, _ in model.named_modules() if name and not name.startswith(inside))
        return cls(name, tuple(dict.fromkeys(names)), prefix, style, others)

    @property
    def is_text(self) -> bool:
        return self.style in ("clip", "t5")

    def names(self, style: str | None = None) -> Names:
        """What its modules are called."""
        return file_names(self.modules, style or self.style)

    def known_as(self) -> Iterator[tuple[str, Group]]:
        """Every name under which files are known to keep an original module, the usual ones first."""
        styles = dict.fromkeys((self.style, *self.others, "diffusers"))
        for style in styles:
            for group in self._groups(style):
                yield kohya_name(group.name, self.prefix), group
                for start in self._dotted:
                    yield f"{start}{group.name}", group
                for start in self._underscored:
                    yield kohya_name(group.name, start), group

    @property
    def _dotted(self) -> tuple[str, ...]:
        return (f"{self.name}.",) if self.is_text else (f"{self.name}.", "diffusion_model.", "base_model.model.")

    @property
    def _underscored(self) -> tuple[str, ...]:
        if self.is_text:  # with one text encoder, sd-scripts and others differ about the number
            return ("lora_te1",) if self.prefix == "lora_te" else ()
        return ("lora_transformer", "lycoris")

    def _groups(self, style: str) -> list[Group]:
        names = self.names(style)
        containers = {name.rpartition(".")[0] for name in self.modules}
        layers = [name for name in self.modules if name not in containers]
        return names.groups(names.known(layers) if names.layout else layers)
