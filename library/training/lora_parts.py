"""What LoRA files call the modules of a model, loaded or not."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..adapters.keys import PartNames
from ..families.base import Family
from ..families.configs import read_config
from ..families.empty import empty
from ..families.loading import class_of


def parts_of(family: Family | type[Family], pipe: Any) -> list[PartNames]:
    """Those parts of a pipeline that are loaded and may be trained."""
    found = [(name, getattr(pipe, name, None)) for name in _names(family)]
    return [part_names(family, name, module) for name, module in found if isinstance(module, nn.Module)]


def models_of_config(family: type[Family], config: str) -> Iterator[tuple[str, nn.Module]]:
    """The same parts of a shipped configuration, without weights."""
    data = read_config(config)
    for name in _names(family):
        settings = dict(data[f"{name}/config.json"])
        if "pos_embed_max_size" in settings:
            settings["pos_embed_max_size"] = 8  # a large grid of places is computed from it, and none is needed here
        yield name, empty(class_of(*data["model_index.json"][name]), settings)


def _names(family: Family | type[Family]) -> tuple[str, ...]:
    return (family.denoiser, *family.text_lora_prefixes)


def part_names(family: Family | type[Family], name: str, model: nn.Module) -> PartNames:
    """Those of one part."""
    if name == family.denoiser:
        return PartNames.of(model, name, family.lora_prefix, family.lora_names, family.lora_other_names)
    return PartNames.of(model, name, family.text_lora_prefixes[name], "clip")
