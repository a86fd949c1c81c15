"""Python's search for circles of garbage, paused while a million objects are made that all stay."""

import gc
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.schema import TrainConfig
from ..config.schema_data import DataConfig
from ..dataset.dataset_config import ParsedDatasetConfig, load_dataset_config
from ..dataset.validate import validate_dataset_config, validate_resolution_multiple
from ..errors import ConfigError
from ..randomness import derive_seed
from .augment import Augmenter, SampleView
from .batch_plan import AnyBatchPlan, BatchPlan, Bucket, StagedBatchPlan
from .buckets import BucketAssignment, build_bucket_assigner
from .manifest import Manifest
from .manifest_builder import assign_buckets, build_manifest, check_stages_not_empty
from .summary import JsonObject, export_datasets, format_data_summary, summarize_buckets
from .validation_split import disable_augmentations

if TYPE_CHECKING:
    from .loader import ImageLoader


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """The search walks over all objects again and again as they become more, and finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class PreparedData:
    """The pictures of a run, each with its place, and the buckets they make."""

    config: DataConfig
    manifest: Manifest
    assignments: tuple[BucketAssignment, ...]  # of each sample
    buckets: tuple[Bucket, ...]
    validation: "PreparedData | None" = None
    """The pictures for validation, which are not among the others."""

    @property
    def images_per_epoch(self) -> tuple[int, int]:
        """How many are shown in an epoch of the last stage, repeats counted: for training, and for regularisation."""
        datasets, samples = self.manifest.datasets, self.manifest.samples
        last = [sample for sample in samples if datasets[sample.dataset_index].from_step == datasets[-1].from_step]
        shown = [sum(sample.repeats for sample in last if sample.is_reg == is_reg) for is_reg in (False, True)]
        return round(shown[0]), round(shown[1])

    @property
    def resolution(self) -> tuple[int, int]:
        """Width and height of the first dataset of the last stage, as set."""
        datasets = self.manifest.datasets
        size = next(dataset for dataset in datasets if dataset.from_step == datasets[-1].from_step).resolution
        return size.width, size.height

    def build_batch_plan(self, dp_size: int, train: TrainConfig, *, one_bucket_per_step: bool = False) -> AnyBatchPlan:
        """Which sample is trained where, on ``ranks`` processes."""
        stages: defaultdict[tuple[int, int | None], list[Bucket]] = defaultdict(list)
        for bucket in self.buckets:
            dataset = self.manifest.datasets[self.manifest.samples[bucket.sample_indices[0]].dataset_index]
            stages[dataset.from_step, dataset.to_step].append(bucket)
        plans = [
            (
                first,
                end,
                BatchPlan(
                    buckets,
                    dp_size,
                    train.gradient_accumulation_steps,
                    derive_seed(train.seed, "stage", first) if first else train.seed,
                    one_bucket_per_step=one_bucket_per_step,
                ),
            )
            for (first, end), buckets in stages.items()
        ]
        return plans[0][2] if len(plans) == 1 and plans[0][1] is None else StagedBatchPlan(plans)

    def format_summary(self, batch_plan: AnyBatchPlan, total_steps: int) -> str:
        """What a run of ``steps`` optimizer steps trains, as text."""
        return format_data_summary(self.manifest, self.assignments, batch_plan, total_steps)

    def to_json(self, batch_plan: AnyBatchPlan) -> list[JsonObject]:
        """The datasets as plain data, with every bucket and every picture."""
        return export_datasets(self.manifest, self.assignments, batch_plan)

    def write_contact_sheet(self, batch_plan: AnyBatchPlan, path: Path, max_per_bucket: int) -> str:
        """Draw the pictures as the model will see them, up to ``limit`` of each bucket, and say what was drawn."""
        from .contact_sheet import draw_contact_sheet, save_contact_sheet

        sheet, count = draw_contact_sheet(
            self.manifest, self.assignments, summarize_buckets(self.assignments, batch_plan), max_per_bucket
        )
        save_contact_sheet(sheet, path)
        return f"contact sheet: {path}, {count} of {len(self.manifest.samples)} pictures"

    def merge_validation(self) -> "PreparedData":
        """All pictures that are ever shown: first those to train on, then those to validate on."""
        if self.validation is None:
            return self
        mine, others = self.manifest, self.validation.manifest
        shifted = [
            replace(sample, dataset_index=sample.dataset_index + len(mine.datasets)) for sample in others.samples
        ]
        manifest = replace(mine, datasets=(*mine.datasets, *others.datasets), samples=(*mine.samples, *shifted))
        return replace(self, manifest=manifest, assignments=(*self.assignments, *self.validation.assignments))

    def build_image_loader(
        self, batch_plan: AnyBatchPlan, rank: int, *, total_steps: int, pin_memory: bool
    ) -> "ImageLoader":
        """Build one rank's loader of pixels; ``total_steps`` resolves a token warmup given as a fraction of the run."""
        from .loader import ImageLoader, MicroBatchDataset  # torch is not needed to inspect a dataset

        dataset = MicroBatchDataset(self.manifest, self.assignments, batch_plan, rank, batch_plan.seed, total_steps)
        return ImageLoader(
            dataset,
            batch_plan,
            num_workers=self.config.max_data_loader_n_workers,
            prefetch_factor=self.config.prefetch_factor,
            pin_memory=pin_memory,
        )

    def list_first_epoch_captions(self, batch_plan: AnyBatchPlan, total_steps: int) -> list[str]:
        """Each picture's caption as it is shown in the first epoch, once however many stages show it."""
        showing, datasets = self.build_augmenter(batch_plan, total_steps), self.manifest.datasets
        first = {
            (datasets[sample.dataset_index].dataset_number, sample.key): index
            for index, sample in reversed(list(enumerate(self.manifest.samples)))
        }
        return [showing.draw_caption(SampleView(0, 0, index, 0)) for index in sorted(first.values())]

    def build_augmenter(self, batch_plan: AnyBatchPlan, total_steps: int) -> Augmenter:
        """Build what draws the crop, flip and caption of each sample in a run of ``total_steps`` steps."""
        return Augmenter(self.manifest, self.assignments, batch_plan.seed, total_steps)

    def build_static_augmenter(self) -> Augmenter:
        """Build an augmenter for where nothing random is drawn."""
        return Augmenter(self.manifest, self.assignments, 0, 0)

    def remove_samples(self, sample_indices: frozenset[int]) -> "PreparedData":
        """Some pictures fewer, by their numbers in ``whole``."""
        first = len(self.manifest.samples)
        kept = [index for index in range(first) if index not in sample_indices]
        samples = tuple(self.manifest.samples[index] for index in kept)
        placements = tuple(self.assignments[index] for index in kept)
        manifest = replace(self.manifest, samples=samples)
        check_stages_not_empty(manifest)
        others = self.validation and self.validation.remove_validation_samples(
            {index - first for index in sample_indices}
        )
        return PreparedData(self.config, manifest, placements, _build_buckets(manifest, placements), others)

    def remove_validation_samples(self, sample_indices: Set[int]) -> "PreparedData | None":
        """The same for pictures that are measured only; nothing when none is left."""
        kept = [index for index in range(len(self.manifest.samples)) if index not in sample_indices]
        manifest = replace(self.manifest, samples=tuple(self.manifest.samples[index] for index in kept))
        placements = tuple(self.assignments[index] for index in kept)
        return replace(self, manifest=manifest, assignments=placements) if kept else None


