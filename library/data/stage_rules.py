"""What is wrong with the steps in which datasets are trained."""

from collections.abc import Iterator, Sequence

from ..config.schema import TrainConfig
from ..dataset.schema import DatasetConfig
from .stages import stages_of


def stage_problems(datasets: Sequence[DatasetConfig], train: TrainConfig | None = None) -> Iterator[str]:
    """Datasets that contradict themselves, steps without pictures, and a run that is not as long as its stages."""
    found = [problem for dataset in datasets for problem in _of_dataset(dataset)]
    yield from found
    if found or not datasets:
        return
    stages = stages_of(datasets)
    for stage in stages:
        if all(subset.is_reg for dataset in stage.datasets for subset in dataset.subsets):
            until = "on" if stage.end is None else f"to {stage.end}"
            yield f"{_where(datasets)}: from step {stage.first} {until} there is no dataset to train on"
    if train is not None and train.max_train_epochs is None:
        yield from misfits(stages[-1].first, stages[-1].end, train.max_train_steps, _where(datasets))


def misfits(first: int, end: int | None, steps: int, where: str = "steps of datasets") -> Iterator[str]:
    """A run of so many steps has to reach the last stage, which begins at ``first``, and to end with it."""
    way_out = "say another number of steps there, or set --max_train_steps"
    if first >= steps:
        yield f"{where}: what is trained from step {first} on is never reached in {steps} steps; {way_out}"
    elif end is not None and end < steps:
        yield f"{where}: nothing is trained after step {end}, and the run has {steps}; {way_out}, or leave the last" \
              " number out"  # fmt: skip
    elif end is not None and end > steps:
        yield f"{where}: the last stage ends at step {end}, and the run at step {steps}; {way_out}"


def _of_dataset(dataset: DatasetConfig) -> Iterator[str]:
    schedule = dataset.resolution_schedule
    if dataset.to_step is not None and dataset.to_step <= dataset.from_step:
        yield f"{dataset.place('to_step')}: to_step: {dataset.to_step} is not above from_step {dataset.from_step}"
    if schedule is None:
        return
    where = dataset.named("resolution_schedule")
    for key, nothing in (("from_step", 0), ("to_step", None)):
        if getattr(dataset, key) != nothing:
            yield f"{dataset.place(key)}: {key}: resolution_schedule says from which step to which; take {key} out"
    if schedule.has_native:
        if not dataset.enable_bucket:
            yield f"{where}: native needs buckets; set enable_bucket"
        elif dataset.bucket_mode == "symmetric":
            yield f"{where}: buckets of one area, as in bucket_mode symmetric, leave no picture its own size; take" \
                  " native out"  # fmt: skip
    step = dataset.bucket_reso_steps
    for portion in schedule.portions:
        if dataset.enable_bucket and portion.size is not None and min(portion.size.width, portion.size.height) < step:
            yield f"{where}: {portion.size} has no room for one bucket of bucket_reso_steps {step}"


def _where(datasets: Sequence[DatasetConfig]) -> str:
    """The first place that says anything about steps."""
    for dataset in datasets:
        for key in ("resolution_schedule", "from_step", "to_step"):
            if getattr(dataset, key):
                return dataset.named(key)
    return "--dataset_config"
