"""Merge a LoRA file into a loaded model for a while; afterwards its weights are the old ones to the bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..adapters.kohya_diffusers_comfyui_keys import AdapterFileContents
from ..distributed.devices import HOST
from .network_weights import merge_adapter_file


@contextmanager
def merge_temporarily(pipe: Any, content: AdapterFileContents, multiplier: float = 1.0) -> Iterator[None]:
    """Let the components of a pipeline compute with a LoRA file inside the block; old weights wait in host memory.

    Weights in half precision round the sum of weight and update, as programs do that merge LoRA files.
    """
    before = [(tensor, tensor.detach().to(HOST, copy=True)) for tensor in list_changed_tensors(pipe, content)]
    try:
        merge_adapter_file(pipe, content, multiplier)
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


def list_changed_tensors(pipe: Any, content: AdapterFileContents) -> list[Tensor]:
    """List the weights and biases of the layers that a file changes, each once."""
    names = dict.fromkeys(content.updates)
    for fused in content.fused.values():
        names |= dict.fromkeys(f"{fused.component}.{part}" for part in fused.group.modules if part is not None)
    tensors = dict[int, Tensor]()
    for name in names:
        part, _, module = name.partition(".")
        layer: Any = getattr(pipe, part).get_submodule(module)
        for tensor in (layer.weight, getattr(layer, "bias", None)):
            if tensor is not None:
                tensors[id(tensor)] = tensor
    return list(tensors.values())
