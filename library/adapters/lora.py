"""LoRA through peft: put into a model, found again in it, read out of it and back into it.

A state is a dict of tensors named by peft, without the adapter's own name: ``<module>.lora_A.weight`` (rank, in) and
``<module>.lora_B.weight`` (out, rank), with two more dimensions where the module is a convolution.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from ..config.schema import AdapterConfig
from ..errors import ConfigError
from ..randomness import seed_for
from .keys import clean
from .layouts import LAYOUTS, Group, groups

State = dict[str, Tensor]


@dataclass(frozen=True)
class Adapter:
    """What was put into a model."""

    rank: int
    alpha: float
    modules: tuple[str, ...]  # names of the modules that got a LoRA, in the model's own order


def inject(
    model: nn.Module,
    config: AdapterConfig,
    targets: Sequence[str],
    seed: int,
    style: str = "diffusers",
    idle: Sequence[str] = (),
) -> Adapter:
    """Freeze ``model`` and give a LoRA to each module whose name ends in one of ``targets``, but not to ``idle`` ones.

    Modules that are one in the original model share their down matrix, as when sd-scripts trains them; ``style`` is
    ``Family.lora_names``.  The start is a function of the seed and the module's name, so that every process makes the
    same one; the update is zero.  The new weights are float32 whatever the model is.
    """
    modules = tuple(name for name in matching(model, targets) if name not in idle)
    alpha = config.network_alpha or config.network_dim  # sd-scripts: 0 stands for the rank
    model.requires_grad_(False)
    # On the meta device peft draws no random numbers; the weights are made below.
    settings = LoraConfig(r=config.network_dim, lora_alpha=alpha, target_modules=list(modules))  # type: ignore[arg-type]
    inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    for name in modules:
        _start(model.get_submodule(name), name, seed)
    _share(model, groups(modules, LAYOUTS[style]) if style in LAYOUTS else ())
    return Adapter(config.network_dim, float(alpha), modules)


def matching(model: nn.Module, targets: Sequence[str]) -> tuple[str, ...]:
    """Names of the linear layers and convolutions that a target names; a target without any is an error."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    idle = [target for target in targets if not any(_ends(name, target) for name in names)]
    if idle or not targets:
        found = ", ".join(map(repr, idle)) or "no target"
        raise ConfigError([f"LoRA targets: {found} matches no layer of {type(model).__name__}"])
    return tuple(name for name in names if any(_ends(name, target) for target in targets))


def _ends(name: str, target: str) -> bool:
    """Whether the last parts of a name are those of a target, in which ``*`` is any one part."""
    parts, wanted = name.split("."), target.split(".")
    return len(parts) >= len(wanted) and all(
        want in ("*", part) for part, want in zip(parts[::-1], wanted[::-1], strict=False)
    )


def _start(layer: Any, name: str, seed: int) -> None:
    """Make the weights of one LoRA: down as nn.Linear makes its own, up zero."""
    down, up = layer.lora_A["default"], layer.lora_B["default"]
    for half in (down, up):
        half.float().to_empty(device=layer.base_layer.weight.device).requires_grad_(True)
    weight = torch.empty(down.weight.shape)
    generator = torch.Generator().manual_seed(seed_for(seed, f"lora/{name}"))
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    with torch.no_grad():
        down.weight.copy_(weight)
        up.weight.zero_()


def _share(model: nn.Module, found: Sequence[Group]) -> None:
    """One down matrix for all modules of a group."""
    for group in found:
        first, *others = (model.get_submodule(name) for name in group.modules if name is not None)
        for layer in others:
            layer.lora_A["default"] = first.lora_A["default"]  # type: ignore[index, operator]


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The LoRA weights of a model, wrapped or not, with their names in a state; a shared one under each name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_A." in name or ".lora_B." in name:
            yield clean(name), parameter


def state(model: nn.Module) -> State:
    """The LoRA weights as they are now; they share memory with the model, and shared ones are one tensor."""
    found = dict(parameters(model))
    once = {id(parameter): parameter.detach() for parameter in found.values()}
    return {name: once[id(parameter)] for name, parameter in found.items()}


def load_state(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Put weights into a model that has its LoRA; names and shapes must be the same."""
    own = state(model)
    wrong = [name for name in own.keys() & given.keys() if own[name].shape != given[name].shape]
    if own.keys() != given.keys() or wrong:
        examples = sorted({*(own.keys() ^ given.keys()), *wrong})[:3]
        raise ValueError(f"the LoRA weights do not fit the model, for example {', '.join(examples)}")
    for name, tensor in own.items():
        tensor.copy_(given[name])
    torn = [name for name, tensor in own.items() if not torch.equal(tensor, given[name].to(tensor))]
    if torn:
        raise ValueError(f"modules that share a matrix were given different ones, for example {torn[0]}")
