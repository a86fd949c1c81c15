"""The precision of trained parameters: float32 as peft makes them, or cast for ``--full_bf16``.

The forward pass runs in autocast, which ``parallel.gradient_accumulation`` enters for each micro-batch.
"""

import torch
from peft.tuners.lora import LoraLayer
from torch import nn


def cast_trainable_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the trainable parameters; call it before the optimizer is built."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def leave_input_casts_to_autocast(model: nn.Module) -> None:
    """Keep peft from casting inputs of LoRA layers to float32, from which autocast would cast a copy for each layer."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and not module.lora_variant:  # DoRA computes norms in the dtype of its input
            module.cast_input_dtype_enabled = False
