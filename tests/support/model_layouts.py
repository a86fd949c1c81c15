"""Write tiny models in the layouts in which people have them: ComfyUI's separate files, and quantized ones."""

import copy
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import original_checkpoints
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from library.config.schema import ModelConfig
from library.models.families import FAMILY_FACTS
from library.models.model_configs import is_tokenizer
from library.parallel.quantize import QuantizedWeight

_VAES = {
    "AutoencoderKL": original_checkpoints.convert_vae_to_ldm,
    "AutoencoderKLQwenImage": original_checkpoints.convert_wan_vae,
    "AutoencoderKLWan": original_checkpoints.convert_wan_vae,
    "AutoencoderKLHunyuanImage": original_checkpoints.convert_hunyuan_image_vae,
    "AutoencoderKLHunyuanVideo": original_checkpoints.convert_hunyuan_video_vae,
    "AutoencoderKLHunyuanVideo15": original_checkpoints.convert_hunyuan_video15_vae,
    "AutoencoderKLQwenImage21": original_checkpoints.convert_qwen_image21_vae,
    "residual": original_checkpoints.convert_wan22_vae,
}
"""How to write each class of VAE with the names of published files; others have those of diffusers."""

EXPERTS = ("wan22_t2v", "wan22_i2v", "wan22_fun_control")
"""Families of two denoisers, with a file each."""
MARKS = {"qwen_image_edit_plus_2511": "__index_timestep_zero__"}


def convert_vae(vae: nn.Module) -> dict[str, Tensor]:
    """Convert a VAE to the names of its published file."""
    name = type(vae).__name__
    if name == "AutoencoderKLFlux2":
        tensors = original_checkpoints.convert_vae_to_ldm(vae)
        starts = {"quant_conv.": "encoder.quant_conv.", "post_quant_conv.": "decoder.post_quant_conv."}
        return {
            next((new + key.removeprefix(old) for old, new in starts.items() if key.startswith(old)), key): tensor
            for key, tensor in tensors.items()
        }
    is_residual = name == "AutoencoderKLWan" and vae.config.is_residual
    return _VAES.get("residual" if is_residual else name, nn.Module.state_dict)(vae)


def convert_denoiser(family: str, pipe: Any, part: str | None = None) -> dict[str, Tensor]:
    """Convert the denoiser, or that of two which is named, to the names of its published file, without prefix."""
    transformer = getattr(pipe, part or "transformer", None)
    transformer = getattr(transformer, "high_noise", transformer)  # of two experts as one denoiser
    if family == "anima":
        return original_checkpoints.build_anima_files(pipe)["transformer"]
    if hasattr(pipe, "unet"):
        is_ldm = family != "kolors"
        return original_checkpoints.convert_unet_to_ldm(pipe.unet) if is_ldm else pipe.unet.state_dict()
    base = {"longcat_image_edit": "longcat_image"}.get(family, family)
    base = "flux" if family in ("flux_kontext", "flux_fill", "flux_control") else base
    base = "z_image" if family == "z_image_omni" else base
    base = "qwen_image" if family.startswith("qwen_image_edit") else base
    base = "wan" if family in ("skyreels_v2", *EXPERTS) else base
    return original_checkpoints.TRANSFORMERS.get(base, nn.Module.state_dict)(transformer)


def build_files(family: str, pipe: Any) -> dict[str, dict[str, Tensor]]:
    """Build the tensors of each component's own file, as ComfyUI has them."""
    facts = FAMILY_FACTS[family]
    files = {part: convert_denoiser(family, pipe, part) for part in facts.pipeline.denoisers}
    files["vae"] = convert_vae(pipe.vae)
    for name in facts.text.components:
        if not is_tokenizer(name) and name != "text_conditioner":
            files[name] = original_checkpoints.convert_text_encoder(getattr(pipe, name))
    if "image_encoder" in facts.components:
        files["image_encoder"] = {
            f"vision_model.{key}": value for key, value in pipe.image_encoder.state_dict().items()
        }
    return files


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> str:
    """Save tensors that may share memory."""
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, path, metadata)
    return str(path)


def save_tokenizers(family: str, pipe: Any, folder: Path) -> str:
    """Save the tokenizers of a model as ``tokenizer_cache_dir`` has them."""
    for part, hub_id in FAMILY_FACTS[family].text.tokenizer_repo_ids.items():
        tokenizer = copy.deepcopy(getattr(pipe, part))
        if "CLIP" in type(tokenizer).__name__:
            tokenizer.pad_token = tokenizer.eos_token  # as in published tokenizers, not by the model
        is_one_of_several = hub_id.endswith((":tokenizer_2", ":tokenizer_3"))
        number = part.removeprefix("tokenizer") if is_one_of_several else ""
        tokenizer.save_pretrained(folder / (hub_id.partition(":")[0].replace("/", "_") + number))
    return str(folder)


