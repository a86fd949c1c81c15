"""With its adapters disabled, a model computes what the base model computes."""

import torch
from small_unet import CONFIG, TARGETS, build_unet, randomize_lora_b, run_unet

from library.adapters import injection
from library.adapters.injection import disable_adapters


@torch.no_grad()
def test_without_adapters_the_base_model_is_computed_and_afterwards_all_weights_are_trainable_again():
    model = build_unet()
    before = run_unet(model)
    injection.inject_into_model(model, CONFIG, TARGETS, seed=1)
    randomize_lora_b(model)
    after, learning = run_unet(model), [name for name, each in model.named_parameters() if each.requires_grad]
    with disable_adapters(model):
        assert torch.equal(run_unet(model), before)
    assert torch.equal(run_unet(model), after) and not torch.equal(after, before)
    assert [name for name, each in model.named_parameters() if each.requires_grad] == learning
