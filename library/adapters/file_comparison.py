"""Compare a written LoRA file with the adapter in memory: the effect of each layer."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from . import lora
from .formats import AdapterFileContents
from .state_dict import PEFT_SUFFIXES, UP

UPDATE_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Tolerated relative error of a layer's update in a file of this dtype."""


@torch.no_grad()
def compare_file_with_model(
    model: nn.Module, contents: AdapterFileContents, alphas: Mapping[str, float]
) -> Iterator[str]:
    """Run each layer on a random input with the weights in memory and with those of the file; yield differences.

    ``model`` has the pipeline's components as children and is in eval mode; its weights are restored afterwards.
    """
    parameters = dict(lora.iter_adapter_parameters(model))
    ups = {module: parameters.get(f"{module}.{PEFT_SUFFIXES[UP]}") for module in alphas}
    for module in sorted(alphas.keys() ^ contents.alphas.keys()):
        # In files with fused modules, a part whose update is zero is the same as a missing one.
        if module not in alphas or (up := ups[module]) is None or bool(up.any()):
            yield f"{module} is {'missing' if module in alphas else 'not trained'}"
    common = [module for module in alphas if module in contents.alphas]
    yield from (
        f"{module} has alpha {contents.alphas[module]:g} and not {alphas[module]:g}"
        for module in common
        if abs(contents.alphas[module] - alphas[module]) > 1e-6 * alphas[module]
    )
    if unexpected := sorted(contents.state_dict.keys() - parameters.keys()):
        yield f"{unexpected[0]} is not trained"
        return
    before = {module: _run_layer(model.get_submodule(module)) for module in common}
    backup = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        for name, tensor in contents.state_dict.items():
            parameters[name].copy_(tensor)
        after = {module: _run_layer(model.get_submodule(module))[0] for module in common}
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(backup[name])
    tolerance = max(UPDATE_TOLERANCE.get(tensor.dtype, 1e-4) for tensor in contents.state_dict.values())
    for module, (output, base_output) in before.items():
        update, error = (output - base_output).abs().max(), (after[module] - output).abs().max()
        rounding = 16 * torch.finfo(output.dtype).eps * output.abs().max()
        if not bool(error <= tolerance * update + rounding):
            yield f"{module}: the output differs by {float(error):.2g} (the update is {float(update):.2g})"


def _run_layer(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """The outputs of the layer and of its base layer for one random input."""
    base: Any = layer.base_layer
    base_weights = _get_base_weights(layer)
    weight = base_weights.get("base_layer.weight", base.weight)  # offloaded weights are not parameters
    generator = torch.Generator().manual_seed(weight.numel())
    shape = (1, weight.shape[1], *weight.shape[2:]) if weight.dim() == 4 else (1, weight.shape[1])
    inputs = torch.randn(shape, generator=generator).to(weight)
    unprefixed = {name.removeprefix("base_layer."): tensor for name, tensor in base_weights.items()}
    with _disable_hooks(layer):
        return functional_call(layer, base_weights, (inputs,)), functional_call(base, unprefixed, (inputs,))


def _get_base_weights(layer: nn.Module) -> dict[str, Tensor]:
    """The base layer's weights, or random ones where they are sharded over ranks.

    Any weights will do to compare two adapters; all-gathering the real ones would need all ranks.
    """
    own = {name: item for name, item in layer.named_parameters() if name.startswith("base_layer.")}
    shapes = {name: _get_full_shape(layer.base_layer, item) for name, item in own.items()}
    if all(
        not item.is_meta and not hasattr(item, "full_tensor") and item.shape == shapes[name]
        for name, item in own.items()
    ):
        return dict(own)
    device = next(item.device for name, item in layer.named_parameters() if name not in own)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).div(shape[1:].numel() ** 0.5).to(device, own[name].dtype)
        for name, shape in shapes.items()
    }


def _get_full_shape(base: Any, weight: Any) -> torch.Size:
    """The unsharded shape of a weight (tensor parallelism, FSDP, DeepSpeed)."""
    if isinstance(base, nn.Linear):
        return torch.Size((base.out_features, base.in_features)[: 1 if weight is base.bias else 2])
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


@contextmanager
def _disable_hooks(layer: nn.Module) -> Iterator[None]:
    """Disable hooks, which may all-gather weights while the other ranks do not take part."""
    hooks = [(module, module._forward_pre_hooks, module._forward_hooks) for module in layer.modules()]
    for module, _, _ in hooks:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, pre_hooks, forward_hooks in hooks:
            module._forward_pre_hooks, module._forward_hooks = pre_hooks, forward_hooks
