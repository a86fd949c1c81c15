"""What LoRA files call the modules of a model, loaded or not."""

from typing import Any

from torch import nn

from ..adapters.keys import ComponentKeys
from ..families.base import Family
from ..families.detect import DetectedModel
from ..families.unloaded import load_components_on_meta


def collect_component_keys(family: Family | type[Family], pipe: Any) -> list[ComponentKeys]:
    """Those parts of a pipeline that are loaded and may be trained."""
    found = [(name, getattr(pipe, name, None)) for name in _list_adaptable_components(family)]
    return [build_component_keys(family, name, module) for name, module in found if isinstance(module, nn.Module)]


def load_meta_components(family: type[Family], detected: DetectedModel) -> dict[str, nn.Module]:
    """The same parts of a model that is not loaded, without weights."""
    names = _list_adaptable_components(family)
    pipe = load_components_on_meta(detected, names)
    return {name: getattr(pipe, name) for name in names}


def _list_adaptable_components(family: Family | type[Family]) -> tuple[str, ...]:
    return (family.denoiser_name, *family.text_lora_prefixes)


def build_component_keys(family: Family | type[Family], component: str, model: nn.Module) -> ComponentKeys:
    """Those of one part."""
    if component == family.denoiser_name:
        return ComponentKeys.from_model(model, component, family.lora_prefix, family.lora_key_style, family.lora_other_key_styles)
    return ComponentKeys.from_model(model, component, family.text_lora_prefixes[component], family.get_text_key_style(component))
