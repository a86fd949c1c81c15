"""Models of any size with random weights, quick to make and the same on every device.

All weights are cut from one block of random numbers, each from a place of its own.  So a model of many billions is
filled as fast as memory can be written, and nothing depends on which parts are made or where.
"""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from ..randomness import derive_generator, derive_seed

_NOISE_LENGTH = 4_194_301
"""Length of the block: a prime, so that the rows of a matrix are never cut from the same place twice."""


def build_empty_model(model_class: Any, config: Mapping[str, Any]) -> Any:
    """A diffusers or transformers model whose parameters are on the meta device, and its buffers are not."""
    with init_empty_weights(include_buffers=False):
        if not model_class.__module__.startswith("transformers."):
            return model_class.from_config(dict(config)).eval()
        model = model_class(model_class.config_class(**config)).eval()
    model.tie_weights()  # each has become a weight of its own on the way to the meta device
    return model


def load_tensors(
    model: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | None
) -> list[str]:
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


def build_random_component(
    component_class: Any,
    config: Mapping[str, Any],
    component: str,
    dtype: torch.dtype,
    device: torch.device | None,
    seed: int = 0,
) -> Any:
    """One part with the sizes of ``config``; parameters are made in their dtype and where they belong."""
    model = build_empty_model(component_class, config)
    numbers = torch.randn(_NOISE_LENGTH, generator=derive_generator(seed, "random weights"))
    numbers = numbers.to(device=device, dtype=dtype)
    made: dict[int, nn.Parameter] = {}  # by the empty one: some layers share theirs
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            weight = torch.empty(parameter.shape, dtype=dtype, device=device)
            _fill_weight(weight, name, numbers, derive_seed(seed, f"{component}/{name}"))
            made[id(parameter)] = nn.Parameter(weight)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, made[id(parameter)])
    _reduce_vae_variance(model)
    return model


def _fill_weight(weight: Tensor, name: str, noise: Tensor, offset: int) -> None:
    """As layers begin: matrices keep the size of what they are multiplied with, norms are one and biases zero."""
    if weight.ndim < 2:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    scale = (weight.numel() / weight.shape[0]) ** -0.5
    flat, start, done = weight.view(-1), offset % _NOISE_LENGTH, 0
    while done < len(flat):
        count = min(_NOISE_LENGTH - start, len(flat) - done)
        torch.mul(noise[start : start + count], scale, out=flat[done : done + count])
        done, start = done + count, 0


@torch.no_grad()
def _reduce_vae_variance(model: nn.Module) -> None:
    """Let a VAE be as sure of its latents as trained ones are.

    The second half of the encoder's output is the log variance.  Without training it is near 0, and its noise would
    bury the picture.
    """
    weights = dict(model.named_parameters())
    bias = weights.get("quant_conv.bias", weights.get("encoder.conv_out.bias"))
    if bias is not None:
        bias[len(bias) // 2 :] = -6
