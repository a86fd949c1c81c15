"""Which tokens go through a layer of a transformer's blocks: those of the text, of the picture, or of both."""

import re
from collections.abc import Sequence

from torch import nn

TEXT_LAYER_PATTERN = re.compile(r"\.(add_[qkv]_proj|to_add_out|ff_context|norm1_context|txt_)")
JOINT_LAYER_PATTERN = re.compile(r"^single_transformer_blocks\.")


def map_layer_token_streams(denoiser: nn.Module, block_lists: Sequence[str], stream_args: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Name of each layer -> the arguments that bring what it sees; ``flow`` has text before picture."""
    found = {}
    for blocks in block_lists:
        for name, _ in denoiser.get_submodule(blocks).named_modules(prefix=blocks):
            found[name] = tuple(stream_args) if JOINT_LAYER_PATTERN.search(name) else (stream_args[0],) if TEXT_LAYER_PATTERN.search(name) else (stream_args[-1],)
    return found
