"""Stages of a run: which datasets are trained in which steps, each at which resolution."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..config.resolution_schedule import Portion
from ..config.values import Size
from ..dataset.schema import DatasetConfig


@dataclass(frozen=True)
class Stage:
    """The datasets of the steps from ``first`` on, counted from 0, up to ``end``, which is left out."""

    first: int
    end: int | None
    datasets: tuple[DatasetConfig, ...]


def stages_of(datasets: Sequence[DatasetConfig]) -> tuple[Stage, ...]:
    """From the first step on; a stage begins wherever a dataset does, or ends."""
    pieces = [piece for dataset in datasets for piece in pieces_of(dataset)]
    borders = {0, *(piece.from_step for piece in pieces), *(piece.to_step for piece in pieces if piece.to_step)}
    stages = [Stage(first, end, tuple(_during(pieces, first, end)))
              for first, end in pairwise([*sorted(borders), None]) if first is not None]  # fmt: skip
    return tuple(stages if stages[-1].datasets else stages[:-1])


def _during(pieces: Sequence[DatasetConfig], first: int, end: int | None) -> Iterator[DatasetConfig]:
    for piece in pieces:
        if piece.from_step <= first and (piece.to_step is None or first < piece.to_step):
            yield replace(piece, from_step=first, to_step=end)


def pieces_of(dataset: DatasetConfig) -> tuple[DatasetConfig, ...]:
    """The dataset at each resolution of its schedule; as it is where it has none."""
    schedule = dataset.resolution_schedule
    if schedule is None:
        return (dataset,)
    pieces, first = [], 0
    for portion in schedule.portions:
        end = None if portion.steps is None else first + portion.steps
        pieces.append(replace(_at(portion, dataset, schedule.largest), resolution_schedule=None, from_step=first,
                              to_step=end, places=_places(dataset)))  # fmt: skip
        first = end or first
    return tuple(pieces)


def _at(portion: Portion, dataset: DatasetConfig, largest: Size | None) -> DatasetConfig:
    """The limits of buckets are meant for the largest size, and are in proportion for those that are smaller.

    At its own size a picture has at most the pixels of a square of the longest side.
    """
    if portion.size is None or largest is None:
        side = dataset.max_bucket_reso
        return replace(dataset, resolution=Size(side, side), bucket_no_upscale=True)
    share = math.sqrt(portion.size.width * portion.size.height / (largest.width * largest.height))
    shortest = max(math.floor(dataset.min_bucket_reso * share), min(dataset.bucket_reso_steps, dataset.min_bucket_reso))
    return replace(dataset, resolution=portion.size, min_bucket_reso=shortest,
                   max_bucket_reso=math.ceil(dataset.max_bucket_reso * share))  # fmt: skip


def _places(dataset: DatasetConfig) -> dict[str, str]:
    return {**dataset.places, "resolution": dataset.place("resolution_schedule")}
