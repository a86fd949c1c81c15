"""JoyImage Edit: texts of different length are masked, and Plus computes the same from one reference of the same size."""

import copy

import pytest
import torch
from diffusers import JoyImageEditPlusTransformer3DModel, JoyImageEditTransformer3DModel

from library.models.families.joyimage_edit import JoyImageEdit, JoyImageEditPlus, fold_patches, unfold_patches
from library.models.model_configs import load_bundled_config
from library.models.weights import build_random_component

LENGTHS = (9, 5)


@pytest.fixture(scope="module")
def inputs():
    draw = torch.Generator().manual_seed(2)
    texts = torch.randn(2, max(LENGTHS), 16, generator=draw)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    items = torch.randn(2, 2, 4, 1, 8, 12, generator=draw)  # the reference, then the picture
    return items, torch.tensor([700.0, 250.0]), texts, mask.long()


def build(name, model_class):
    config = load_bundled_config(f"{name}_tiny")["transformer/config.json"]
    return build_random_component(model_class, config, "transformer", torch.float32, None)


@torch.no_grad()
def test_texts_of_different_length_are_those_that_diffusers_predicts_for_each_alone(inputs):
    items, times, texts, mask = inputs
    theirs = build("joyimage_edit", JoyImageEditTransformer3DModel)
    ours = copy.deepcopy(theirs)
    JoyImageEdit.prepare_denoiser(ours)
    batched = ours(items, times, texts, encoder_hidden_states_mask=mask, return_dict=False)[0]
    for row, length in enumerate(LENGTHS):
        one = slice(row, row + 1)
        alone = theirs(items[one], times[one], texts[one, :length], return_dict=False)[0]
        torch.testing.assert_close(batched[one], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            ours(items[one], times[one], texts[one, :length], return_dict=False)[0], alone, rtol=1e-5, atol=1e-6
        )
    assert (ours(items, times, texts, return_dict=False)[0] - batched)[1].abs().max() > 1e-3


@torch.no_grad()
def test_plus_predicts_the_same_from_one_reference_as_the_model_of_one(inputs):
    items, times, texts, mask = inputs
    edit, plus = build("joyimage_edit", JoyImageEditTransformer3DModel), JoyImageEditPlusTransformer3DModel
    plus = build("joyimage_edit_plus", plus)
    plus.load_state_dict(edit.state_dict())
    JoyImageEdit.prepare_denoiser(edit)
    JoyImageEditPlus.prepare_denoiser(plus)
    reference, picture = items[:, 0, :, 0], items[:, 1, :, 0]
    patches = torch.cat([fold_patches(picture), fold_patches(reference)], dim=1)
    shapes = [[(1, 4, 6), (1, 4, 6)]] * 2
    theirs = plus(patches, times, texts, mask, shapes, return_dict=False)[0]
    ours = edit(items, times, texts, encoder_hidden_states_mask=mask, return_dict=False)[0]
    torch.testing.assert_close(unfold_patches(theirs, 8, 12), ours[:, 1, :, 0], rtol=1e-4, atol=1e-5)
    assert torch.equal(unfold_patches(patches, 8, 12), picture)
