"""Shared by tests: loaded weights."""

import torch
from family_cases import modules_of


def present(family, pipe):
    return {name for name in family.components if getattr(pipe, name) is not None}


def same_weights(family, pipe, whole):
    """What is loaded in ``pipe`` has the weights that it has in ``whole``."""
    for name, part in modules_of(family, pipe).items():
        theirs = getattr(whole, name).state_dict()
        assert part.state_dict().keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in part.state_dict().items()), name
