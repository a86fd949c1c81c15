"""Models with random weights: reproducible, and with the statistics of an initialized model."""

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.models.weights import build_random_component

SMALL = dict(vocab_size=600, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


def list_weights(part):
    return torch.cat([parameter.detach().flatten().float() for parameter in part.parameters()])


def test_a_component_does_not_depend_on_the_others_and_the_global_generator_is_unchanged():
    family = FAMILIES.get("sdxl")()
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    full_pipe = family.load("random:sdxl:tiny", torch.float32)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    for part in ("unet", "vae", "text_encoder_2"):
        single = family.load("random:sdxl:tiny", torch.float32, (part,))
        assert torch.equal(list_weights(getattr(single, part)), list_weights(getattr(full_pipe, part)))
    assert not torch.equal(list_weights(full_pipe.text_encoder)[:99], list_weights(full_pipe.text_encoder_2)[:99])


def test_random_weights_are_the_same_model_in_half_precision():
    one, half = (
        build_random_component(CLIPTextModel, SMALL, "text_encoder", dtype, None)
        for dtype in (torch.float32, torch.bfloat16)
    )
    torch.testing.assert_close(list_weights(half), list_weights(one), rtol=2e-2, atol=1e-5)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_no_two_rows_of_a_large_matrix_are_the_same_slice_of_the_noise():
    model = build_random_component(
        CLIPTextModel, {**SMALL, "vocab_size": 49408, "hidden_size": 256}, "text_encoder", torch.float32, None
    )
    table = next(p.detach() for name, p in model.named_parameters() if "token_embedding" in name)
    assert len(torch.unique(table[:, :3], dim=0)) == len(table)
    matrices = [p.detach() for p in model.parameters() if p.shape == (256, 256)]
    assert len({float(matrix[0, 0]) for matrix in matrices}) == len(matrices)
    for weight in (table, *matrices):
        assert float(weight.std()) == pytest.approx(256**-0.5, rel=0.02)


def test_norm_weights_are_one_biases_zero_and_buffers_those_of_transformers():
    model, judge = (
        build_random_component(CLIPTextModel, SMALL, "text_encoder", torch.float32, None),
        CLIPTextModel(CLIPTextConfig(**SMALL)),
    )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert bool((parameter == float(name.endswith("weight"))).all()), name
    reference = dict(judge.named_buffers())
    assert dict(model.named_buffers()).keys() == reference.keys()
    assert all(torch.equal(buffer, reference[name]) for name, buffer in model.named_buffers())
    assert not model.training and all(parameter.requires_grad for parameter in model.parameters())


@torch.no_grad()
def test_the_latent_variance_of_a_random_vae_is_as_small_as_that_of_a_trained_one():
    vae = FAMILIES.get("sdxl")().load("random:sdxl:tiny", torch.float32, ("vae",)).vae
    std = vae.encode(torch.rand(1, 3, 64, 96) * 2 - 1).latent_dist
    assert float(std.std.mean()) < 0.3 * float(std.mean.std())


def test_the_device_of_a_model_can_be_set_while_it_is_loaded(tmp_path):
    family = FAMILIES.get("sd1")()
    family.load("random:sd1:tiny", torch.float32).save_pretrained(tmp_path)
    place = torch.device("cpu")
    for source in ("random:sd1:tiny", detect_model(str(tmp_path)), None):
        pipe = family.load(source, torch.bfloat16, device=place)
        assert {parameter.device for parameter in pipe.unet.parameters()} == {place}
        assert pipe.vae.dtype == torch.float32


def test_the_components_of_the_built_in_model_can_be_loaded_separately():
    family = FAMILIES.get("sd1")()
    full_pipe = family.load(None, torch.float32)
    pipe = family.load(None, torch.float32, family.facts.text.components)
    assert pipe.unet is None
    family.load(None, torch.float32, ("unet", "vae"), pipe=pipe)
    for part in ("unet", "vae", "text_encoder"):
        assert torch.equal(list_weights(getattr(pipe, part)), list_weights(getattr(full_pipe, part)))
