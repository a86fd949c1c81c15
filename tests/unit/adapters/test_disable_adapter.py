"""A model whose adapters are switched off is the one that was there before."""

import torch
from small_unet import CONFIG, TARGETS, call, randomise, unet

from library.adapters import lora
from library.adapters.lora import disable_adapters


@torch.no_grad()
def test_switched_off_the_model_is_what_it_was_and_afterwards_all_learns_again():
    model = unet()
    before = call(model)
    lora.inject_into_model(model, CONFIG, TARGETS, seed=1)
    randomise(model)
    after, learning = call(model), [name for name, each in model.named_parameters() if each.requires_grad]
    with disable_adapters(model):
        assert torch.equal(call(model), before)
    assert torch.equal(call(model), after) and not torch.equal(after, before)
    assert [name for name, each in model.named_parameters() if each.requires_grad] == learning
