"""Names of LoRA weights: as modules carry them, as peft's states have them, and as kohya's files do."""

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ..errors import UserError
from .ldm_names import ldm_names

_HALVES = {"lora_A": "lora_down", "lora_B": "lora_up"}
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


def file_names(modules: Iterable[str], style: str) -> Mapping[str, str]:
    """Names of a model's modules, trained or not -> what kohya's files call them; see ``Family.lora_names``."""
    return _STYLES[style]([clean(name) for name in modules])


def _own_names(modules: Iterable[str]) -> Mapping[str, str]:
    return {name: name for name in modules}


def _clip_names(modules: Iterable[str]) -> Mapping[str, str]:
    """Some versions of transformers have the layers of CLIP inside ``text_model``, and files always do."""
    return {name: name if name.startswith("text_model.") else f"text_model.{name}" for name in modules}


_STYLES: Mapping[str, Callable[[Iterable[str]], Mapping[str, str]]] = {
    "diffusers": _own_names,
    "ldm": ldm_names,
    "clip": _clip_names,
}

_SAME: Mapping[str, str] = MappingProxyType({})


def to_kohya(
    state: Mapping[str, Tensor], alpha: float, prefix: str, names: Mapping[str, str] = _SAME
) -> dict[str, Tensor]:
    """A peft state as sd-scripts saves it, with the alpha of each module; tensors are on the CPU, in one piece.

    ``names`` are ``file_names``; a module that is not in it keeps its own.
    """
    tensors = {}
    for name, tensor in state.items():
        module, half, _ = name.rsplit(".", 2)
        start = kohya_name(names.get(module, module), prefix)
        tensors[f"{start}.{_HALVES[half]}.weight"] = tensor.detach().cpu().contiguous()
        tensors[f"{start}.alpha"] = torch.tensor(float(alpha))
    if left := stray(tensors):
        raise ValueError(f"{len(left)} LoRA names are not clean, for example {left[0]}")
    if len(tensors) * 2 != len(state) * 3:
        raise ValueError("two modules have the same name in a kohya file")
    return tensors


def from_kohya(
    tensors: Mapping[str, Tensor], modules: Iterable[str], prefix: str, names: Mapping[str, str] = _SAME
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A kohya file's tensors as a peft state, and the alpha of each module that has one.

    ``modules`` are the names in the model: a kohya name alone does not say which underscores were dots.
    """
    known = {kohya_name(names.get(module, module), prefix): module for module in modules}
    halves = {f"{down}.weight": f"{half}.weight" for half, down in _HALVES.items()}
    state, alphas, unknown = {}, {}, []
    for key, tensor in tensors.items():
        start, _, end = key.partition(".")
        if start in known and end in halves:
            state[f"{known[start]}.{halves[end]}"] = tensor
        elif start in known and end == "alpha":
            alphas[known[start]] = float(tensor)
        else:
            unknown.append(key)
    if unknown:
        raise UserError(f"{len(unknown)} of {len(tensors)} keys are none of this model's, for example {unknown[0]}")
    return state, alphas


def kohya_name(module: str, prefix: str) -> str:
    """``mid_block.attentions.0.proj_in`` -> ``lora_unet_mid_block_attentions_0_proj_in``."""
    return f"{prefix}_{module.replace('.', '_')}"
