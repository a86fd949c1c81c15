"""Models without weights, and what fills them."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor


def build_empty_model(model_class: Any, config: Mapping[str, Any]) -> Any:
    """A diffusers or transformers model whose parameters are on the meta device, and its buffers are not."""
    with init_empty_weights(include_buffers=False):
        if not model_class.__module__.startswith("transformers."):
            return model_class.from_config(dict(config)).eval()
        model = model_class(model_class.config_class(**config)).eval()
    model.tie_weights()  # each has become a weight of its own on the way to the meta device
    return model


def load_tensors(model: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | None) -> list[str]:
    """Put tensors into an empty model, one by one; returns the names of weights that are still missing.

    Tensors that the model does not know are left out.
    """
    known = model.state_dict()
    for name, tensor in tensors.items():
        if name in known and tensor.shape != known[name].shape:
            raise ValueError(f"{name} is {list(tensor.shape)} in the file and {list(known[name].shape)} in the model")
    ready = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items() if name in known}
    model.load_state_dict(ready, strict=False, assign=True)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    if device is not None:
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
    model.requires_grad_(True)
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]
