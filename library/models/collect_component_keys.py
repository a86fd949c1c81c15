"""The key names of each part of a pipeline that can have an adapter: the denoiser and the text encoders.

They map the modules of a loaded component to the keys of LoRA files: diffusers', sd-scripts' and ComfyUI's. Saving,
loading and converting LoRA files all use them.
"""

from typing import Any

from torch import nn

from ..adapters.component_key_names import ComponentKeys, list_module_names
from .base import Family


def list_adaptable_components(family: Family | type[Family]) -> tuple[str, ...]:
    """List the denoiser and the text encoders of a family that LoRA files can hold layers of."""
    return (family.facts.denoiser_name, *family.facts.lora.text_encoders)


def collect_component_keys(family: Family | type[Family], pipe: Any) -> list[ComponentKeys]:
    """Collect the key names of every adaptable component that is loaded.

    Components that were freed after caching are left out: nothing of theirs is saved.
    """
    components = [(name, getattr(pipe, name, None)) for name in list_adaptable_components(family)]
    return [build_component_keys(family, name, module) for name, module in components if isinstance(module, nn.Module)]


def build_component_keys(
    family: Family | type[Family], component: str, model: nn.Module | tuple[str, ...]
) -> ComponentKeys:
    """Build the key names of one component: those of diffusers, sd-scripts and ComfyUI for each of its modules.

    ``model`` is the component, wrapped or not, with or without an adapter, or the names of its modules.
    """
    modules, lora = list_module_names(model) if isinstance(model, nn.Module) else model, family.facts.lora
    if component == family.facts.denoiser_name:
        return ComponentKeys(component, modules, lora.prefix, lora.key_style, lora.other_key_styles)
    encoder = lora.text_encoders[component]
    return ComponentKeys(component, modules, encoder.prefix, encoder.key_style)
