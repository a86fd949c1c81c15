"""Blocks of a denoiser that are equal: a step that computes three of them counts what a step of all counts."""

import pytest
import torch
from support.measured_memory import load_config
from torch import nn

from library.estimate import repeated_blocks
from library.estimate.meta_run import LargestBatch, MetaRun
from library.estimate.repeated_blocks import RepeatedBlocks
from library.parallel.parallel_plan import BlockSequence


class Block(nn.Module):
    """A block with two streams, the second of which the last block of a model may not return."""

    def __init__(self, width: int, calls: list[int], number: int):
        super().__init__()
        self.layer, self.calls, self.number = nn.Linear(width, width, device="meta"), calls, number

    def forward(self, image, text, *, scale):
        self.calls.append(self.number)
        return self.layer(image) * scale, text


def build_chain(widths):
    calls = list[int]()
    blocks = tuple(Block(width, calls, number) for number, width in enumerate(widths))
    return BlockSequence(blocks, ("image", "text")), calls


def run_chain(chain, *, widths=None):
    image = torch.ones(3, (widths or [4])[0], device="meta", requires_grad=True)
    text, scale = torch.ones(2, 4, device="meta"), torch.ones((), device="meta", requires_grad=True)
    states = image
    for block in chain.blocks:
        states, text = block(states, text, scale=scale)
    states.sum().backward()
    return image, scale, text


def test_of_equal_blocks_the_first_two_and_the_last_one_are_computed():
    chain, calls = build_chain([4] * 6)
    repeated = RepeatedBlocks(chain)
    image, scale, text = run_chain(chain)

    assert calls == [0, 1, 5] and text.shape == (2, 4)
    assert image.grad.shape == image.shape and scale.grad.shape == ()
    assert repeated.restore_skipped("abxyzf") == ("a", "b", "b", "b", "b", "f")
    repeated.is_enabled = False
    run_chain(chain)
    assert calls[3:] == [*range(6)] and repeated.restore_skipped("abcdef") == tuple("abcdef")


def test_blocks_that_differ_in_parameters_or_inputs_are_computed():
    chain, calls = build_chain([4] * 5)
    chain.blocks[2].layer.weight.requires_grad_(False)
    RepeatedBlocks(chain)
    run_chain(chain)
    assert calls == [0, 1, 2, 3, 4]

    chain, calls = build_chain([4] * 5)
    RepeatedBlocks(chain)
    states = torch.ones(3, 4, device="meta", requires_grad=True)
    for number, block in enumerate(chain.blocks):
        block(states if number != 2 else states[:2], states, scale=1)
    assert calls == [0, 1, 2, 4], "the third has another input"


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--gradient_checkpointing",)], ids=["plain", "checkpointed"])
def test_a_step_that_skips_equal_blocks_counts_all_of_them(more, monkeypatch):
    model = "--pretrained_model_name_or_path", "random:z_image", "--mixed_precision", "bf16"
    config, _, detected = load_config(*model, *more)
    batch = LargestBatch((512, 512), ("an image",))
    skipped = MetaRun(config, detected, batch).step
    monkeypatch.setattr(repeated_blocks, "COMPUTED_FIRST", 1000)
    computed = MetaRun(config, detected, batch).step

    assert skipped.flows == computed.flows and len(skipped.blocks) == len(computed.blocks) == 30
    for name in ("saved", "peak", "flops", "kernels"):
        assert getattr(skipped.total, name) == pytest.approx(getattr(computed.total, name), rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "more"),
    [
        ("wan22_t2v", 2, ("--noise_experts", "both", "--seed", "1")),
        ("wan22_t2v", 2, ("--noise_experts", "both", "--seed", "2")),
        ("wan_vace", 5, ()),
    ],
)
def test_a_step_of_one_of_two_experts_or_with_blocks_for_a_control_counts_the_blocks_that_it_visits(name, count, more):
    model = "--pretrained_model_name_or_path", f"random:{name}:tiny", *more
    config, _, detected = load_config(*model)
    controls = ((64, 64),) * (name == "wan_vace")
    run = MetaRun(config, detected, LargestBatch((64, 64), ("a clip",), control_sizes=controls, num_frames=5))
    if name == "wan_vace":
        with_references = LargestBatch(
            (64, 64), ("a clip",), control_sizes=controls * 3, num_references=2, num_frames=5
        )
        longer = MetaRun(config, detected, with_references).step
        assert longer.blocks[0].flops > 1.5 * run.step.blocks[0].flops, "four latent frames, and two without references"
    again = run.run_again(load_config(*model, "--gradient_checkpointing")[0])
    assert len(run.step.blocks) == len(again.step.blocks) == count
    assert all(part.saved > 0 and part.flops > 0 for part in run.step.blocks)
    assert again.step.total.saved < run.step.total.saved
