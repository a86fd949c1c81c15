"""About how fast a way is beside others: what is computed, what travels, and who waits.  A ranking, and no promise."""

from dataclasses import dataclass

from .cut import Cut
from .imagined import around
from .need import frozen_of
from .ways import Way


@dataclass(frozen=True)
class Assumed:
    """Of the devices that nobody has seen."""

    flops: float
    """In a second, as far as models like these reach it."""
    link: float
    """Bytes in a second from one device to the next, and between a device and its host."""


def pictures_a_second(way: Way, cut: Cut, pictures: int, assumed: Assumed) -> float:
    """Over all devices, with ``pictures`` in a micro-batch."""
    layout, count = way.layout, way.config.train.gradient_accumulation_steps
    size = layout.data * layout.together
    each = max(len(stage.chunks) for stage in cut.stages)
    waits = (layout.stages - 1) / each
    computing = (count + waits) * cut.busy / assumed.flops
    fetching = count * _fetched(way, cut) / assumed.link
    between = 2 * max(stage.departing for stage in cut.stages) + cut.sent
    learnt = sum(each.nbytes for each in cut.run.learnt)
    exchanged = around(size) * learnt + (2 * learnt / size if way.zero and way.zero.optimizer_device else 0)
    seconds = max(computing, fetching) + (count * between + exchanged) / assumed.link
    return count * pictures * layout.data / seconds


def _fetched(way: Way, cut: Cut) -> float:
    """Bytes of weights that come to a device in a micro-batch."""
    train = way.config.train
    often = 3 if train.gradient_checkpointing else 2
    if way.sharding is not None:
        whole, parts = frozen_of(cut), way.sharding.parts
        often = often if way.sharding.reshards else 1
        return often * whole * ((parts - 1) + way.sharding.offloads) / parts
    if way.zero is not None and way.zero.stage == 3:
        size = way.layout.data
        return often * frozen_of(cut) * ((size - 1) + bool(way.zero.param_device)) / size
    return often * cut.run.swapped
