"""LoRA files as sd-scripts, diffusers and ComfyUI write them, from the state of our adapters and back.

A state names each tensor ``<part>.<module>.lora_A.weight``, the part being the pipeline's own name for it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..config.save_rules import unwritable
from ..errors import UserError
from .folding import alpha_dtype_told, folded, told, unfolded
from .fusing import NotOneError, fuse, is_turned, split
from .keys import PartNames, kohya_name, stray
from .layouts import Group
from .updates import (
    ALPHA,
    COMFY,
    DIFFUSERS,
    DOWN,
    KOHYA,
    MAGNITUDE,
    STATE,
    UP,
    Update,
    named,
    part_of_name,
    updates_of,
)  # fmt: skip

Format = Literal["kohya", "diffusers", "comfy"]
Tensors = Mapping[str, Tensor]

_FOR_COMFY = "lora_transformer"
_OLD_ATTENTION = re.compile(r"\.to_(q|k|v|out)_lora\.")


@dataclass(frozen=True)
class Content:
    """What is in a LoRA file."""

    state: dict[str, Tensor]
    alphas: dict[str, float]
    """Of each module of the state, part included."""
    format: Format
    alpha_dtype: torch.dtype = torch.float32
    """How the file wrote its alphas."""


def usual_format(kinds: Iterable[str], family: Format) -> Format:
    """What most programs read for these kinds of updates; ``family`` is that for LoRA."""
    found = set(kinds)
    if found & {"oft", "boft"}:
        return "diffusers"
    return family if found <= {"lora"} else "comfy"


def to_file(state: Tensors, alphas: Mapping[str, float], parts: Sequence[PartNames], form: Format,
            alpha_dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, str]]:  # fmt: skip
    """The tensors of a file, on the CPU, each in one piece, and the metadata that is needed to undo it.

    Files of sd-scripts and ComfyUI hold alphas.  diffusers' do not: what alpha does is multiplied into the update.
    """
    if left := stray(state):
        raise ValueError(f"{len(left)} names of weights are not clean, for example {left[0]}")
    updates = {module: _on_cpu(update) for module, update in updates_of(state, alphas).items()}
    if problems := unwritable((update.kind for update in updates.values()), form):
        raise UserError("; ".join(problems))
    tensors: dict[str, Tensor] = {}
    for part in parts:
        start = f"{part.name}."
        own = {module.removeprefix(start): update for module, update in updates.items() if module.startswith(start)}
        for name, tensor in _written(own, part, form):
            if name in tensors:
                raise ValueError(f"two tensors are called {name} in the file")
            tensors[name] = tensor.to(alpha_dtype) if name.endswith(f".{ALPHA}") else tensor.contiguous()
    if strangers := [module for module in updates if not module.startswith(tuple(f"{part.name}." for part in parts))]:
        raise ValueError(f"{strangers[0]} is in no part that files can hold")
    # Modules may share a matrix in memory, and a file has it once for each of them.
    taken: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in taken:
            tensors[name] = tensor.clone()
        taken.add(tensor.data_ptr())
    return tensors, told(updates, alpha_dtype) if form == "diffusers" else {}


def _on_cpu(update: Update) -> Update:
    return Update({name: tensor.detach().cpu() for name, tensor in update.tensors.items()}, update.alpha)


def _written(own: Mapping[str, Update], part: PartNames, form: Format) -> Iterator[tuple[str, Tensor]]:
    """One part's updates as tensors of a file."""
    if form == "diffusers":
        names = part.names(part.style if part.is_text else "diffusers").single
        for module, update in own.items():
            yield from named(f"{part.name}.{names.get(module, module)}", folded(update), DIFFUSERS)
        for group in _turned_groups(own, part):
            turned = folded(fuse([own[str(group.modules[0])]], group.original))
            yield from named(kohya_name(str(group.modules[0]), _FOR_COMFY), turned, KOHYA)
    elif form == "comfy" and not part.is_text and part.name != "unet":
        apart = {str(group.modules[0]) for group in _turned_groups(own, part)}
        for module, update in own.items():
            if module not in apart:
                yield from _with_alpha(f"{part.name}.{module}", update, COMFY)
        yield from _as_kohya({module: own[module] for module in own if module in apart}, part)
    else:
        yield from _as_kohya(own, part)


def _turned_groups(own: Mapping[str, Update], part: PartNames) -> list[Group]:
    """Modules whose halves stand in another order than in the original.

    ComfyUI forgets it when it reads diffusers' names of them.  So it gets them by the original name, or, in a file for
    diffusers, which passes over it, by one that it reads after diffusers' own.
    """
    groups = part.names().groups(own) if part.names().layout else []
    return [group for group in groups if group.original.pair and is_turned(own[str(group.modules[0])], group.original)]


def _as_kohya(own: Mapping[str, Update], part: PartNames) -> Iterator[tuple[str, Tensor]]:
    for group in part.names().groups(own):
        try:
            whole = fuse([None if module is None else own[module] for module in group.modules], group.original)
        except NotOneError as error:
            raise UserError(f"{part.name}.{group.name}: {error}; take save_format comfy") from None
        yield from _with_alpha(kohya_name(group.name, part.prefix), whole, KOHYA)


