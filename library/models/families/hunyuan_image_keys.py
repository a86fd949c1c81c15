"""Names of the modules of HunyuanImage 2.1: its authors' files, LoRA files of sd-scripts and ComfyUI, its VAE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...adapters.original_module_names import IMAGE_STREAM, TEXT_STREAM, KeyStyle, OriginalModule, build_stream_modules

_SINGLE_BLOCK = "single_transformer_blocks.{}"
SINGLE_PARTS = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
_STREAM_NAMES = ("attn_qkv", "attn_proj", "mlp.fc1", "mlp.fc2", "mod.linear")
_REFINER = "context_embedder.token_refiner.refiner_blocks"
_TEXT_TIME = "context_embedder.time_text_embed"
_REFINER_PARTS: Mapping[str, tuple[str, ...]] = {
    "norm1": ("norm1",),
    "norm2": ("norm2",),
    "self_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "self_attn_proj": ("attn.to_out.0",),
    "mlp.fc1": ("ff.net.0.proj",),
    "mlp.fc2": ("ff.net.2",),
    "adaLN_modulation.1": ("norm_out.linear",),
}
LAYOUT: tuple[OriginalModule, ...] = (
    *build_stream_modules("double_blocks.{}.img_", "transformer_blocks", IMAGE_STREAM, _STREAM_NAMES),
    *build_stream_modules("double_blocks.{}.txt_", "transformer_blocks", TEXT_STREAM, _STREAM_NAMES),
    OriginalModule(
        "single_blocks.{}.linear1",
        tuple(f"{_SINGLE_BLOCK}.{part}" for part in SINGLE_PARTS),
        output_ratios=(1, 1, 1, 4),
    ),
    OriginalModule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swaps_scale_shift=True),
    *(
        OriginalModule(name, (module,))
        for name, module in {
            "single_blocks.{}.linear2": f"{_SINGLE_BLOCK}.proj_out",
            "single_blocks.{}.modulation.linear": f"{_SINGLE_BLOCK}.norm.linear",
            "final_layer.linear": "proj_out",
            "img_in.proj": "x_embedder.proj",
            "time_in.mlp.0": "time_guidance_embed.timestep_embedder.linear_1",
            "time_in.mlp.2": "time_guidance_embed.timestep_embedder.linear_2",
            "txt_in.input_embedder": "context_embedder.proj_in",
            "txt_in.t_embedder.mlp.0": f"{_TEXT_TIME}.timestep_embedder.linear_1",
            "txt_in.t_embedder.mlp.2": f"{_TEXT_TIME}.timestep_embedder.linear_2",
            "txt_in.c_embedder.linear_1": f"{_TEXT_TIME}.text_embedder.linear_1",
            "txt_in.c_embedder.linear_2": f"{_TEXT_TIME}.text_embedder.linear_2",
            "byt5_in.layernorm": "context_embedder_2.norm",
            **{f"byt5_in.fc{number}": f"context_embedder_2.linear_{number}" for number in (1, 2, 3)},
            "double_blocks.{}.img_attn_q_norm": "transformer_blocks.{}.attn.norm_q",
            "double_blocks.{}.img_attn_k_norm": "transformer_blocks.{}.attn.norm_k",
            "double_blocks.{}.txt_attn_q_norm": "transformer_blocks.{}.attn.norm_added_q",
            "double_blocks.{}.txt_attn_k_norm": "transformer_blocks.{}.attn.norm_added_k",
            "single_blocks.{}.q_norm": f"{_SINGLE_BLOCK}.attn.norm_q",
            "single_blocks.{}.k_norm": f"{_SINGLE_BLOCK}.attn.norm_k",
        }.items()
    ),
    *(
        OriginalModule(
            f"txt_in.individual_token_refiner.blocks.{block}.{name}",
            tuple(f"{_REFINER}.{block}.{part}" for part in parts),
        )
        for block in (0, 1)
        for name, parts in _REFINER_PARTS.items()
    ),
)

_COMFYUI_PARTS = {
    "_attn_qkv": "_attn.qkv",
    "_attn_proj": "_attn.proj",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
    "_mod.linear": "_mod.lin",
    ".modulation.linear": ".modulation.lin",
    "_in.mlp.0": "_in.in_layer",
    "_in.mlp.2": "_in.out_layer",
    "_embedder.mlp.0": "_embedder.in_layer",
    "_embedder.mlp.2": "_embedder.out_layer",
    "c_embedder.linear_1": "c_embedder.in_layer",
    "c_embedder.linear_2": "c_embedder.out_layer",
}


def rename_for_comfyui(name: str) -> str:
    """Return the name in ComfyUI of a module of the file; ComfyUI converts files to it, and its LoRA files have it."""
    for part, other in _COMFYUI_PARTS.items():
        name = name.replace(part, other)
    return name


COMFYUI_KEYS = KeyStyle(
    "hunyuan_image_comfyui", tuple(replace(module, name=rename_for_comfyui(module.name)) for module in LAYOUT)
)
HUNYUAN_IMAGE_KEYS = KeyStyle(
    "hunyuan_image",
    LAYOUT,
    is_read_by_diffusers=False,
    unread_in_comfyui={
        "kohya": "loads half of the layers of this layout, which has sd-scripts' names",
        **dict.fromkeys(("diffusers", "comfy"), "loads nothing of this layout"),
    },
    has_lokr_in_diffusers=True,
    comfyui_style=COMFYUI_KEYS,
)


def build_vae_patterns(config: Mapping[str, Any]) -> dict[str, str]:
    """Build the patterns of a VAE's keys; diffusers counts resnets and samplers of all levels in one list."""
    patterns = {
        r"\.mid_block\.resnets\.0\.": ".mid.block_1.",
        r"\.mid_block\.resnets\.1\.": ".mid.block_2.",
        r"\.mid_block\.attentions\.0\.": ".mid.attn_1.",
        r"\.to_([qkv])\.": r".\1.",
        r"\.proj\.": ".proj_out.",
        r"\.conv_shortcut\.": ".nin_shortcut.",
    }
    for way, blocks in (("down", config["layers_per_block"]), ("up", config["layers_per_block"] + 1)):
        for level in range(len(config["block_out_channels"])):
            parts = (*(f"block.{block}" for block in range(blocks)), f"{way}sample")
            for index, part in enumerate(parts, level * len(parts)):
                patterns[rf"\.{way}_blocks\.{index}\."] = f".{way}.{level}.{part}."
    return patterns
