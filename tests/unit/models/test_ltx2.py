"""LTX-2 is trained on pictures: sound has no part in it, and models of which that is not known are refused."""

import pytest
import torch
from family_cases import build_case
from torch import nn

from library.config import RunConfig
from library.dataloader.sample_prompts import Prompt
from library.models.families.ltx2 import FACTS, LTX2
from library.models.model_configs import ModelError, build_bundled_reader, load_bundled_config
from library.training.full_weights import list_trained_names

__all__ = ["build_case"]  # a fixture


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ltx2", "ltx2_2_3"])
def test_exactly_the_layers_of_sound_get_no_gradient(name, build_case):
    family, tiny = build_case(name)
    denoiser = tiny.pipe.transformer.requires_grad_(True)
    times = torch.tensor([700.0, 250.0])
    family.predict(tiny.pipe, denoiser, tiny.batch.latents, times, tiny.batch).square().sum().backward()
    layers = {each: layer for each, layer in denoiser.named_modules() if isinstance(layer, nn.Linear)}
    idle = {each for each, layer in layers.items() if layer.weight.grad is None}
    assert idle == layers.keys() & {*family.get_unused_layers(denoiser)}
    assert 0 < len(idle) < len(layers)
    weights = {each for each, weight in denoiser.named_parameters() if weight.grad is not None}
    assert {*list_trained_names(RunConfig().adapter, family, "transformer", denoiser)} == weights


@pytest.mark.slow
def test_a_preview_without_guidance_calls_the_denoiser_once_for_each_step(build_case):
    family, tiny = build_case("ltx2")
    with torch.no_grad():
        cond = family.encode_prompts(tiny.pipe, ["a red circle"])
    calls = []
    tiny.pipe.transformer.register_forward_hook(lambda module, args, output: calls.append(len(output[0])))
    counts = []
    for scale in (1.0, 3.0):
        prompt = Prompt("a", height=64, width=96, num_inference_steps=2, cfg_scale=scale)
        family.generate_frames(tiny.pipe, prompt, cond, cond, torch.Generator().manual_seed(1), None)
        counts.append(calls[:])
        calls.clear()
    assert counts == [[1, 1], [2, 1, 2, 1]]  # with the text and without, and without sound


CHANGES = {
    "model_index.json": ({"text_encoder": ["transformers", "Gemma4UnifiedForConditionalGeneration"]}, "LTX-2.5"),
    "transformer/config.json": ({"use_prompt_adaln_single": False}, "LTX-2.5"),
    "connectors/config.json": ({"video_connector_num_learnable_registers": None}, "no learnable registers"),
    "scheduler/scheduler_config.json": ({"_class_name": "DDIMScheduler"}, "only flow matching"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_models_that_are_not_known_are_refused_with_the_reason(name):
    config, (change, reason) = load_bundled_config("ltx2_2_3"), CHANGES[name]
    assert "of LTX-2.3" in FACTS.detection.match_configs(build_bundled_reader(config)).reason
    changed = {**config, name: {**config[name], **change}}
    with pytest.raises(ModelError, match=reason):
        FACTS.detection.match_configs(build_bundled_reader(changed))


def test_layers_of_sound_are_known_by_their_names():
    denoiser = nn.ModuleDict(
        {"ff": nn.Identity(), "audio_ff": nn.Identity(), "av_cross_attn_video_a2v_gate": nn.Identity()}
    )
    assert LTX2().get_unused_layers(denoiser) == ("audio_ff", "av_cross_attn_video_a2v_gate")
