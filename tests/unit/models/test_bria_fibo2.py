"""The transformer of Bria Fibo 2 that counts no tokens on the host computes what diffusers' does; its captions."""

import copy
import json

import pytest
import torch
from diffusers import BriaFibo2Pipeline, BriaFibo2Transformer2DModel

from library.models.families.bria_fibo2 import BriaFibo2, _clean_caption
from library.models.model_configs import load_bundled_config
from library.models.weights import build_random_component

CONFIG = load_bundled_config("bria_fibo2_tiny")["transformer/config.json"]


@pytest.fixture(scope="module")
def models():
    """diffusers' transformer, and ours of the same weights."""
    theirs = build_random_component(BriaFibo2Transformer2DModel, CONFIG, "transformer", torch.float32, None)
    ours = copy.deepcopy(theirs)
    BriaFibo2.prepare_denoiser(ours)
    return ours, theirs


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(150, 45), (100, 100), (30,)], ids=["other counts", "padded alike", "one"])
@pytest.mark.parametrize("num_references", [0, 2])
def test_the_prediction_is_that_of_diffusers(models, lengths, num_references):
    ours, theirs = models
    draw, longest, count = torch.Generator().manual_seed(2), max(lengths), len(lengths)
    padded = longest + 20 * (count > 1)
    mask = torch.arange(padded) < torch.tensor(lengths).unsqueeze(1)
    texts = torch.randn(count, 6, padded, 24, generator=draw) * mask[:, None, :, None]
    references = [torch.randn(count, 4, *size, generator=draw) for size in ((6, 4), (4, 10))[:num_references]]
    inputs = {
        "hidden_states": torch.randn(count, 4, 8, 12, generator=draw),
        "timestep": torch.tensor([0.7, 0.2])[:count],
        "context_latents": references or None,
    }
    mine = ours(**inputs, encoder_hidden_states=texts, encoder_attention_mask=mask if count > 1 else None).sample
    expected = theirs(
        **inputs,
        encoder_hidden_states=texts[:, :, :longest],
        encoder_attention_mask=mask[:, :longest] if count > 1 else None,
        return_dict=False,
    )[0]
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    shorter = mask & (torch.arange(padded) < 40)
    other = ours(**inputs, encoder_hidden_states=texts, encoder_attention_mask=shorter, return_dict=False)[0]
    assert count == 1 or (other - mine).abs().max() > 1e-2


def test_longer_texts_have_more_gist_tokens(models):
    counts = models[0]._count_gist_tokens(200)
    assert (counts[0], counts[40], counts[100], counts[200]) == (4, 4, 12, 16) and counts == sorted(counts)


def test_captions_are_cleaned_as_by_the_pipeline():
    caption = {"objects": [], "short_description": "a red circle", "style": {"aesthetic_score": 3, "medium": "ink"}}
    cleaned = _clean_caption(BriaFibo2Pipeline, json.dumps(caption, indent=1), 0)
    assert cleaned == '{"short_description":"a red circle","style":{"medium":"ink"}}'
    assert _clean_caption(BriaFibo2Pipeline, "a red circle", 0) == "a red circle"
    assert _clean_caption(BriaFibo2Pipeline, '{"edit_instruction": "paint it blue"}', 1) == (
        '{"edit_instruction": "paint it blue"}'
    )
    assert '"objects":[]' in _clean_caption(BriaFibo2Pipeline, "", 0) == _clean_caption(BriaFibo2Pipeline, "", 1)
