"""The names of text encoders in GGUF files, as llama.cpp writes them, and what they are in transformers; no torch.

Image models keep the names of their original code there, and need no table.
"""

import re
from collections.abc import Mapping

_LLAMA: tuple[tuple[str, str], ...] = (
    (r"^token_embd\.", "model.embed_tokens."),
    (r"^output_norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^blk\.(\d+)\.attn_([qkv])\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"^blk\.(\d+)\.attn_output\.", r"model.layers.\1.self_attn.o_proj."),
    (r"^blk\.(\d+)\.attn_([qk])_norm\.", r"model.layers.\1.self_attn.\2_norm."),
    (r"^blk\.(\d+)\.attn_norm\.", r"model.layers.\1.input_layernorm."),
    (r"^blk\.(\d+)\.ffn_(gate|up|down)\.", r"model.layers.\1.mlp.\2_proj."),
    (r"^blk\.(\d+)\.ffn_norm\.", r"model.layers.\1.post_attention_layernorm."),
)
_GEMMA: tuple[tuple[str, str], ...] = (
    (r"^blk\.(\d+)\.ffn_norm\.", r"model.layers.\1.pre_feedforward_layernorm."),
    (r"^blk\.(\d+)\.post_attention_norm\.", r"model.layers.\1.post_attention_layernorm."),
    (r"^blk\.(\d+)\.post_ffw_norm\.", r"model.layers.\1.post_feedforward_layernorm."),
    *_LLAMA,
)
_T5: tuple[tuple[str, str], ...] = (
    (r"^token_embd\.", "shared."),
    (r"^enc\.output_norm\.", "encoder.final_layer_norm."),
    (r"^enc\.blk\.(\d+)\.attn_([qkvo])\.", r"encoder.block.\1.layer.0.SelfAttention.\2."),
    (
        r"^enc\.blk\.(\d+)\.attn_rel_b\.",
        r"encoder.block.\1.layer.0.SelfAttention.relative_attention_bias.",
    ),
    (r"^enc\.blk\.(\d+)\.attn_norm\.", r"encoder.block.\1.layer.0.layer_norm."),
    (r"^enc\.blk\.(\d+)\.ffn_gate\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_0."),
    (r"^enc\.blk\.(\d+)\.ffn_up\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_1."),
    (r"^enc\.blk\.(\d+)\.ffn_down\.", r"encoder.block.\1.layer.1.DenseReluDense.wo."),
    (r"^enc\.blk\.(\d+)\.ffn_norm\.", r"encoder.block.\1.layer.1.layer_norm."),
)
TEXT_NAMES: Mapping[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(("qwen2", "qwen2vl", "qwen3", "qwen3vl", "llama"), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA),
    **dict.fromkeys(("t5", "t5encoder"), _T5),
}
"""The patterns of names by ``general.architecture``; the first that matches is applied."""


def rename_tensor(name: str, architecture: str) -> str:
    """Return the name in transformers of a tensor of a text encoder; all others keep theirs."""
    for pattern, new in TEXT_NAMES.get(architecture, ()):
        if re.match(pattern, name):
            return re.sub(pattern, new, name)
    return name


SHIFTED_NORMS = "gemma2", "gemma3"
"""Architectures whose norms multiply with 1 + weight in transformers, and with the weight in the files."""
INTERLEAVED_HEADS = "llama"
"""The architecture whose queries and keys are ordered in pairs for the rotary embedding of llama.cpp."""


def find_norm_shift(key: str, architecture: str) -> int:
    """Return what llama.cpp added to a weight when it wrote the file."""
    return int(architecture in SHIFTED_NORMS and key.endswith("norm.weight"))


def find_interleaved_heads(key: str, architecture: str, heads: tuple[int, int]) -> int:
    """Return the number of heads, of (queries, keys), whose rows llama.cpp reordered; 0 if it did not."""
    if architecture != INTERLEAVED_HEADS:
        return 0
    ends = ("q_proj.weight", "q_proj.bias"), ("k_proj.weight", "k_proj.bias")
    return next((count for count, each in zip(heads, ends, strict=True) if key.endswith(each)), 0)
