"""Prepare the data of a run: scan the images, split off validation, assign buckets; build batch plans and loaders."""

import gc
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.schema import TrainConfig
from ..config.schema_data import DataConfig
from ..dataset.clip_windows import FrameRule
from ..dataset.controls import ControlImage, ControlLimits
from ..dataset.dataset_config import ParsedDatasetConfig, load_dataset_config
from ..dataset.listing import format_first_names
from ..dataset.musubi_format import set_musubi_bucket_steps
from ..dataset.slider_prompts import SliderPrompt, list_slider_texts, parse_slider_prompts
from ..dataset.validate import (
    find_clips_for_image_models,
    validate_dataset_config,
    validate_resolution_multiple,
    validate_stages_not_empty,
)
from ..errors import ConfigError, FileError
from ..problems import Place, Problem
from ..randomness import Purpose, derive_seed
from .augment import Augmenter, SampleView
from .batch_plan import AnyBatchPlan, BatchPlan, Bucket, StagedBatchPlan
from .buckets import BucketAssignment, BucketKey, build_bucket_assigner, build_bucket_key
from .dataset_metadata import build_dataset_metadata
from .face_crop import find_unreadable_faces
from .manifest import Manifest
from .manifest_builder import assign_buckets, build_manifest
from .slider_data import (
    build_slider_buckets,
    build_slider_manifest,
    build_slider_metadata,
    find_impossible_frames,
    format_slider_summary,
    repeat_to_steps,
)
from .summary import JsonObject, export_datasets, format_data_summary, summarize_buckets
from .validation_split import disable_augmentations

if TYPE_CHECKING:
    from .loader import ImageLoader


