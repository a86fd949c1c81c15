"""What will be trained, in words and in one table; for the start of a run and for --dry_run."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from .batches import BatchPlan
from .bucket_facts import BucketFacts, facts_of
from .buckets import Placement
from .manifest import Manifest
from .mask_files import mask_source


def described(manifest: Manifest, placements: Sequence[Placement], plan: BatchPlan, steps: int) -> str:
    """The pictures, the buckets and the arithmetic of a run of ``steps`` optimizer steps, as text."""
    table = _buckets(manifest, facts_of(placements, plan))
    return "\n".join([_pictures(manifest), *manifest.notes, table, _arithmetic(plan, steps)])


def _pictures(manifest: Manifest) -> str:
    counts = Counter((sample.dataset, sample.subset) for sample in manifest.samples)
    shown: defaultdict[tuple[int, int], float] = defaultdict(float)
    masks: Counter[tuple[int, int]] = Counter()
    for sample in manifest.samples:
        shown[sample.dataset, sample.subset] += sample.repeats
        masks[sample.dataset, sample.subset] += sample.mask is not None
    lines = []
    for number, index, ending, captions, found in manifest.endings:
        subset = manifest.datasets[number].subsets[index]
        used, times = counts[number, index], shown[number, index]
        kind = "regularisation pictures" if subset.is_reg else "pictures"
        masked = f", masks {masks[number, index]}/{used}" if mask_source(subset) else ""
        lines.append(f"dataset {number + 1}, {subset.source}: {used} {kind}, shown {_number(times)} times an epoch,"
                     f" captions found {captions}/{found} ({ending or 'no ending'}){masked}")  # fmt: skip
    return "\n".join(lines)


def _number(value: float) -> str:
    """Weights of datasets make parts of repeats."""
    return str(round(value)) if abs(value - round(value)) < 0.05 else f"{value:.1f}"


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


def _arithmetic(plan: BatchPlan, steps: int) -> str:
    batches = sorted({bucket.batch_size for bucket in plan.buckets})
    batch = " or ".join(map(str, batches))
    pictures = sum(len(bucket.samples) for bucket in plan.buckets)
    layout = f"batch {batch} x {plan.ranks} ranks x {plan.accumulation} accumulation"
    per_epoch = plan.batches_per_epoch / plan.accumulation
    return "\n".join([
        f"one epoch: {pictures} pictures, with repeats {plan.samples_per_epoch} samples",
        f"  / ({layout}), bucket by bucket = {plan.batches_per_epoch} micro-steps = {per_epoch:g} steps",
        f"the run: {steps} steps = {steps / per_epoch:.4g} epochs",
    ])  # fmt: skip
