"""The pictures as each stage of a run shows them: a picture of several stages is there several times, like copies."""

from collections.abc import Sequence
from dataclasses import replace

from ..dataset.schema import DatasetConfig
from ..errors import ConfigError
from .buckets import BucketAssignment, build_bucket_assigner
from .manifest import Manifest
from .merging import merge_small_buckets
from .stages import Stage, build_stages
from .weights import apply_dataset_weights


def assign_buckets(manifest: Manifest, datasets: Sequence[DatasetConfig]) -> tuple[Manifest, tuple[BucketAssignment, ...]]:
    """The manifest with the datasets of all stages, one stage after the other, and where each picture is placed."""
    stages = build_stages(datasets)
    whole = replace(manifest, datasets=(), samples=())
    placements: list[BucketAssignment] = []
    latest: dict[int, int] = {}
    for stage in stages:
        part, places = _assign_stage_buckets(manifest, stage)
        first = len(whole.datasets)
        latest |= {dataset.dataset_number: first + index for index, dataset in enumerate(stage.datasets)}
        shifted = [replace(sample, dataset_index=latest[sample.dataset_index]) for sample in part.samples]
        said = part.notes if len(stages) == 1 else [f"from step {stage.first_step}: {note}" for note in part.notes]
        whole = replace(whole, datasets=(*whole.datasets, *stage.datasets), samples=(*whole.samples, *shifted),
                        notes=(*whole.notes, *said))  # fmt: skip
        placements += places
    endings = tuple((latest[ending[0]], *ending[1:]) for ending in manifest.caption_counts)
    whole = replace(whole, caption_counts=endings)
    check_stages_not_empty(whole)
    return whole, tuple(placements)


def check_stages_not_empty(manifest: Manifest) -> None:
    """Pictures may all be kept for validation, or be left out."""
    used = {manifest.datasets[sample.dataset_index].from_step for sample in manifest.samples if not sample.is_reg}
    if empty := {dataset.from_step for dataset in manifest.datasets} - used:
        when = f" from step {min(empty)} on" if max(empty) else ""
        raise ConfigError([f"no picture is left to train on{when}"])


def _assign_stage_buckets(manifest: Manifest, stage: Stage) -> tuple[Manifest, tuple[BucketAssignment, ...]]:
    """The pictures of one stage, with datasets as they are counted in the file."""
    here = {dataset.dataset_number: dataset for dataset in stage.datasets}
    datasets = [here.get(number, dataset) for number, dataset in enumerate(manifest.datasets)]
    places = {number: build_bucket_assigner(dataset) for number, dataset in here.items()}
    mine = [sample for sample in manifest.samples if sample.dataset_index in here]
    alone = [places[sample.dataset_index](*sample.size) for sample in mine]
    placements, notes = merge_small_buckets(mine, alone, datasets)
    samples, shares = apply_dataset_weights(mine, datasets)
    return replace(manifest, samples=samples, notes=(*notes, *shares)), placements