@dataclass(frozen=True)
class PreparedData:
    """The images of a run, with the bucket assignment of each, and the buckets."""

    config: DataConfig
    manifest: Manifest
    assignments: tuple[BucketAssignment, ...]  # the bucket of each sample
    buckets: tuple[Bucket, ...]
    validation: "PreparedData | None" = None
    """The validation images, which are in no bucket."""
    slider_prompts: tuple[SliderPrompt, ...] = ()
    """What a run without images learns; each is a sample and a bucket of its own."""

    @property
    def images_per_epoch(self) -> tuple[int, int]:
        """Count training and regularization images of the last stage's epoch, with repeats."""
        datasets, samples = self.manifest.datasets, self.manifest.samples
        last = [sample for sample in samples if datasets[sample.dataset_index].from_step == datasets[-1].from_step]
        train, reg = (sum(sample.repeats for sample in last if sample.is_reg == is_reg) for is_reg in (False, True))
        return round(train), round(reg)

    @property
    def resolution(self) -> tuple[int, int]:
        """Width and height of the first dataset of the last stage, as set."""
        datasets = self.manifest.datasets
        size = next(dataset for dataset in datasets if dataset.from_step == datasets[-1].from_step).resolution
        return size.width, size.height

    def list_slider_texts(self) -> list[str]:
        """List all texts of a run without images."""
        return list_slider_texts(self.slider_prompts)

    def list_resolution_sides(self) -> tuple[int, ...]:
        """List the sides in pixels of squares with the areas of the datasets' resolutions."""
        sizes = (dataset.resolution for dataset in self.manifest.datasets)
        return tuple(sorted({round(math.sqrt(size.width * size.height)) for size in sizes}))

    def build_batch_plan(self, dp_size: int, train: TrainConfig, *, one_bucket_per_step: bool = False) -> AnyBatchPlan:
        """Plan the batches of every rank and step, for ``dp_size`` data-parallel ranks."""
        stages: defaultdict[tuple[int, int | None], list[Bucket]] = defaultdict(list)
        step_size = dp_size * train.gradient_accumulation_steps
        for bucket in repeat_to_steps(self.buckets, step_size) if self.slider_prompts else self.buckets:
            dataset = self.manifest.datasets[self.manifest.samples[bucket.sample_indices[0]].dataset_index]
            stages[dataset.from_step, dataset.to_step].append(bucket)
        plans = []
        for (first, end), buckets in stages.items():
            seed = derive_seed(train.seed, Purpose.STAGE, first) if first else train.seed
            accumulation = train.gradient_accumulation_steps
            plan = BatchPlan(buckets, dp_size, accumulation, seed, one_bucket_per_step=one_bucket_per_step)
            plans.append((first, end, plan))
        return plans[0][2] if len(plans) == 1 and plans[0][1] is None else StagedBatchPlan(plans)

    def format_summary(self, batch_plan: AnyBatchPlan, total_steps: int) -> str:
        """Format images, buckets and epochs of a run as text."""
        if self.slider_prompts:
            return format_slider_summary(self.slider_prompts, self.manifest.notes, batch_plan, total_steps)
        return format_data_summary(self.manifest, self.assignments, batch_plan, total_steps)

    def to_json(self, batch_plan: AnyBatchPlan) -> list[JsonObject]:
        """Export the datasets as JSON, with every bucket and every image."""
        return export_datasets(self.manifest, self.assignments, batch_plan)

    def build_metadata(self, dp_size: int) -> dict[str, str]:
        """Build the keys of a LoRA file that describe the images, or the prompts of a run without images."""
        if self.slider_prompts:
            return build_slider_metadata(self.config.slider_prompts or "", self.slider_prompts)
        return build_dataset_metadata(self.manifest, self.assignments, dp_size)

    def write_contact_sheet(self, batch_plan: AnyBatchPlan, path: Path, max_per_bucket: int) -> str:
        """Draw the contact sheet and return a line for the log."""
        from .contact_sheet import draw_contact_sheet, save_contact_sheet

        buckets = summarize_buckets(self.assignments, batch_plan)
        sheet, count = draw_contact_sheet(self.manifest, self.assignments, buckets, max_per_bucket)
        save_contact_sheet(sheet, path)
        return f"contact sheet: {path}, {count} of {len(self.manifest.samples)} images"

    def merge_validation(self) -> "PreparedData":
        """Append the validation images to the training images, for caching."""
        if self.validation is None:
            return self
        train, validation = self.manifest, self.validation.manifest
        offset = len(train.datasets)
        shifted = [replace(sample, dataset_index=sample.dataset_index + offset) for sample in validation.samples]
        datasets = (*train.datasets, *validation.datasets)
        manifest = replace(train, datasets=datasets, samples=(*train.samples, *shifted))
        return replace(self, manifest=manifest, assignments=(*self.assignments, *self.validation.assignments))

    def build_image_loader(
        self, batch_plan: AnyBatchPlan, rank: int, *, total_steps: int, pin_memory: bool
    ) -> "ImageLoader":
        """Build one rank's loader of pixels; ``total_steps`` resolves a token warmup given as a fraction of the run."""
        from .loader import ImageLoader, MicroBatchDataset  # torch is not needed to inspect a dataset

        dataset = MicroBatchDataset(
            self.manifest,
            self.assignments,
            batch_plan=batch_plan,
            rank=rank,
            seed=batch_plan.seed,
            total_steps=total_steps,
        )
        return ImageLoader(
            dataset,
            batch_plan,
            num_workers=self.config.max_data_loader_n_workers,
            prefetch_factor=self.config.prefetch_factor,
            pin_memory=pin_memory,
        )

    def list_first_epoch_captions(self, batch_plan: AnyBatchPlan, total_steps: int) -> list[str]:
        """List the caption of each image as drawn in the first epoch, once for all stages."""
        augmenter, datasets = self.build_augmenter(batch_plan, total_steps), self.manifest.datasets
        first = {
            (datasets[sample.dataset_index].dataset_index_in_file, sample.key): index
            for index, sample in reversed(list(enumerate(self.manifest.samples)))
        }
        return [augmenter.draw_caption(SampleView(0, 0, index, 0)) for index in sorted(first.values())]

    def build_augmenter(self, batch_plan: AnyBatchPlan, total_steps: int) -> Augmenter:
        """Build the augmenter, which draws the crop, flip and caption of each sample."""
        return Augmenter(self.manifest, self.assignments, batch_plan.seed, total_steps)

    def build_static_augmenter(self) -> Augmenter:
        """Build an augmenter for cache keys, where nothing random is drawn."""
        return Augmenter(self.manifest, self.assignments, 0, 0)

    def remove_samples(self, sample_indices: frozenset[int]) -> "PreparedData":
        """Remove images that cannot be encoded, by their positions in ``merge_validation().manifest.samples``."""
        manifest, assignments = self._select_samples(sample_indices, 0)
        if problems := list(validate_stages_not_empty(manifest.datasets, manifest.trained_datasets)):
            raise FileError(problems)
        validation = None
        if self.validation is not None:
            rest, rest_assignments = self.validation._select_samples(sample_indices, len(self.manifest.samples))
            if rest_assignments:
                validation = replace(self.validation, manifest=rest, assignments=rest_assignments)
        return PreparedData(self.config, manifest, assignments, _build_buckets(manifest, assignments), validation)

    def _select_samples(
        self, removed: frozenset[int], first_index: int
    ) -> tuple[Manifest, tuple[BucketAssignment, ...]]:
        indices = [index for index in range(len(self.manifest.samples)) if index + first_index not in removed]
        manifest = replace(self.manifest, samples=tuple(self.manifest.samples[index] for index in indices))
        return manifest, tuple(self.assignments[index] for index in indices)


