"""A model whose blocks are dealt out over the devices of one process: each run of blocks on one of them is measured."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...distributed.device_map import assigned
from .stage import Stage, frozen_bytes
from .weightless import Footprint, Weightless


def dealt(run: Weightless, places: Mapping[str, int], devices: int) -> tuple[list[Stage], float]:
    """What each device has, and bytes that go from one to another in a micro-batch; ``places`` of modules."""
    homes = {tensor: number for _, tensor, number in assigned(run.denoiser, places)}
    where = [homes[next(block.parameters())] for block in run.chain.blocks]
    ends = [0, *(place for place in range(1, len(where)) if where[place] != where[place - 1]), len(where)]
    before, *chunks = run.stages(run.passage(), [0, *ends])
    frozen, learnt = _by_device(homes, devices, learns=False), _by_device(homes, devices, learns=True)
    # The first has all that is no block, too.
    in_all = sum(each.nbytes for each in run.learnt)
    frozen[0] += frozen_bytes(run) - sum(frozen)
    learnt[0] += in_all - sum(learnt)
    found = []
    for device in range(devices):
        mine = [chunk for chunk, first in zip(chunks, ends, strict=False) if where[first] == device]
        rest = Footprint(before.kept + chunks[-1].behind, 0, before.flops) if device == 0 else Footprint(0, 0, 0)
        found.append(
            Stage(frozen[device], (_together(before, mine, rest),), 0, 1, learnt[device] / in_all, device == 0)
        )
    return found, 2.0 * sum(chunk.flow for chunk in chunks)


def _by_device(homes: Mapping[Tensor, int], devices: int, *, learns: bool) -> list[int]:
    found = [0] * devices
    for tensor, number in homes.items():
        found[number] += tensor.nbytes * (tensor.requires_grad == learns)
    return found


def _together(before: Footprint, chunks: Sequence[Footprint], rest: Footprint) -> Footprint:
    """Of chunks that all wait for backward on one device; what is before blocks is in each, and counts in ``rest``."""
    kept = rest.kept + sum(chunk.kept - before.kept - chunk.behind for chunk in chunks)
    flops = rest.flops + sum(chunk.flops - before.flops for chunk in chunks)
    return Footprint(kept, kept + max((chunk.peak - chunk.kept for chunk in chunks), default=0), flops)
