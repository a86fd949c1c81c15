"""Resolution stages of a run: ranges of steps with the same datasets, by ``resolution_schedule`` and ``from_step``.

Each stage has a batch plan of its own, over samples that exist once per stage.  So caches, readers and the trials
before the first step need to know nothing of stages.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..config.types import Resolution, ScheduledResolution
from .schema import DatasetConfig


@dataclass(frozen=True)
class Stage:
    """The datasets trained from ``first_step``, counted from 0, up to ``end_step``, exclusive."""

    first_step: int
    end_step: int | None
    datasets: tuple[DatasetConfig, ...]


def build_stages(datasets: Sequence[DatasetConfig]) -> tuple[Stage, ...]:
    """Split the run into stages wherever a dataset starts or ends."""
    expanded = [item for dataset in datasets for item in expand_resolution_schedule(dataset)]
    borders = {0, *(item.from_step for item in expanded), *(item.to_step for item in expanded if item.to_step)}
    stages = [
        Stage(first, end, tuple(_select_datasets(expanded, first, end)))
        for first, end in pairwise([*sorted(borders), None])
        if first is not None
    ]
    return tuple(stages if stages[-1].datasets else stages[:-1])


def _select_datasets(datasets: Sequence[DatasetConfig], first: int, end: int | None) -> Iterator[DatasetConfig]:
    for dataset in datasets:
        if dataset.from_step <= first and (dataset.to_step is None or first < dataset.to_step):
            yield replace(dataset, from_step=first, to_step=end)


def expand_resolution_schedule(dataset: DatasetConfig) -> tuple[DatasetConfig, ...]:
    """Return the dataset at each resolution of its schedule with its steps; unchanged if it has no schedule."""
    schedule = dataset.resolution_schedule
    if schedule is None:
        return (dataset,)
    locations = {**dataset.locations, "resolution": dataset.locate("resolution_schedule").without_key()}
    expanded, first = [], 0
    for entry in schedule.entries:
        end = None if entry.steps is None else first + entry.steps
        resized = _apply_resolution(entry, dataset, schedule.largest)
        expanded.append(replace(resized, resolution_schedule=None, from_step=first, to_step=end, locations=locations))
        first = end or first
    return tuple(expanded)


def _apply_resolution(entry: ScheduledResolution, dataset: DatasetConfig, largest: Resolution | None) -> DatasetConfig:
    """Set the resolution; bucket limits apply to the largest one and are scaled down for the others.

    A ``native`` entry limits images only to the area of a square with the longest side.
    """
    if entry.resolution is None or largest is None:
        side = dataset.max_bucket_reso
        return replace(dataset, resolution=Resolution(side, side), bucket_no_upscale=True)
    scale = math.sqrt(entry.resolution.width * entry.resolution.height / (largest.width * largest.height))
    shortest = max(math.floor(dataset.min_bucket_reso * scale), min(dataset.bucket_reso_steps, dataset.min_bucket_reso))
    longest = math.ceil(dataset.max_bucket_reso * scale)
    return replace(dataset, resolution=entry.resolution, min_bucket_reso=shortest, max_bucket_reso=longest)
