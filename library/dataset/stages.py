"""What is wrong with the steps in which datasets are trained."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..config.schema import TrainConfig
from ..config.types import Resolution, ScheduledResolution
from .schema import DatasetConfig


def validate_stages(datasets: Sequence[DatasetConfig], train: TrainConfig | None = None) -> Iterator[str]:
    """Datasets that contradict themselves, steps without pictures, and a run that is not as long as its stages."""
    found = [problem for dataset in datasets for problem in _validate_dataset_steps(dataset)]
    yield from found
    if found or not datasets:
        return
    stages = build_stages(datasets)
    for stage in stages:
        if all(subset.is_reg for dataset in stage.datasets for subset in dataset.subsets):
            until = "on" if stage.end_step is None else f"to {stage.end_step}"
            yield f"{_locate_steps(datasets)}: from step {stage.first_step} {until} there is no dataset to train on"
    if train is not None and train.max_train_epochs is None:
        yield from validate_run_length(
            stages[-1].first_step, stages[-1].end_step, train.max_train_steps, _locate_steps(datasets)
        )


def validate_run_length(
    first_step: int, end_step: int | None, total_steps: int, location: str = "steps of datasets"
) -> Iterator[str]:
    """A run of so many steps has to reach the last stage, which begins at ``first``, and to end with it."""
    way_out = "say another number of steps there, or set --max_train_steps"
    if first_step >= total_steps:
        yield f"{location}: what is trained from step {first_step} on is never reached in {total_steps} steps; {way_out}"
    elif end_step is not None and end_step < total_steps:
        yield (
            f"{location}: nothing is trained after step {end_step}, and the run has {total_steps}; {way_out}, or leave the last"
            " number out"
        )
    elif end_step is not None and end_step > total_steps:
        yield f"{location}: the last stage ends at step {end_step}, and the run at step {total_steps}; {way_out}"


def _validate_dataset_steps(dataset: DatasetConfig) -> Iterator[str]:
    schedule = dataset.resolution_schedule
    if dataset.to_step is not None and dataset.to_step <= dataset.from_step:
        yield f"{dataset.locate('to_step')}: to_step: {dataset.to_step} is not above from_step {dataset.from_step}"
    if schedule is None:
        return
    where = dataset.format_location("resolution_schedule")
    for key, nothing in (("from_step", 0), ("to_step", None)):
        if getattr(dataset, key) != nothing:
            yield f"{dataset.locate(key)}: {key}: resolution_schedule says from which step to which; take {key} out"
    if schedule.has_native:
        if not dataset.enable_bucket:
            yield f"{where}: native needs buckets; set enable_bucket"
        elif dataset.bucket_mode == "symmetric":
            yield (
                f"{where}: buckets of one area, as in bucket_mode symmetric, leave no picture its own size; take"
                " native out"
            )
    step = dataset.bucket_reso_steps
    for portion in schedule.entries:
        if (
            dataset.enable_bucket
            and portion.resolution is not None
            and min(portion.resolution.width, portion.resolution.height) < step
        ):
            yield f"{where}: {portion.resolution} has no room for one bucket of bucket_reso_steps {step}"


def _locate_steps(datasets: Sequence[DatasetConfig]) -> str:
    """The first place that says anything about steps."""
    for dataset in datasets:
        for key in ("resolution_schedule", "from_step", "to_step"):
            if getattr(dataset, key):
                return dataset.format_location(key)
    return "--dataset_config"


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
    stages = [
        Stage(first, end, tuple(_select_datasets(pieces, first, end)))
        for first, end in pairwise([*sorted(borders), None])
        if first is not None
    ]
    return tuple(stages if stages[-1].datasets else stages[:-1])


def _select_datasets(
    datasets: Sequence[DatasetConfig], first_step: int, end_step: int | None
) -> Iterator[DatasetConfig]:
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
        pieces.append(
            replace(
                _apply_resolution(portion, dataset, schedule.largest),
                resolution_schedule=None,
                from_step=first,
                to_step=end,
                locations=_locate_resolution_in_schedule(dataset),
            )
        )
        first = end or first
    return tuple(pieces)


def _apply_resolution(
    entry: ScheduledResolution, dataset: DatasetConfig, largest_size: Resolution | None
) -> DatasetConfig:
    """The limits of buckets are meant for the largest size, and are in proportion for those that are smaller.

    At its own size a picture has at most the pixels of a square of the longest side.
    """
    if entry.resolution is None or largest_size is None:
        side = dataset.max_bucket_reso
        return replace(dataset, resolution=Resolution(side, side), bucket_no_upscale=True)
    share = math.sqrt(entry.resolution.width * entry.resolution.height / (largest_size.width * largest_size.height))
    shortest = max(math.floor(dataset.min_bucket_reso * share), min(dataset.bucket_reso_steps, dataset.min_bucket_reso))
    return replace(
        dataset,
        resolution=entry.resolution,
        min_bucket_reso=shortest,
        max_bucket_reso=math.ceil(dataset.max_bucket_reso * share),
    )


def _locate_resolution_in_schedule(dataset: DatasetConfig) -> dict[str, str]:
    return {**dataset.locations, "resolution": dataset.locate("resolution_schedule")}
