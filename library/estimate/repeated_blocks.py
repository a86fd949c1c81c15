"""Skip the blocks of a denoiser that are equal to the one before them: a step on the meta device is the same with them.

Of each run of equal blocks the first two and the last one are computed.  The first saves what all of them share, and
after the last one other blocks may follow; what is between needs as much memory and work as the second.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..parallel.parallel_plan import BlockSequence

COMPUTED_FIRST, COMPUTED_LAST = 2, 1
"""How many blocks at both ends of a run of equal ones are computed."""
Reading = TypeVar("Reading")


class RepeatedBlocks:
    """Replaces the call of repeated blocks by tensors of the right shapes, with gradients for all inputs."""

    def __init__(self, chain: BlockSequence):
        """Wrap the repeated blocks of ``chain``; hooks that are added later are called for them as for all others."""
        self.is_enabled = True
        """Whether the next step skips blocks: equal blocks may be treated differently, as swapped ones are."""
        self._twins: dict[int, int] = {}
        self._shapes: dict[int, Any] = {}
        self._outputs: dict[int, Any] = {}
        self._skipped: set[int] = set()
        runs = [[*members] for _, members in groupby(range(len(chain.blocks)), lambda i: _describe(chain.blocks[i]))]
        for run in runs:
            self._twins |= dict.fromkeys(run[COMPUTED_FIRST:-COMPUTED_LAST], run[:COMPUTED_FIRST][-1])
        for index in {*self._twins, *self._twins.values()}:
            chain.hooks.wrap(chain.blocks[index], partial(self._call_block, index))

    def restore_skipped(self, readings: Sequence[Reading]) -> tuple[Reading, ...]:
        """Return what was read of each block in the last step, with that of its twin for each skipped one."""
        skipped, self._skipped = self._skipped, set()
        return tuple(readings[self._twins[index]] if index in skipped else each for index, each in enumerate(readings))

    def _call_block(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.is_enabled:
            return forward(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shapes = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]
        twin = self._twins.get(index)
        if twin is None:
            output = forward(*args, **kwargs)
            self._shapes[index], self._outputs[index] = shapes, _describe_output(output)
            return output
        if shapes != self._shapes[twin]:
            return forward(*args, **kwargs)
        self._skipped.add(index)
        leaves, form = self._outputs[twin]
        anchor = torch.empty(0, device=tensors[0].device, requires_grad=torch.is_grad_enabled())
        apply: Any = _Skipped.apply
        results = iter(apply([each for each in leaves if each is not None], anchor, *tensors))
        return tree_unflatten([None if each is None else next(results) for each in leaves], form)


class _Skipped(torch.autograd.Function):
    """A block whose outputs and gradients have shapes only."""

    @staticmethod
    def forward(ctx: Any, outputs: Any, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.inputs = [(each.shape, each.dtype, each.device) if each.requires_grad else None for each in inputs]
        results = tuple(anchor.new_empty(shape, dtype=dtype) for shape, dtype, _ in outputs)
        ctx.mark_non_differentiable(
            *(each for each, (*_, has_grad) in zip(results, outputs, strict=True) if not has_grad)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = (None if each is None else torch.empty(each[0], dtype=each[1], device=each[2]) for each in ctx.inputs)
        return None, None, *found


def _describe(block: nn.Module) -> Any:
    """Describe a block; blocks with equal descriptions compute the same on inputs of the same shapes."""
    layers = tuple((name, type(module).__name__) for name, module in block.named_modules())
    parameters = tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in block.named_parameters())
    return type(block).__name__, layers, parameters


def _describe_output(output: Any) -> Any:
    leaves, form = tree_flatten(output)
    described = [(leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else None for leaf in leaves]
    return described, form
