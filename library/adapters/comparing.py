"""Whether a file does in each layer what the adapter in memory does there."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from . import lora
from .formats import AdapterFileContents
from .updates import PEFT_SUFFIXES, UP

UPDATE_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""How far the update of a layer may be off, as a share of itself, in a file of this precision."""


@torch.no_grad()
def compare_file_with_model(model: nn.Module, contents: AdapterFileContents, alphas: Mapping[str, float]) -> Iterator[str]:
    """Run each layer on one input, with the weights in memory and with those of the file; say where they differ.

    ``trained`` holds the parts of the pipeline as its children, not in training; it is afterwards as it was.
    """
    parameters = {name: parameter for name, parameter in lora.iter_adapter_parameters(model)}
    ups = {module: parameters.get(f"{module}.{PEFT_SUFFIXES[UP]}") for module in alphas}
    for module in sorted(alphas.keys() ^ contents.alphas.keys()):
        # What does nothing cannot be told from what is not there, in a file that has one LoRA for several modules.
        if module not in alphas or (up := ups[module]) is None or bool(up.any()):
            yield f"{module} is {'missing' if module in alphas else 'not trained'}"
    common = [module for module in alphas if module in contents.alphas]
    yield from (f"{module} has alpha {contents.alphas[module]:g} and not {alphas[module]:g}" for module in common
                if abs(contents.alphas[module] - alphas[module]) > 1e-6 * alphas[module])  # fmt: skip
    if strangers := sorted(contents.state_dict.keys() - parameters.keys()):
        yield f"{strangers[0]} is not trained"
        return
    before = {module: _run_layer(model.get_submodule(module)) for module in common}
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        for name, tensor in contents.state_dict.items():
            parameters[name].copy_(tensor)
        after = {module: _run_layer(model.get_submodule(module))[0] for module in common}
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    precision = {tensor.dtype for tensor in contents.state_dict.values()}
    tolerance = max(UPDATE_TOLERANCE.get(dtype, 1e-4) for dtype in precision)
    for module, (adapted, plain) in before.items():
        update, error = (adapted - plain).abs().max(), (after[module] - adapted).abs().max()
        noise = 16 * torch.finfo(adapted.dtype).eps * adapted.abs().max()
        if not bool(error <= tolerance * update + noise):
            yield f"{module} does something else in the file: off by {float(error):.2g}, of {float(update):.2g}"


def _run_layer(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """What the layer makes of one input with its adapter, and without."""
    base: Any = layer.base_layer
    frozen = _get_base_weights(layer)
    weight = frozen.get("base_layer.weight", base.weight)  # one that rests elsewhere is no parameter
    draw = torch.Generator().manual_seed(weight.numel())
    shape = (1, weight.shape[1], *weight.shape[2:]) if weight.dim() == 4 else (1, weight.shape[1])
    given = torch.randn(shape, generator=draw).to(weight)
    plain = {name.removeprefix("base_layer."): tensor for name, tensor in frozen.items()}
    with _disable_hooks(layer):
        return functional_call(layer, frozen, (given,)), functional_call(base, plain, (given,))


def _get_base_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The weights of the layer itself; where other processes have them, random ones stand in for them.

    Any will do to see whether two adapters do the same, and to fetch the true ones all processes would be needed.
    """
    own = {name: item for name, item in layer.named_parameters() if name.startswith("base_layer.")}
    whole = {name: _get_full_shape(layer.base_layer, item) for name, item in own.items()}
    if all(not item.is_meta and not hasattr(item, "full_tensor") and item.shape == whole[name]
           for name, item in own.items()):  # fmt: skip
        return dict(own)
    here = next(item.device for name, item in layer.named_parameters() if name not in own)
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw).div(shape[1:].numel() ** 0.5).to(here, own[name].dtype)
            for name, shape in whole.items()}  # fmt: skip


def _get_full_shape(base: Any, weight: Any) -> torch.Size:
    """That of a weight of which perhaps only some rows or columns are here, or, with DeepSpeed, nothing."""
    if isinstance(base, nn.Linear):
        return torch.Size((base.out_features, base.in_features)[: 1 if weight is base.bias else 2])
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


@contextmanager
def _disable_hooks(layer: nn.Module) -> Iterator[None]:
    """Without hooks, which may fetch weights from processes that do nothing of this kind now."""
    kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module in layer.modules()]
    for module, _, _ in kept:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks, module._forward_hooks = before, after
