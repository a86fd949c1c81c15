"""Which ways of sharing a run fit on devices of a size, how much each needs there, and which is fastest."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...config import RunConfig
from ...data.prepare import Prepared
from ...data.staged_plan import Plan
from ...families.detect import Detected
from .cut import Cut
from .need import Need, need
from .pace import Assumed, pictures_a_second
from .remembered import remembered
from .ways import Way, ways
from .weightless import Heaviest

MOST_SHAPES = 64
"""As many sizes of pictures as a pipeline keeps buffers for."""
ENDLESS = 2**60


@dataclass(frozen=True)
class Devices:
    """What is to be trained on."""

    count: int
    memory: int
    """Bytes of each."""
    assumed: Assumed


@dataclass(frozen=True)
class Row:
    """One way, and what is expected of it."""

    way: Way
    need: Need
    pictures_a_second: float

    def record(self, fastest: float, memory: int) -> dict[str, Any]:
        """As plain data."""
        parts = {field.name: getattr(self.need, field.name) for field in fields(self.need)}
        return {"way": self.way.name, "options": self.way.words, "fits": self.need.total <= memory,
                "bytes": {**parts, "total": self.need.total},
                "relative_speed": round(self.pictures_a_second / fastest, 3)}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """What a run puts on a device at most."""

    heaviest: Heaviest
    shapes: float
    """All buckets together, in largest ones."""

    @classmethod
    def of(cls, prepared: Prepared, plan: Plan, steps: int) -> "Load":
        """Of the largest bucket, and the longest captions of all."""
        loads = {(bucket.size, bucket.batch_size): bucket.batch_size * bucket.size[0] * bucket.size[1]
                 for bucket in plan.buckets if len(bucket.samples)}  # fmt: skip
        (size, count), most = max(loads.items(), key=lambda item: item[1])
        captions = sorted(set(prepared.first_captions(plan, steps)), key=len, reverse=True)
        longest = (captions * count)[:count]
        together = sum(sorted(loads.values(), reverse=True)[:MOST_SHAPES])
        return cls(Heaviest(size, tuple(longest)), together / most)


def forecast(
    config: RunConfig, given: frozenset[str], model: Detected, load: Load, devices: Devices,
    only: Sequence[str] | None = None,
) -> list[Row]:  # fmt: skip
    """Of all ways, or of ``only`` those of such names; the fastest first."""
    cuts, rows, memory = dict[Hashable, Cut](), [], None
    wanted = config.parallel.device_map
    is_filled = wanted is not None and wanted.way == "sequential"  # others deal out the same however much there is
    rooms = [devices.memory if is_filled else ENDLESS] * devices.count
    for way in ways(config, given, devices.count, model):
        if only is not None and way.name not in only:
            continue
        if way.cut not in cuts:
            cuts[way.cut] = Cut(way.config, model, load.heaviest, way.layout, rooms)
        cut = cuts[way.cut]
        memory = remembered(config.optim, cut.run.groups()) if memory is None else memory
        speed = pictures_a_second(way, cut, len(load.heaviest.captions), devices.assumed)
        rows.append(Row(way, need(way, cut, memory, load.shapes), speed))
    return sorted(rows, key=lambda row: (-row.pictures_a_second, row.need.total))
