"""Weights of a pipeline that trains them: each block's on its own stage, and found by their shapes elsewhere."""

from typing import Any

import torch
from torch import nn

from library.parallel.pipeline_weights import PipelineWeights


def test_a_rank_holds_the_weights_of_its_stage_and_empty_ones_in_place_of_the_others():
    """Frozen weights of other stages are gathered for the file as trained ones are."""
    blocks = [nn.Linear(3, 2), nn.Linear(2, 4)]
    blocks[1].bias.requires_grad_(False)
    blocks[1].scale = nn.Parameter(torch.tensor(2.0))
    group: Any = None
    weights = PipelineWeights(group, [4, 6], 0, torch.device("cpu"))
    own = blocks[0].weight
    for stage, block in enumerate(blocks):
        weights.add_block(block, stage)

    assert blocks[0].weight is own and own in weights
    assert [each.numel() for each in (blocks[1].weight, blocks[1].scale)] == [0, 1] and blocks[1].bias.is_meta
    assert blocks[1].weight.requires_grad and not blocks[1].bias.requires_grad and blocks[1].scale not in weights
    for remote, shape in ((blocks[1].weight, (4, 2)), (blocks[1].bias, (4,))):
        stand_in = weights.get_stand_in(remote)
        assert remote in weights and stand_in.is_meta and stand_in.shape == shape
        assert weights.find_weight(stand_in) is remote
    assert weights.take(blocks[1].weight, torch.ones(4, 2)).shape == (0,), "a checkpoint has whole weights"
    assert torch.equal(weights.take(own, torch.ones(6)), torch.ones(2, 3))
    assert weights.find_weight(weights.get_stand_in(blocks[1].scale)) is None
