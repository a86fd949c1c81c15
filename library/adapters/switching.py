"""Adapters in a model, switched off for a while, or in another precision."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def cast_trainable_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Have what is learnt in another precision; call it before an optimizer knows the weights."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the one that was there before."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    learning = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, learns in learning.items():
            parameter.requires_grad_(learns)
