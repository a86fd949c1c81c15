"""The training adapter of a distilled model: a frozen LoRA that is added to the base layers while training.

The layers of a distilled model (Z-Image-Turbo, FLUX.1 schnell) lose their few steps when they are trained.  With a
training adapter, which undoes the distillation, the trained LoRA does not learn that; previews, and programs that use
the LoRA, compute without it.  Its matrices are frozen parameters beside each base weight, which is never changed: so
quantized weights are those of a run without it, and every strategy shards and moves them like other parameters.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters.kohya_diffusers_comfyui_keys import AdapterFileContents
from ..adapters.module_adapter import DOWN, UP, ModuleAdapter


class TrainingAdapterLayer(nn.Module):
    """The frozen update of one linear layer or convolution, with alpha / rank in ``up``."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, update: ModuleAdapter):
        super().__init__()
        down, up = (update.tensors[name].float() for name in (DOWN, UP))
        if isinstance(layer, nn.Conv2d):
            down, up = down.view(update.rank, *layer.weight.shape[1:]), up.flatten(1)[:, :, None, None]
        else:
            down, up = down.flatten(1), up.flatten(1)
        self.down = nn.Parameter(down.to(layer.weight), requires_grad=False)
        self.up = nn.Parameter((update.scale * up).to(layer.weight), requires_grad=False)
        self.is_active = True
        self.conv_options: dict[str, Any] | None = None
        if isinstance(layer, nn.Conv2d):
            self.conv_options = {name: getattr(layer, name) for name in ("stride", "padding", "dilation")}

    def forward(self, input: Tensor) -> Tensor:
        input = input.to(self.down.dtype)
        if self.conv_options is None:
            return F.linear(F.linear(input, self.down), self.up)
        return F.conv2d(F.conv2d(input, self.down, **self.conv_options), self.up)


def _add_update(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Add the training adapter's update to the output of a base layer, as a forward hook."""
    if not layer.training_adapter.is_active:
        return output
    update: Tensor = layer.training_adapter(inputs[0])
    return output + update.to(output.dtype)


def attach_training_adapter(denoiser: nn.Module, updates: Mapping[str, ModuleAdapter]) -> None:
    """Add the updates to the layers of a model, before it is quantized and gets the adapter that is trained."""
    for name, update in updates.items():
        layer: Any = denoiser.get_submodule(name)
        layer.training_adapter = TrainingAdapterLayer(layer, update)
        layer.register_forward_hook(_add_update)


@contextmanager
def bypass_training_adapter(model: nn.Module) -> Iterator[None]:
    """Let the model compute without its training adapter within the context."""
    layers = [module for module in model.modules() if isinstance(module, TrainingAdapterLayer)]
    for layer in layers:
        layer.is_active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_active = True


def inspect_training_adapter(content: AdapterFileContents, denoiser_name: str) -> Iterator[str]:
    """Find out why a file cannot be a training adapter; the messages do not name it."""
    merge = "; a training adapter has to be a LoRA"
    updates = (*content.updates.values(), *(each.update for each in content.fused.values()))
    if others := sorted({update.title for update in updates if update.adapter_type != "lora"}):
        yield f"has layers of type {' and '.join(others)}{merge}"
    elif content.fused:
        name, fused = next(iter(content.fused.items()))
        yield f"{name}: {fused.reason}{merge} of separate layers"
    encoders = sorted({module.partition(".")[0] for module in content.alphas} - {denoiser_name})
    if encoders:
        yield f"has layers of {', '.join(encoders)}; a training adapter is for the {denoiser_name}"
