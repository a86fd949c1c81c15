"""What will be trained, as plain data that JSON can hold."""

from collections.abc import Sequence
from typing import Any

from .bucket_facts import export_bucket, summarize_buckets
from .buckets import BucketAssignment
from .manifest import Manifest
from .mask_files import Mask
from .resolved import collect_extra_keys, convert_to_sd_scripts
from .staged_plan import AnyBatchPlan

JsonObject = dict[str, Any]


def export_datasets(manifest: Manifest, assignments: Sequence[BucketAssignment], batch_plan: AnyBatchPlan) -> list[JsonObject]:
    """Each dataset: its settings in sd-scripts' names, our own beside them, its buckets, and every picture."""
    facts = summarize_buckets(assignments, batch_plan)
    records = []
    for number, (dataset, settings) in enumerate(zip(manifest.datasets, convert_to_sd_scripts(manifest.datasets), strict=True)):
        records.append(
            {
                "resolved": settings,
                "beyond": collect_extra_keys(dataset),
                "bucket_mode": dataset.bucket_mode,
                "bucket_max_crop": dataset.bucket_max_crop,
                "bucket_min_pictures": dataset.bucket_min_pictures,
                "buckets": [export_bucket(manifest, bucket) for bucket in facts
                            if manifest.samples[bucket.most_cropped_sample].dataset_index == number],
                "samples": [_export_sample(manifest, assignments, index) for index, sample in enumerate(manifest.samples)
                            if sample.dataset_index == number],
            }
        )  # fmt: skip
    return records


def _export_sample(manifest: Manifest, assignments: Sequence[BucketAssignment], sample_index: int) -> JsonObject:
    sample, placement = manifest.samples[sample_index], assignments[sample_index]
    subset = manifest.datasets[sample.dataset_index].subsets[sample.subset_index]
    return {
        "image": str(sample.image),
        "size": list(sample.size),
        "bucket": list(placement.bucket_resolution),
        "resized": list(placement.resized_size),
        "crop": None if subset.random_crop else list(placement.crop_left_top),  # drawn anew each time
        "crop_loss": placement.cropped_fraction,
        "caption": sample.caption,
        "repeats": sample.repeats,
        "subset": sample.subset_index,
        "is_reg": sample.is_reg,
        "weight": sample.loss_weight,
        "mask": None if sample.mask is None else _export_mask(sample.mask),
    }


def _export_mask(mask: Mask) -> JsonObject:
    """Its file, which is the picture itself where its opacity is the mask, and how much of the picture counts."""
    return {"image": str(mask.image), "is_alpha": mask.is_alpha, "share": mask.coverage}