def prepare_data(
    config: DataConfig,
    size_multiple: int,
    cache_dir: str | None = None,
    model: str = "this model",
    control_limits: ControlLimits | None = None,
    max_side: int | None = None,
    frame_rule: FrameRule | None = None,
) -> PreparedData:
    """Scan all images and assign them to buckets, with sides that are multiples of ``size_multiple``.

    Messages call the model that needs this ``model``.  Scan results are cached in ``cache_dir``, by default next to
    the images.  ``frame_rule`` is what the model asks of clips; without it, it takes none.
    """
    if config.dataset_option is None:
        raise ConfigError([Problem("dataset_config", "missing", "set the TOML file that lists the image folders")])
    parsed = load_dataset_config(config)
    if config.slider_prompts is not None:
        return _prepare_slider_data(
            config, parsed, size_multiple, model=model, frame_rule=frame_rule, max_side=max_side
        )
    problems = [*validate_dataset_config(config), *validate_resolution_multiple(parsed.datasets, size_multiple, model)]
    if frame_rule is None:
        problems += find_clips_for_image_models(parsed.datasets, model, "")
    if problems or parsed.problems:
        raise ConfigError(problems or parsed.problems)
    parsed = replace(parsed, datasets=set_musubi_bucket_steps(parsed.datasets, size_multiple))
    with _pause_garbage_collection():
        cache_path = Path(cache_dir).expanduser() if cache_dir else None
        prepared = _build_prepared_data(config, parsed, cache_path, frame_rule)
    if problems := list(find_unreadable_faces(prepared.manifest.samples, prepared.manifest.datasets)):
        raise FileError(problems)
    if control_limits is not None:
        _check_control_counts(prepared.merge_validation().manifest, control_limits)
        prepared = _mark_masks(prepared) if control_limits.are_masks else prepared
        prepared = _mark_alpha(prepared) if control_limits.have_alpha else prepared
    if max_side is not None:
        _check_bucket_sides(prepared.merge_validation(), max_side, model)
    return prepared


def _prepare_slider_data(
    config: DataConfig,
    parsed: ParsedDatasetConfig,
    size_multiple: int,
    *,
    model: str,
    frame_rule: FrameRule | None,
    max_side: int | None,
) -> PreparedData:
    """Prepare a run on texts alone: the prompts of its file, with the sizes and frames that the model can make."""
    path = Path(config.slider_prompts or "").expanduser()
    prompts = parse_slider_prompts(path).prompts
    problems = [
        *parsed.problems,
        *validate_resolution_multiple(parsed.datasets, size_multiple, model),
        *find_impossible_frames(prompts, frame_rule, model),
    ]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    manifest, assignments = build_slider_manifest(path, prompts, parsed.datasets, parsed.notices)
    prepared = PreparedData(config, manifest, assignments, (), slider_prompts=prompts)
    if max_side is not None:
        _check_bucket_sides(prepared, max_side, model)
    return replace(prepared, buckets=build_slider_buckets(prompts))


def _check_bucket_sides(prepared: PreparedData, max_side: int, model: str) -> None:
    """Raise ``FileError`` for buckets with a side that the model has no positions for, by dataset."""
    found: defaultdict[tuple[str, Place], set[tuple[int, int]]] = defaultdict(set)
    for sample, assignment in zip(prepared.manifest.samples, prepared.assignments, strict=True):
        size = assignment.bucket_resolution
        if max(size) > max_side:
            dataset = prepared.manifest.datasets[sample.dataset_index]
            has_limits = dataset.enable_bucket and dataset.file_format == "sd-scripts"
            key = "max_bucket_reso" if has_limits and min(size) <= max_side else "resolution"
            found[key, dataset.locate(key)].add(size)
    problems = []
    for (key, place), sizes in found.items():
        shown = ", ".join(f"{width}x{height}" for width, height in sorted(sizes)[:3])
        text = f"{model} has positions for sides of up to {max_side} pixels, not for buckets of {shown}"
        problems.append(Problem(key, text, f"set at most {max_side}", place))
    if problems:
        raise FileError(problems)


