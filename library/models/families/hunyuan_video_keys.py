"""Names of the modules of HunyuanVideo: its authors' files, and LoRA files of musubi-tuner and ComfyUI."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...adapters.original_module_names import KeyStyle, OriginalModule
from .hunyuan_image_keys import LAYOUT as IMAGE_LAYOUT
from .hunyuan_image_keys import rename_for_comfyui

_TIME_TEXT = "time_text_embed"
LAYOUT: tuple[OriginalModule, ...] = (
    *(
        module
        for module in IMAGE_LAYOUT
        if module.name.startswith(("double_blocks.", "single_blocks.", "final_layer.", "txt_in.", "img_in."))
    ),
    *(
        OriginalModule(name, (module,))
        for name, module in {
            "time_in.mlp.0": f"{_TIME_TEXT}.timestep_embedder.linear_1",
            "time_in.mlp.2": f"{_TIME_TEXT}.timestep_embedder.linear_2",
            "guidance_in.mlp.0": f"{_TIME_TEXT}.guidance_embedder.linear_1",
            "guidance_in.mlp.2": f"{_TIME_TEXT}.guidance_embedder.linear_2",
            "vector_in.in_layer": f"{_TIME_TEXT}.text_embedder.linear_1",
            "vector_in.out_layer": f"{_TIME_TEXT}.text_embedder.linear_2",
        }.items()
    ),
)

COMFYUI_KEYS = KeyStyle(
    "hunyuan_video_comfyui", tuple(replace(module, name=rename_for_comfyui(module.name)) for module in LAYOUT)
)
HUNYUAN_VIDEO_KEYS = KeyStyle(
    "hunyuan_video",
    LAYOUT,
    is_read_by_diffusers=False,
    unread_in_comfyui={
        "kohya": "loads half of the layers of this layout, which has musubi-tuner's names",
        **dict.fromkeys(("diffusers", "comfy"), "loads nothing of this layout"),
    },
    has_lokr_in_diffusers=True,
    comfyui_style=COMFYUI_KEYS,
)


def build_video_vae_patterns(config: Mapping[str, Any]) -> dict[str, str]:
    """Build the patterns of the VAE's keys in diffusers, and what ComfyUI's file has there; its levels go down."""
    last = len(config["block_out_channels"]) - 1
    return {
        r"\.mid_block\.resnets\.0\.": ".mid.block_1.",
        r"\.mid_block\.resnets\.1\.": ".mid.block_2.",
        r"\.mid_block\.attentions\.0\.": ".mid.attn_1.",
        r"\.group_norm\.": ".norm.",
        r"\.to_([qkv])\.": r".\1.",
        r"\.to_out\.0\.": ".proj_out.",
        r"\.conv_norm_out\.": ".norm_out.",
        r"\.conv_shortcut\.": ".nin_shortcut.",
        r"\.(down|up)samplers\.0\.": r".\1sample.",
        r"\.resnets\.": ".block.",
        r"\.down_blocks\.": ".down.",
        **{rf"\.up_blocks\.{index}\.": f".up.{last - index}." for index in range(last + 1)},
    }