def build_options(family: str, paths: Mapping[str, str], tokenizers: str, **others: Any) -> ModelConfig:
    """Build the options for a model in separate files."""
    facts = FAMILY_FACTS[family]
    options = {component: option for option, component in facts.options.components.items()}
    components = {options[name]: path for name, path in paths.items() if name != facts.file_denoiser}
    told = "skyreels_v2", "hunyuan_video_i2v", "hunyuan_video15_i2v", "wan22_ti2v"
    is_named = facts.pipeline.kind == "edit" or family in told
    named = {"family": family} if is_named else {}
    return ModelConfig(paths[facts.file_denoiser], tokenizer_cache_dir=tokenizers, **components, **named, **others)


def write_separate_files(family: str, pipe: Any, folder: Path, **others: Any) -> ModelConfig:
    """Write a model as separate files, and return the options that name them."""
    files = build_files(family, pipe)
    paths = {name: save_tensors(tensors, folder / f"{name}.safetensors") for name, tensors in files.items()}
    return build_options(family, paths, save_tokenizers(family, pipe, folder / "tokenizers"), **others)


def list_flags(options: ModelConfig) -> list[str]:
    """The options as words of a command."""
    given = {name: value for name, value in vars(options).items() if value != getattr(ModelConfig, name)}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def is_quantized_key(key: str, tensor: Tensor) -> bool:
    """The linear layers of blocks, which files of this kind have quantized."""
    return key.endswith(".weight") and tensor.ndim == 2 and any(part.isdigit() for part in key.split("."))


