"""The experts of Nucleus-Image compute what diffusers' do, one expert after another."""

import torch
from diffusers.models.transformers.transformer_nucleusmoe_image import SwiGLUExperts

from library.models.families import FAMILIES


def test_all_experts_at_once_are_one_after_another():
    torch.manual_seed(3)
    model = torch.nn.Sequential(SwiGLUExperts(8, 6, 4)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    tokens, weight = torch.randn(4 * 5, 8).double().requires_grad_(), torch.randn(20, 8).double()
    counts = torch.full((4,), 5)

    def compute() -> tuple[torch.Tensor, ...]:
        output = model[0](tokens, counts)
        return output, *torch.autograd.grad((output * weight).sum(), (tokens, *model.parameters()))

    expected = compute()
    FAMILIES.get("nucleus_image").prepare_denoiser(model)
    assert type(model[0]) is not SwiGLUExperts
    torch.testing.assert_close(compute(), expected)
