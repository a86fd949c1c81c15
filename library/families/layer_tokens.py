"""Which tokens go through a layer of a transformer's blocks: those of the text, of the picture, or of both."""

import re
from collections.abc import Sequence

from torch import nn

TEXT = re.compile(r"\.(add_[qkv]_proj|to_add_out|ff_context|norm1_context|txt_)")
BOTH = re.compile(r"^single_transformer_blocks\.")


def layer_tokens(denoiser: nn.Module, lists: Sequence[str], flow: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Name of each layer -> the arguments that bring what it sees; ``flow`` has text before picture."""
    found = {}
    for blocks in lists:
        for name, _ in denoiser.get_submodule(blocks).named_modules(prefix=blocks):
            found[name] = tuple(flow) if BOTH.search(name) else (flow[0],) if TEXT.search(name) else (flow[-1],)
    return found
