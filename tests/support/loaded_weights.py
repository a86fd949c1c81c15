"""Compare the weights of loaded components."""

import torch
from family_cases import get_modules


def list_loaded_components(family, pipe):
    return {name for name in family.facts.components if getattr(pipe, name) is not None}


def assert_same_weights(family, pipe, full_pipe):
    """Compare the components of ``pipe`` with those of ``full_pipe``."""
    for name, part in get_modules(family, pipe).items():
        expected = getattr(full_pipe, name).state_dict()
        assert part.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in part.state_dict().items()), name
