"""The key names and file tensors of a model with an adapter, and a reference implementation of merging."""

from typing import Any

import torch
from torch import Tensor, nn

from library.adapters import injection
from library.adapters.component_key_names import ComponentKeys, list_module_names
from library.adapters.kohya_diffusers_comfyui_keys import FileFormat, convert_to_file_format
from library.adapters.module_adapter import group_by_module
from library.models.families import FAMILIES


def build_component_keys(model: nn.Module, family: Any = None) -> ComponentKeys:
    """The key names of a denoiser."""
    family = family or FAMILIES.get("sd1")
    return ComponentKeys(
        family.facts.denoiser_name,
        list_module_names(model),
        family.facts.lora.prefix,
        family.facts.lora.key_style,
        family.facts.lora.other_key_styles,
    )


def build_adapter_state(
    model: nn.Module, adapter: injection.Adapter, part: str = "unet"
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The state dict and alphas that ``convert_to_file_format`` takes."""
    state = {f"{part}.{name}": tensor for name, tensor in injection.get_adapter_state_dict(model).items()}
    return state, {f"{part}.{module}": alpha for module, alpha in adapter.alphas.items()}


def convert_adapter(
    model: nn.Module, adapter: injection.Adapter, form: FileFormat, family: Any = None
) -> dict[str, Tensor]:
    names = build_component_keys(model, family)
    return convert_to_file_format(*build_adapter_state(model, adapter, names.name), [names], form)[0]


def convert_adapter_to_kohya(model: nn.Module, adapter: injection.Adapter, family: Any = None) -> dict[str, Tensor]:
    return convert_adapter(model, adapter, "kohya", family)


@torch.no_grad()
def merge(pipe: Any, state: dict[str, Tensor], alphas: dict[str, float]) -> None:
    """Merge updates into the weights, by definition."""
    for name, update in group_by_module(state, alphas).items():
        part, _, module = name.partition(".")
        weight, tensors = getattr(pipe, part).get_submodule(module).weight, update.tensors
        if update.adapter_type in ("lora", "dora"):
            delta = tensors["up"].flatten(1) @ tensors["down"].flatten(1)
        elif update.adapter_type == "loha":
            delta = (tensors["hada_w1_a"] @ tensors["hada_w1_b"]) * (tensors["hada_w2_a"] @ tensors["hada_w2_b"])
        else:
            delta = torch.kron(tensors["lokr_w1"], tensors["lokr_w2_a"] @ tensors["lokr_w2_b"])
        changed = weight + update.scale * delta.reshape(weight.shape)
        if update.adapter_type == "dora":
            norm = changed.flatten(1).norm(dim=1)
            changed = changed * (tensors["magnitude"].flatten() / norm).view(-1, *[1] * (weight.dim() - 1))
        weight.copy_(changed)
