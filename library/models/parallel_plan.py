"""Which tokens go through a layer of a transformer's blocks: those of the text, of the picture, or of both."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

TEXT_LAYER_PATTERN = re.compile(r"\.(add_[qkv]_proj|to_add_out|ff_context|norm1_context|txt_)")


JOINT_LAYER_PATTERN = re.compile(r"^single_transformer_blocks\.")


def map_layer_token_streams(
    denoiser: nn.Module, block_lists: Sequence[str], stream_args: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Name of each layer -> the arguments that bring what it sees; ``flow`` has text before picture."""
    found = {}
    for blocks in block_lists:
        for name, _ in denoiser.get_submodule(blocks).named_modules(prefix=blocks):
            found[name] = (
                tuple(stream_args)
                if JOINT_LAYER_PATTERN.search(name)
                else (stream_args[0],)
                if TEXT_LAYER_PATTERN.search(name)
                else (stream_args[-1],)
            )
    return found


COLWISE_PATTERN = re.compile(r"\.(to_[qkv]|add_[qkv]_proj|proj_mlp|w1|w3|net\.0\.proj)$")


ROWWISE_PATTERN = re.compile(r"\.(to_out\.0|to_add_out|w2|net\.2)$")


FUSED_ROWWISE_PATTERN = re.compile(r"single_transformer_blocks\.\d+\.proj_out$")


GATED_ACTIVATIONS = {"GEGLU", "SwiGLU"}


def build_tensor_parallel_plan(denoiser: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name of each layer that is cut -> ``colwise`` or ``rowwise``, and how many of them each piece has."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, layer in denoiser.named_modules():
        base: Any = getattr(layer, "base_layer", layer)
        if not isinstance(base, nn.Linear):
            continue
        if COLWISE_PATTERN.search(name):
            parts = 2 if type(denoiser.get_submodule(name.rpartition(".")[0])).__name__ in GATED_ACTIVATIONS else 1
            found[name] = "colwise", (base.out_features // parts,) * parts
        elif ROWWISE_PATTERN.search(name):
            found[name] = "rowwise", (base.in_features,)
        elif FUSED_ROWWISE_PATTERN.search(name):
            heads = base.out_features
            found[name] = "rowwise", (heads, base.in_features - heads)
    return found
