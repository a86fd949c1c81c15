"""The key names of each part of a pipeline that can have an adapter: the denoiser and the text encoders.

They map the modules of a loaded component to the keys of LoRA files: diffusers', sd-scripts' and ComfyUI's. Saving,
loading and converting LoRA files all use them.
"""

from typing import Any

from torch import nn

from ..adapters.component_keys import ComponentKeys, list_module_names
from .base import Family


def list_adaptable_components(family: Family | type[Family]) -> tuple[str, ...]:
    """List the denoiser and the text encoders of a family that LoRA files can hold layers of."""
    return (family.denoiser_name, *family.text_lora_prefixes)


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
    modules = list_module_names(model) if isinstance(model, nn.Module) else model
    if component == family.denoiser_name:
        styles = family.lora_key_style, family.lora_other_key_styles
        return ComponentKeys(component, modules, family.lora_prefix, *styles)
    return ComponentKeys(component, modules, family.text_lora_prefixes[component], family.get_text_key_style(component))
