"""A LoRA file is merged for a while, and the old weights come back to the bit."""

import pytest
import torch

from library.adapters.kohya_diffusers_comfyui_keys import AdapterFileContents
from library.training.temporary_merge import list_changed_tensors, merge_temporarily


class Pipe:
    """A pipeline with one component of two layers."""

    def __init__(self, dtype: torch.dtype):
        torch.manual_seed(0)
        self.unet = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4)).to(dtype)


def build_content() -> AdapterFileContents:
    generator = torch.Generator().manual_seed(1)
    state = {
        "unet.1.lora_A.weight": torch.randn(2, 5, generator=generator),
        "unet.1.lora_B.weight": torch.randn(4, 2, generator=generator),
    }
    return AdapterFileContents(state_dict=state, alphas={"unet.1": 3.0}, file_format="kohya")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_changed_inside_and_the_old_ones_to_the_bit_afterwards(dtype):
    pipe, content = Pipe(dtype), build_content()
    before = {name: tensor.clone() for name, tensor in pipe.unet.state_dict().items()}
    update = 3.0 / 2 * content.state_dict["unet.1.lora_B.weight"] @ content.state_dict["unet.1.lora_A.weight"]

    with pytest.raises(KeyError), merge_temporarily(pipe, content, multiplier=0.5):
        expected = (before["1.weight"].float() + 0.5 * update).to(dtype)
        assert torch.allclose(pipe.unet[1].weight, expected, rtol=1e-6)
        assert not torch.allclose(pipe.unet[1].weight, before["1.weight"], rtol=1e-2)
        assert torch.equal(pipe.unet[0].weight, before["0.weight"])
        raise KeyError  # as generating a picture may

    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.unet.state_dict().items())


def test_only_layers_of_the_file_are_copied():
    pipe = Pipe(torch.float32)

    changed = list_changed_tensors(pipe, build_content())

    assert list(map(id, changed)) == [id(pipe.unet[1].weight), id(pipe.unet[1].bias)]
