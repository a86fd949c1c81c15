"""Ideogram 4 from the files that people have: fp8 with fused attention, the VAE of FLUX.2, the second transformer."""

import original_checkpoints
import pytest
import torch
from safetensors.torch import save_file

from library.config.schema import ModelConfig
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES


def write_fp8_file(path):
    """A transformer as ComfyUI's files have it: fp8 with a scale for each weight of the blocks, and fused attention."""
    family = FAMILIES.get("ideogram4")()
    pipe = family.load("random:ideogram4:tiny", torch.float32, ("transformer",))
    expected, tensors = {}, {}
    for name, tensor in original_checkpoints.convert_ideogram4_transformer(pipe.transformer).items():
        if name.startswith("layers.") and tensor.ndim == 2 and "adaln" not in name:
            scale = tensor.abs().max() / 448
            tensors[f"{name}_scale"], tensor = scale, (tensor / scale).to(torch.float8_e4m3fn)
            expected[name] = tensor.float() * scale
        tensors[name] = tensor.clone()
    save_file(tensors, path)
    return family, expected


def test_a_file_in_fp8_with_fused_attention_is_split(tmp_path):
    path, others = tmp_path / "ideogram4_fp8_scaled.safetensors", ("vae", "text_encoder")
    family, expected = write_fp8_file(path)
    pipe = family.load("random:ideogram4:tiny", torch.float32, others)
    for name in others:
        getattr(pipe, name).save_pretrained(tmp_path / name)
    detected = detect_model(ModelConfig(str(path), **{name: str(tmp_path / name) for name in others}))
    assert (detected.family, detected.bundled_config) == ("ideogram4", "ideogram4_tiny")
    assert detected.stored_formats == ("fp8",)
    loaded = family.load(detected, torch.float32, ("transformer",)).transformer
    for number, block in enumerate(loaded.layers):
        parts = torch.cat([getattr(block.attention, name).weight for name in ("to_q", "to_k", "to_v")])
        assert torch.equal(parts, expected[f"layers.{number}.attention.qkv.weight"])
        assert torch.equal(block.feed_forward.w2.weight, expected[f"layers.{number}.feed_forward.w2.weight"])


def test_the_transformer_that_reads_no_text_is_refused_by_the_name_of_its_file(tmp_path):
    write_fp8_file(tmp_path / "ideogram4_unconditional_fp8_scaled.safetensors")
    with pytest.raises(ConfigError, match="for guidance, which reads no text"):
        detect_model(str(tmp_path / "ideogram4_unconditional_fp8_scaled.safetensors"))


def test_the_statistics_of_a_vae_of_flux2_are_brought_into_the_order_of_the_pipeline():
    family = FAMILIES.get("ideogram4")()
    pipe = family.load("random:ideogram4:tiny", torch.float32, ("vae",))
    generator = torch.Generator().manual_seed(2)
    mean = torch.randn(4, generator=generator).repeat(4, 1) + torch.randn(4, 4, generator=generator) / 20
    variance = torch.rand(4, 4, generator=generator)
    for rows in ((mean.T, variance.T), (mean, variance)):  # by channel first, as in FLUX.2, and by the place in a patch
        pipe.vae.bn.running_mean.copy_(rows[0].flatten())
        pipe.vae.bn.running_var.copy_(rows[1].flatten())
        family.configure_pipeline(pipe, lambda name: None)
        assert torch.equal(pipe.vae.bn.running_mean, mean.flatten())
        assert torch.equal(pipe.vae.bn.running_var, variance.flatten())
