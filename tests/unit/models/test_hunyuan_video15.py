"""HunyuanVideo 1.5: its transformer computes what that of diffusers does, without its masks of token pairs."""

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from family_cases import build_case

from library.models.families.hunyuan_video15 import FACTS, HUNYUAN_VIDEO15_KEYS
from library.models.model_configs import ModelError, build_bundled_reader, load_bundled_config

__all__ = ["build_case"]  # a fixture


@torch.no_grad()
def test_the_transformer_computes_what_that_of_diffusers_does(build_case):
    _, tiny = build_case("hunyuan_video15")
    ours = tiny.pipe.transformer
    theirs = HunyuanVideo15Transformer3DModel.from_config(ours.config)
    theirs.load_state_dict(ours.state_dict())
    assert type(theirs) is not type(ours)
    latents = torch.randn(2, 4, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    texts, glyphs = tiny.call["prompt_embeds"], tiny.call["prompt_embeds_2"]
    call = {
        "hidden_states": torch.cat([latents, torch.zeros(2, 5, 2, 4, 6)], dim=1),
        "timestep": torch.tensor([700.0, 250.0]),
        "encoder_hidden_states": texts,
        "encoder_attention_mask": tiny.call["prompt_embeds_mask"],
        "encoder_hidden_states_2": glyphs,
        "encoder_attention_mask_2": tiny.call["prompt_embeds_mask_2"],
        "return_dict": False,
    }

    expected = theirs(**call, image_embeds=torch.zeros(2, 729, ours.config.image_embed_dim))[0]

    torch.testing.assert_close(ours(**call)[0], expected, rtol=1e-4, atol=1e-5)
    shorter = {**call, "encoder_attention_mask": torch.ones(2, texts.shape[1])}
    assert not torch.allclose(ours(**shorter)[0], expected), "the mask matters"


@pytest.mark.slow
@torch.no_grad()
def test_the_transformer_with_a_first_image_computes_what_that_of_diffusers_does(build_case):
    _, tiny = build_case("hunyuan_video15_i2v")
    ours = tiny.pipe.transformer
    theirs = HunyuanVideo15Transformer3DModel.from_config(ours.config)
    theirs.load_state_dict(ours.state_dict())
    latents = torch.randn(2, 4, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    images = torch.randn(2, 4, ours.config.image_embed_dim, generator=torch.Generator().manual_seed(2))
    call = {
        "hidden_states": torch.cat([latents, torch.randn(2, 5, 2, 4, 6)], dim=1),
        "timestep": torch.tensor([700.0, 250.0]),
        "encoder_hidden_states": tiny.call["prompt_embeds"],
        "encoder_attention_mask": tiny.call["prompt_embeds_mask"],
        "encoder_hidden_states_2": tiny.call["prompt_embeds_2"],
        "encoder_attention_mask_2": tiny.call["prompt_embeds_mask_2"],
        "return_dict": False,
    }
    expected = theirs(**call, image_embeds=images)[0]
    torch.testing.assert_close(ours(**call, image_embeds=images)[0], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours(**call, image_embeds=-images)[0], expected, atol=1e-3)


def test_models_of_few_steps_are_refused():
    configs = dict(load_bundled_config("hunyuan_video15"))
    match = FACTS.detection.match_configs(build_bundled_reader(configs))
    assert (match.size_multiple, match.prediction_type) == (16, "flow")
    configs["transformer/config.json"] = {**configs["transformer/config.json"], "use_meanflow": True}
    with pytest.raises(ModelError, match="distilled to few steps"):
        FACTS.detection.match_configs(build_bundled_reader(configs))


def test_lora_files_have_the_names_of_musubi_tuner_and_for_comfyui_those_of_its_fused_layers():
    names = {module.name for module in HUNYUAN_VIDEO15_KEYS.layout}
    assert {"double_blocks.{}.img_attn_q", "double_blocks.{}.txt_mlp.fc2", "double_blocks.{}.img_mod.linear"} <= names
    fused = {module.name: len(module.diffusers_modules) for module in HUNYUAN_VIDEO15_KEYS.comfyui_style.layout}
    assert fused["double_blocks.{}.img_attn.qkv"] == fused["double_blocks.{}.txt_attn.qkv"] == 3
    assert fused["double_blocks.{}.img_mlp.0"] == 1 and len(fused) == 10