def _with_alpha(name: str, update: Update, ends: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    if update.kind == "lokr" and update.rank == 1 and update.scale != 1:
        update = folded(update)  # loaders do not look at the alpha of two full matrices
    if update.kind == "dora":
        scale = update.tensors[MAGNITUDE].reshape(-1, *[1] * (update.tensors[DOWN].dim() - 1))
        update = Update({**update.tensors, MAGNITUDE: scale}, update.alpha)
    yield from named(name, update, ends)
    yield f"{name}.{ALPHA}", torch.tensor(float(update.alpha))


def from_file(tensors: Tensors, metadata: Mapping[str, str], parts: Sequence[PartNames]) -> Content:
    """What a file of any of these programs holds, for a model with these parts."""
    known = known_names(parts)
    found, unknown = _by_module(tensors, known)
    for name in [name for name in found if name.startswith(f"{_FOR_COMFY}_")]:
        part, group = known[name]
        if any(f"{part.name}.{module}" in found for module in group.modules):  # it is there for ComfyUI, once more
            del found[name]
    updates: dict[str, Update] = {}
    for name, whole in found.items():
        part, group = known[name]
        try:
            pieces = split(_update(name, whole), group.original)
        except NotOneError as error:
            raise UserError(f"{name}: {error}") from None
        for module, piece in zip(group.modules, pieces, strict=True):
            if piece is None:
                continue
            if module is None:
                unknown.append(name)
            elif f"{part.name}.{module}" in updates:
                raise UserError(f"{name}: the file holds {part.name}.{module} twice")
            else:
                updates[f"{part.name}.{module}"] = piece
    if unknown:
        raise UserError(f"{len(unknown)} of {len(tensors)} keys are none of this model's, for example {unknown[0]}")
    updates = unfolded(updates, metadata)
    state = {key: tensor for module, update in updates.items() for key, tensor in named(module, update, STATE)}
    written = {tensor.dtype for key, tensor in tensors.items() if key.endswith(f".{ALPHA}")}
    dtype = written.pop() if len(written) == 1 else alpha_dtype_told(metadata)
    return Content(state, {module: update.alpha for module, update in updates.items()}, format_of(tensors), dtype)


def known_names(parts: Iterable[PartNames]) -> dict[str, tuple[PartNames, Group]]:
    """What files call the modules of these parts."""
    known: dict[str, tuple[PartNames, Group]] = {}
    for part in parts:
        for name, group in part.known_as():
            known.setdefault(name, (part, group))
    return known


def format_of(tensors: Iterable[str]) -> Format:
    """Whose file has such keys."""
    modules = {named[0] for key in tensors if (named := part_of_name(modern(key))) is not None}
    if not any("." in module for module in modules):
        return "kohya"
    return "comfy" if any(key.endswith(f".{ALPHA}") for key in tensors) else "diffusers"


def modern(key: str) -> str:
    """A key of older diffusers versions as newer ones write it."""
    if ".processor." in key or "_lora." in key:
        key = key.replace(".processor.", ".")
        ends = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"} if ".self_attn." in key else {
            "q": "to_q", "k": "to_k", "v": "to_v", "out": "to_out.0"}  # fmt: skip
        return _OLD_ATTENTION.sub(lambda found: f".{ends[found[1]]}.lora.", key)
    return key


def _by_module(tensors: Tensors, known: Mapping[str, object]) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """The tensors by what the file calls a module and what they are; and the keys that are of no module."""
    found: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        place = part_of_name(modern(key))
        if place is None or place[0] not in known:
            unknown.append(key)
        else:
            found.setdefault(place[0], {})[place[1]] = tensor
    return found, unknown


def _update(name: str, whole: Tensors) -> Update:
    """One module's tensors as they stand in a file."""
    tensors = {key: tensor for key, tensor in whole.items() if key != ALPHA}
    update = Update(tensors, 0)
    if update.kind in ("lora", "dora"):
        if not {DOWN, UP} <= tensors.keys():
            raise UserError(f"{name}: one of lora_down and lora_up is missing")
        if update.kind == "dora":
            tensors[MAGNITUDE] = _magnitude(name, tensors)
    alpha = float(whole[ALPHA]) if ALPHA in whole else float(update.rank)
    if update.kind == "lokr" and {"lokr_w1", "lokr_w2"} <= tensors.keys():
        alpha = 1.0  # no loader looks at it
    return Update(tensors, alpha)


def _magnitude(name: str, tensors: Tensors) -> Tensor:
    """As in a model: one number for each output, along the second dimension where it is a convolution."""
    scale, outputs = tensors[MAGNITUDE], len(tensors[UP])
    if scale.numel() != outputs or (scale.dim() == 2 and scale.shape[0] != outputs):
        raise UserError(f"{name}: its dora_scale belongs to inputs, and only one for each output can be used")
    return scale.reshape(1, -1, 1, 1) if tensors[DOWN].dim() == 4 else scale.flatten()
