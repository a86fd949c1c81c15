"""Every caption that a run will show: known beforehand, because how a sample is shown follows from the plan."""

from collections.abc import Iterable

from ...dataset.schema import SubsetConfig
from ..batches import MicroBatchSchedule
from ..showing import Augmenter, SampleView


def collect_run_captions(augmenter: Augmenter, batch_plan: MicroBatchSchedule, total_steps: int, extra_captions: Iterable[str] = ()) -> dict[str, int]:
    """Each caption that any rank shows in ``steps`` steps, the empty one and ``also`` among them, with its sample.

    Where captions never change, a look at each sample is enough; else the plan is gone through step by step.
    """
    found = dict.fromkeys(["", *extra_captions], 0)
    changing = {index for index in range(len(augmenter.manifest.samples)) if find_varying_caption_keys(augmenter.get_subset(index))}
    for index in range(len(augmenter.manifest.samples)):
        if index not in changing:
            found.setdefault(augmenter.draw_caption(SampleView(0, 0, index, 0)), index)
    for position in range(total_steps * batch_plan.accumulation_steps if changing else 0):
        for visit in augmenter.list_views(batch_plan.get_micro_batch(position), position // batch_plan.accumulation_steps):
            if visit.sample_index in changing:
                found.setdefault(augmenter.draw_caption(visit), visit.sample_index)
    return found


def find_varying_caption_keys(subset: SubsetConfig) -> tuple[str, ...]:
    """The keys by which a caption of this subset may be another one each time it is shown."""
    return tuple(key for key in _VARYING_CAPTION_KEYS if getattr(subset, key))


_VARYING_CAPTION_KEYS = (
    "shuffle_caption", "enable_wildcard", "caption_dropout_rate", "caption_dropout_every_n_epochs",
    "caption_tag_dropout_rate", "token_warmup_step",
)  # fmt: skip
