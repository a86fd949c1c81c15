"""Kandinsky 5 image: the mask of padded texts, sizes of previews, and models that are refused."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from diffusers import Kandinsky5T2IPipeline
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5AttnProcessor
from family_cases import build_case

from library.errors import FileError
from library.models.detect import detect_model
from library.models.families.kandinsky5_image import _rotate
from library.models.model_configs import load_bundled_config

__all__ = ["build_case"]  # a fixture


@pytest.mark.slow
@torch.no_grad()
def test_a_mask_of_no_padding_changes_nothing_and_padding_would(build_case):
    family, tiny = build_case("kandinsky5_image")
    t, texts = torch.tensor([700.0, 250.0]), tiny.batch.cond["embeds"]
    whole = family.predict(tiny.pipe, tiny.pipe.transformer, tiny.batch.latents, t, tiny.batch)
    padded = replace(tiny.batch, text_pad_multiple=16)
    masked = family.predict(tiny.pipe, tiny.pipe.transformer, tiny.batch.latents, t, padded)
    torch.testing.assert_close(masked, whole)
    zeros = [torch.nn.functional.pad(text, (0, 0, 0, 7)) for text in texts]
    unmasked = replace(tiny.batch, cond={**tiny.batch.cond, "embeds": zeros})
    seen = family.predict(tiny.pipe, tiny.pipe.transformer, tiny.batch.latents, t, unmasked)
    assert not torch.allclose(seen, whole, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kandinsky5_image", "kandinsky5_i2v"])
@torch.no_grad()
def test_the_attention_is_that_of_diffusers_in_bf16_and_keeps_its_precision_in_float32(build_case, name):
    family, tiny = build_case(name)
    t, differences = torch.tensor([700.0, 250.0]), dict[torch.dtype, float]()
    theirs = copy.deepcopy(tiny.pipe)
    for module in theirs.transformer.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(Kandinsky5AttnProcessor())
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            ours, reference = (
                family.predict(pipe, pipe.transformer, tiny.batch.latents, t, tiny.batch)
                for pipe in (tiny.pipe, theirs)
            )
        differences[dtype] = float((ours - reference).abs().max() / reference.abs().max())
    assert differences[torch.bfloat16] == 0.0
    assert 0.0 < differences[torch.float32] < 1e-2  # where theirs are rounded to bf16

    positions, tokens = tiny.pipe.transformer.text_rope_embeddings, torch.randn(1, 5, 2, 16)
    turned = (
        torch.view_as_complex(tokens.double().unflatten(-1, (8, 2))) * (1j * positions.args[:5, None].double()).exp()
    )
    rotated = _rotate(tokens, positions(torch.arange(5)).unsqueeze(0))
    torch.testing.assert_close(rotated, torch.view_as_real(turned).flatten(-2).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_the_pipeline_samples_the_size_that_is_asked_for_and_is_that_of_diffusers(build_case):
    _, tiny = build_case("kandinsky5_image")
    options = {**tiny.call, "guidance_scale": 1.0, "num_inference_steps": 2, "output_type": "latent"}
    theirs = Kandinsky5T2IPipeline(**tiny.pipe.components)
    theirs.set_progress_bar_config(disable=True)
    theirs.resolutions = [(96, 64)]
    ours, reference = (
        pipe(**options, height=64, width=96, generator=torch.Generator().manual_seed(2)).image
        for pipe in (tiny.pipe, theirs)
    )
    assert torch.equal(ours, reference) and ours.shape[1:4] == (1, 8, 12)


def test_image_editing_and_video_models_are_refused(tmp_path):
    data = copy.deepcopy(dict(load_bundled_config("kandinsky5_image_tiny")))
    data["transformer/config.json"]["visual_cond"] = True
    for path, content in data.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    with pytest.raises(FileError) as caught:
        detect_model(str(tmp_path))
    assert "has a picture or video as a condition" in str(caught.value)
