"""From the settings to placed pictures: ``check`` before anything is loaded, then ``prepare``."""

from array import array
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.schema import CacheConfig, DataConfig, TrainConfig, ValidateConfig
from ..dataset.schema import DatasetConfig, flags_of
from ..errors import ConfigError
from ..randomness import seed_for
from .batches import BatchPlan, BucketSamples
from .bucket_facts import facts_of
from .buckets import Placement, place_for
from .cache.rules import cache_problems
from .collector import collector_paused
from .dataset_config import Reading, read_datasets
from .dataset_rules import missing_folders, not_yet
from .describe import described
from .held_out import idle, quiet
from .manifest import Manifest, scan
from .mask_rules import mask_problems
from .record import Record, recorded
from .showing import Showing, Visit
from .stage_rules import stage_problems
from .staged_plan import Plan, StagedPlan
from .stages import pieces_of
from .staging import refuse_empty_stages, staged

if TYPE_CHECKING:
    from .cache.latents import LatentReader
    from .cache.texts import TextReader
    from .fixed_batches import FixedBatches, Read
    from .loader import StepLoader


@dataclass(frozen=True)
class Prepared:
    """The pictures of a run, each with its place, and the buckets they make."""

    config: DataConfig
    manifest: Manifest
    placements: tuple[Placement, ...]  # of each sample
    buckets: tuple[BucketSamples, ...]
    held_out: "Prepared | None" = None
    """The pictures for validation, which are not among the others."""

    @property
    def pictures(self) -> tuple[int, int]:
        """How many are shown in an epoch of the last stage, repeats counted: for training, and for regularisation."""
        datasets, samples = self.manifest.datasets, self.manifest.samples
        last = [sample for sample in samples if datasets[sample.dataset].from_step == datasets[-1].from_step]
        shown = [sum(sample.repeats for sample in last if sample.is_reg == is_reg) for is_reg in (False, True)]
        return round(shown[0]), round(shown[1])

    @property
    def resolution(self) -> tuple[int, int]:
        """Width and height of the first dataset of the last stage, as set."""
        datasets = self.manifest.datasets
        size = next(dataset for dataset in datasets if dataset.from_step == datasets[-1].from_step).resolution
        return size.width, size.height

    def batch_plan(self, ranks: int, train: TrainConfig, *, one_bucket_per_step: bool = False) -> Plan:
        """Which sample is trained where, on ``ranks`` processes."""
        stages: defaultdict[tuple[int, int | None], list[BucketSamples]] = defaultdict(list)
        for bucket in self.buckets:
            dataset = self.manifest.datasets[self.manifest.samples[bucket.samples[0]].dataset]
            stages[dataset.from_step, dataset.to_step].append(bucket)
        plans = [
            (first, end, BatchPlan(buckets, ranks, train.gradient_accumulation_steps,
                                   seed_for(train.seed, "stage", first) if first else train.seed,
                                   one_bucket_per_step=one_bucket_per_step))
            for (first, end), buckets in stages.items()
        ]  # fmt: skip
        return plans[0][2] if len(plans) == 1 and plans[0][1] is None else StagedPlan(plans)

    def describe(self, plan: Plan, steps: int) -> str:
        """What a run of ``steps`` optimizer steps trains, as text."""
        return described(self.manifest, self.placements, plan, steps)

    def record(self, plan: Plan) -> list[Record]:
        """The datasets as plain data, with every bucket and every picture."""
        return recorded(self.manifest, self.placements, plan)

    def preview(self, plan: Plan, path: Path, limit: int) -> str:
        """Draw the pictures as the model will see them, up to ``limit`` of each bucket, and say what was drawn."""
        from .contact_sheet import draw_sheet, write_sheet

        sheet, count = draw_sheet(self.manifest, self.placements, facts_of(self.placements, plan), limit)
        write_sheet(sheet, path)
        return f"contact sheet: {path}, {count} of {len(self.manifest.samples)} pictures"

    def whole(self) -> "Prepared":
        """All pictures that are ever shown: first those to train on, then those to validate on."""
        if self.held_out is None:
            return self
        mine, others = self.manifest, self.held_out.manifest
        shifted = [replace(sample, dataset=sample.dataset + len(mine.datasets)) for sample in others.samples]
        manifest = replace(mine, datasets=(*mine.datasets, *others.datasets), samples=(*mine.samples, *shifted))
        return replace(self, manifest=manifest, placements=(*self.placements, *self.held_out.placements))

    def held_out_batches(self, most: int | None, latents: "LatentReader | None",
                         texts: "TextReader | None") -> "tuple[FixedBatches, Read] | None":  # fmt: skip
        """The pictures for validation, if any, in ``most`` batches at most, and what reads them, as for ``loader``."""
        if self.held_out is None:
            return None
        from .cache.loader import CachedLoader
        from .fixed_batches import fixed_batches
        from .loader import MicroBatchReader

        whole = self.whole()
        batches = fixed_batches(self.held_out.manifest, self.held_out.placements, len(self.manifest.samples), most)
        showing = Showing(whole.manifest, whole.placements, 0, 0)  # nothing in it is drawn
        if latents is not None:
            return batches, CachedLoader(showing, batches, 0, latents, texts, pin_memory=False).batch
        return batches, MicroBatchReader(whole.manifest, whole.placements, batches, 0, 0, 0).__getitem__

    def loader(self, plan: Plan, rank: int, *, total_steps: int, pin_memory: bool,
               latents: "LatentReader | None" = None, texts: "TextReader | None" = None) -> "StepLoader":  # fmt: skip
        """One rank's batches; ``total_steps`` is the length of the run, of which a token warm-up may be a share.

        With ``latents`` no picture is opened, with ``texts`` captions come encoded.
        """
        from .cache.loader import CachedLoader, WithTexts
        from .loader import Loader, MicroBatchReader  # torch is not needed for looking at pictures

        if latents is not None:
            return CachedLoader(self.showing(plan, total_steps), plan, rank, latents, texts, pin_memory=pin_memory)
        reader = MicroBatchReader(self.manifest, self.placements, plan, rank, plan.seed, total_steps)
        loader = Loader(reader, plan, workers=self.config.max_data_loader_n_workers,
                        prefetch=self.config.prefetch_factor, pin_memory=pin_memory)  # fmt: skip
        return loader if texts is None else WithTexts(loader, texts)

    def first_captions(self, plan: Plan, total_steps: int) -> list[str]:
        """Each picture's caption as it is shown in the first epoch, once however many stages show it."""
        showing, datasets = self.showing(plan, total_steps), self.manifest.datasets
        first = {(datasets[sample.dataset].number, sample.key): index
                 for index, sample in reversed(list(enumerate(self.manifest.samples)))}  # fmt: skip
        return [showing.caption(Visit(0, 0, index, 0)) for index in sorted(first.values())]

    def showing(self, plan: Plan, total_steps: int) -> Showing:
        """How the samples are shown in a run of so many steps."""
        return Showing(self.manifest, self.placements, plan.seed, total_steps)

    def without(self, indexes: frozenset[int]) -> "Prepared":
        """Some pictures fewer, by their numbers in ``whole``."""
        first = len(self.manifest.samples)
        kept = [index for index in range(first) if index not in indexes]
        samples = tuple(self.manifest.samples[index] for index in kept)
        placements = tuple(self.placements[index] for index in kept)
        manifest = replace(self.manifest, samples=samples)
        refuse_empty_stages(manifest)
        others = self.held_out and self.held_out.apart_from({index - first for index in indexes})
        return Prepared(self.config, manifest, placements, _buckets(manifest, placements), others)

    def apart_from(self, indexes: Set[int]) -> "Prepared | None":
        """The same for pictures that are measured only; nothing when none is left."""
        kept = [index for index in range(len(self.manifest.samples)) if index not in indexes]
        manifest = replace(self.manifest, samples=tuple(self.manifest.samples[index] for index in kept))
        placements = tuple(self.placements[index] for index in kept)
        return replace(self, manifest=manifest, placements=placements) if kept else None