def prepare_data(config: DataConfig, size_multiple: int, cache_dir: str | None = None) -> PreparedData:
    """Look at all pictures and place them; sizes are multiples of ``pixel_step``, which the model family needs.

    What is found out about files is kept in ``cache_dir``, or else beside the pictures, for the next time.
    """
    if config.dataset_config is None:
        raise ConfigError(["--dataset_config: missing; it names the folders of pictures"])
    reading = load_dataset_config(config)
    problems = [*validate_dataset_config(config), *validate_resolution_multiple(reading.datasets, size_multiple)]
    if problems or reading.problems:
        raise ConfigError(list(dict.fromkeys(problems or reading.problems)))
    with pause_garbage_collection():
        return _build_prepared_data(config, reading, Path(cache_dir).expanduser() if cache_dir else None)


def _build_prepared_data(config: DataConfig, parsed: ParsedDatasetConfig, cache_dir: Path | None) -> PreparedData:
    datasets = parsed.datasets
    found = build_manifest(datasets, config.on_invalid_images, cache_dir)
    found = replace(found, notes=(*parsed.notices, *found.notes))
    if config.resolution is not None and all(dataset.resolution_schedule for dataset in datasets):
        note = "--resolution: not used, because every dataset has a resolution_schedule"
        found = replace(found, notes=(note, *found.notes))
    manifest, placements = assign_buckets(found, datasets)
    held_out = Manifest(tuple(map(disable_augmentations, found.datasets)), found.validation_samples, (), ())
    places = list(map(build_bucket_assigner, held_out.datasets))
    # A bucket of few pictures joins no other one here: that would depend on the pictures that are trained.
    apart = tuple(places[sample.dataset_index](*sample.size) for sample in held_out.samples)
    return PreparedData(
        config,
        manifest,
        placements,
        _build_buckets(manifest, placements),
        PreparedData(config, held_out, apart, ()) if apart else None,
    )


def _build_buckets(manifest: Manifest, assignments: Sequence[BucketAssignment]) -> tuple[Bucket, ...]:
    members: defaultdict[tuple[int, tuple[int, int]], list[int]] = defaultdict(list)
    for index, (sample, placement) in enumerate(zip(manifest.samples, assignments, strict=True)):
        members[sample.dataset_index, placement.bucket_resolution].append(index)
    return tuple(
        Bucket(
            size,
            array("q", samples),
            array("d", [manifest.samples[index].repeats for index in samples]),
            manifest.datasets[dataset].batch_size,
            manifest.datasets[dataset].dataset_number,
        )
        for (dataset, size), samples in sorted(members.items())
    )
