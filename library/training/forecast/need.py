"""Bytes that a device needs for its part of a run, by what they are for."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from ...distributed.sharded import blocks_of
from ...distributed.swapping import AHEAD
from .cut import Cut
from .stage import Stage
from .ways import Way

CONTEXT = 768 * 2**20
"""An assumption: the device's own context, workspaces of its libraries, and gaps between pieces of memory."""
COMPANY = 256 * 2**20
"""An assumption: buffers of the library by which devices talk to each other."""
LIVE, SMALL = 1_000_000_000, 100_000
"""DeepSpeed's own, in numbers: what it keeps of what it fetched, and does not divide."""


@dataclass(frozen=True)
class Need:
    """On the device of the process that needs most."""

    weights: int
    """What is frozen."""
    adapters: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    """In the worst moment of a step, with all that lives for a moment only."""
    fetched: int
    """Weights of others that are here while they are computed with."""
    exchange: int
    """Buffers for what travels."""
    reserve: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def need(way: Way, cut: Cut, remembered: int, shapes: float) -> Need:
    """``remembered``: by an optimizer of all that learns; ``shapes``: all buckets together, in largest ones."""
    needs = [_of_stage(way, cut, stage, remembered, shapes) for stage in cut.stages]
    return max(needs, key=lambda each: each.total)


def _of_stage(way: Way, cut: Cut, stage: Stage, remembered: int, shapes: float) -> Need:
    run, size = cut.run, way.layout.data * way.layout.together
    learnt = round(stage.share * sum(each.nbytes for each in run.learnt))
    numbers = round(stage.share * sum(each.numel() for each in run.learnt))
    weights, fetched = _frozen(way, cut, stage)
    gradients, optimizer = learnt, round(stage.share * remembered)
    activations = stage.activations(run.encoding)
    buffers = way.config.train.gradient_accumulation_steps * (stage.arriving + stage.departing) * shapes
    exchange = int(buffers)
    if way.zero is not None:
        part = -(-learnt // size)
        in_host_memory = way.zero.optimizer_device is not None
        gradients = 0 if in_host_memory else part
        optimizer = 0 if in_host_memory else part + -(-remembered // size)
        exchange = _bucket(way, numbers)
    elif size > 1 and way.sharding is None and way.layout.together == 1:
        exchange = 0 if way.config.distributed.ddp_gradient_as_bucket_view else learnt
    elif size > 1:
        exchange += max(0, learnt - activations)  # gradients in one piece, when all else is gone
    average = 0 if way.config.optim.ema_decay is None else 4 * numbers
    reserve = CONTEXT + (COMPANY if size > 1 else 0)
    return Need(weights, learnt, gradients, optimizer, average, activations, fetched, exchange, reserve)


def frozen_of(cut: Cut) -> int:
    """All weights that could be spread."""
    return sum(each.nbytes for each in _frozen_tensors(cut.run.trained.parameters()))


def _frozen(way: Way, cut: Cut, stage: Stage) -> tuple[int, int]:
    """What rests on the device, and what comes for a while."""
    if way.sharding is not None:
        return _spread(way, cut, stage.frozen)
    if way.zero is not None and way.zero.stage == 3:
        return _divided(way, cut, stage.frozen)
    return stage.frozen, min(cut.run.swapped, AHEAD)


def _spread(way: Way, cut: Cut, whole: int) -> tuple[int, int]:
    """By FSDP: each tensor by its rows, filled up; blocks come one by one, and the one after it is on its way."""
    sharding = way.sharding
    assert sharding is not None
    tensors = _frozen_tensors(cut.run.trained.parameters())
    parts = sum(-(-each.shape[0] // sharding.parts) * (each.nbytes // each.shape[0]) for each in tensors)
    fetched = 0
    for part in cut.run.trained.children():
        met: set[Tensor] = set()
        blocks = []
        for block in blocks_of(part, sharding.blocks):  # inner ones first, which an outer one leaves alone
            own = set(_frozen_tensors(block.parameters())) - met
            met |= own
            blocks.append(sum(each.nbytes for each in own))
        outside = sum(each.nbytes for each in _frozen_tensors(part.parameters())) - sum(blocks)
        fetched += outside + (sum(blocks) if not sharding.reshards else 2 * max(blocks, default=0))
    rest = whole - sum(each.nbytes for each in tensors)
    return rest + (0 if sharding.offloads else parts), fetched


def _divided(way: Way, cut: Cut, whole: int) -> tuple[int, int]:
    """By ZeRO 3: each tensor evenly; small ones are whole besides, and what was fetched goes late."""
    assert way.zero is not None
    size, settings = way.layout.data, _zero_file(way)
    tensors = _frozen_tensors(cut.run.trained.parameters())
    small = int(settings.get("stage3_param_persistence_threshold", SMALL))
    parts = sum(-(-each.numel() // size) * each.element_size() for each in tensors)
    kept = sum(each.nbytes for each in tensors if each.numel() <= small)
    large = [each for each in tensors if each.numel() > small]
    width = max((each.element_size() for each in large), default=0)
    live = min(sum(each.nbytes for each in large),
               int(settings.get("stage3_max_live_parameters", LIVE)) * width)  # fmt: skip
    rest = whole - sum(each.nbytes for each in tensors)
    return rest + kept + (0 if way.zero.param_device else parts), live


def _bucket(way: Way, numbers: int) -> int:
    """What DeepSpeed puts aside for its exchanges, however little travels."""
    settings = _zero_file(way)
    count = 2 if settings.get("overlap_comm") and way.zero is not None and way.zero.stage < 3 else 1
    return 4 * count * int(settings.get("reduce_bucket_size", numbers))


def _zero_file(way: Way) -> dict[str, Any]:
    assert way.zero is not None
    return dict(way.zero.file.get("zero_optimization", {}))


def _frozen_tensors(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [each for each in dict.fromkeys(parameters) if not each.requires_grad]
