"""Weights of diffusers are put together to the tensors of a single file, to the bit: the inverse of loading one."""

import re

import model_layouts
import original_checkpoints
import pytest
import torch
from tiny_pipelines import TINY

from library.models.families import FAMILY_FACTS
from library.models.original_layout import find_original_tensors
from library.models.single_file import build_key_conversion

FAMILIES_OF_FILES = [
    name
    for name, facts in FAMILY_FACTS.items()
    if facts.single_files.prefixes and facts.pipeline.experts is None and name in TINY
]
OF_NO_WEIGHT = {
    "pixart_sigma": r"pos_embed|y_embedder\.",
    "anima": r"net\.llm_adapter\.",
    "wan_animate": r"motion_encoder\..*\.0\.kernel$",
}
"""Patterns of tensors of files that are no weights of the denoiser here."""
QUICK = ("sd1", "sdxl", "sd3", "flux", "z_image")


def rebuild(model, facts, component, original):
    config = model.config if isinstance(model.config, dict) else model.config.to_dict()
    conversion = build_key_conversion(facts, component, dict(config))
    shapes = {key: tuple(tensor.shape) for key, tensor in original.items()}
    state = model.state_dict()
    return {each.key: each.build(state.__getitem__) for each in find_original_tensors(shapes, "", model, conversion)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES_OF_FILES]
)
def test_every_tensor_of_the_denoisers_file_is_put_together_to_the_bit(name):
    pipe, facts = TINY[name]().pipe, FAMILY_FACTS[name]
    original = model_layouts.convert_denoiser(name, pipe)
    built = rebuild(getattr(pipe, facts.denoiser_name), facts, facts.denoiser_name, original)
    assert all(re.match(OF_NO_WEIGHT.get(name, "$^"), key) for key in original.keys() - built.keys())
    assert [key for key in built if not torch.equal(built[key], original[key])] == []


@pytest.mark.parametrize(
    ("name", "encoder"), [("sd1", "text_encoder"), ("sd2", "text_encoder"), ("sdxl", "text_encoder_2")]
)
def test_every_tensor_of_a_clip_encoder_is_put_together_to_the_bit(name, encoder):
    """OpenCLIP has one tensor for query, key and value, and a transposed projection."""
    pipe, facts = TINY[name]().pipe, FAMILY_FACTS[name]
    model = getattr(pipe, encoder)
    original = (
        original_checkpoints.convert_text_encoder(model)
        if name == "sd1"
        else original_checkpoints.convert_open_clip(model)
    )
    built = rebuild(model, facts, encoder, original)
    assert {"logit_scale"} >= original.keys() - built.keys()
    assert [key for key in built if not torch.equal(built[key], original[key])] == []


def test_rows_that_no_weight_has_are_an_error():
    pipe, facts = TINY["flux"]().pipe, FAMILY_FACTS["flux"]
    original = model_layouts.convert_denoiser("flux", pipe)
    key = next(key for key in original if key.endswith("img_attn.qkv.weight"))
    longer = original | {key: torch.cat([original[key], original[key][:1]])}
    with pytest.raises((ValueError, KeyError)):
        rebuild(pipe.transformer, facts, "transformer", longer)
