"""Stages of a run: which datasets are trained in which steps, each at which resolution."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..config.resolution_schedule import ScheduledResolution
from ..config.values import Resolution
from ..dataset.schema import DatasetConfig


@dataclass(frozen=True)
class Stage:
    """The datasets of the steps from ``first`` on, counted from 0, up to ``end``, which is left out."""

    first_step: int
    end_step: int | None
    datasets: tuple[DatasetConfig, ...]


def build_stages(datasets: Sequence[DatasetConfig]) -> tuple[Stage, ...]:
    """From the first step on; a stage begins wherever a dataset does, or ends."""
    pieces = [piece for dataset in datasets for piece in expand_resolution_schedule(dataset)]
    borders = {0, *(piece.from_step for piece in pieces), *(piece.to_step for piece in pieces if piece.to_step)}
    stages = [Stage(first, end, tuple(_select_datasets(pieces, first, end)))
              for first, end in pairwise([*sorted(borders), None]) if first is not None]  # fmt: skip
    return tuple(stages if stages[-1].datasets else stages[:-1])


def _select_datasets(datasets: Sequence[DatasetConfig], first_step: int, end_step: int | None) -> Iterator[DatasetConfig]:
    for piece in datasets:
        if piece.from_step <= first_step and (piece.to_step is None or first_step < piece.to_step):
            yield replace(piece, from_step=first_step, to_step=end_step)


def expand_resolution_schedule(dataset: DatasetConfig) -> tuple[DatasetConfig, ...]:
    """The dataset at each resolution of its schedule; as it is where it has none."""
    schedule = dataset.resolution_schedule
    if schedule is None:
        return (dataset,)
    pieces, first = [], 0
    for portion in schedule.entries:
        end = None if portion.steps is None else first + portion.steps
        pieces.append(replace(_apply_resolution(portion, dataset, schedule.largest), resolution_schedule=None, from_step=first,
                              to_step=end, locations=_locate_resolution_in_schedule(dataset)))  # fmt: skip
        first = end or first
    return tuple(pieces)


def _apply_resolution(entry: ScheduledResolution, dataset: DatasetConfig, largest_size: Resolution | None) -> DatasetConfig:
    """The limits of buckets are meant for the largest size, and are in proportion for those that are smaller.

    At its own size a picture has at most the pixels of a square of the longest side.
    """
    if entry.resolution is None or largest_size is None:
        side = dataset.max_bucket_reso
        return replace(dataset, resolution=Resolution(side, side), bucket_no_upscale=True)
    share = math.sqrt(entry.resolution.width * entry.resolution.height / (largest_size.width * largest_size.height))
    shortest = max(math.floor(dataset.min_bucket_reso * share), min(dataset.bucket_reso_steps, dataset.min_bucket_reso))
    return replace(dataset, resolution=entry.resolution, min_bucket_reso=shortest,
                   max_bucket_reso=math.ceil(dataset.max_bucket_reso * share))  # fmt: skip


def _locate_resolution_in_schedule(dataset: DatasetConfig) -> dict[str, str]:
    return {**dataset.locations, "resolution": dataset.locate("resolution_schedule")}
