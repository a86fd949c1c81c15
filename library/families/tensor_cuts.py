"""How the linear layers of a denoiser can be cut, so that several devices compute a part of each block.

Layers that make heads of attention or neurons are cut by rows, and those that take them by columns: in between each
device has its own heads and neurons.  Several things in one layer, such as a gate beside what it closes, are pieces
that are cut each for itself.
"""

import re
from typing import Any

from torch import nn

COLWISE_PATTERN = re.compile(r"\.(to_[qkv]|add_[qkv]_proj|proj_mlp|w1|w3|net\.0\.proj)$")
ROWWISE_PATTERN = re.compile(r"\.(to_out\.0|to_add_out|w2|net\.2)$")
FUSED_ROWWISE_PATTERN = re.compile(r"single_transformer_blocks\.\d+\.proj_out$")
GATED_ACTIVATIONS = {"GEGLU", "SwiGLU"}


def build_tensor_parallel_plan(denoiser: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name of each layer that is cut -> ``rows`` or ``columns``, and how many of them each piece has."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, layer in denoiser.named_modules():
        base: Any = getattr(layer, "base_layer", layer)
        if not isinstance(base, nn.Linear):
            continue
        if COLWISE_PATTERN.search(name):
            parts = 2 if type(denoiser.get_submodule(name.rpartition(".")[0])).__name__ in GATED_ACTIVATIONS else 1
            found[name] = "rows", (base.out_features // parts,) * parts
        elif ROWWISE_PATTERN.search(name):
            found[name] = "columns", (base.in_features,)
        elif FUSED_ROWWISE_PATTERN.search(name):
            heads = base.out_features
            found[name] = "columns", (heads, base.in_features - heads)
    return found