def _mark_masks(prepared: PreparedData) -> PreparedData:
    """Mark the control images of files as masks, whose transparent parts are read in another way."""

    return _change_controls(prepared, lambda control: replace(control, is_mask=not control.made))


def _mark_alpha(prepared: PreparedData) -> PreparedData:
    """Mark the control images of files as ones whose alpha channel is read."""
    return _change_controls(prepared, lambda control: replace(control, has_alpha=not control.made))


def _change_controls(prepared: PreparedData, change: Callable[[ControlImage], ControlImage]) -> PreparedData:
    def change_all(manifest: Manifest) -> Manifest:
        samples = [replace(sample, controls=tuple(map(change, sample.controls))) for sample in manifest.samples]
        return replace(manifest, samples=tuple(samples))

    validation = prepared.validation
    if validation is not None:
        validation = replace(validation, manifest=change_all(validation.manifest))
    return replace(prepared, manifest=change_all(prepared.manifest), validation=validation)


def _check_control_counts(manifest: Manifest, limits: ControlLimits) -> None:
    """Raise ``FileError`` for pictures with more or fewer control images than the model takes, by subset.

    If the run cannot use any, raise ``ConfigError``.
    """
    if limits.rejection is not None and any(sample.controls for sample in manifest.samples):
        raise ConfigError([limits.rejection])
    found: defaultdict[Problem, list[str]] = defaultdict(list)
    for sample in manifest.samples:
        num_references = sum(control.is_reference for control in sample.controls)
        text = limits.describe_problem(len(sample.controls) - num_references)
        if text := text or limits.describe_reference_problem(num_references):
            subset = manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
            found[subset.report(subset.control_key or subset.source_key, text)].append(sample.image.name)
    if found:
        raise FileError(
            replace(problem, text=f"{problem.text}: {format_first_names(list(dict.fromkeys(names)))}")
            for problem, names in found.items()
        )


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which would traverse the growing manifest again and again and free nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _build_prepared_data(
    config: DataConfig, parsed: ParsedDatasetConfig, cache_dir: Path | None, frame_rule: FrameRule | None
) -> PreparedData:
    scanned = build_manifest(parsed.datasets, config.on_invalid_images, cache_dir, frame_rule)
    notes = [*parsed.notices, *scanned.notes]
    if config.resolution is not None and all(dataset.resolution_schedule for dataset in parsed.datasets):
        notes.insert(0, "--resolution: not used, because every dataset has a resolution_schedule")
    manifest, assignments = assign_buckets(replace(scanned, notes=tuple(notes)), parsed.datasets)
    validation_datasets = tuple(map(disable_augmentations, scanned.datasets))
    validation_manifest = Manifest(validation_datasets, scanned.validation_samples, (), ())
    assigners = list(map(build_bucket_assigner, validation_datasets))
    # Small buckets are not merged here: the result would depend on the training images.
    validation_assignments = tuple(
        assigners[sample.dataset_index](*sample.size) for sample in scanned.validation_samples
    )
    validation = PreparedData(config, validation_manifest, validation_assignments, ())
    buckets = _build_buckets(manifest, assignments)
    return PreparedData(config, manifest, assignments, buckets, validation if validation_assignments else None)


def _build_buckets(manifest: Manifest, assignments: Sequence[BucketAssignment]) -> tuple[Bucket, ...]:
    members: defaultdict[BucketKey, list[int]] = defaultdict(list)
    for index, (sample, assignment) in enumerate(zip(manifest.samples, assignments, strict=True)):
        members[build_bucket_key(sample, assignment, manifest.datasets[sample.dataset_index])].append(index)
    buckets = []
    for key, indices in sorted(members.items()):
        dataset_index, resolution, num_frames, has_sound, controls, num_references = key
        dataset = manifest.datasets[dataset_index]
        repeats = array("d", [manifest.samples[index].repeats for index in indices])
        number = dataset.dataset_index_in_file
        buckets.append(
            Bucket(
                resolution=resolution,
                sample_indices=array("q", indices),
                repeats=repeats,
                batch_size=dataset.batch_size,
                dataset_index_in_file=number,
                control_resolutions=controls,
                num_references=num_references,
                num_frames=num_frames,
                has_sound=has_sound,
            )
        )
    return tuple(buckets)
