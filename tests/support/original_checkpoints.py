"""Convert diffusers pipelines to single-file checkpoints with the key names of the original code."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from library.adapters.component_key_names import build_key_map
from library.adapters.original_module_names import map_to_ldm_names
from library.models.families.anima import ANIMA_KEYS
from library.models.families.flux import FLUX_KEYS
from library.models.families.flux2 import FLUX2_KEYS
from library.models.families.flux3 import FLUX3_KEYS
from library.models.families.hunyuan_image_keys import rename_for_comfyui
from library.models.families.krea2 import KREA2_KEYS
from library.models.families.lumina2 import LUMINA2_KEYS
from library.models.families.sd3 import SD3_KEYS

_VAE = (
    (r"\bdown_blocks\.", "down."),
    (r"\.resnets\.", ".block."),
    (r"\.downsamplers\.0\.", ".downsample."),
    (r"\.upsamplers\.0\.", ".upsample."),
    (r"\bmid_block\.block\.0", "mid.block_1"),
    (r"\bmid_block\.block\.1", "mid.block_2"),
    (r"\bmid_block\.attentions\.0", "mid.attn_1"),
    (r"attn_1\.group_norm", "attn_1.norm"),
    (r"attn_1\.to_out\.0", "attn_1.proj_out"),
    (r"attn_1\.to_([qkv])", r"attn_1.\1"),
    (r"\bconv_norm_out", "norm_out"),
    (r"\bconv_shortcut", "nin_shortcut"),
)
_OPEN_CLIP = (
    (r"^text_model\.", ""),
    (r"^encoder\.layers\.", "transformer.resblocks."),
    (r"\.layer_norm([12])", r".ln_\1"),
    (r"\.mlp\.fc1", ".mlp.c_fc"),
    (r"\.mlp\.fc2", ".mlp.c_proj"),
    (r"\.self_attn\.out_proj", ".attn.out_proj"),
    (r"^embeddings\.token_embedding", "token_embedding"),
    (r"^final_layer_norm", "ln_final"),
    (r"^embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"^text_projection\.weight", "text_projection"),
)


def convert_unet_to_ldm(unet: nn.Module) -> dict[str, Tensor]:
    names = map_to_ldm_names(name for name, _ in unet.named_modules())
    return {
        f"{names[key.rpartition('.')[0]]}.{key.rpartition('.')[2]}": tensor for key, tensor in unet.state_dict().items()
    }


def convert_vae_to_ldm(vae: nn.Module) -> dict[str, Tensor]:
    last = len(vae.config.block_out_channels) - 1
    tensors = {}
    for key, tensor in vae.state_dict().items():
        key = re.sub(r"\bup_blocks\.(\d)", lambda match: f"up.{last - int(match[1])}", key)
        key = _apply_replacements(key, _VAE)
        is_attention = re.search(r"attn_1\.(q|k|v|proj_out)\.weight", key)
        tensors[key] = tensor[:, :, None, None].contiguous() if is_attention else tensor
    return tensors


def convert_clip(encoder: nn.Module) -> dict[str, Tensor]:
    """Add the ``text_model.`` prefix that transformers used when these files were written."""
    return {
        ("" if key.startswith("text_") else "text_model.") + key: tensor for key, tensor in encoder.state_dict().items()
    }


def convert_open_clip(encoder: nn.Module, more_layers: int = 0) -> dict[str, Tensor]:
    """Convert to OpenCLIP keys, with ``more_layers`` that the diffusers model leaves out."""
    tensors: dict[str, Tensor] = {}
    state = encoder.state_dict()
    for key, tensor in state.items():
        name = _apply_replacements(key, _OPEN_CLIP)
        if match := re.match(r"(.*)\.self_attn\.q_proj\.(weight|bias)", name):
            parts = [state[key.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj")]
            tensors[f"{match[1]}.attn.in_proj_{match[2]}"] = torch.cat(parts)
        elif not re.search(r"self_attn\.[kv]_proj", name):
            tensors[name] = tensor.T.contiguous() if name == "text_projection" else tensor
    count = encoder.config.num_hidden_layers
    for key in [key for key in tensors if key.startswith("transformer.resblocks.0.")]:
        for more in range(count, count + more_layers):
            tensors[key.replace("resblocks.0.", f"resblocks.{more}.")] = torch.zeros_like(tensors[key])
    return {**tensors, "logit_scale": torch.tensor(4.6)}


def _apply_replacements(name: str, rules: Any) -> str:
    for pattern, new in rules:
        name = re.sub(pattern, new, name)
    return name


def add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor.clone() for name, tensor in tensors.items()}


def convert_sd3_transformer(model: nn.Module) -> dict[str, Tensor]:
    state, tensors = model.state_dict(), {}
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    for group in build_key_map((), SD3_KEYS).group_modules(linear):
        for end in ("weight", "bias"):
            parts = [state[f"{module}.{end}"] for module in group.modules]
            is_pair = (
                group.original.swaps_scale_shift and state[f"{group.modules[0]}.bias"].numel() == 2 * model.inner_dim
            )
            tensors[f"{group.name}.{end}"] = torch.cat(parts[0].chunk(2)[::-1]) if is_pair else torch.cat(parts)
    ends = {
        "attn.norm_q": "x_block.attn.ln_q",
        "attn.norm_k": "x_block.attn.ln_k",
        "attn2.norm_q": "x_block.attn2.ln_q",
        "attn2.norm_k": "x_block.attn2.ln_k",
        "attn.norm_added_q": "context_block.attn.ln_q",
        "attn.norm_added_k": "context_block.attn.ln_k",
    }
    for name, tensor in state.items():
        if "norm_" in name and name.startswith("transformer_blocks"):
            _, number, part = name.removesuffix(".weight").split(".", 2)
            tensors[f"joint_blocks.{number}.{ends[part]}.weight"] = tensor
    tensors["pos_embed"] = state["pos_embed.pos_embed"]
    for end in ("weight", "bias"):
        tensors[f"x_embedder.proj.{end}"] = state[f"pos_embed.proj.{end}"]
    return tensors


def convert_flux_transformer(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The last modulation is shift and scale, but scale and shift in diffusers."""
    state, tensors = model.state_dict() if isinstance(model, nn.Module) else model, {}
    linear = [
        name.removesuffix(".weight")
        for name in state
        if name.endswith(".weight") and ".norm_" not in name and "norm.weight" not in name and not name.startswith(_OWN)
    ]
    for group in build_key_map((), FLUX_KEYS).group_modules(linear):
        for end in ("weight", "bias"):
            tensors[f"{group.name}.{end}"] = torch.cat([state[f"{module}.{end}"] for module in group.modules])
    ends = {
        "attn.norm_q": "img_attn.norm.query_norm",
        "attn.norm_k": "img_attn.norm.key_norm",
        "attn.norm_added_q": "txt_attn.norm.query_norm",
        "attn.norm_added_k": "txt_attn.norm.key_norm",
    }
    for name, tensor in state.items():
        if "attn.norm_" in name:
            kind, number, part = name.removesuffix(".weight").split(".", 2)
            end = ends[part].replace("img_attn.", "") if kind.startswith("single") else ends[part]
            blocks = "single_blocks" if kind.startswith("single") else "double_blocks"
            tensors[f"{blocks}.{number}.{end}.scale"] = tensor
    for name in [name for name in tensors if name.startswith("final_layer.adaLN_modulation.1.")]:
        tensors[name] = torch.cat(tensors[name].chunk(2)[::-1])
    return tensors