def check(config: DataConfig, cache: CacheConfig | None = None, validate: ValidateConfig | None = None,
          train: TrainConfig | None = None, wrong: Set[str] = frozenset()) -> list[str]:  # fmt: skip
    """Everything that is wrong with the dataset file, without opening a picture or importing anything heavy.

    ``wrong`` are options of the run that could not be read.
    """
    if config.dataset_config is None or not Path(config.dataset_config).is_file():
        return []  # the rules across options say so
    reading = read(config, wrong)
    datasets = reading.datasets
    found = [*reading.problems, *missing_folders(datasets), *not_yet(datasets), *mask_problems(datasets, config)]
    found += cache_problems(datasets, cache or CacheConfig())
    found += idle(datasets, validate or ValidateConfig())
    found += stage_problems(datasets, train)
    return list(dict.fromkeys(found))


def prepare(config: DataConfig, pixel_step: int, cache_dir: str | None = None) -> Prepared:
    """Look at all pictures and place them; sizes are multiples of ``pixel_step``, which the model family needs.

    What is found out about files is kept in ``cache_dir``, or else beside the pictures, for the next time.
    """
    if config.dataset_config is None:
        raise ConfigError(["--dataset_config: missing; it names the folders of pictures"])
    reading = read(config)
    problems = [*check(config), *_unfit(reading.datasets, pixel_step)]
    if problems or reading.problems:
        raise ConfigError(list(dict.fromkeys(problems or reading.problems)))
    with collector_paused():
        return _looked_at(config, reading.datasets, Path(cache_dir).expanduser() if cache_dir else None)


