"""musubi-tuner's dataset files: a dataset there has no subsets, the folder of pictures stands in it."""

from collections.abc import Mapping

FLAT: Mapping[str, str] = {"image_directory": "image_dir", "image_jsonl_file": "metadata_file"}
"""Its names for keys of a subset."""

_CONTROL = "control pictures, as editing models take them"
_VIDEO = "videos"
_FRAMES = "one-frame training of FramePack"
_NOT_YET: Mapping[str, str] = {
    "skip_corrupted_cache": "this key of musubi-tuner",
    "control_directory": _CONTROL,
    "no_resize_control": _CONTROL,
    "control_resolution": _CONTROL,
    "flux_kontext_no_resize_control": _CONTROL,
    "qwen_image_edit_no_resize_control": _CONTROL,
    "qwen_image_edit_control_resolution": _CONTROL,
    "multiple_target": "several target pictures, as layered models take them",
    "fp_latent_window_size": _FRAMES,
    "fp_1f_clean_indices": _FRAMES,
    "fp_1f_target_index": _FRAMES,
    "fp_1f_no_post": _FRAMES,
    "video_directory": _VIDEO,
    "video_jsonl_file": _VIDEO,
    "target_frames": _VIDEO,
    "frame_extraction": _VIDEO,
    "frame_stride": _VIDEO,
    "frame_sample": _VIDEO,
    "max_frames": _VIDEO,
    "source_fps": _VIDEO,
}


def is_flat(names: Mapping[str, object]) -> bool:
    """Whether a dataset with these keys is written in musubi-tuner's way."""
    wanted = {*FLAT, "video_directory", "video_jsonl_file"}
    return "subsets" not in names and not wanted.isdisjoint(names)


def refusal(name: str) -> str | None:
    """For a key that cannot be honoured yet."""
    return f"not yet: {_NOT_YET[name]}; take it out" if name in _NOT_YET else None
