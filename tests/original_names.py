"""Models as single files in the names of the original code, written from diffusers pipelines."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from library.adapters.ldm_names import ldm_names

_VAE = (
    (r"\bdown_blocks\.", "down."), (r"\.resnets\.", ".block."), (r"\.downsamplers\.0\.", ".downsample."),
    (r"\.upsamplers\.0\.", ".upsample."), (r"\bmid_block\.block\.0", "mid.block_1"),
    (r"\bmid_block\.block\.1", "mid.block_2"), (r"\bmid_block\.attentions\.0", "mid.attn_1"),
    (r"attn_1\.group_norm", "attn_1.norm"), (r"attn_1\.to_out\.0", "attn_1.proj_out"),
    (r"attn_1\.to_([qkv])", r"attn_1.\1"), (r"\bconv_norm_out", "norm_out"), (r"\bconv_shortcut", "nin_shortcut"),
)  # fmt: skip
_OPEN_CLIP = (
    (r"^text_model\.", ""), (r"^encoder\.layers\.", "transformer.resblocks."), (r"\.layer_norm([12])", r".ln_\1"),
    (r"\.mlp\.fc1", ".mlp.c_fc"), (r"\.mlp\.fc2", ".mlp.c_proj"), (r"\.self_attn\.out_proj", ".attn.out_proj"),
    (r"^embeddings\.token_embedding", "token_embedding"), (r"^final_layer_norm", "ln_final"),
    (r"^embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"^text_projection\.weight", "text_projection"),
)  # fmt: skip


def ldm_unet(unet: nn.Module) -> dict[str, Tensor]:
    names = ldm_names(name for name, _ in unet.named_modules())
    return {f"{names[key.rpartition('.')[0]]}.{key.rpartition('.')[2]}": tensor
            for key, tensor in unet.state_dict().items()}  # fmt: skip


def ldm_vae(vae: nn.Module) -> dict[str, Tensor]:
    last = len(vae.config.block_out_channels) - 1
    found = {}
    for key, tensor in vae.state_dict().items():
        key = re.sub(r"\bup_blocks\.(\d)", lambda match: f"up.{last - int(match[1])}", key)
        key = _replaced(key, _VAE)
        is_attention = re.search(r"attn_1\.(q|k|v|proj_out)\.weight", key)
        found[key] = tensor[:, :, None, None].contiguous() if is_attention else tensor
    return found


def clip(encoder: nn.Module) -> dict[str, Tensor]:
    """As transformers had it when these files were made."""
    return {("" if key.startswith("text_") else "text_model.") + key: tensor
            for key, tensor in encoder.state_dict().items()}  # fmt: skip


def open_clip(encoder: nn.Module, more_layers: int = 0) -> dict[str, Tensor]:
    """With ``more_layers`` that the diffusers model leaves out."""
    found: dict[str, Tensor] = {}
    state = encoder.state_dict()
    for key, tensor in state.items():
        name = _replaced(key, _OPEN_CLIP)
        if match := re.match(r"(.*)\.self_attn\.q_proj\.(weight|bias)", name):
            parts = [state[key.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj")]
            found[f"{match[1]}.attn.in_proj_{match[2]}"] = torch.cat(parts)
        elif not re.search(r"self_attn\.[kv]_proj", name):
            found[name] = tensor.T.contiguous() if name == "text_projection" else tensor
    count = encoder.config.num_hidden_layers
    for key in [key for key in found if key.startswith("transformer.resblocks.0.")]:
        for more in range(count, count + more_layers):
            found[key.replace("resblocks.0.", f"resblocks.{more}.")] = torch.zeros_like(found[key])
    return {**found, "logit_scale": torch.tensor(4.6)}


def _replaced(name: str, rules: Any) -> str:
    for pattern, new in rules:
        name = re.sub(pattern, new, name)
    return name


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor.clone() for name, tensor in tensors.items()}


def checkpoint(family: str, pipe: Any) -> dict[str, Tensor]:
    """All of a model in one file."""
    texts = {
        "sd1": lambda: with_prefix("cond_stage_model.transformer.", clip(pipe.text_encoder)),
        "sd2": lambda: with_prefix("cond_stage_model.model.", open_clip(pipe.text_encoder, more_layers=1)),
        "sdxl": lambda: (
            with_prefix("conditioner.embedders.0.transformer.", clip(pipe.text_encoder))
            | with_prefix("conditioner.embedders.1.model.", open_clip(pipe.text_encoder_2))
        ),
    }
    unet = ldm_unet(pipe.unet)
    average = {f"model_ema.{name.replace('.', '')}": torch.zeros(1) for name in unet}  # not what is loaded
    return (with_prefix("model.diffusion_model.", unet) | with_prefix("first_stage_model.", ldm_vae(pipe.vae))
            | texts[family]() | average | {"alphas_cumprod": torch.ones(1000)})  # fmt: skip
