"""Every caption that a run will show: known beforehand, because how a sample is shown follows from the plan."""

from collections.abc import Iterable

from ...dataset.schema import SubsetConfig
from ..batches import Layout
from ..showing import Showing, Visit


def captions_of_run(showing: Showing, plan: Layout, steps: int, also: Iterable[str] = ()) -> dict[str, int]:
    """Each caption that any rank shows in ``steps`` steps, the empty one and ``also`` among them, with its sample.

    Where captions never change, a look at each sample is enough; else the plan is gone through step by step.
    """
    found = dict.fromkeys(["", *also], 0)
    changing = {index for index in range(len(showing.manifest.samples)) if changes(showing.subset(index))}
    for index in range(len(showing.manifest.samples)):
        if index not in changing:
            found.setdefault(showing.caption(Visit(0, 0, index, 0)), index)
    for position in range(steps * plan.accumulation if changing else 0):
        for visit in showing.visits(plan.micro_batch(position), position // plan.accumulation):
            if visit.sample in changing:
                found.setdefault(showing.caption(visit), visit.sample)
    return found


def changes(subset: SubsetConfig) -> tuple[str, ...]:
    """The keys by which a caption of this subset may be another one each time it is shown."""
    return tuple(key for key in _CHANGING if getattr(subset, key))


_CHANGING = (
    "shuffle_caption", "enable_wildcard", "caption_dropout_rate", "caption_dropout_every_n_epochs",
    "caption_tag_dropout_rate", "token_warmup_step",
)  # fmt: skip
