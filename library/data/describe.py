"""What will be trained, in words and in one table; for the start of a run and for --dry_run."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from .bucket_facts import BucketFacts, facts_of_stage
from .buckets import Placement
from .manifest import Manifest
from .mask_files import mask_source
from .staged_plan import Plan, PlannedStage, stages_in


def described(manifest: Manifest, placements: Sequence[Placement], plan: Plan, steps: int) -> str:
    """The pictures, the buckets and the arithmetic of a run of ``steps`` optimizer steps, as text."""
    stages = stages_in(plan)
    lines = [_pictures(manifest), *manifest.notes]
    for number, stage in enumerate(stages, 1):
        end = steps if stage.end is None else min(stage.end, steps)
        if len(stages) > 1:
            lines.append(f"stage {number} of {len(stages)}: steps {stage.first + 1} to {end}")
        lines += [_buckets(manifest, facts_of_stage(placements, stage)), _epoch(stage)]
        what = "the run" if len(stages) == 1 else "the stage"
        lines.append(f"{what}: {end - stage.first} steps = {_rounded((end - stage.first) / _steps(stage))} epochs")
    return "\n".join(lines if len(stages) == 1 else [*lines, f"the run: {steps} steps in {len(stages)} stages"])


def _pictures(manifest: Manifest) -> str:
    repeats: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    masks: Counter[tuple[int, int]] = Counter()
    for sample in manifest.samples:
        repeats[sample.dataset, sample.subset].append(sample.repeats)
        masks[sample.dataset, sample.subset] += sample.mask is not None
    lines = []
    for number, index, ending, captions, found in manifest.endings:
        subset = manifest.datasets[number].subsets[index]
        mine = repeats[number, index]
        kind = "regularisation picture" if subset.is_reg else "picture"
        masked = f", masks {masks[number, index]}/{len(mine)}" if mask_source(subset) else ""
        name = f"dataset {manifest.datasets[number].number + 1}"
        lines.append(f"{name}, {subset.source}: {_counted(len(mine), kind)}{_repeated(mine)}, captions"
                     f" found {captions}/{found} ({ending or 'no ending'}){masked}")  # fmt: skip
    return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def _rounded(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _repeated(repeats: Sequence[float]) -> str:
    """Regularisation, and weights of datasets, give pictures of one subset different repeats, or parts of them."""
    if not repeats:
        return ""
    least, most = min(repeats), max(repeats)
    times = f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
    return f" x {times} repeats = {_rounded(sum(repeats))} in an epoch"


def _buckets(manifest: Manifest, buckets: Sequence[BucketFacts]) -> str:
    """A line a bucket; the remainder is what does not fill whole steps, padding weighs nothing."""
    head = ("dataset", "bucket", "pictures", "x repeats", "batch size", "micro-batches", "remainder", "padding",
            "mean crop", "worst crop")  # fmt: skip
    rows: list[tuple[str, ...]] = [head]
    for bucket in buckets:
        cells = (bucket.dataset + 1, f"{bucket.size[0]}x{bucket.size[1]}", len(bucket.samples), bucket.shown,
                 bucket.batch_size, bucket.micro_batches, bucket.remainder, bucket.padding,
                 f"{bucket.mean_loss:.1%}", f"{bucket.worst_loss:.1%}")  # fmt: skip
        rows.append(tuple(map(str, cells)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    worst = ["worst picture", *(manifest.samples[bucket.worst].key if bucket.worst_loss else "" for bucket in buckets)]
    return "\n".join(f"{line}  {name}".rstrip() for line, name in zip(lines, worst, strict=True))


def _filling(padding: int, filled: int) -> str:
    return f", and {padding} that fill up the last batches of buckets and weigh nothing: {filled}" if padding else ""


def _steps(stage: PlannedStage) -> float:
    return stage.plan.batches_per_epoch / stage.plan.accumulation


def _epoch(stage: PlannedStage) -> str:
    plan = stage.plan
    batch = " or ".join(map(str, sorted({bucket.batch_size for bucket in plan.buckets})))
    pictures = sum(len(bucket.samples) for bucket in plan.buckets)
    padding = sum(map(plan.padding_per_epoch, range(len(plan.buckets))))
    filled = plan.samples_per_epoch + padding
    return "\n".join([
        f"one epoch: {_counted(pictures, 'picture')}, with repeats {plan.samples_per_epoch}{_filling(padding, filled)}",
        f"  {filled} / (batch {batch} x {plan.ranks} process{'es' * (plan.ranks != 1)}"
        f" x accumulation {plan.accumulation}) = {_rounded(_steps(stage))} steps",
    ])  # fmt: skip
