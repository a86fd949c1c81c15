"""What LoRA files call the modules of a model, loaded or not."""

from typing import Any

from torch import nn

from ..adapters.keys import PartNames
from ..families.base import Family
from ..families.detect import Detected
from ..families.unloaded import unloaded


def parts_of(family: Family | type[Family], pipe: Any) -> list[PartNames]:
    """Those parts of a pipeline that are loaded and may be trained."""
    found = [(name, getattr(pipe, name, None)) for name in _names(family)]
    return [part_names(family, name, module) for name, module in found if isinstance(module, nn.Module)]


def models_of(family: type[Family], model: Detected) -> dict[str, nn.Module]:
    """The same parts of a model that is not loaded, without weights."""
    names = _names(family)
    pipe = unloaded(model, names)
    return {name: getattr(pipe, name) for name in names}


def _names(family: Family | type[Family]) -> tuple[str, ...]:
    return (family.denoiser, *family.text_lora_prefixes)


def part_names(family: Family | type[Family], name: str, model: nn.Module) -> PartNames:
    """Those of one part."""
    if name == family.denoiser:
        return PartNames.of(model, name, family.lora_prefix, family.lora_names, family.lora_other_names)
    return PartNames.of(model, name, family.text_lora_prefixes[name], family.text_style(name))
