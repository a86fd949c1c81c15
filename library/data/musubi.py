"""musubi-tuner's dataset files: a dataset there has no subsets, the folder of pictures stands in it."""

from collections.abc import Mapping

MUSUBI_SUBSET_KEYS: Mapping[str, str] = {"image_directory": "image_dir", "image_jsonl_file": "metadata_file"}
"""Its names for keys of a subset."""

_CONTROL_IMAGES = "control pictures, as editing models take them"
_VIDEOS = "videos"
_ONE_FRAME_TRAINING = "one-frame training of FramePack"
_UNSUPPORTED_MUSUBI_KEYS: Mapping[str, str] = {
    "skip_corrupted_cache": "this key of musubi-tuner",
    "control_directory": _CONTROL_IMAGES,
    "no_resize_control": _CONTROL_IMAGES,
    "control_resolution": _CONTROL_IMAGES,
    "flux_kontext_no_resize_control": _CONTROL_IMAGES,
    "qwen_image_edit_no_resize_control": _CONTROL_IMAGES,
    "qwen_image_edit_control_resolution": _CONTROL_IMAGES,
    "multiple_target": "several target pictures, as layered models take them",
    "fp_latent_window_size": _ONE_FRAME_TRAINING,
    "fp_1f_clean_indices": _ONE_FRAME_TRAINING,
    "fp_1f_target_index": _ONE_FRAME_TRAINING,
    "fp_1f_no_post": _ONE_FRAME_TRAINING,
    "video_directory": _VIDEOS,
    "video_jsonl_file": _VIDEOS,
    "target_frames": _VIDEOS,
    "frame_extraction": _VIDEOS,
    "frame_stride": _VIDEOS,
    "frame_sample": _VIDEOS,
    "max_frames": _VIDEOS,
    "source_fps": _VIDEOS,
}


def is_musubi_dataset(table: Mapping[str, object]) -> bool:
    """Whether a dataset with these keys is written in musubi-tuner's way."""
    wanted = {*MUSUBI_SUBSET_KEYS, "video_directory", "video_jsonl_file"}
    return "subsets" not in table and not wanted.isdisjoint(table)


def explain_unsupported_key(name: str) -> str | None:
    """For a key that cannot be honoured yet."""
    return f"not yet: {_UNSUPPORTED_MUSUBI_KEYS[name]}; take it out" if name in _UNSUPPORTED_MUSUBI_KEYS else None
