"""musubi-tuner's dataset format: how a file is recognized, its names of keys, and keys that do not belong in it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config.toml_positions import KeyPath
from ..config.types import Resolution
from ..problems import Place, Problem
from .schema import DATASET_KEYS, DatasetConfig

MUSUBI_SUBSET_KEYS: Mapping[str, str] = {
    "image_directory": "image_dir",
    "image_jsonl_file": "metadata_file",
    "video_directory": "video_dir",
    "video_jsonl_file": "metadata_file",
    "control_directory": "control_directory",
}
"""musubi-tuner's names of subset keys; its datasets have no subsets and contain these keys themselves."""

RENAMED_DATASET_KEYS: Mapping[str, str] = {
    "flux_kontext_no_resize_control": "no_resize_control",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}
"""The current keys by their earlier names in musubi-tuner."""

VIDEO_SOURCE_KEYS = ("video_directory", "video_jsonl_file")
SOURCE_KEYS = ("image_directory", "image_jsonl_file", *VIDEO_SOURCE_KEYS)
"""musubi-tuner's names of the source of a dataset."""

VIDEO_KEYS = ("target_frames", "frame_extraction", "frame_stride", "frame_sample", "max_frames", "source_fps")
"""Keys that choose the frames of videos."""

WINDOW_KEY, PUBLISHED_WINDOW = "fp_latent_window_size", 9
"""The key of the size of FramePack's sections, and the size that the published models have."""

POSITION_KEYS = ("fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post")
"""Keys of the positions of one-frame training."""

ONE_FRAME_KEYS = (WINDOW_KEY, *POSITION_KEYS)
"""Keys that only FramePack and Wan read; musubi-tuner ignores them for other models."""

_KEYS_OF_MUSUBI_ALONE = frozenset((*SOURCE_KEYS, *ONE_FRAME_KEYS))
_SHARED_KEYS = frozenset("resolution batch_size num_repeats enable_bucket bucket_no_upscale caption_extension".split())
_OWN_KEYS_BESIDE_MUSUBI = frozenset(
    "control_resolution no_resize_control control_directory cache_directory recursive include exclude image_column"
    " caption_column control_from_image multiple_target weight resolution_schedule from_step to_step".split()
)
MUSUBI_KEYS = _SHARED_KEYS | _OWN_KEYS_BESIDE_MUSUBI | MUSUBI_SUBSET_KEYS.keys() | {*VIDEO_KEYS}
"""The keys of files in musubi-tuner's format that are read here."""

_BUCKET_KEYS = frozenset(
    "min_bucket_reso max_bucket_reso bucket_reso_steps bucket_mode bucket_max_crop bucket_min_images".split()
)
_OWN_BUCKET_KEYS = frozenset({"bucket_mode", "bucket_max_crop", "bucket_min_images"})

MUSUBI_RESOLUTION = Resolution(960, 544)
"""The resolution of datasets that set none."""

MUSUBI_TARGET_FRAMES = (1,)
"""The lengths of windows of datasets that set none."""

MUSUBI_BUCKET_STEP = 16
"""Sides of musubi-tuner's buckets are multiples of this, or of what the model needs: 32 for HiDream-O1."""

_UNSUPPORTED_MUSUBI_KEYS: Mapping[str, str] = {
    "skip_corrupted_cache": "not supported yet: this key of musubi-tuner",
}


def explain_unsupported_musubi_key(name: str) -> str | None:
    """Explain a key of musubi-tuner that is not supported."""
    return f"{_UNSUPPORTED_MUSUBI_KEYS[name]}; remove it" if name in _UNSUPPORTED_MUSUBI_KEYS else None


def is_musubi_dataset(table: Mapping[str, Any]) -> bool:
    """Whether a ``[[datasets]]`` table is written as musubi-tuner's: without subsets, with the keys of one itself."""
    return "subsets" not in table and any(name in table for name in MUSUBI_SUBSET_KEYS)


def find_musubi_key(document: Mapping[str, Any]) -> KeyPath | None:
    """Find the first key that only musubi-tuner has."""
    return next((path for path in _iter_key_paths(document) if path[-1] in _KEYS_OF_MUSUBI_ALONE), None)


def find_mixed_keys(document: Mapping[str, Any]) -> list[KeyPath]:
    """Find the keys that do not go with musubi-tuner's, in a file that has keys which only musubi-tuner has.

    Of the subsets of a dataset, that is one key: they are of another format as a whole.
    """
    found = list[KeyPath]()
    for path in _iter_key_paths(document):
        name, is_of_subset = path[-1], len(path) > 3
        if is_of_subset and name in DATASET_KEYS and not any(other[:3] == path[:3] for other in found):
            found.append(path)
        elif not is_of_subset and name in DATASET_KEYS and name not in MUSUBI_KEYS:
            found.append(path)
    subsets = [
        ("datasets", index, "subsets")
        for index, table in _enumerate_tables(document.get("datasets"))
        if "subsets" in table
    ]
    return [*found, *(path for path in subsets if not any(other[:3] == path for other in found))]


def _iter_key_paths(document: Mapping[str, Any]) -> Iterator[KeyPath]:
    """Yield the paths of all keys of ``[general]``, the datasets and their subsets."""
    tables: list[tuple[KeyPath, Any]] = [(("general",), document.get("general"))]
    tables += [(("datasets", index), table) for index, table in _enumerate_tables(document.get("datasets"))]
    for path, table in tables:
        for name, value in table.items() if isinstance(table, dict) else ():
            if name != "subsets":
                yield (*path, name)
            for index, subset in _enumerate_tables(value) if name == "subsets" else ():
                yield from ((*path, "subsets", index, key) for key in subset)


def _enumerate_tables(value: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, table in enumerate(value if isinstance(value, list) else ()):
        if isinstance(table, dict):
            yield index, table


def explain_mixed_key(path: KeyPath, musubi_path: KeyPath, locate: Callable[[KeyPath], Place]) -> Problem:
    """Build the problem of a key that does not go with a key of musubi-tuner's."""
    name, musubi_key = str(path[-1]), str(musubi_path[-1])
    key, where = DATASET_KEYS.get(name), f"{musubi_key} ({locate(musubi_path)})"
    owner = "this program's buckets" if name in _OWN_BUCKET_KEYS else "sd-scripts' format"
    text = f"a key of {owner}, but {where} is one of musubi-tuner's: the file mixes two formats"
    if name in _BUCKET_KEYS:
        fix = "remove it: musubi-tuner's buckets follow from resolution alone"
    elif "subsets" in path or key is None or key.flag is None:
        fix = "write all [[datasets]] in one of the two"
    else:
        fix = f"remove it, or set it for the run: --{key.flag}"
    return Problem(name, text, fix, locate(path).with_key(name))


def set_musubi_bucket_steps(datasets: Sequence[DatasetConfig], size_multiple: int) -> tuple[DatasetConfig, ...]:
    """Give the datasets of musubi-tuner's format the steps that the model needs: 32 for HiDream-O1, 16 for others."""
    step = math.lcm(MUSUBI_BUCKET_STEP, size_multiple)
    return tuple(
        replace(dataset, bucket_reso_steps=step, min_bucket_reso=step)
        if dataset.file_format == "musubi-tuner"
        else dataset
        for dataset in datasets
    )