_OWN = ("distilled_guidance_layer.",)
"""Beginnings of Chroma's own names."""
_CHROMA = (
    (r"(layers\.\d+)\.linear_1", r"\1.in_layer"),
    (r"(layers\.\d+)\.linear_2", r"\1.out_layer"),
    (r"(norms\.\d+)\.weight", r"\1.scale"),
)


def convert_chroma_transformer(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    approximator = {name: tensor for name, tensor in state.items() if name.startswith("distilled_guidance_layer.")}
    return {
        **convert_flux_transformer(model),
        **{_apply_replacements(name, _CHROMA): tensor for name, tensor in approximator.items()},
    }


_FLUX2_OUTER = (
    ("x_embedder", "img_in"),
    ("context_embedder", "txt_in"),
    ("time_guidance_embed.timestep_embedder.linear_1", "time_in.in_layer"),
    ("time_guidance_embed.timestep_embedder.linear_2", "time_in.out_layer"),
    ("time_guidance_embed.guidance_embedder.linear_1", "guidance_in.in_layer"),
    ("time_guidance_embed.guidance_embedder.linear_2", "guidance_in.out_layer"),
    ("modulation_img.linear", "modulation_img.lin"),
    ("modulation_txt.linear", "modulation_txt.lin"),
    ("single_stream_modulation.linear", "single_stream_modulation.lin"),
    ("norm_out.linear", "final_layer.adaLN_modulation.1"),
    ("proj_out", "final_layer.linear"),
)


def convert_flux2_transformer(model: nn.Module) -> dict[str, Tensor]:
    state, tensors = model.state_dict(), {}
    linear = [
        name for name, part in model.named_modules() if isinstance(part, nn.Linear) and "transformer_blocks" in name
    ]
    for group in build_key_map((), FLUX2_KEYS).group_modules(linear):
        tensors[f"{group.name}.weight"] = torch.cat([state[f"{module}.weight"] for module in group.modules])
    norms = {"norm_q": "query_norm", "norm_k": "key_norm", "norm_added_q": "query_norm", "norm_added_k": "key_norm"}
    for name, tensor in state.items():
        parts = name.split(".")
        if "transformer_blocks" not in name:
            new = _apply_replacements(name, _FLUX2_OUTER)
            tensors[new] = torch.cat(tensor.chunk(2)[::-1]) if "norm_out" in name else tensor
        elif parts[-2] in norms:
            stream = "" if parts[0].startswith("single") else "txt_attn." if "added" in name else "img_attn."
            blocks = "single_blocks" if parts[0].startswith("single") else "double_blocks"
            tensors[f"{blocks}.{parts[1]}.{stream}norm.{norms[parts[-2]]}.scale"] = tensor
    return tensors


def convert_ovis_image_transformer(model: nn.Module) -> dict[str, Tensor]:
    """FLUX.1's names; the projections of the gated MLPs are two modules, the gate second in diffusers."""
    state, tensors = dict(model.state_dict()), {}
    tensors["txt_norm.scale"] = state.pop("context_embedder_norm.weight")
    for name in [name for name in state if ".net.0.proj." in name or ".net.2." in name]:
        block, stream, *_, end = (
            re.sub(r"^transformer_blocks", "double_blocks", name).rpartition(".ff")[0],
            *name.split(".")[2:],
        )
        mlp = f"{block}.{'txt' if stream == 'ff_context' else 'img'}_mlp"
        tensor = state.pop(name)
        if ".net.2." in name:
            tensors[f"{mlp}.down_proj.{end}"] = tensor
        else:
            tensors[f"{mlp}.up_proj.{end}"], tensors[f"{mlp}.gate_proj.{end}"] = tensor.chunk(2)
    return tensors | _convert_flux_like(
        {f"time_embed.{name}" if "timestep" in name else name: state[name] for name in state}
    )


def convert_longcat_image_transformer(model: nn.Module) -> dict[str, Tensor]:
    """FLUX.1's names, without a pooled text."""
    return _convert_flux_like(model.state_dict())


def _convert_flux_like(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return convert_flux_transformer({name.replace("time_embed.", "time_text_embed."): state[name] for name in state})


def convert_z_image_transformer(model: nn.Module) -> dict[str, Tensor]:
    state, tensors = model.state_dict(), {}
    for name, tensor in state.items():
        new = _apply_replacements(name, _Z_IMAGE)
        if ".attention.to_q." in name:
            parts = [state[name.replace("to_q", each)] for each in ("to_q", "to_k", "to_v")]
            tensors[new.replace("to_q", "qkv")] = torch.cat(parts)
        elif not re.search(r"attention\.to_[kv]\.", name):
            tensors[new] = tensor
    return tensors


_IDEOGRAM4 = ((r"\.attention\.to_out\.0\.", ".attention.o."), (r"\.attention\.to_q\.", ".attention.qkv."))


def convert_ideogram4_transformer(model: nn.Module) -> dict[str, Tensor]:
    state, tensors = model.state_dict(), {}
    for name, tensor in state.items():
        if ".attention.to_q." in name:
            tensor = torch.cat([state[name.replace("to_q", each)] for each in ("to_q", "to_k", "to_v")])
        if not re.search(r"attention\.to_[kv]\.", name):
            tensors[_apply_replacements(name, _IDEOGRAM4)] = tensor
    return tensors


_LUMINA2 = (
    (r"^time_caption_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
    (r"^time_caption_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
    (r"^time_caption_embed\.caption_embedder", "cap_embedder"),
    (r"\.attn\.norm_([qk])", r".attention.\1_norm"),
    (r"\.norm1\.norm|(?<=context_refiner\.\d)\.norm1", ".attention_norm1"),
    (r"\.norm2", ".attention_norm2"),
)


def convert_lumina2_transformer(model: nn.Module) -> dict[str, Tensor]:
    tensors = dict(model.state_dict())
    linear = [
        name.removesuffix(".weight")
        for name in tensors
        if build_key_map((), LUMINA2_KEYS).filter_known_modules([name.removesuffix(".weight")])
    ]
    for group in build_key_map((), LUMINA2_KEYS).group_modules(linear):
        for end in ("weight", "bias"):
            if f"{group.modules[0]}.{end}" in tensors:
                tensors[f"{group.name}.{end}"] = torch.cat([tensors.pop(f"{module}.{end}") for module in group.modules])
    return {_apply_replacements(name, _LUMINA2): tensor for name, tensor in tensors.items()}


_KREA2 = (
    (r"^txt_in\.norm\.weight", "txtmlp.0.scale"),
    (r"^final_layer\.norm\.weight", "last.norm.scale"),
    (r"^final_layer\.scale_shift_table", "last.modulation.lin"),
    (r"\.attn\.norm_([qk])\.weight", r".attn.qknorm.\1norm.scale"),
    (r"\.norm1\.weight", ".prenorm.scale"),
    (r"\.norm2\.weight", ".postnorm.scale"),
    (r"\.scale_shift_table", ".mod.lin"),
    (r"^transformer_blocks", "blocks"),
    (r"^text_fusion", "txtfusion"),
)


def convert_anima_transformer(model: nn.Module) -> dict[str, Tensor]:
    keys = model.state_dict()
    names = build_key_map([key.rpartition(".")[0] for key in keys], ANIMA_KEYS).renames
    return {f"{names[key.rpartition('.')[0]]}.{key.rpartition('.')[2]}": tensor for key, tensor in keys.items()}


def convert_flux3_transformer(model: nn.Module) -> dict[str, Tensor]:
    """The shift and the scale of the last layer are in the other order."""
    state, tensors = model.state_dict(), {}
    names = build_key_map([key.rpartition(".")[0] for key in state], FLUX3_KEYS).renames
    for key, tensor in state.items():
        module, _, end = key.rpartition(".")
        name = f"{names[module]}.{'scale' if names[module].endswith('_norm') else end}"
        tensors[name] = torch.cat(tensor.chunk(2)[::-1]) if module == "norm_out.linear" else tensor
    return tensors


_HUNYUAN_IMAGE = (
    (r"^context_embedder_2\.norm", "byt5_in.layernorm"),
    (r"^context_embedder_2\.linear_", "byt5_in.fc"),
    (r"^context_embedder\.time_text_embed\.text_embedder", "txt_in.c_embedder"),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1", "txt_in.t_embedder.mlp.0"),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2", "txt_in.t_embedder.mlp.2"),
    (r"^context_embedder\.proj_in", "txt_in.input_embedder"),
    (r"^context_embedder\.token_refiner\.refiner_blocks", "txt_in.individual_token_refiner.blocks"),
    (r"^time_guidance_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
    (r"^time_guidance_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
    (r"^x_embedder", "img_in"),
    (r"^proj_out", "final_layer.linear"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^transformer_blocks", "double_blocks"),
    (r"^single_transformer_blocks", "single_blocks"),
    (r"(?<=blocks\.)(\d+)\.norm1_context\.", r"\1.txt_mod."),
    (r"^(double_blocks\.\d+)\.norm1\.", r"\1.img_mod."),
    (r"^(single_blocks\.\d+)\.norm\.", r"\1.modulation."),
    (r"^(txt_in.*)\.norm_out\.linear", r"\1.adaLN_modulation.1"),
    (r"^(single_blocks\.\d+)\.proj_out", r"\1.linear2"),
    (r"^(single_blocks\.\d+)\.attn\.norm_([qk])", r"\1.\2_norm"),
    (r"\.attn\.norm_added_([qk])", r".txt_attn_\1_norm"),
    (r"\.attn\.norm_([qk])", r".img_attn_\1_norm"),
    (r"^(txt_in.*)\.attn\.to_out\.0", r"\1.self_attn_proj"),
    (r"\.attn\.to_out\.0", ".img_attn_proj"),
    (r"\.attn\.to_add_out", ".txt_attn_proj"),
    (r"^(txt_in.*)\.ff\.", r"\1.mlp."),
    (r"\.ff_context\.", ".txt_mlp."),
    (r"\.ff\.", ".img_mlp."),
    (r"\.net\.0\.proj\.", ".fc1."),
    (r"\.net\.2\.", ".fc2."),
)


def convert_hunyuan_image_transformer(model: nn.Module) -> dict[str, Tensor]:
    """Tencent's names; the shift and the scale of the last layer are in the other order."""
    state, tensors = dict(model.state_dict()), {}
    for name in [name for name in state if re.search(r"\.attn\.(to|add)_[kv]|\.proj_mlp\.", name)]:
        query = re.sub(r"\.proj_mlp\.", ".attn.to_q.", re.sub(r"_[kv](?=_proj\.|\.)", "_q", name))
        state[query] = torch.cat([state[query], state.pop(name)])
    for name, tensor in state.items():
        kind = "linear1" if name.startswith("single") else "self_attn_qkv" if "refiner" in name else "img_attn_qkv"
        new = name.replace(".attn.to_q.", f".{kind}.").replace(".attn.add_q_proj.", ".txt_attn_qkv.")
        new = _apply_replacements(new, _HUNYUAN_IMAGE)
        is_last = new.startswith("final_layer.adaLN_modulation")
        tensors[new] = torch.cat(tensor.chunk(2)[::-1]) if is_last else tensor
    return tensors


_HUNYUAN_VIDEO = (
    (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
    (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
    (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.mlp.0"),
    (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.mlp.2"),
    (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
    (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
)


def convert_hunyuan_video_transformer(model: nn.Module) -> dict[str, Tensor]:
    """Tencent's names, which are those of HunyuanImage in the blocks and the text's refiner."""
    return {
        _apply_replacements(name, _HUNYUAN_VIDEO): tensor
        for name, tensor in convert_hunyuan_image_transformer(model).items()
    }


_HUNYUAN_VIDEO15 = (
    (r"^time_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
    (r"^time_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
    (r"^image_embedder\.norm_in", "vision_in.proj.0"),
    (r"^image_embedder\.linear_1", "vision_in.proj.1"),
    (r"^image_embedder\.linear_2", "vision_in.proj.3"),
    (r"^image_embedder\.norm_out", "vision_in.proj.4"),
    (r"^cond_type_embed\.", "cond_type_embedding."),
    (r"^(transformer_blocks\.\d+)\.attn\.add_([qkv])_proj", r"\1.txt_attn_\2"),
    (r"^(transformer_blocks\.\d+)\.attn\.to_([qkv])\.", r"\1.img_attn_\2."),
)


def convert_hunyuan_video15_transformer(model: nn.Module) -> dict[str, Tensor]:
    """Tencent's names: queries, keys and values of the blocks are apart, those of the text's refiner together."""
    state, tensors = dict(model.state_dict()), {}
    for name in [name for name in state if re.search(r"refiner_blocks.*\.attn\.to_[kv]\.", name)]:
        query = re.sub(r"to_[kv]", "to_q", name)
        state[query] = torch.cat([state[query], state.pop(name)])
    for name, tensor in state.items():
        new = _apply_replacements(name, _HUNYUAN_VIDEO15).replace(".attn.to_q.", ".self_attn_qkv.")
        new = _apply_replacements(new, _HUNYUAN_IMAGE)
        is_last = new.startswith("final_layer.adaLN_modulation")
        tensors[new] = torch.cat(tensor.chunk(2)[::-1]) if is_last else tensor
    return tensors


def convert_hunyuan_video15_vae(vae: nn.Module) -> dict[str, Tensor]:
    """Tencent's names, which number blocks by level."""
    rules = (
        (r"\.(down|up)_blocks\.(\d+)\.resnets\.", r".\1.\2.block."),
        (r"\.(down|up)_blocks\.(\d+)\.(?:down|up)samplers\.0\.", r".\1.\2.\1sample."),
        (r"\.mid_block\.attentions\.0\.to_([qkv])", r".mid.attn_1.\1"),
        (r"\.mid_block\.attentions\.0", ".mid.attn_1"),
        (r"\.mid_block\.resnets\.0", ".mid.block_1"),
        (r"\.mid_block\.resnets\.1", ".mid.block_2"),
        (r"\.conv_shortcut\.", ".nin_shortcut."),
    )
    return {_apply_replacements(name, rules): tensor for name, tensor in vae.state_dict().items()}


def convert_hunyuan_video_vae(vae: nn.Module) -> dict[str, Tensor]:
    """ComfyUI's names, which are those of older autoencoders; kernels of the attention cover one pixel."""
    tensors = {}
    for name, tensor in convert_vae_to_ldm(vae).items():
        is_kernel = re.search(r"attn_1\.(q|k|v|proj_out)\.weight", name)
        tensors[name] = tensor[..., None].contiguous() if is_kernel else tensor
    return tensors


def convert_hunyuan_image_for_comfyui(model: nn.Module) -> dict[str, Tensor]:
    """The names of ComfyUI's class, to which it converts those of the file."""
    norms = (
        (r"(img|txt)_attn_q_norm", r"\1_attn.norm.query_norm"),
        (r"(img|txt)_attn_k_norm", r"\1_attn.norm.key_norm"),
    )
    norms += ((r"\.q_norm", ".norm.query_norm"), (r"\.k_norm", ".norm.key_norm"))
    tensors = convert_hunyuan_image_transformer(model)
    return {_apply_replacements(rename_for_comfyui(name), norms): tensor for name, tensor in tensors.items()}


_HUNYUAN_VAE = (
    (r"\.mid_block\.resnets\.0", ".mid.block_1"),
    (r"\.mid_block\.resnets\.1", ".mid.block_2"),
    (r"\.mid_block\.attentions\.0", ".mid.attn_1"),
    (r"attn_1\.to_([qkv])", r"attn_1.\1"),
    (r"attn_1\.proj\.", "attn_1.proj_out."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
)


def convert_hunyuan_image_vae(vae: nn.Module) -> dict[str, Tensor]:
    """Levels of resnets, all but the last with a sampler."""
    tensors, layers = {}, vae.config.layers_per_block

    def place(match: re.Match[str]) -> str:
        way = match[1]
        blocks = layers + (way == "up")
        level, block = divmod(int(match[2]), blocks + 1)
        return f".{way}.{level}.{f'{way}sample' if block == blocks else f'block.{block}'}."

    for name, tensor in vae.state_dict().items():
        name = re.sub(r"\.(down|up)_blocks\.(\d+)\.", place, name)
        tensors[_apply_replacements(name, _HUNYUAN_VAE)] = tensor
    return tensors


def convert_qwen_image21_transformer(model: nn.Module) -> dict[str, Tensor]:
    """ComfyUI's file: the gate and the projection of an MLP are one module, the gate first."""
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if ".gate_layer." in name]:
        parts = tensors.pop(name), tensors.pop(name.replace("gate_layer", "proj"))
        tensors[name.replace("gate_layer", "gate_up")] = torch.cat(parts)
    return tensors


_QWEN_IMAGE21_VAE = {
    "resnets": {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"},
    "ends": {"conv_in": "conv1", "norm_out": "head.0", "conv_out": "head.2"},
}


def convert_wan22_vae(vae: nn.Module) -> dict[str, Tensor]:
    """The names of Wan 2.2's VAE, whose blocks are lists of layers: ``encoder.downsamples.0.downsamples.1.residual.2``."""
    inner = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
    inner["conv_shortcut"] = "shortcut"
    outer = {"conv_in": "conv1", "norm_out": "head.0", "conv_out": "head.2"}
    tensors = {}
    for key, tensor in vae.state_dict().items():
        half, *parts = key.split(".")
        samples = "downsamples" if half == "encoder" else "upsamples"
        if half.endswith("quant_conv"):
            name = ["conv2" if half.startswith("post") else "conv1", *parts]
        elif parts[0] in outer:
            name = [half, outer[parts[0]], *parts[1:]]
        elif parts[:2] == ["mid_block", "resnets"]:
            name = [half, "middle", str(2 * int(parts[2])), inner[parts[3]], *parts[4:]]
        elif parts[0] == "mid_block":
            name = [half, "middle", "1", *parts[3:]]
        elif parts[2] == "resnets":
            name = [half, samples, parts[1], samples, parts[3], inner[parts[4]], *parts[5:]]
        else:
            last = vae.config.num_res_blocks + (half == "decoder")
            name = [half, samples, parts[1], samples, str(last), *parts[3:]]
        tensors[".".join(name)] = tensor
    return tensors


def convert_qwen_image21_vae(vae: nn.Module) -> dict[str, Tensor]:
    """The names of Wan 2.2's VAE, whose kernels have an axis for frames."""
    tensors = {}
    for key, tensor in vae.state_dict().items():
        half, _, rest = key.partition(".")
        parts, resnets = rest.split("."), _QWEN_IMAGE21_VAE["resnets"]
        if half.endswith("quant_conv"):
            name = f"{'conv2' if half.startswith('post') else 'conv1'}.{rest}"
        elif parts[0] in _QWEN_IMAGE21_VAE["ends"]:
            name = f"{half}.{_QWEN_IMAGE21_VAE['ends'][parts[0]]}.{parts[1]}"
        elif parts[0] == "mid_block":
            is_resnet = parts[1] == "resnets"
            number = 2 * int(parts[2]) if is_resnet else 1
            name = ".".join([f"{half}.middle.{number}", resnets[parts[3]] if is_resnet else parts[3], *parts[4:]])
        else:
            samples = "downsamples" if half == "encoder" else "upsamples"
            inner = parts[3] if parts[2] == "resnets" else "2" if half == "encoder" else "3"
            rest = ".".join(parts[4 if parts[2] == "resnets" else 3 :])
            first, _, last = rest.partition(".")
            rest = f"{ {**resnets, 'conv_shortcut': 'shortcut'}.get(first, first) }.{last}"
            name = f"{half}.{samples}.{parts[1]}.{samples}.{inner}.{rest}"
        is_kernel = tensor.ndim == 4 and key.endswith(".weight") and not re.search(r"resample|attentions", key)
        tensors[name] = tensor.unsqueeze(2) if is_kernel else tensor
    return tensors


def build_anima_files(pipe: Any) -> dict[str, dict[str, Tensor]]:
    """The three files of the published model: the adapter between text and transformer is in the transformer's."""
    tensors = convert_anima_transformer(pipe.transformer)
    tensors |= add_prefix("llm_adapter.", pipe.text_conditioner.state_dict())
    return {
        "transformer": add_prefix("net.", tensors),
        "vae": convert_wan_vae(pipe.vae),
        "text_encoder": convert_text_encoder(pipe.text_encoder),
    }


def convert_krea2_transformer(model: nn.Module) -> dict[str, Tensor]:
    """The modulation of a block is one row."""
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    names = build_key_map(linear, KREA2_KEYS).renames
    tensors = {}
    for key, tensor in model.state_dict().items():
        module, _, end = key.rpartition(".")
        name = f"{names[module]}.{end}" if module in names else _apply_replacements(key, _KREA2)
        tensors[name] = tensor.flatten() if name.endswith(".mod.lin") else tensor
    return tensors


_PIXART = (
    (r"^pos_embed\.proj", "x_embedder.proj"),
    (r"^adaln_single\.emb\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
    (r"^adaln_single\.emb\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
    (r"^adaln_single\.linear", "t_block.1"),
    (r"^caption_projection\.linear_", "y_embedder.y_proj.fc"),
    (r"^proj_out", "final_layer.linear"),
    (r"^scale_shift_table", "final_layer.scale_shift_table"),
    (r"^transformer_blocks", "blocks"),
    (r"\.attn1\.to_q", ".attn.qkv"),
    (r"\.attn2\.to_q", ".cross_attn.q_linear"),
    (r"\.attn2\.to_k", ".cross_attn.kv_linear"),
    (r"\.attn1\.to_out\.0", ".attn.proj"),
    (r"\.attn2\.to_out\.0", ".cross_attn.proj"),
    (r"\.ff\.net\.0\.proj", ".mlp.fc1"),
    (r"\.ff\.net\.2", ".mlp.fc2"),
)


def convert_pixart_transformer(model: nn.Module) -> dict[str, Tensor]:
    """The names of the authors' checkpoint, which has a table of positions and an embedding of no text as well."""
    state, tensors = model.state_dict(), {}
    for name, tensor in state.items():
        parts = [tensor]
        if ".attn1.to_q." in name:
            parts += [state[name.replace("to_q", each)] for each in ("to_k", "to_v")]
        if ".attn2.to_k." in name:
            parts += [state[name.replace("to_k", "to_v")]]
        if not re.search(r"attn1\.to_[kv]|attn2\.to_v", name):
            tensors[_apply_replacements(name, _PIXART)] = torch.cat(parts)
    tokens, side = 300, model.config.sample_size // model.config.patch_size
    tensors["y_embedder.y_embedding"] = tensors["x_embedder.proj.bias"].new_zeros(tokens, model.config.caption_channels)
    tensors["pos_embed"] = tensors["x_embedder.proj.bias"].new_zeros(1, side**2, model.inner_dim)
    return tensors


_AURA_FLOW = (
    (r"^joint_transformer_blocks\.(.*\.attn)\.to_([qkv])\.", r"double_layers.\1.w2\2."),
    (r"^joint_transformer_blocks\.(.*\.attn)\.to_out\.0\.", r"double_layers.\1.w2o."),
    (r"^joint_transformer_blocks\.(.*\.attn)\.add_([qkv])_proj\.", r"double_layers.\1.w1\2."),
    (r"^joint_transformer_blocks\.(.*\.attn)\.to_add_out\.", r"double_layers.\1.w1o."),
    (r"^joint_transformer_blocks\.(\d+)\.norm1_context\.linear\.", r"double_layers.\1.modC.1."),
    (r"^joint_transformer_blocks\.(\d+)\.norm1\.linear\.", r"double_layers.\1.modX.1."),
    (r"^joint_transformer_blocks\.(\d+)\.ff_context\.", r"double_layers.\1.mlpC."),
    (r"^joint_transformer_blocks\.(\d+)\.ff\.", r"double_layers.\1.mlpX."),
    (r"^single_transformer_blocks\.(.*\.attn)\.to_([qkv])\.", r"single_layers.\1.w1\2."),
    (r"^single_transformer_blocks\.(.*\.attn)\.to_out\.0\.", r"single_layers.\1.w1o."),
    (r"^single_transformer_blocks\.(\d+)\.norm1\.linear\.", r"single_layers.\1.modCX.1."),
    (r"^single_transformer_blocks\.(\d+)\.ff\.", r"single_layers.\1.mlp."),
    (r"\.linear_([12])\.weight$", r".c_fc\1.weight"),
    (r"\.out_projection\.", ".c_proj."),
    (r"^time_step_proj\.c_fc1\.", "t_embedder.mlp.0."),
    (r"^time_step_proj\.linear_1\.", "t_embedder.mlp.0."),
    (r"^time_step_proj\.c_fc2\.", "t_embedder.mlp.2."),
    (r"^time_step_proj\.linear_2\.", "t_embedder.mlp.2."),
    (r"^context_embedder\.", "cond_seq_linear."),
    (r"^proj_out\.", "final_linear."),
    (r"^norm_out\.linear\.", "modF.1."),
    (r"^pos_embed\.pos_embed$", "positional_encoding"),
    (r"^pos_embed\.proj\.", "init_x_linear."),
)


def convert_aura_flow_transformer(model: nn.Module) -> dict[str, Tensor]:
    tensors = {_apply_replacements(name, _AURA_FLOW): tensor for name, tensor in model.state_dict().items()}
    scale, shift = tensors["modF.1.weight"].chunk(2)
    return {**tensors, "modF.1.weight": torch.cat([shift, scale])}


_Z_IMAGE = (
    (r"all_(final_layer|x_embedder)\.2-1\.", r"\1."),
    (r"\.attention\.to_out\.0\.", ".attention.out."),
    (r"\.attention\.norm_([qk])\.", r".attention.\1_norm."),
)
_WAN = (
    (r"\.norm1\.", ".residual.0."),
    (r"\.conv1\.", ".residual.2."),
    (r"\.norm2\.", ".residual.3."),
    (r"\.conv2\.", ".residual.6."),
    (r"\.conv_shortcut\.", ".shortcut."),
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
    (r"\.conv_in\.", ".conv1."),
    (r"\.norm_out\.", ".head.0."),
    (r"\.conv_out\.", ".head.2."),
    (r"\.mid_block\.resnets\.0\.", ".middle.0."),
    (r"\.mid_block\.attentions\.0\.", ".middle.1."),
    (r"\.mid_block\.resnets\.1\.", ".middle.2."),
    (r"\.down_blocks\.", ".downsamples."),
)


def convert_wan_vae(vae: nn.Module) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in vae.state_dict().items():
        name = re.sub(r"up_blocks\.(\d)\.resnets\.(\d)", lambda m: f"upsamples.{4 * int(m[1]) + int(m[2])}", name)
        name = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"upsamples.{4 * int(m[1]) + 3}", name)
        tensors[_apply_replacements(name, _WAN)] = tensor
    return tensors


_WAN_TRANSFORMER = (
    (r"^condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
    (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
    (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
    (r"\.norm_added_k\.", ".norm_k_img."),
    (r"\.add_([kv])_proj\.", r".\1_img."),
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^proj_out\.", "head.head."),
    (r"^patch_embedding\.ref_conv\.", "ref_conv."),
    (r"^(vace_blocks\.\d+)\.proj_in\.", r"\1.before_proj."),
    (r"^(vace_blocks\.\d+)\.proj_out\.", r"\1.after_proj."),
    (r"^scale_shift_table", "head.modulation"),
    (r"\.scale_shift_table", ".modulation"),
    (r"\.norm2\.", ".norm0."),
    (r"\.norm3\.", ".norm2."),
    (r"\.norm0\.", ".norm3."),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
)
_UMT5 = (
    (r"^shared\.", "token_embedding."),
    (r"^encoder\.final_layer_norm\.", "norm."),
    (r"^encoder\.block\.(\d+)\.layer\.(\d)\.", r"blocks.\1.\2."),
    (r"\.0\.layer_norm\.", ".norm1."),
    (r"\.1\.layer_norm\.", ".norm2."),
    (r"\.0\.SelfAttention\.relative_attention_bias\.", ".pos_embedding.embedding."),
    (r"\.0\.SelfAttention\.", ".attn."),
    (r"\.1\.DenseReluDense\.wi_0\.", ".ffn.gate.0."),
    (r"\.1\.DenseReluDense\.wi_1\.", ".ffn.fc1."),
    (r"\.1\.DenseReluDense\.wo\.", ".ffn.fc2."),
)


def convert_wan_transformer(model: nn.Module) -> dict[str, Tensor]:
    return {_apply_replacements(name, _WAN_TRANSFORMER): tensor for name, tensor in model.state_dict().items()}


_WAN_ANIMATE = (
    (r"^motion_encoder\.motion_synthesis_weight", "motion_encoder.dec.direction.weight"),
    (r"^motion_encoder\.conv_in\.weight", "motion_encoder.enc.net_app.convs.0.0.weight"),
    (r"^motion_encoder\.conv_in\.act_fn\.bias", "motion_encoder.enc.net_app.convs.0.1.bias"),
    (r"^motion_encoder\.conv_out\.", "motion_encoder.enc.net_app.convs.8."),
    (r"^motion_encoder\.motion_network\.", "motion_encoder.enc.fc."),
    (r"\.conv1\.weight", ".conv1.0.weight"),
    (r"\.conv1\.act_fn\.bias", ".conv1.1.bias"),
    (r"\.conv2\.act_fn\.bias", ".conv2.2.bias"),
    (r"\.conv_skip\.weight", ".skip.1.weight"),
    (r"^face_encoder\.(conv1_local|conv2|conv3)\.", r"face_encoder.\1.conv."),
    (r"^face_adapter\.", "face_adapter.fuser_blocks."),
    (r"\.norm_([qk])\.", r".\1_norm."),
    (r"\.to_q\.", ".linear1_q."),
    (r"\.to_out\.", ".linear2."),
)


def convert_wan_animate_transformer(model: nn.Module) -> dict[str, Tensor]:
    """The names of the repository of Wan 2.2, with one layer for keys and values of faces, and fixed kernels of blurs."""
    tensors = convert_wan_transformer(model)
    others = ("motion_encoder.", "face_")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(others)}
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(others)}
    for name, tensor in own.items():
        original = re.sub(
            r"^motion_encoder\.res_blocks\.(\d)\.(.*)",
            lambda match: f"motion_encoder.enc.net_app.convs.{int(match[1]) + 1}.{match[2]}",
            name,
        )
        if "motion_encoder" in name:
            original = original.replace(".conv2.weight", ".conv2.1.weight")
        original = _apply_replacements(original, _WAN_ANIMATE)
        if ".to_v." in name:
            continue
        if ".to_k." in name:
            original = original.replace(".to_k.", ".linear1_kv.")
            tensor = torch.cat([tensor, own[name.replace(".to_k.", ".to_v.")]])
        if ".net_app." in original and original.endswith(".bias"):
            tensor = tensor.reshape(1, -1, 1, 1)
        tensors[original] = tensor
        if original.endswith((".conv2.1.weight", ".skip.1.weight")):
            tensors[original.replace(".1.weight", ".0.kernel")] = torch.ones(4, 4) / 16
    return tensors


def convert_umt5(encoder: nn.Module) -> dict[str, Tensor]:
    """The names of the text encoder in the repository of Wan."""
    tensors = {_apply_replacements(name, _UMT5): tensor for name, tensor in encoder.state_dict().items()}
    tensors.pop("encoder.embed_tokens.weight")
    return tensors


TRANSFORMERS = {
    "sd3": convert_sd3_transformer,
    "flux": convert_flux_transformer,
    "chroma": convert_chroma_transformer,
    "flux2_dev": convert_flux2_transformer,
    "flux2_klein": convert_flux2_transformer,
    "z_image": convert_z_image_transformer,
    "qwen_image": nn.Module.state_dict,
    "aura_flow": convert_aura_flow_transformer,
    "ovis_image": convert_ovis_image_transformer,
    "longcat_image": convert_longcat_image_transformer,
    "ernie_image": nn.Module.state_dict,
    "lumina2": convert_lumina2_transformer,
    "krea2": convert_krea2_transformer,
    "ideogram4": convert_ideogram4_transformer,
    "sana": nn.Module.state_dict,
    "cogview4": nn.Module.state_dict,
    "anima": convert_anima_transformer,
    "flux3": convert_flux3_transformer,
    "hunyuan_image": convert_hunyuan_image_transformer,
    "qwen_image21": convert_qwen_image21_transformer,
    "pixart_sigma": convert_pixart_transformer,
    "hidream": nn.Module.state_dict,
    "kandinsky5_image": nn.Module.state_dict,
    "hunyuan_video": convert_hunyuan_video_transformer,
    "hunyuan_video15": convert_hunyuan_video15_transformer,
    **dict.fromkeys(
        ("wan", "wan_i2v", "wan_flf2v", "wan_vace", "wan_fun_control", "wan_fun_control11", "wan22_ti2v"),
        convert_wan_transformer,
    ),
    "wan22_fun_control": convert_wan_transformer,
    "wan_animate": convert_wan_animate_transformer,
}
"""How to write the denoiser of each family with the names of its published file."""


def build_flow_checkpoint(family: str, pipe: Any) -> dict[str, Tensor]:
    """Build a checkpoint with all components in one file, as ComfyUI writes them."""
    transformer, vae, texts = {
        "sd3": (
            convert_sd3_transformer,
            ("first_stage_model.", convert_vae_to_ldm),
            {
                "clip_l.transformer.": pipe.text_encoder,
                "clip_g.transformer.": getattr(pipe, "text_encoder_2", None),
                "t5xxl.transformer.": getattr(pipe, "text_encoder_3", None),
            },
        ),
        "z_image": (
            convert_z_image_transformer,
            ("vae.", convert_vae_to_ldm),
            {"qwen3_4b.transformer.": pipe.text_encoder},
        ),
        "aura_flow": (
            convert_aura_flow_transformer,
            ("vae.", convert_vae_to_ldm),
            {"pile_t5xl.transformer.": pipe.text_encoder},
        ),
        "ovis_image": (
            convert_ovis_image_transformer,
            ("vae.", convert_vae_to_ldm),
            {"qwen3_2b.transformer.": pipe.text_encoder},
        ),
        "longcat_image": (
            convert_longcat_image_transformer,
            ("vae.", convert_vae_to_ldm),
            {"qwen25_7b.transformer.": pipe.text_encoder},
        ),
        "hunyuan_image": (
            convert_hunyuan_image_transformer,
            ("vae.", convert_hunyuan_image_vae),
            {
                "qwen25_7b.transformer.": pipe.text_encoder,
                "byt5_small.transformer.": getattr(pipe, "text_encoder_2", None),
            },
        ),
        "qwen_image21": (
            convert_qwen_image21_transformer,
            ("vae.", convert_qwen_image21_vae),
            {"qwen3vl_8b.transformer.": pipe.text_encoder},
        ),
        "qwen_image": (nn.Module.state_dict, ("vae.", convert_wan_vae), {"qwen25_7b.transformer.": pipe.text_encoder}),
    }[family]
    tensors = add_prefix("model.diffusion_model.", transformer(pipe.transformer)) | add_prefix(vae[0], vae[1](pipe.vae))
    for name, encoder in texts.items():
        tensors |= add_prefix(f"text_encoders.{name}", convert_text_encoder(encoder))
    return tensors


def convert_text_encoder(encoder: nn.Module) -> dict[str, Tensor]:
    """Convert to the key names of single-file text encoders."""
    if type(encoder).__name__.startswith("CLIP"):
        return convert_clip(encoder)
    tensors = {}
    for name, tensor in encoder.state_dict().items():
        name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        is_qwen3 = type(encoder).__name__ == "Qwen3Model"
        tensors[f"model.{name}" if is_qwen3 else name] = tensor
    tensors.pop("encoder.embed_tokens.weight", None)
    return tensors


def build_checkpoint(family: str, pipe: Any) -> dict[str, Tensor]:
    """Build a checkpoint with all components in one file."""
    if hasattr(pipe, "transformer"):
        return build_flow_checkpoint(family, pipe)
    convert_texts = {
        "sd1": lambda: add_prefix("cond_stage_model.transformer.", convert_clip(pipe.text_encoder)),
        "sd2": lambda: add_prefix("cond_stage_model.model.", convert_open_clip(pipe.text_encoder, more_layers=1)),
        "sdxl": lambda: (
            add_prefix("conditioner.embedders.0.transformer.", convert_clip(pipe.text_encoder))
            | add_prefix("conditioner.embedders.1.model.", convert_open_clip(pipe.text_encoder_2))
        ),
    }
    convert_texts |= {
        "sd1_inpainting": convert_texts["sd1"],
        "sd2_inpainting": convert_texts["sd2"],
        **dict.fromkeys(("sdxl_inpainting", "sdxl_pix2pix"), convert_texts["sdxl"]),
        "sd1_pix2pix": convert_texts["sd1"],
        "sdxl_refiner": lambda: add_prefix("conditioner.embedders.0.model.", convert_open_clip(pipe.text_encoder_2)),
    }
    unet = convert_unet_to_ldm(pipe.unet)
    ema = {f"model_ema.{name.replace('.', '')}": torch.zeros(1) for name in unet}  # EMA weights, which are not loaded
    return (
        add_prefix("model.diffusion_model.", unet)
        | add_prefix("first_stage_model.", convert_vae_to_ldm(pipe.vae))
        | convert_texts[family]()
        | ema
        | {"alphas_cumprod": torch.ones(1000)}
    )
