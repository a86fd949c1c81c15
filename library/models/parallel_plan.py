"""How the layers of a transformer are parallelized: their token streams, and the tensor-parallel plan."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

TEXT_LAYER_PATTERN = re.compile(r"\.(add_[qkv]_proj|to_add_out|ff_context|norm1_context|txt_)")
SINGLE_STREAM_PATTERN = re.compile(r"^single_transformer_blocks\.")
COLWISE_PATTERN = re.compile(r"\.(to_[qkv]|add_[qkv]_proj|proj_mlp|w1|w3|net\.0\.proj)$")
ROWWISE_PATTERN = re.compile(r"\.(to_out\.0|to_add_out|w2|net\.2)$")
FUSED_ROWWISE_PATTERN = re.compile(r"single_transformer_blocks\.\d+\.proj_out$")
"""FLUX.1: one matrix for the output of the attention and of the MLP."""

GATED_ACTIVATIONS = {"GEGLU", "SwiGLU"}
"""diffusers' activations whose projection holds the gate as well."""


def map_layer_token_streams(
    denoiser: nn.Module, block_lists: Sequence[str], stream_args: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Layer -> the block arguments whose tokens it processes; ``stream_args`` has text before image."""
    streams = {}
    for blocks in block_lists:
        for name, _ in denoiser.get_submodule(blocks).named_modules(prefix=blocks):
            if SINGLE_STREAM_PATTERN.search(name):
                streams[name] = tuple(stream_args)
            else:
                streams[name] = (stream_args[0 if TEXT_LAYER_PATTERN.search(name) else -1],)
    return streams


def build_tensor_parallel_plan(denoiser: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Layer -> ``colwise`` or ``rowwise`` sharding, and the sizes of the sections that are sharded separately."""
    plan: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, layer in denoiser.named_modules():
        base: Any = getattr(layer, "base_layer", layer)
        if not isinstance(base, nn.Linear):
            continue
        if COLWISE_PATTERN.search(name):
            parts = 2 if type(denoiser.get_submodule(name.rpartition(".")[0])).__name__ in GATED_ACTIVATIONS else 1
            plan[name] = "colwise", (base.out_features // parts,) * parts
        elif ROWWISE_PATTERN.search(name):
            plan[name] = "rowwise", (base.in_features,)
        elif FUSED_ROWWISE_PATTERN.search(name):
            plan[name] = "rowwise", (base.out_features, base.in_features - base.out_features)
    return plan
