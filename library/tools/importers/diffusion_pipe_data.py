"""The dataset file of diffusion-pipe: directories, resolutions and aspect ratios."""

import math
from collections.abc import Mapping
from typing import Any

from ...models.detect import get_size_multiple
from .equivalents import set_control_folders
from .imported import ImportedConfig, KeyReader, to_integer, to_number, to_switch, to_text
from .keys import diffusion_pipe as keys

PROGRAM = "diffusion-pipe"


def read_directories(content: dict[str, Any], result: ImportedConfig, batch_sizes: Mapping[Any, int]) -> None:
    """Each directory becomes a subset of a dataset for each of its resolutions."""
    top = KeyReader(content, result, "dataset.")
    shared = {key: top.read(key) for key in keys.DIRECTORY_KEYS if key in top}
    datasets: dict[tuple[tuple[str, Any], ...], list[dict[str, Any]]] = {}
    for number, table in enumerate(top.read("directory", [])):
        reader = KeyReader({**shared, **table}, result, f"directory[{number}].")
        resolutions, buckets = _read_sizes(reader)
        subset, has_masks = _read_subset(reader)
        for resolution in resolutions:
            size = resolution if isinstance(resolution, int) else round(math.sqrt(resolution[0] * resolution[1]))
            batch_size = batch_sizes.get(resolution if isinstance(resolution, int) else size)
            if batch_size is None:
                batch_size = next(iter(batch_sizes.values()), 1)
            dataset = {
                "resolution": round_size(size, result.family),
                "batch_size": batch_size,
                **_describe_buckets(buckets, size, result.family),
            }
            datasets.setdefault((*dataset.items(), ("has_masks", has_masks)), []).append(dict(subset))
        reader.list_unknown(PROGRAM)
    result.datasets = [
        {**{key: value for key, value in table if key != "has_masks"}, "subsets": subsets}
        for table, subsets in datasets.items()
    ]
    top.apply_rules(keys.DATASET_RULES)
    top.list_unknown(PROGRAM)


def round_size(size: int, family: str) -> int:
    step = get_size_multiple(family)
    return max(step, round(size / step) * step)


def _read_sizes(reader: KeyReader) -> tuple[list[Any], tuple[float, float] | None]:
    """Resolutions, and the range of aspect ratios with buckets."""
    resolutions = reader.read("resolutions", [])
    if "size_buckets" in reader:
        sizes = reader.read("size_buckets")
        reader.list_change("size_buckets", "buckets are computed from a resolution here; use crops of these sizes")
        resolutions = resolutions or [[size[0], size[1]] for size in sizes[:1]]
    is_bucketed = reader.read("enable_ar_bucket", False, to_switch)
    ratios = (reader.read("min_ar", 0.5, to_number), reader.read("max_ar", 2.0, to_number))
    count = reader.read("num_ar_buckets", 7, to_integer)
    given = reader.read("ar_buckets")
    frames = reader.read("frame_buckets", [1])
    if frames != [1]:
        reader.list_harmless("frame_buckets", "only images are trained here, which are a bucket of their own there")
    if is_bucketed and given:
        values = [item if isinstance(item, (int, float)) else item[0] / item[1] for item in given]
        ratios = (min(values), max(values))
        reader.list_change("ar_buckets", "buckets are computed here, with sides between those of these aspect ratios")
    elif is_bucketed:
        reason = "buckets are every few pixels here, nearest by log aspect ratio; python -m library plan lists them"
        reader.list_change("num_ar_buckets", reason, count)
    return resolutions, ratios if is_bucketed else None


def _describe_buckets(ratios: tuple[float, float] | None, size: int, family: str) -> dict[str, Any]:
    """Symmetric buckets whose sides have aspect ratios in the range; none train squares."""
    if ratios is None:
        return {}
    step = get_size_multiple(family)
    widest = max(ratios[1], 1 / ratios[0])
    longest = math.ceil(size * math.sqrt(widest) / step) * step
    shortest = math.floor(size / math.sqrt(widest) / step) * step
    return {
        "enable_bucket": True,
        "bucket_mode": "symmetric",
        "bucket_reso_steps": step,
        "min_bucket_reso": max(step, shortest),
        "max_bucket_reso": longest,
    }


def _read_subset(reader: KeyReader) -> tuple[dict[str, Any], bool]:
    subset: dict[str, Any] = {"image_dir": reader.read("path", "", to_text) or "", "caption_extension": ".txt"}
    if prefix := reader.read("caption_prefix", None, to_text):
        subset["caption_prefix"] = prefix
    count = reader.read("cache_shuffle_num", 0, to_integer)
    delimiter = reader.read("cache_shuffle_delimiter", ", ")
    if count or reader.read("shuffle_tags", False, to_switch):
        subset["shuffle_caption"] = True
        if (delimiter.strip() or delimiter) != ",":
            subset["caption_separator"] = delimiter.strip() or delimiter
        if count:
            reader.list_change("cache_shuffle_num", "tags are shuffled anew every time, not among a few orders")
    reader.read("shuffle_tags")
    masks = reader.read("mask_path", None, to_text)
    if masks:
        subset["conditioning_data_dir"] = masks
        reader.result.options["masked_loss"] = True
    controls = reader.read("control_path", None, to_text)
    set_control_folders(reader.result, subset, f"{reader.prefix}control_path", [controls] if controls else [])
    reader.apply_rules(keys.DIRECTORY_RULES, subset)
    return subset, masks is not None