def scale_to_fp8(tensors: Mapping[str, Tensor], layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Quantize to fp8 as published files do; return what is stored, and what it stands for in float32.

    ``scale_weight``: ComfyUI's first format, with a marker for the file; ``comfy_quant``: its second one, with a mark
    for each layer; ``rows``: a scale for each row; ``plain``: without any scale.
    """
    result, reference = {}, dict(tensors)
    for key, tensor in tensors.items():
        if not is_quantized_key(key, tensor):
            result[key] = tensor
            continue
        base, rows = key.removesuffix(".weight"), tensor.float()
        peak = rows.abs().amax(1, keepdim=True) if layout == "rows" else rows.abs().max()
        scale = torch.ones(()) if layout == "plain" else peak / 448
        result[key] = (rows / scale).to(torch.float8_e4m3fn)
        reference[key] = result[key].float() * scale
        if layout == "scale_weight":
            result[f"{base}.scale_weight"], result[f"{base}.scale_input"] = scale, torch.ones(())
        elif layout == "rows":
            result[f"{base}.weight_scale"] = scale
        elif layout == "comfy_quant":
            mark = json.dumps({"format": "float8_e4m3fn"}).encode()
            result[f"{base}.comfy_quant"] = torch.tensor(list(mark), dtype=torch.uint8)
            result[f"{base}.weight_scale"], result[f"{base}.input_scale"] = scale, torch.ones(())
    if layout == "scale_weight":
        result["scaled_fp8"] = torch.empty(2, dtype=torch.float8_e4m3fn)
    return result, reference


LLAMA_CPP_NAMES = {
    "t5encoder": {
        r"^shared\.": "token_embd.",
        r"^encoder\.final_layer_norm\.": "enc.output_norm.",
        r"^encoder\.block\.": "enc.blk.",
        r"\.layer\.0\.SelfAttention\.relative_attention_bias\.": ".attn_rel_b.",
        r"\.layer\.0\.SelfAttention\.([qkvo])\.": r".attn_\1.",
        r"\.layer\.0\.layer_norm\.": ".attn_norm.",
        r"\.layer\.1\.DenseReluDense\.wi_0\.": ".ffn_gate.",
        r"\.layer\.1\.DenseReluDense\.wi_1\.": ".ffn_up.",
        r"\.layer\.1\.DenseReluDense\.wo\.": ".ffn_down.",
        r"\.layer\.1\.layer_norm\.": ".ffn_norm.",
    },
    "llama": {
        r"^(model\.)?(language_model\.)?(model\.)?layers\.": "blk.",
        r"^(model\.)?(language_model\.)?(model\.)?embed_tokens\.": "token_embd.",
        r"^(model\.)?(language_model\.)?(model\.)?norm\.": "output_norm.",
        r"^lm_head\.": "output.",
        r"\.self_attn\.([qk])_norm\.": r".attn_\1_norm.",
        r"\.self_attn\.([qkv])_proj\.": r".attn_\1.",
        r"\.self_attn\.o_proj\.": ".attn_output.",
        r"\.mlp\.(gate|up|down)_proj\.": r".ffn_\1.",
        r"\.input_layernorm\.": ".attn_norm.",
        r"\.post_attention_layernorm\.": ".ffn_norm.",
    },
    "gemma2": {
        r"\.post_attention_layernorm\.": ".post_attention_norm.",
        r"\.pre_feedforward_layernorm\.": ".ffn_norm.",
        r"\.post_feedforward_layernorm\.": ".post_ffw_norm.",
    },
}
"""The names that llama.cpp's converter gives to the weights of text encoders."""


def write_gguf_encoder(encoder: nn.Module, path: Path, architecture: str) -> dict[str, Tensor]:
    """Write a text encoder as llama.cpp's converter does; return what it stands for, with its names before."""
    own, llama = LLAMA_CPP_NAMES.get(architecture, {}), LLAMA_CPP_NAMES["llama"]
    patterns = [*own.items(), *({} if architecture == "t5encoder" else llama).items()]
    config: Any = getattr(encoder.config, "text_config", encoder.config)
    heads = {"q": getattr(config, "num_attention_heads", 0), "k": getattr(config, "num_key_value_heads", 0)}
    tensors, names = {}, {}
    for key, tensor in original_checkpoints.convert_text_encoder(encoder).items():
        if any(part in key for part in ("visual.", "vision_", "multi_modal_projector")):
            continue  # another file (mmproj) has them
        name = key
        for pattern, new in patterns:
            name = re.sub(pattern, new, name)
        names[name], rows = key, tensor.detach().float()
        kind = re.search(r"attn_([qk])\.", name)
        if architecture == "llama" and kind is not None:
            count = heads[kind[1]]
            rows = rows.view(count, 2, len(rows) // count // 2, -1).swapaxes(1, 2).reshape(rows.shape)
        tensors[name] = rows + 1 if architecture == "gemma2" and name.endswith("norm.weight") else rows
    counts = {f"{architecture}.attention.head_count": heads["q"], f"{architecture}.attention.head_count_kv": heads["k"]}
    stored = write_gguf(tensors, path, architecture, counts)
    reference = {}
    for name, rows in stored.items():
        kind = re.search(r"attn_([qk])\.", name)
        if architecture == "llama" and kind is not None:
            count = heads[kind[1]]
            rows = rows.view(count, len(rows) // count // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
        reference[names[name]] = rows - 1 if architecture == "gemma2" and name.endswith("norm.weight") else rows
    return reference


def write_gguf(
    tensors: Mapping[str, Tensor], path: Path, architecture: str, counts: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Write a GGUF file with matrices in Q8_0 where their rows allow it; return what it stands for in float32.

    ``counts``: more of its metadata.
    """
    infos, data, reference = [], b"", {}
    for name, tensor in tensors.items():
        rows = tensor.detach().float().contiguous()
        if is_quantized_key(name, tensor) and tensor.shape[-1] % 32 == 0:
            blocks = rows.view(-1, 32)
            scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
            values = (blocks / scale.float().clamp_min(1e-12)).round().clamp(-127, 127).to(torch.int8)
            raw, kind = torch.cat([scale.view(torch.uint8), values.view(torch.uint8)], dim=1).numpy().tobytes(), 8
            reference[name] = (values.float() * scale.float()).view(tensor.shape)
        else:
            raw, kind, reference[name] = rows.numpy().tobytes(), 0, rows
        dims = tensor.shape[::-1]
        infos.append(_pack_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data)))
        data += raw + bytes(-len(raw) % 32)
    values = _pack_text("general.architecture") + struct.pack("<I", 8) + _pack_text(architecture)
    for name, number in (counts or {}).items():
        values += _pack_text(name) + struct.pack("<II", 4, number)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), 1 + len(counts or {})) + values + b"".join(infos)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return reference


def _pack_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def quantize_torchao(
    state: Mapping[str, Tensor], kind: str
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Tensor]]:
    """Store matrices in ``int8`` or ``float8`` as torchao does: what is stored, its metadata, what it stands for."""
    result, metadata, reference = {}, {"tensor_names": json.dumps(list(state))}, dict(state)
    for key, tensor in state.items():
        if not is_quantized_key(key, tensor):
            result[key], metadata[key] = tensor, json.dumps({"_type": "Tensor"})
            continue
        base, peak = key.removesuffix(".weight"), 127 if kind == "int8" else 448
        scale = tensor.float().abs().amax(1, keepdim=True) / peak
        values = tensor.float() / scale
        values = values.round().to(torch.int8) if kind == "int8" else values.to(torch.float8_e4m3fn)
        result[f"{base}._weight_qdata"], result[f"{base}._weight_scale"] = values, scale
        if kind == "int8":
            result[f"{base}._weight_zero_point"] = torch.zeros_like(scale, dtype=torch.int8)
        metadata[key] = json.dumps({"_type": f"{kind.capitalize()}Tensor", "_tensor_data_names": ["qdata", "scale"]})
        reference[key] = values.float() * scale
    return result, metadata, reference


def quantize_nf4(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Store matrices in nf4 as bitsandbytes does; return what is stored, and what it stands for."""
    result, reference = {}, dict(state)
    for key, tensor in state.items():
        if not is_quantized_key(key, tensor):
            result[key] = tensor
            continue
        weight = QuantizedWeight.quantize(tensor.float(), "nf4")
        packed, scale, levels = weight.tensors
        details = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(tensor.shape)}
        data = torch.tensor(list(json.dumps(details).encode()), dtype=torch.uint8)
        result[key] = packed.flatten()[: (tensor.numel() + 1) // 2].view(-1, 1)
        result[f"{key}.absmax"], result[f"{key}.quant_map"] = scale.float().flatten(), levels
        result[f"{key}.quant_state.bitsandbytes__nf4"] = data
        reference[key] = weight.dequantize(torch.float32)
    return result, reference
