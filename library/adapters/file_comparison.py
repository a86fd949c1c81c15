"""Compare a written LoRA file with the adapter in memory: the effect of each layer."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import injection
from .kohya_diffusers_comfyui_keys import AdapterFileContents
from .module_adapter import PEFT_SUFFIXES, UP

UPDATE_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""The relative error that a layer's update may have in a file of this dtype."""


@torch.no_grad()
def compare_file_with_model(
    model: nn.Module, contents: AdapterFileContents, alphas: Mapping[str, float]
) -> Iterator[str]:
    """Run each layer on a random input with the weights in memory and with those of the file; yield differences.

    ``model`` has the pipeline's components as children and is in eval mode; its weights are restored afterwards.
    """
    parameters = dict(injection.iter_adapter_parameters(model))
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
    with _replace_partial_base(layer) as base, _disable_hooks(layer), injection.cast_lora_inputs(layer):
        weight = base.weight
        generator = torch.Generator().manual_seed(weight.numel())
        inputs = torch.randn((1, *weight.shape[1:]), generator=generator).to(weight)
        return layer(inputs), base(inputs)


@contextmanager
def _replace_partial_base(layer: nn.Module) -> Iterator[Any]:
    """Give a base layer without its full weight random weights within the context; yield the base layer.

    Any weights will do to compare two adapters; all-gathering the real ones would need all ranks.
    """
    base: Any = layer.base_layer
    if _has_full_weight(base):
        yield base
        return
    device = next(item.device for name, item in layer.named_parameters() if not name.startswith("base_layer."))
    dtype = base.weight.dtype if "weight" in base._parameters else torch.float32
    with torch.device("meta"):
        if isinstance(base, nn.Conv2d):
            names = "in_channels out_channels kernel_size stride padding dilation groups".split()
            sizes: dict[str, Any] = {name: getattr(base, name) for name in names}
            full: Any = nn.Conv2d(**sizes, bias=base.bias is not None, dtype=dtype)
        else:
            full = nn.Linear(base.in_features, base.out_features, base.bias is not None, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(full.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator, device=device)
        values = values.div_(parameter.shape[1:].numel() ** 0.5).to(dtype)
        full.register_parameter(name, nn.Parameter(values, requires_grad=False))
    layer.base_layer = full
    try:
        yield full
    finally:
        layer.base_layer = base


def _has_full_weight(base: Any) -> bool:
    """Whether this process has the whole weight: no part of it (TP, FSDP, ZeRO 3), and not none (PP)."""
    weight = base._parameters.get("weight", base._parameters.get("quantized_weight"))
    if weight is None:  # in host memory
        return True
    if weight.is_meta or hasattr(weight, "full_tensor") or hasattr(weight, "ds_shape"):
        return False
    shape = weight.shape if "weight" in base._parameters else base.stored_weight.shape
    return not isinstance(base, nn.Linear) or shape == (base.out_features, base.in_features)


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
