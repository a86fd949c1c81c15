"""How much an optimizer remembers, found out by a step of the optimizer itself on tensors of the same shapes."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...config.schema import OptimConfig
from ...errors import UserError
from ...optim.optimizers import Group, make_optimizer


def remembered(config: OptimConfig, groups: Sequence[Group]) -> int:
    """Bytes; of each shape that occurs one tensor is made."""
    counts = Counter((tuple(each.shape), each.dtype) for group in groups for each in group.parameters)
    ones = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in counts]
    optimizer: Any = make_optimizer(config, [Group("each shape", ones, config.learning_rate)])
    try:
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        for parameter in ones:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        raise UserError(f"--optimizer_type {config.optimizer_type}: does no step on this machine, so what it remembers"
                        f" cannot be found out ({str(error).strip().splitlines()[0]})") from error  # fmt: skip
    return sum(count * _bytes(optimizer.state.get(one, {}))
               for one, count in zip(ones, counts.values(), strict=True))  # fmt: skip


def _bytes(state: Any) -> int:
    """Of what is remembered of one tensor, in whatever it is wrapped."""
    if isinstance(state, Tensor):
        return state.nbytes
    inside = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(map(_bytes, inside))
