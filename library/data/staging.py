"""The pictures as each stage of a run shows them: a picture of several stages is there several times, like copies."""

from collections.abc import Sequence
from dataclasses import replace

from ..dataset.schema import DatasetConfig
from ..errors import ConfigError
from .buckets import Placement, place_for
from .manifest import Manifest
from .merging import merged
from .stages import Stage, stages_of
from .weights import weighted


def staged(found: Manifest, datasets: Sequence[DatasetConfig]) -> tuple[Manifest, tuple[Placement, ...]]:
    """The manifest with the datasets of all stages, one stage after the other, and where each picture is placed."""
    stages = stages_of(datasets)
    whole = replace(found, datasets=(), samples=())
    placements: list[Placement] = []
    latest: dict[int, int] = {}
    for stage in stages:
        part, places = _in_stage(found, stage)
        first = len(whole.datasets)
        latest |= {dataset.number: first + index for index, dataset in enumerate(stage.datasets)}
        shifted = [replace(sample, dataset=latest[sample.dataset]) for sample in part.samples]
        said = part.notes if len(stages) == 1 else [f"from step {stage.first}: {note}" for note in part.notes]
        whole = replace(whole, datasets=(*whole.datasets, *stage.datasets), samples=(*whole.samples, *shifted),
                        notes=(*whole.notes, *said))  # fmt: skip
        placements += places
    endings = tuple((latest[ending[0]], *ending[1:]) for ending in found.endings)
    whole = replace(whole, endings=endings)
    refuse_empty_stages(whole)
    return whole, tuple(placements)


def refuse_empty_stages(manifest: Manifest) -> None:
    """Pictures may all be kept for validation, or be left out."""
    used = {manifest.datasets[sample.dataset].from_step for sample in manifest.samples if not sample.is_reg}
    if empty := {dataset.from_step for dataset in manifest.datasets} - used:
        when = f" from step {min(empty)} on" if max(empty) else ""
        raise ConfigError([f"no picture is left to train on{when}"])


def _in_stage(found: Manifest, stage: Stage) -> tuple[Manifest, tuple[Placement, ...]]:
    """The pictures of one stage, with datasets as they are counted in the file."""
    here = {dataset.number: dataset for dataset in stage.datasets}
    datasets = [here.get(number, dataset) for number, dataset in enumerate(found.datasets)]
    places = {number: place_for(dataset) for number, dataset in here.items()}
    mine = [sample for sample in found.samples if sample.dataset in here]
    alone = [places[sample.dataset](*sample.size) for sample in mine]
    placements, notes = merged(mine, alone, datasets)
    samples, shares = weighted(mine, datasets)
    return replace(found, samples=samples, notes=(*notes, *shares)), placements
