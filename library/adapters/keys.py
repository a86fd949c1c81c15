"""Names of LoRA weights: as modules carry them, as peft's states have them, and as files do."""

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..errors import UserError
from .fusing import Lora, fuse, split
from .layouts import LAYOUTS, Names
from .ldm_names import ldm_names

_ENDS = ("lora_down.weight", "lora_up.weight", "alpha")
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
    """Some versions of transformers have the layers of CLIP inside ``text_model``, and files always do."""
    return {name: name if name.startswith("text_model.") else f"text_model.{name}" for name in modules}


_STYLES: Mapping[str, Callable[[Iterable[str]], Mapping[str, str]]] = {
    "diffusers": _own_names,
    "ldm": ldm_names,
    "clip": _clip_names,
    "t5": _own_names,
}


def to_kohya(state: Mapping[str, Tensor], alpha: float, prefix: str, names: Names = SAME) -> dict[str, Tensor]:
    """A peft state as sd-scripts saves it, with the alpha of each module; tensors are on the CPU, in one piece.

    ``names`` are ``file_names``.
    """
    _refuse_stray(state)
    parts = {module: Lora(state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"], alpha)
             for module in _modules(state)}  # fmt: skip
    tensors = {}
    for group in names.groups(parts):
        whole = fuse([None if module is None else parts[module] for module in group.modules], group.original)
        start = kohya_name(group.name, prefix)
        if f"{start}.alpha" in tensors:
            raise ValueError("two modules have the same name in a kohya file")
        tensors[f"{start}.lora_down.weight"] = whole.down.detach().cpu().contiguous()
        tensors[f"{start}.lora_up.weight"] = whole.up.detach().cpu().contiguous()
        tensors[f"{start}.alpha"] = torch.tensor(float(whole.alpha))
    return tensors


def from_kohya(
    tensors: Mapping[str, Tensor], modules: Iterable[str], prefix: str, names: Names = SAME
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A kohya file's tensors as a peft state, and the alpha of each module.

    ``modules`` are the names in the model: a kohya name alone does not say which underscores were dots.
    """
    known = {kohya_name(group.name, prefix): group for group in names.groups(modules)}
    state: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    unknown = [key for key in tensors if key.partition(".")[0] not in known or key.partition(".")[2] not in _ENDS]
    for start in dict.fromkeys(key.partition(".")[0] for key in tensors if key not in unknown):
        down, up, alpha = (tensors.get(f"{start}.{end}") for end in _ENDS)
        if down is None or up is None:
            raise UserError(f"{start}: one of lora_down and lora_up is missing")
        whole = Lora(down, up, float(len(down) if alpha is None else alpha))
        for module, part in zip(known[start].modules, split(whole, known[start].original), strict=True):
            if module is not None:
                state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"] = part.down, part.up
                alphas[module] = part.alpha
            elif bool(part.up.any()):
                unknown.append(start)
    if unknown:
        raise UserError(f"{len(unknown)} of {len(tensors)} keys are none of this model's, for example {unknown[0]}")
    return state, alphas


def to_diffusers(state: Mapping[str, Tensor], alpha: float, part: str) -> dict[str, Tensor]:
    """A peft state with diffusers' names, ``part`` being the pipeline's: ``transformer.<module>.lora_A.weight``.

    Such files have no alpha; what it does is multiplied into ``lora_B``, which every loader understands.
    """
    _refuse_stray(state)
    tensors = {}
    for module in _modules(state):
        down, up = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"]
        # A copy of each: modules may share a matrix in memory, and a file has it once for each of them.
        tensors[f"{part}.{module}.lora_A.weight"] = down.detach().cpu().clone().contiguous()
        tensors[f"{part}.{module}.lora_B.weight"] = (up.detach().cpu() * (alpha / len(down))).contiguous()
    return tensors


def kohya_name(module: str, prefix: str) -> str:
    """``mid_block.attentions.0.proj_in`` -> ``lora_unet_mid_block_attentions_0_proj_in``."""
    return f"{prefix}_{module.replace('.', '_')}"


def _modules(state: Mapping[str, Tensor]) -> list[str]:
    """The modules in a state, in its order."""
    return list(dict.fromkeys(name.rsplit(".", 2)[0] for name in state))


def _refuse_stray(tensors: Mapping[str, Tensor]) -> None:
    if left := stray(tensors):
        raise ValueError(f"{len(left)} LoRA names are not clean, for example {left[0]}")