def _looked_at(config: DataConfig, datasets: Sequence[DatasetConfig], cache_dir: Path | None) -> Prepared:
    found = scan(datasets, config.on_bad_data, cache_dir)
    if config.resolution is not None and all(dataset.resolution_schedule for dataset in datasets):
        note = "--resolution: not used, because every dataset has a resolution_schedule"
        found = replace(found, notes=(note, *found.notes))
    manifest, placements = staged(found, datasets)
    held_out = Manifest(tuple(map(quiet, found.datasets)), found.held_out, (), ())
    places = list(map(place_for, held_out.datasets))
    # A bucket of few pictures joins no other one here: that would depend on the pictures that are trained.
    apart = tuple(places[sample.dataset](*sample.size) for sample in held_out.samples)
    return Prepared(config, manifest, placements, _buckets(manifest, placements),
                    Prepared(config, held_out, apart, ()) if apart else None)  # fmt: skip


def read(config: DataConfig, wrong: Set[str] = frozenset()) -> Reading:
    """The dataset file alone, with the run's options where it is silent; looks at no folder."""
    return read_datasets(Path(str(config.dataset_config)), flags_of(config), wrong)


def _unfit(datasets: Sequence[DatasetConfig], pixel_step: int) -> list[str]:
    """Sizes that the model cannot take."""
    problems = []
    for dataset in datasets:
        if dataset.enable_bucket:
            if (step := dataset.bucket_reso_steps) % pixel_step:
                problems.append(f"{dataset.place('bucket_reso_steps')}: bucket_reso_steps: {step} is no multiple of"
                                f" {pixel_step}, as this model needs; write {_near(step, pixel_step)}")  # fmt: skip
            continue
        where = dataset.named("resolution" if dataset.resolution_schedule is None else "resolution_schedule")
        for size in [piece.resolution for piece in pieces_of(dataset)]:
            if size.width % pixel_step or size.height % pixel_step:
                sides = [_near(side, pixel_step) for side in (size.width, size.height)]
                problems.append(f"{where}: {size} is no multiple of {pixel_step} on each side, as this model needs;"
                                f" write {sides}")  # fmt: skip
    return problems


def _near(number: int, step: int) -> int:
    """The multiple of ``step`` that is nearest, but not nothing."""
    return max(step, round(number / step) * step)


def _buckets(manifest: Manifest, placements: Sequence[Placement]) -> tuple[BucketSamples, ...]:
    members: defaultdict[tuple[int, tuple[int, int]], list[int]] = defaultdict(list)
    for index, (sample, placement) in enumerate(zip(manifest.samples, placements, strict=True)):
        members[sample.dataset, placement.bucket].append(index)
    return tuple(
        BucketSamples(size, array("q", samples), array("d", [manifest.samples[index].repeats for index in samples]),
                      manifest.datasets[dataset].batch_size, manifest.datasets[dataset].number)
        for (dataset, size), samples in sorted(members.items())
    )  # fmt: skip
