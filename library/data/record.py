"""What will be trained, as plain data that JSON can hold."""

from collections.abc import Sequence
from typing import Any

from .bucket_facts import as_plain, facts_of
from .buckets import Placement
from .manifest import Manifest
from .mask_files import Mask
from .resolved import beyond, resolved
from .staged_plan import Plan

Record = dict[str, Any]


def recorded(manifest: Manifest, placements: Sequence[Placement], plan: Plan) -> list[Record]:
    """Each dataset: its settings in sd-scripts' names, our own beside them, its buckets, and every picture."""
    facts = facts_of(placements, plan)
    records = []
    for number, (dataset, settings) in enumerate(zip(manifest.datasets, resolved(manifest.datasets), strict=True)):
        records.append(
            {
                "resolved": settings,
                "beyond": beyond(dataset),
                "bucket_mode": dataset.bucket_mode,
                "bucket_max_crop": dataset.bucket_max_crop,
                "bucket_min_pictures": dataset.bucket_min_pictures,
                "buckets": [as_plain(manifest, bucket) for bucket in facts
                            if manifest.samples[bucket.worst].dataset == number],
                "samples": [_sample(manifest, placements, index) for index, sample in enumerate(manifest.samples)
                            if sample.dataset == number],
            }
        )  # fmt: skip
    return records


def _sample(manifest: Manifest, placements: Sequence[Placement], index: int) -> Record:
    sample, placement = manifest.samples[index], placements[index]
    subset = manifest.datasets[sample.dataset].subsets[sample.subset]
    return {
        "image": str(sample.image),
        "size": list(sample.size),
        "bucket": list(placement.bucket),
        "resized": list(placement.resized),
        "crop": None if subset.random_crop else list(placement.crop),  # drawn anew each time
        "crop_loss": placement.crop_loss,
        "caption": sample.caption,
        "repeats": sample.repeats,
        "subset": sample.subset,
        "is_reg": sample.is_reg,
        "weight": sample.weight,
        "mask": None if sample.mask is None else _mask(sample.mask),
    }


def _mask(mask: Mask) -> Record:
    """Its file, which is the picture itself where its opacity is the mask, and how much of the picture counts."""
    return {"image": str(mask.image), "is_alpha": mask.is_alpha, "share": mask.share}
