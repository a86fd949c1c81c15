"""How long each block of a model computes, tried out on the device one by one, before stages of a pipeline are cut.

What a block is called with is found by a forward without numbers; then one block of each kind computes with random
ones of the same sizes, forward and backward.  So no device has to hold more than one block.
"""

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..config import RunConfig
from ..data.prepare import Prepared
from ..distributed.devices import HOST, wait_for
from ..distributed.strategy import DataParallel
from ..families.base import Family
from ..families.detect import detect
from .forecast.forecast import Load
from .forecast.weightless import Weightless
from .parallel_fit import chain_of
from .plan import RunPlan

logger = logging.getLogger(__name__)

TRIES = 3
"""After one that only warms up."""


def block_seconds(config: RunConfig, strategy: DataParallel, family: Family, denoiser: nn.Module, prepared: Prepared,
                  plan: RunPlan) -> tuple[float, ...]:  # fmt: skip
    """Of the largest pictures, the mean over processes, so that all of them cut alike."""
    load = Load.of(prepared, plan.batches, plan.steps)
    calls = _calls(Weightless(config, detect(config.model), load.heaviest))
    known: dict[Any, float] = {}
    for block, call in zip(chain_of(family, denoiser).blocks, calls, strict=True):
        kind = _kind(block, call)
        if kind not in known:
            known[kind] = _seconds(block, call, strategy)
    mine = [known[_kind(block, call)] for block, call in zip(chain_of(family, denoiser).blocks, calls, strict=True)]
    means = tuple(map(statistics.mean, zip(*strategy.gather(mine), strict=True)))
    logger.info("pipeline: %d kinds of blocks tried out; all %d take %.3g s for a micro-batch of the largest pictures",
                len(known), len(means), sum(means))  # fmt: skip
    return means


def _calls(run: Weightless) -> list[Any]:
    """(arguments, named arguments) of each block, on no device."""
    calls: dict[nn.Module, Any] = {}
    blocks = run.chain.blocks

    def note(block: nn.Module, *call: Any) -> None:  # what a hook returns, the block would be given
        calls.setdefault(block, call)

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    run.step()
    for hook in hooks:
        hook.remove()
    return [calls[block] for block in blocks]


def _kind(block: nn.Module, call: Any) -> Any:
    shapes = tuple((name, item.shape) for name, item in block.named_parameters())
    given = tuple((item.shape, item.dtype) for item in tree_leaves(call) if isinstance(item, Tensor))
    return type(block), shapes, given


def _seconds(block: nn.Module, call: Any, strategy: DataParallel) -> float:
    """Forward and backward, the median of a few."""
    times = []
    block.to(strategy.device)
    for _ in range(TRIES + 1):
        arguments, named = tree_map(_filled(strategy.device), call)
        wait_for(strategy.device)
        started = time.perf_counter()
        with strategy.accelerator.autocast():
            made = block(*arguments, **named)
        total = sum(item.float().sum() for item in tree_leaves(made) if isinstance(item, Tensor))
        assert isinstance(total, Tensor)
        if total.requires_grad:  # a first block without adapters has no backward
            total.backward()  # type: ignore[no-untyped-call]
        wait_for(strategy.device)
        times.append(time.perf_counter() - started)
    for parameter in block.parameters():
        parameter.grad = None
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(HOST)
    for buffer in block.buffers():
        buffer.data = buffer.data.to(HOST)
    return statistics.median(times[1:])


def _filled(device: torch.device) -> Callable[[Any], Any]:
    draw = torch.Generator().manual_seed(0)

    def filled(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        if not item.is_floating_point():
            return torch.zeros(item.shape, dtype=item.dtype, device=device)
        made = torch.randn(item.shape, generator=draw).to(device, item.dtype)
        return made.requires_grad_(item.requires_grad)

    return filled
