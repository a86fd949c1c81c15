"""Mochi's transformer with a mask in its attention computes what diffusers' own does, which takes tokens out."""

from dataclasses import replace

import pytest
import torch
from diffusers import MochiTransformer3DModel
from family_cases import build_case

__all__ = ["build_case"]  # a fixture


@pytest.mark.slow
@torch.no_grad()
def test_masked_attention_computes_what_diffusers_transformer_does(build_case):
    _, tiny = build_case("mochi")
    ours = tiny.pipe.transformer
    theirs = MochiTransformer3DModel.from_config(ours.config)
    generator = torch.Generator().manual_seed(1)
    ours.pos_frequencies.copy_(torch.randn(ours.pos_frequencies.shape, generator=generator))
    theirs.load_state_dict(ours.state_dict())
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [0] * 9]).bool()
    arguments = {
        "hidden_states": torch.randn(3, 12, 2, 8, 12, generator=generator),
        "encoder_hidden_states": torch.randn(3, 9, 48, generator=generator),
        "timestep": torch.tensor([20.0, 500.0, 901.0]),
        "encoder_attention_mask": mask,
    }
    expected = theirs(**arguments).sample
    torch.testing.assert_close(ours(**arguments).sample, expected, rtol=1e-4, atol=1e-5)
    other_padding = arguments["encoder_hidden_states"].where(mask[:, :, None], torch.tensor(7.0))
    padded = ours(**{**arguments, "encoder_hidden_states": other_padding}).sample
    torch.testing.assert_close(padded, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_empty_text_is_none_as_in_the_pipeline(build_case):
    family, tiny = build_case("mochi")
    pipe, texts = tiny.pipe, ["a red circle", ""]
    recorded = []
    pipe.transformer.register_forward_pre_hook(lambda module, args, kwargs: recorded.append(kwargs), with_kwargs=True)
    latents = torch.randn(2, 12, 1, 8, 12, generator=torch.Generator().manual_seed(2))
    cond = family.encode_prompts(pipe, texts)
    ours = family.predict(pipe, pipe.transformer, latents, torch.full((2,), 700.0), replace(tiny.batch, cond=cond))
    assert recorded[-1]["encoder_attention_mask"].sum(1).tolist() == [len(cond["embeds"][0]), 0]
    embeds, mask, *_ = pipe.encode_prompt([""], do_classifier_free_guidance=False)
    alone = pipe.transformer(latents[1:], embeds, torch.full((1,), 300.0), mask).sample
    torch.testing.assert_close(-ours[1:], alone, rtol=1e-4, atol=1e-5)
